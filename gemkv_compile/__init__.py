"""A torch.compile backend that finds attention and KV-cache updates, proves what they mean, and pages them in INT8.

model.compile(backend="gemkv")      # or gemkv_compile.compile(model), or torch.compile(model, backend="gemkv")
model.generate(...)                 # unchanged
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Options",
    "PagedKVTensor",
    "Report",
    "compile",
    "drop",
    "explain",
    "group_errors",
    "kv_memory",
    "memory",
    "report_of",
    "trim",
]

_HOME = {
    "compile": "gemkv_compile.frontend",
    "explain": "gemkv_compile.frontend",
    "report_of": "gemkv_compile.frontend",
    "Options": "gemkv_compile.options",
    "Report": "gemkv_compile.report",
    "PagedKVTensor": "gemkv_compile.runtime.handle",
    "group_errors": "gemkv_compile.runtime.group_errors",
    "kv_memory": "gemkv_compile.runtime.ledger",
    "trim": "gemkv_compile.runtime.ledger",
}

_MODULES = ("drop", "memory")

if TYPE_CHECKING:
    from gemkv_compile import drop, memory
    from gemkv_compile.frontend import compile, explain, report_of
    from gemkv_compile.options import Options
    from gemkv_compile.report import Report
    from gemkv_compile.runtime.group_errors import group_errors
    from gemkv_compile.runtime.handle import PagedKVTensor
    from gemkv_compile.runtime.ledger import kv_memory, trim


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
