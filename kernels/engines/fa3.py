"""FlashAttention-3, for Hopper GPUs (arXiv:2407.08608): package fa3-fwd, or flash-attn's hopper folder."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from torch import Tensor

from gemkv_compile.kernels.engines.engine import Engine, Place, Prompt, half_precision, sides, token_rows

MODULES = ("fa3_fwd_interface", "flash_attn_interface")
PACKAGES = {"fa3_fwd_interface": "fa3-fwd", "flash_attn_interface": "flash-attn-3"}


def missing() -> str | None:
    """Why it is not there, and what to do."""
    if _module_name() is not None:
        return None
    return "FlashAttention-3 is not installed: pip install fa3-fwd, or build the hopper folder of flash-attention"


def refuses(prompt: Prompt, place: Place) -> str | None:
    """Why it does not do these prompts; whether its build has windows and caps is seen in a trial."""
    if place.capability != (9, 0):
        return f"it is for GPUs of compute capability 9.0 (Hopper), this is {place.name}"
    if prompt.head_dim > 256:
        return f"it has head sizes up to 256, not {prompt.head_dim}"
    return half_precision(prompt)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt) -> Tensor:
    """Arguments and result as in `gemkv_compile.kernels.engines.engine.Engine`."""
    cap = {} if prompt.softcap is None else {"softcap": prompt.softcap}
    rows = [token_rows(x) for x in (q, k, v)]
    result = _function()(*rows, softmax_scale=scale, causal=prompt.causal, window_size=sides(prompt), **cap)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


def version() -> str:
    """The version of the package that is there."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(PACKAGES[_module_name() or MODULES[0]])
    except PackageNotFoundError:
        return "unknown"


def _module_name() -> str | None:
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


@functools.cache
def _function() -> Any:
    return importlib.import_module(_module_name() or MODULES[0]).flash_attn_func


ENGINE = Engine("fa3", "FlashAttention-3, Hopper", ("cuda",), missing, refuses, attend, version)
