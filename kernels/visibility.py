"""Which stored or new tokens the queries of a call may attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemkv_compile.errors import ShapeMismatch
from gemkv_compile.kernels.softmax import NEVER


@dataclass(frozen=True)
class Visibility:
    """The rules of one call. Positions count the tokens of a sequence; query i of sequence b is token first[b] + i.

    Args:
        first: Position of query 0, [batch] int32.
        total: Tokens up to the last query, [batch] int32; the last mask column is token total - 1.
        padding: As in `gemkv_compile.kernels.ops`.
        mask: [batch|1, Hkv|1, groups|1, Q, K] bool or float, see `grouped_mask`.
        causal: Whether a query sees no token after its own.
        window: A query sees this many tokens up to its own, or None.
    """

    first: Tensor
    total: Tensor
    padding: Tensor | None
    mask: Tensor | None
    causal: bool
    window: int | None

    def tokens(self, positions: Tensor, exists: Tensor) -> Tensor:
        """What holds for every query: [batch, T] bool from positions and exists, both [batch, T]."""
        if self.padding is None:
            return exists
        return exists & self.padding.gather(1, positions.clamp(0, self.padding.shape[1] - 1))

    def pairs(self, positions: Tensor, allowed: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """What holds between queries begin .. end - 1 and tokens.

        Args:
            positions: [batch, T] int64.
            allowed: [batch, T], the result of `tokens`.
        Returns:
            visible, bool, and the bias to add to the scores or None; both broadcast to [batch, Hkv, groups, Q, T].
        """
        batch, num_tokens = positions.shape
        visible = allowed.view(batch, 1, 1, 1, num_tokens)
        token = positions.view(batch, 1, 1, 1, num_tokens)
        if self.causal or self.window is not None:
            steps = torch.arange(begin, end, device=positions.device)
            query = (self.first.unsqueeze(1) + steps)[:, None, None, :, None]
            if self.causal:
                visible = visible & (token <= query)
            if self.window is not None:
                visible = visible & (token > query - self.window)
        if self.mask is None:
            return visible, None
        columns = token - (self.total - self.mask.shape[-1]).view(-1, 1, 1, 1, 1)
        picked = torch.take_along_dim(self.mask[..., begin:end, :], columns.clamp(0, self.mask.shape[-1] - 1), dim=-1)
        visible = visible & (columns >= 0)
        if picked.dtype == torch.bool:
            return visible & picked, None
        return visible & (picked != NEVER), picked.to(torch.float32)


def grouped_mask(mask: Tensor | None, num_kv_heads: int) -> Tensor | None:
    """View a mask [batch|1, Hq|1, Q, K] as [batch|1, Hkv|1, groups|1, Q, K]."""
    if mask is None:
        return None
    return mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else (num_kv_heads, -1))


def check_padding(padding: Tensor | None, num_tokens: int) -> None:
    """Raise ShapeMismatch unless padding has a column for each of `num_tokens` tokens."""
    if padding is not None and padding.shape[1] < num_tokens:
        raise ShapeMismatch(
            f"padding must have a column for each of the {num_tokens} tokens of the longest sequence, "
            f"got {padding.shape[1]}. Extend it with True for the new tokens."
        )


def masked_scores(scores: Tensor, visible: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Finish scaled scores in this order: softcap, then the bias, then -inf where nothing is visible."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~visible, NEVER)


def hide_rows(x: Tensor, seen: Tensor) -> Tensor:
    """Keys or values [batch, Hkv, T, D] with 0 for tokens that nobody sees; seen is [batch, T] bool.

    A weight of 0 does not silence a NaN, and memory that nobody has written may hold one.
    """
    return x.masked_fill(~seen[:, None, :, None], 0.0)
