"""FlashAttention-2 (arXiv:2307.08691): package flash-attn."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from torch import Tensor

from gemkv_compile.kernels.engines.engine import Engine, Place, Prompt, half_precision, sides, token_rows

OLDEST = (2, 6)  # the first with softcap and with windows of today's meaning


def missing() -> str | None:
    """Why it is not there, and what to do."""
    if importlib.util.find_spec("flash_attn") is None:
        return "FlashAttention-2 is not installed: pip install flash-attn"
    if _numbers(version()) < OLDEST:
        return f"flash-attn {version()} is older than 2.6: pip install -U flash-attn"
    return None


def refuses(prompt: Prompt, place: Place) -> str | None:
    """Why it does not do these prompts."""
    if place.capability < (8, 0):
        return f"it is for GPUs of compute capability 8.0 or more, this is {place.name}"
    if prompt.head_dim > 256:
        return f"it has head sizes up to 256, not {prompt.head_dim}"
    return half_precision(prompt)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt) -> Tensor:
    """Arguments and result as in `gemkv_compile.kernels.engines.engine.Engine`."""
    rows = [token_rows(x) for x in (q, k, v)]
    options = {"causal": prompt.causal, "window_size": sides(prompt), "softcap": prompt.softcap or 0.0}
    out: Tensor = _function()(*rows, softmax_scale=scale, **options)
    return out.transpose(1, 2)


def version() -> str:
    """The version of flash-attn, "0" if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return "0"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


@functools.cache
def _function() -> Any:
    return importlib.import_module("flash_attn").flash_attn_func


ENGINE = Engine("fa2", "FlashAttention-2", ("cuda",), missing, refuses, attend, version)
