"""What a compile returns: unwrap handles, run the rewritten graph, wrap handles."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gemkv_compile.plan import (
    AlignedPadding,
    Argument,
    CallPlan,
    Computed,
    Passed,
    Size,
    Sized,
    SizeTensor,
    TablePlan,
)
from gemkv_compile.runtime.dropping import Chosen, Dropper
from gemkv_compile.runtime.handle import PagedKVTensor, make_handle
from gemkv_compile.runtime.importing import continue_past
from gemkv_compile.runtime.newest import NewestPasts, NewestRows
from gemkv_compile.runtime.padding import Paddings
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool, pools
from gemkv_compile.runtime.reservation import HeldPages
from gemkv_compile.runtime.static_past import continue_static, give_up_storage, read_positions
from gemkv_compile.runtime.step_graphs import StepGraphs

log = logging.getLogger(__name__)


class Executable:
    """Calls a rewritten graph with the device state of the caches that it is given.

    Args:
        inner: The compiled rewritten graph.
        original: The graph before the rewrite, for a call that the rewritten one does not cover.
        plan: How the two correspond.
        steps: Runs its decode steps as CUDA graphs, if they may be.
        dropper: Drops pages of its caches, if a policy says so.
    Every call either completes, and all its caches have grown, or raises, and all of them are as they were.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        original: Callable[..., Any],
        plan: CallPlan,
        steps: StepGraphs | None = None,
        dropper: Dropper | None = None,
    ) -> None:
        self._inner = inner
        self._steps = steps
        self._dropper = dropper
        self._original = original
        self._plan = plan
        self._pools = [pools.get(table.layout, table.device, table.pool_bytes) for table in plan.tables]
        self._warned: set[str] = set()
        self._has_places = any(table.buffer is not None for table in plan.tables)
        self._newest = None if self._has_places or dropper else NewestPasts(plan.tables, self._pools)
        self._rows = None if self._has_places else NewestRows(plan.tables, self._pools)
        self._paddings = Paddings(plan.paddings)
        self._sizes = [(table.batch, table.num_tokens) for table in plan.tables]
        self._has_fixed_sizes = all(isinstance(size, int) for pair in self._sizes for size in pair)
        results = list(enumerate(plan.results))
        self._computed = [(i, source.position) for i, source in results if isinstance(source, Computed)]
        self._passed = [(i, source.index) for i, source in results if isinstance(source, Passed)]
        self._sized: dict[Size, list[int]] = {}
        for i, source in results:
            if isinstance(source, Sized):
                self._sized.setdefault(source.size, []).append(i)
        self._is_fresh = True

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        edited = {i: args[i].materialise() for i in self._plan.written if isinstance(args[i], PagedKVTensor)}
        results = self._call([edited.get(i, arg) for i, arg in enumerate(args)] if edited else args)
        for index, dense in edited.items():  # what the graph did in place to a handle that is no past of its own
            args[index].copy_(dense)
        return results

    def _call(self, args: Sequence[Any]) -> tuple[Any, ...]:
        plan = self._plan
        if self._is_fresh:
            self._is_fresh = False
            _forget_trace(args)
        if self._has_places:
            give_up_storage(plan.tables, args)
        values = _Values(args)
        sizes: Any = self._sizes
        if not self._has_fixed_sizes:
            sizes = [(values.of(batch), values.of(num_tokens)) for batch, num_tokens in sizes]
        tables: list[PageTable] = []  # claimed for this call
        starts: list[int] = []
        unneeded: list[Chosen | None] = []
        try:
            if self._newest is not None:
                self._newest.begin(args, sizes, tables, starts)
            if len(tables) < len(sizes):
                why_not = self._begin(args, sizes, tables, starts, unneeded)
                if why_not is not None:
                    return self._run_original(args, why_not)
            outputs = self._run(args, tables, starts, sizes)
            if torch.is_grad_enabled():
                _hold_pages(outputs, tables)
            if self._dropper is not None:
                self._dropper.drop(outputs, args, tables, starts, sizes, unneeded)
            for table, (_, num_tokens) in zip(tables, sizes, strict=True):
                table.commit(num_tokens)
            # Before others may continue the tables: rows that no handle shows may be given back then.
            return self._wrap(args, outputs, tables, starts, values)
        finally:
            _end(tables)

    def _begin(
        self,
        args: Sequence[Any],
        sizes: list[tuple[int, int]],
        tables: list[PageTable],
        starts: list[int],
        unneeded: list[Chosen | None],
    ) -> str | None:
        """Claim and begin the tables that have not been yet; returns why the call is not covered, if so."""
        positions = read_positions(self._plan.tables, args) if self._has_places else [None] * len(sizes)
        caches = list(zip(self._plan.tables, self._pools, sizes, positions, strict=True))
        for plan, pool, size, position in caches[len(tables) :]:
            found = _continue(pool, plan, args, position, size)
            if found is None:
                return _OTHER_PLACES
            table, start = found
            tables.append(table)
            starts.append(start)
            if not _prepare(table, start, plan):
                return _MORE_ROWS
            if self._dropper is not None:
                unneeded.append(self._dropper.chosen_before(len(unneeded), table, size[1]))
            table.begin(size[1], plan.keep, start, unneeded[-1] if unneeded else None)
        return None

    def _run(
        self, args: Sequence[Any], tables: list[PageTable], starts: list[int], sizes: list[tuple[int, int]]
    ) -> Sequence[Any]:
        if self._steps is not None and not torch.is_grad_enabled():
            outputs = self._steps.run(args, tables, starts)
            if outputs is not None:
                return outputs
        results: Sequence[Any] = self._inner(*self._inputs(args, tables, starts, sizes))
        return results

    def _inputs(
        self, args: Sequence[Any], tables: list[PageTable], starts: list[int], sizes: list[tuple[int, int]]
    ) -> list[Any]:
        paddings = self._paddings.aligned(args, starts, [batch for batch, _ in sizes])
        inputs = []
        for source in self._plan.inputs:
            if isinstance(source, Argument):
                inputs.append(_dense(args[source.index]))
            elif isinstance(source, AlignedPadding):
                inputs.append(paddings[source.padding])
            elif isinstance(source, SizeTensor):
                inputs.append(torch.full((), _value(source.size, args), dtype=torch.int64, device=source.device))
            else:
                inputs.append(getattr(tables[source.table], source.field))
        return inputs

    def _wrap(
        self,
        args: Sequence[Any],
        outputs: Sequence[Any],
        tables: list[PageTable],
        starts: list[int],
        values: _Values,
    ) -> tuple[Any, ...]:
        results: list[Any] = [None] * len(self._plan.results)
        for i, position in self._computed:
            results[i] = outputs[position]
        for i, index in self._passed:
            results[i] = args[index]
        for size, places in self._sized.items():
            value = size if isinstance(size, int) else size(args)
            for i in places:
                results[i] = value
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            if self._rows is not None:
                self._rows.show(results, tables, starts)
            else:
                self._show_places(results, args, tables, starts, values)
        return tuple(results)

    def _show_places(
        self, results: list[Any], args: Sequence[Any], tables: list[PageTable], starts: list[int], values: _Values
    ) -> None:
        """Put handles among the results where some caches have fixed places; those written into show the new rows."""
        for plan, table, start in zip(self._plan.tables, tables, starts, strict=True):
            places = None if plan.buffer is None else values.of(plan.buffer.places)
            length = table.length
            for output in plan.outputs:
                first = start if output.keep is None else max(start, length - output.keep)
                results[output.index] = make_handle(table, output.role, first, length, plan.seq_dim, places)
            if plan.buffer is not None:
                for past in _written_pasts(plan, args):
                    past.stand_for(table, start if plan.keep is None else max(start, length - plan.keep), length)

    def _run_original(self, args: Sequence[Any], why: str) -> tuple[Any, ...]:
        if why not in self._warned:
            log.warning("gemkv: %s, so this call ran without rewriting; its cache is dense.", why)
            self._warned.add(why)
        dense = [_dense(arg) for arg in args]
        results = self._original(*dense)
        written = [past for plan in self._plan.tables for past in _written_pasts(plan, args)]
        for i, arg in enumerate(args):
            if any(arg is past for past in written):
                arg.copy_(dense[i])
                results = [arg if result is dense[i] else result for result in results]
        return tuple(results)


_MORE_ROWS = (
    "a past with more rows than this graph's window was given (give each call the cache that the previous one returned)"
)
_OTHER_PLACES = (
    "rows were written into a static cache other than after those that are there, or its tensors are views of others"
)


def _continue(
    pool: PagePool, plan: TablePlan, args: Sequence[Any], position: int | None, size: tuple[int, int]
) -> tuple[PageTable, int] | None:
    """The table that a call appends to, claimed, and the first row of its past; None if the call is not covered."""
    if plan.buffer is not None:
        return continue_static(pool, plan, args, position, size)
    return continue_past(pool, size[0], _at(args, plan.past_keys), _at(args, plan.past_values), plan.seq_dim)


def _written_pasts(plan: TablePlan, args: Sequence[Any]) -> list[PagedKVTensor]:
    """The handles that the call's rows are written into."""
    in_place = plan.buffer is not None and plan.buffer.in_place
    pasts = [_at(args, index) for index in (plan.past_keys, plan.past_values)] if in_place else []
    return [past for past in pasts if isinstance(past, PagedKVTensor)]


def _forget_trace(args: Sequence[Any]) -> None:
    """Collect what Dynamo's trace left: reference cycles that hold this call's handles, and with them their pages."""
    if any(isinstance(arg, PagedKVTensor) for arg in args):
        gc.collect()


def _prepare(table: PageTable, start: int, plan: TablePlan) -> bool:
    """Make the table show exactly the rows from `start` on; False if the rewritten graph would miss some."""
    lowest = 0 if plan.window is None else max(0, table.length + 1 - plan.window)
    if plan.exact_rows is not None and start < table.length + 1 - plan.exact_rows:
        return False
    if start > lowest or table.base > lowest:
        table.expose_from(start)
    return True


def _end(tables: Sequence[PageTable]) -> None:
    """End the claims of a call; one table's failure does not keep the others from being as they were."""
    for i, table in enumerate(tables):
        try:
            table.end()
        except BaseException:
            _end(tables[i + 1 :])
            raise


def _hold_pages(outputs: Sequence[Any], tables: Sequence[PageTable]) -> None:
    """Tie the pages that a backward pass reads to the autograd graph: they are those of this very moment."""
    nodes = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None]
    held = HeldPages(tables) if nodes else None
    for node in nodes:
        metadata: Any = node.metadata
        metadata.setdefault("gemkv_pages", []).append(held)


class _Values(dict[Callable[[Sequence[Any]], int], int]):
    """Sizes of one call, each computed once."""

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()
        self._args = args

    def __missing__(self, function: Callable[[Sequence[Any]], int]) -> int:
        value = self[function] = function(self._args)
        return value

    def of(self, size: Size) -> int:
        """The value of a size."""
        return size if isinstance(size, int) else self[size]


def _value(size: Size, args: Sequence[Any]) -> int:
    return size if isinstance(size, int) else size(args)


def _at(args: Sequence[Any], index: int | None) -> Any:
    return None if index is None else args[index]


def _dense(value: Any) -> Any:
    return value.materialise() if isinstance(value, PagedKVTensor) else value
