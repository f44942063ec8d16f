"""Which kernel attends to a chunk's own keys on a GPU."""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor

from gemkv_compile.errors import InvalidOption

log = logging.getLogger(__name__)

ENGINES = ("auto", "plain", "hopper")
SWITCH = "GEMKV_HOPPER_PREFILL"


def hopper_is_used() -> bool:
    """Whether "auto" may mean the Hopper kernel: only with GEMKV_HOPPER_PREFILL=1, until it has run on a GPU."""
    return os.environ.get(SWITCH) == "1"


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, (0, 0) of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def takes_hopper(
    engine: str, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, mask: Tensor | None, scale: float
) -> bool:
    """Whether the Hopper kernel attends q [B, Hq, Q, D] to the chunk's own k and v [B, Hkv, N, D].

    Args:
        engine: "plain": never; "hopper": always; "auto": where it can, if `hopper_is_used`.
        padding, mask, scale: As in `gemkv_compile.kernels.ops.attend_chunk`.
    Raises:
        InvalidOption: there is no such engine, or "hopper" cannot do this.
    """
    if engine not in ENGINES:
        raise InvalidOption(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}.")
    if engine == "plain" or (engine == "auto" and not hopper_is_used()):
        return False
    if padding is not None or mask is not None:
        reason = "it knows no padding and no mask"
    else:
        from gemkv_compile.kernels.attend_chunk.kernel_hopper import eligible

        reason = eligible(q, k, v, scale, capability(q.device))
    if reason and engine == "hopper":
        raise InvalidOption(f'The Hopper kernel cannot do this: {reason}. Use engine="plain".')
    if reason:
        log.debug("gemkv: the plain kernel runs: %s", reason)
    return not reason
