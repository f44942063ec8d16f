"""Which kernel attends to a chunk's own keys on a GPU."""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor

from gemkv_compile.errors import InvalidOption

log = logging.getLogger(__name__)

VARIANTS = ("auto", "plain", "hopper")
SWITCH = "GEMKV_HOPPER_PREFILL"


def hopper_is_used() -> bool:
    """Whether "auto" may mean the Hopper kernel: unless GEMKV_HOPPER_PREFILL=0."""
    return os.environ.get(SWITCH) != "0"


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, (0, 0) of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def takes_hopper(
    variant: str, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, mask: Tensor | None, scale: float
) -> bool:
    """Whether the Hopper kernel attends q [B, Hq, Q, D] to the chunk's own k and v [B, Hkv, N, D].

    Args:
        variant: "plain": never; "hopper": always; "auto": where it can, if `hopper_is_used`.
        padding, mask, scale: As in `gemkv_compile.kernels.ops.attend_chunk`.
    Raises:
        InvalidOption: there is no such variant, or "hopper" cannot do this.
    """
    if variant not in VARIANTS:
        raise InvalidOption(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}.")
    if variant == "plain" or (variant == "auto" and not hopper_is_used()):
        return False
    if padding is not None or mask is not None:
        reason = "it knows no padding and no mask"
    else:
        from gemkv_compile.kernels.attend_chunk.kernel_hopper import eligible

        reason = eligible(q, k, v, scale, capability(q.device))
    if reason and variant == "hopper":
        raise InvalidOption(f'The Hopper kernel cannot do this: {reason}. Use variant="plain".')
    if reason:
        log.debug("gemkv: the plain kernel runs: %s", reason)
    return not reason
