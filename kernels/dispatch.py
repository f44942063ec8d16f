"""Which implementation of an operator runs: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)


def implementation(operator: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes an operator on a device.

    Args:
        operator: An operator, such as "append_kv", or what the runtime calls, such as "attention_shares".
    """
    return _implementation(operator, device.type)


@functools.cache
def _implementation(operator: str, device_type: str) -> Callable[..., Any]:
    kind, suffix = ("kernel", "triton") if uses_triton(device_type) else ("reference", "reference")
    module = importlib.import_module(f"gemkv_compile.kernels.{operator}.{kind}")
    function: Callable[..., Any] = getattr(module, f"{operator}_{suffix}")
    return function


@functools.cache
def uses_triton(device_type: str) -> bool:
    """Whether operators on such a device run as Triton kernels."""
    if device_type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        log.warning("gemkv: Triton is not installed, so plain torch operators run on the GPU, many times slower.")
        return False
    return True
