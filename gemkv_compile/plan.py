"""What a compile hands to the runtime: how to call the rewritten graph. Plain data, no graph nodes, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gemkv_compile.kernels.layout import PageLayout

Size = int | Callable[[Sequence[Any]], int]
"""An int, or a function of the call's arguments (SymInt placeholders and tensor sizes)."""

StateField = Literal["page_table", "seq_lens", "starts", "tail", "stored"]


@dataclass(frozen=True)
class OutputPlan:
    """A graph output that is all rows of a cache after the call, or its last `keep` rows, as keys (0) or values (1)."""

    index: int
    role: int
    keep: int | None


@dataclass(frozen=True)
class BufferPlan:
    """A cache of a fixed number of places, and where the call's rows go.

    Args:
        places: How many rows it has room for.
        start, scalar, vector: The position of the first new row: a size, or an argument that holds it (a tensor of no
            dimensions, or one with the place of each new row).
        only_new: Attention sees the new rows alone, so that they must come first.
        rolls: All places hold rows; the first one leaves, and the new one becomes the last.
        in_place: A past is written itself: handles that are it grow. Else it stays, and the call returns new handles.
        masks: The masks over its places, computed from the call's arguments; None for one that is not known from them.
    """

    places: Size
    start: Size | None
    scalar: int | None
    vector: int | None
    only_new: bool
    rolls: bool
    in_place: bool
    masks: tuple[Callable[..., Any] | None, ...]


@dataclass(frozen=True)
class ObservedPlan:
    """The attention whose newest queries the rewritten graph returns for a policy that observes them.

    Args:
        position: Of these among the graph's outputs; [batch, num_q_heads, n, head_dim], with zeros before the queries
            of a chunk of fewer than n tokens.
        scale, softcap, window: Of the attention; window None: it sees everything before it.
    """

    position: int
    scale: float
    softcap: float | None
    window: int | None


@dataclass(frozen=True)
class TablePlan:
    """One key/value cache of the graph.

    Args:
        past_keys, past_values: Argument positions of the past, or None if this graph starts the cache.
        seq_dim: Sequence dimension of the cache tensors, 1 or 2.
        batch, num_tokens: Sizes of the new keys.
        keep: Rows that stay visible after the call, or None for all.
        window: Tokens that a query may attend to, itself included, or None for all.
        exact_rows: An attention without a mask sees every row of the past. In the rewritten graph it has this number
            as its window, so a past of more than exact_rows - 1 rows is not covered; None if there is none such.
        layout, device, pool_bytes: Which pool the pages come from.
        outputs: Which outputs of the original graph are handles of this cache.
        buffer: Set if the cache has a fixed number of places. With a past, the handles that are the past grow.
        drops: Whether the policy of the option `drop` is asked about this cache.
        observed: What it observes, if it does.
    """

    past_keys: int | None
    past_values: int | None
    seq_dim: int
    batch: Size
    num_tokens: Size
    keep: int | None
    window: int | None
    exact_rows: int | None
    layout: PageLayout
    device: torch.device
    pool_bytes: int | None
    outputs: tuple[OutputPlan, ...]
    buffer: BufferPlan | None = None
    drops: bool = False
    observed: ObservedPlan | None = None


@dataclass(frozen=True)
class PaddingPlan:
    """A 2-D padding mask of the call, to be aligned with a table's rows: kv column j is source[:, column + j]."""

    source: int  # argument position
    column: Size
    table: int


@dataclass(frozen=True)
class Argument:
    """An input of the rewritten graph that is an argument of the call."""

    index: int


@dataclass(frozen=True)
class State:
    """An input of the rewritten graph that is state of a table: on its device, but for "stored", on the host."""

    table: int
    field: StateField


@dataclass(frozen=True)
class AlignedPadding:
    """An input of the rewritten graph that is a prepared padding mask."""

    padding: int


@dataclass(frozen=True)
class SizeTensor:
    """An input of the rewritten graph that holds a size of the call, int64 []."""

    size: Size
    device: torch.device


Input = Argument | State | AlignedPadding | SizeTensor


@dataclass(frozen=True)
class Computed:
    """A result that the rewritten graph returns at a position."""

    position: int


@dataclass(frozen=True)
class Passed:
    """A result that is an argument of the call."""

    index: int


@dataclass(frozen=True)
class Sized:
    """A result that is a number: a length, usually."""

    size: Size


@dataclass(frozen=True)
class CallPlan:
    """How to call the rewritten graph.

    Args:
        inputs: Where each of its inputs comes from.
        results: For each output of the original graph that is no cache, where it comes from.
        written: Arguments that the graph writes in place.
    """

    inputs: tuple[Input, ...]
    tables: tuple[TablePlan, ...]
    paddings: tuple[PaddingPlan, ...]
    results: tuple[Computed | Passed | Sized | None, ...]
    written: tuple[int, ...] = ()
