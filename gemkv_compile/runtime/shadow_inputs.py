"""What the shadow notes before a call: inputs for two more runs of the graph, and the state of random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.plan import CallPlan, Size, TablePlan
from gemkv_compile.runtime.exact_rows import exact_rows
from gemkv_compile.runtime.handle import PagedKVTensor


class ShadowInputs:
    """The inputs of a call, as they were before it.

    Attributes:
        stored: The arguments with handles as dense tensors: what the pages hold.
        exact: The same with exact rows; None in place of a handle whose exact rows are not known.
        is_known, is_exact: Whether all exact rows are known, and whether they are equal to the stored ones.
        rounds_past: Whether the call quantises a dense past, so that no dense input shows what the call reads.
        num_tokens: New tokens by table.
        shown: [batch, q_len] bool, new tokens that are no padding, or None if the graph knows of no padding.
        random: The state of random numbers.
    """

    def __init__(self, args: Sequence[Any], plan: CallPlan) -> None:
        handles = {i: arg for i, arg in enumerate(args) if isinstance(arg, PagedKVTensor)}
        dense = {i: handle.materialise() for i, handle in handles.items()}
        exact = {i: exact_rows.of(handle, dense[i]) for i, handle in handles.items()}
        self.stored = copied([dense.get(i, arg) for i, arg in enumerate(args)], plan.written)
        self.exact = [exact.get(i, arg) for i, arg in enumerate(self.stored)]
        self.is_known = all(rows is not None for rows in exact.values())
        self.is_exact = all(rows is not None and torch.equal(rows, dense[i]) for i, rows in exact.items())
        self.rounds_past = any(_rounds_past(table, args) for table in plan.tables)
        self.num_tokens = [_value(table.num_tokens, args) for table in plan.tables]
        self.shown = _shown(plan, args)
        self.random = RandomState(args)


class RandomState:
    """The random number generators of the CPU and of the devices of some arguments, and a state of theirs."""

    def __init__(self, args: Iterable[Any]) -> None:
        devices = {arg.device.index for arg in args if isinstance(arg, Tensor) and arg.device.type == "cuda"}
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
        self._states = self.now()

    def now(self) -> list[Tensor]:
        """The generators' states."""
        return [generator.get_state() for generator in self._generators]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block that draws from the noted state on, and leaves the generators as they are."""
        states = self.now()
        self._set(self._states)
        try:
            yield
        finally:
            self._set(states)

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def copied(args: Sequence[Any], written: Sequence[int]) -> list[Any]:
    """The arguments with copies of all that share memory with the `written` ones; copies share it as these do."""
    originals = [args[i].untyped_storage() for i in written if isinstance(args[i], Tensor)]
    copies = {storage.data_ptr(): storage.clone() for storage in originals}
    return [_moved(arg, copies) if copies and isinstance(arg, Tensor) else arg for arg in args]


def _moved(tensor: Tensor, copies: dict[int, Any]) -> Tensor:
    storage = copies.get(tensor.untyped_storage().data_ptr())
    if storage is None:
        return tensor
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _rounds_past(plan: TablePlan, args: Sequence[Any]) -> bool:
    keys, values = (None if index is None else args[index] for index in (plan.past_keys, plan.past_values))
    if not plan.layout.is_quantised or keys is None or values is None or not keys.numel():
        return False
    both = isinstance(keys, PagedKVTensor) and isinstance(values, PagedKVTensor)
    return not (both and keys.table is values.table and keys.table.pool.layout == plan.layout)


def _shown(plan: CallPlan, args: Sequence[Any]) -> Tensor | None:
    if not plan.paddings:
        return None
    padding = plan.paddings[0]
    table = plan.tables[padding.table]
    past = None if table.past_keys is None else args[table.past_keys]
    first = _value(padding.column, args) + (past.shape[table.seq_dim] if past is not None and past.numel() else 0)
    mask = args[padding.source][:, first : first + _value(table.num_tokens, args)]
    return mask.to(torch.bool).expand(_value(table.batch, args), -1)


def _value(size: Size, args: Sequence[Any]) -> int:
    return size if isinstance(size, int) else size(args)
