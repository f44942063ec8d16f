"""This package's kernel with scores on int8 tensor cores: an approximation, so only taken by name."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor

from gemkv_compile.kernels.engines.engine import Engine, Place, Prompt, half_precision

HEAD_DIMS = (64, 128, 256)
ERROR = 0.05  # of the largest number, for the random prompt of a trial, whose scores are of a standard deviation of 1.5


def missing() -> str | None:
    """Why it is not there, and what to do."""
    if importlib.util.find_spec("triton") is None:
        return "it is a Triton kernel, and Triton is not installed: pip install triton"
    return None


def refuses(prompt: Prompt, place: Place) -> str | None:
    """Why it does not do these prompts."""
    if place.capability < (8, 0):
        return f"it is for GPUs of compute capability 8.0 or more, this is {place.name}"
    if prompt.head_dim not in HEAD_DIMS:
        return f"it has head sizes of {', '.join(map(str, HEAD_DIMS))}, not {prompt.head_dim}"
    return half_precision(prompt)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt, padding: Tensor | None = None) -> Tensor:
    """Arguments and result as in `gemkv_compile.kernels.engines.engine.Engine`; padding as in `kernel_int8`."""
    from gemkv_compile.kernels.attend_chunk.kernel_int8 import attend_int8_triton

    return attend_int8_triton(q, k, v, padding, scale, prompt.softcap, prompt.causal, prompt.window)[0]


@functools.cache
def version() -> str:
    """Triton's."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"


ENGINE = Engine(
    "int8", "gemkv, scores in int8", ("cuda",), missing, refuses, attend, version, error=ERROR, takes_padding=True
)
