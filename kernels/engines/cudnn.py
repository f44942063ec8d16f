"""cuDNN's attention, through torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gemkv_compile.kernels.engines.engine import Engine, Place, Prompt, half_precision

WIDE = 91000  # the first cuDNN with heads of 256 channels, on Hopper


def missing() -> str | None:
    """Why it is not there, and what to do."""
    if torch.backends.cudnn.is_available():
        return None
    return "this PyTorch has no cuDNN: install a build with CUDA"


def refuses(prompt: Prompt, place: Place) -> str | None:
    """Why it does not do these prompts. Source: check_cudnn_tensor_shapes in PyTorch's sdp_utils.cpp."""
    if place.capability < (8, 0):
        return f"it is for GPUs of compute capability 8.0 or more, this is {place.name}"
    if prompt.window is not None:
        return "torch has no window for it"
    if prompt.softcap is not None:
        return "torch has no softcap for it"
    wide = place.capability == (9, 0) and (torch.backends.cudnn.version() or 0) >= WIDE
    most = 256 if wide else 128
    if prompt.head_dim > most:
        return f"it has head sizes up to {most} on {place.name}, not {prompt.head_dim}"
    return half_precision(prompt)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt) -> Tensor:
    """Arguments and result as in `gemkv_compile.kernels.engines.engine.Engine`."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=prompt.causal, scale=scale, enable_gqa=True)


def version() -> str:
    """cuDNN's own number."""
    return str(torch.backends.cudnn.version())


ENGINE = Engine("cudnn", "cuDNN, through PyTorch", ("cuda",), missing, refuses, attend, version)
