"""What the finding stages say: an attention, a cache, or a refusal with its sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node


@dataclass(frozen=True)
class Refusal:
    """Why something is kept: a reason code, one sentence for the user, and the node it is about."""

    reason: str
    sentence: str
    node: Node


@dataclass(frozen=True)
class Attention:
    """softmax(softcap(scale * query @ keys^T) + mask, and sinks) @ values, whichever way the graph spells it.

    Args:
        node: The output, [batch, num_q_heads, q_len, head_dim].
        query: [batch, num_q_heads, q_len, head_dim].
        keys, values: [batch, num_kv_heads, kv_len, head_dim], before heads are repeated for their query group.
        mask: Boolean (True: attend) or additive, broadcastable to [batch, num_q_heads, q_len, kv_len], or None.
        is_causal: Whether the operator masks causally, aligned at the top left.
        sinks: One logit per query head that takes part in the softmax and has no value, [num_q_heads], or None.
        visible: It sees the last `visible` cached rows only, or None for all (int or SymInt).
        over_places: Its keys are all places of a buffer, and so are the columns of its mask.
    """

    node: Node
    query: Node
    keys: Node
    values: Node
    scale: float
    softcap: float | None
    mask: Node | None
    is_causal: bool
    rule: str
    sinks: Node | None = None
    visible: Any = None
    over_places: bool = False


@dataclass(frozen=True)
class Position:
    """Where rows are written into a buffer: `start`, or what an integer input holds when the call begins.

    Args:
        start: A constant or a size of the graph.
        scalar: An input of no dimensions; `read_at` is the node that reads it, before the graph changes it.
        vector: An input with the place of each row, which are consecutive, or the call is not covered.
        rows: The number of rows, where it is known from the position alone (a sympy expression).
    """

    start: Any = None
    scalar: Node | None = None
    vector: Node | None = None
    read_at: Node | None = None
    rows: Any = None


@dataclass(frozen=True)
class Buffer:
    """Memory of a fixed number of places that a cache's rows are written into.

    Args:
        places: How many rows it has room for (int or SymInt).
        position: Where the new rows go.
        writes: The nodes that write keys and values, and the views that they write through.
        only_new: Attention sees the first rows only, as many as there are new ones: right at position 0 alone.
        rolls: All places hold rows; the first one leaves, the others move up, and the new row becomes the last.
        in_place: The past itself is written; else a new tensor is, which the graph returns.
    """

    places: Any
    position: Position
    writes: tuple[Node, ...]
    only_new: bool = False
    rolls: bool = False
    in_place: bool = True

    def writes_through(self, user: Node) -> bool:
        """Whether a user of the memory is one of the writes, or serves nothing else."""
        return user in self.writes or (len(user.users) > 0 and user.users.keys() <= set(self.writes))


@dataclass(frozen=True)
class CacheOutput:
    """A graph output that is all cached rows or the last `keep`: its position, and the node that stands there."""

    index: int
    role: int
    keep: Any  # None, int or SymInt
    node: Node


@dataclass(frozen=True)
class Cache:
    """A key/value cache that the graph updates.

    Args:
        new_keys, new_values: This call's rows, [batch, num_kv_heads, q_len, head_dim] (seq_dim 2) or with dimensions 1
            and 2 exchanged (seq_dim 1).
        past_keys, past_values: Placeholders, or None where the cache starts.
        all_keys, all_values: The nodes of past and new rows together.
        readers: The attentions over this cache.
        rule: The update idiom.
        buffer: The memory of a fixed number of places that it stands in, or None. Without a past it is one that the
            graph makes; with one, `all_keys` and `all_values` are the pasts, which the graph writes in place.
    """

    new_keys: Node
    new_values: Node
    past_keys: Node | None
    past_values: Node | None
    all_keys: Node
    all_values: Node
    seq_dim: int
    outputs: tuple[CacheOutput, ...]
    readers: tuple[Attention, ...]
    rule: str
    buffer: Buffer | None = None
