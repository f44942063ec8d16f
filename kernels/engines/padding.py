"""Whether a padding mask hides nothing: `generate` gives one with every prompt, and it rarely does."""

from __future__ import annotations

import torch
from torch import Tensor

KNOWN = "_gemkv_hides_nothing"


def hides_nothing(padding: Tensor | None, tokens: int) -> bool:
    """Whether every token of a prompt is attended to.

    Args:
        padding: Bool [B, >= tokens], or None.
        tokens: Of the prompt, the first columns.
    The device is asked once for each mask, so by the first layer that reads it. A capture cannot ask: False there.
    """
    if padding is None:
        return True
    if padding.shape[1] < tokens or (padding.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    asked = tokens, 0 if padding.is_inference() else padding._version
    found = getattr(padding, KNOWN, None)
    if found is None or found[0] != asked:
        found = asked, bool(padding[:, :tokens].all())
        setattr(padding, KNOWN, found)
    return found[1]
