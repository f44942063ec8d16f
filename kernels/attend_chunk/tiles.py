"""The keys and values that a chunk of queries may attend to, tile by tile: the pages, the tail, the chunk itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.memory import read_groups
from gemkv_compile.kernels.past import Past
from gemkv_compile.kernels.visibility import Visibility, check_padding, grouped_mask, masked_scores

TILE = 512  # keys, and queries, in a tile of scores


@dataclass(frozen=True)
class KeyTile:
    """Some keys and values.

    Args:
        k, v: [batch, Hkv, T, D] float32.
        positions: Their tokens, [batch, T] int64.
        allowed: What `Visibility.tokens` gives for them, [batch, T] bool.
        earliest, latest: Bounds, over the batch, of a token's distance from the chunk's first; stored tokens have -1 as
            earliest.
        own: The place of the tile in the chunk; None for stored tokens.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    allowed: Tensor
    earliest: int
    latest: int
    own: slice | None = None


class Chunk:
    """The queries of one `attend_chunk` call and the rules for what they see; arguments as in `kernels.ops`.

    The chunk has new_len tokens, and the queries are those of its last ones.
    """

    def __init__(
        self,
        q: Tensor,
        new_len: int,
        page_table: Tensor,
        seq_lens: Tensor,
        starts: Tensor,
        tail: Tensor,
        padding: Tensor | None,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        causal: bool,
        window: int | None,
        layout: PageLayout,
    ) -> None:
        self.seq_lens, self.starts, self.tail, self.layout = seq_lens, starts, tail, layout
        self.softcap, self.q_len, self.new_len = softcap, q.shape[2], new_len
        self.ahead = new_len - self.q_len  # tokens of the chunk before query 0
        self.query = self.by_kv_head(q).to(torch.float32) * scale  # [B, Hkv, groups, Q, D]
        # Query 0 sees window - 1 tokens before itself; the mask has columns for the chunk's own tokens too.
        bounds = [] if window is None else [max(0, window - 1 - self.ahead)]
        bounds += [] if mask is None else [max(0, mask.shape[-1] - new_len)]
        self.past = Past(page_table, seq_lens, starts, min(bounds, default=None), layout)
        check_padding(padding, max(self.past.lengths, default=0) + new_len)
        masks = padding, grouped_mask(mask, layout.num_kv_heads)
        self.rules = Visibility(seq_lens + self.ahead, seq_lens + new_len, *masks, causal, window)

    def by_kv_head(self, x: Tensor) -> Tensor:
        """View [batch, Hq, ...] as [batch, Hkv, groups, ...]."""
        return x.unflatten(1, (self.layout.num_kv_heads, -1))

    def query_tiles(self, tile: KeyTile) -> Iterator[slice]:
        """The query tiles that are not wholly before, or a window after, all keys of a tile."""
        rules = self.rules
        for begin in range(0, self.q_len, TILE):
            end = min(begin + TILE, self.q_len)
            late = rules.causal and tile.earliest >= end + self.ahead
            gone = rules.window is not None and tile.latest <= begin + self.ahead - rules.window
            if not late and not gone:
                yield slice(begin, end)

    def scores(self, tile: KeyTile, queries: slice) -> tuple[Tensor, Tensor]:
        """Finished scores [batch, Hkv, groups, Q, T], and which tokens some query sees, [batch, T] bool."""
        visible, bias = self.rules.pairs(tile.positions, tile.allowed, queries.start, queries.stop)
        scores = multiply_heads(self.query[:, :, :, queries], tile.k.mT)
        return masked_scores(scores, visible, bias, self.softcap), visible.flatten(1, 3).any(1)

    def key_tiles(self, k: Tensor, v: Tensor) -> Iterator[KeyTile]:
        """All keys and values in the order of their tokens; k and v are the chunk's own, [batch, Hkv, Q, D]."""
        yield from self._stored_tiles()
        first = self.seq_lens.to(torch.int64).unsqueeze(1)
        for begin in range(0, self.new_len, TILE):
            own = slice(begin, min(begin + TILE, self.new_len))
            positions = first + torch.arange(own.start, own.stop, device=k.device)
            allowed = self.rules.tokens(positions, positions >= self.starts.unsqueeze(1))
            own_k, own_v = k[:, :, own].to(torch.float32), v[:, :, own].to(torch.float32)
            yield KeyTile(own_k, own_v, positions, allowed, own.start, own.stop - 1, own)

    def _stored_tiles(self) -> Iterator[KeyTile]:
        positions, exists = self.past.pages()
        allowed = self.rules.tokens(positions, exists)
        for place, data in self.past.steps(TILE):
            k, v = read_groups(data, self.layout)
            latest = min(self.past.farthest + place.stop - 1, -1)
            yield KeyTile(k, v, positions[:, place], allowed[:, place], -1, latest)
        if (newest := self.past.tail()) is not None:
            k, v = self.tail.to(torch.float32).unbind(1)
            yield KeyTile(k, v, newest[0], self.rules.tokens(*newest), -1, -1)


def multiply_heads(rows: Tensor, columns: Tensor) -> Tensor:
    """Matrix products of rows [batch, Hkv, groups, Q, N] with columns [batch, Hkv, N, M], shared by the groups."""
    product = rows.flatten(2, 3) @ columns
    return product.unflatten(2, rows.shape[2:4])
