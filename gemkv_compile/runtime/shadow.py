"""The shadow: the first calls of a rewritten graph run beside the graph as it was, and the drift is measured.

A shadowed call has three results. R is the rewritten graph's, and is returned. O_q is the original graph's on the
cache as its handles show it: R differs from it by an error of the rewriting. O_x is the original graph's on the rows
as they were before a format rounded them: O_q differs from it by an error of the format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from gemkv_compile.plan import CallPlan, Computed, TablePlan
from gemkv_compile.runtime.drift import Figures, measure
from gemkv_compile.runtime.exact_rows import exact_rows
from gemkv_compile.runtime.handle import PagedKVTensor
from gemkv_compile.runtime.shadow_inputs import ShadowInputs, copied

log = logging.getLogger(__name__)
Record = Callable[[Figures | None, Figures | None, str], None]


class Shadowed:
    """An executable whose first calls are shadowed.

    Args:
        executable: Calls the rewritten graph.
        original: The graph before the rewrite.
        plan: How the two correspond.
        calls: How many calls to shadow.
        record: Takes each call's rewrite error and format error, None where one is not known, and why the shadow
            failed, or "".
    Results, caches and random numbers are those of the executable alone. A shadow that fails says so once, and ends.
    """

    def __init__(
        self, executable: Callable[..., Any], original: GraphModule, plan: CallPlan, calls: int, record: Record
    ) -> None:
        self._executable = executable
        self._original = original
        self._plan = plan
        self._calls_left = calls
        self._record = record

    def __call__(self, *args: Any) -> Any:
        if self._calls_left <= 0:
            if exact_rows:
                exact_rows.forget(args)
            return self._executable(*args)
        self._calls_left -= 1
        before = _outcome(lambda: ShadowInputs(args, self._plan))
        results = self._executable(*args)  # may raise, for the same reason as the shadow: that is the caller's
        if isinstance(before, ShadowInputs):
            before = _outcome(lambda: self._compare(before, results))
        if isinstance(before, Exception):
            self._give_up(before)
        return results

    def _give_up(self, error: Exception) -> None:
        self._calls_left = 0
        log.warning("gemkv: the shadow of a graph failed and ends here; results are not affected.", exc_info=error)
        self._record(None, None, f"{type(error).__name__}: {error}")

    def _compare(self, before: ShadowInputs, results: Sequence[Any]) -> None:
        drawn = before.random.now()
        with before.random.again():
            stored = self._run(before.stored)
            draws_alike = all(map(torch.equal, before.random.now(), drawn))
        tables = self._returned(results)
        rewrite_error = format_error = None
        if tables is not None and not before.rounds_past:
            if draws_alike and not any(map(_rounds_own_row, self._plan.tables, tables, before.num_tokens)):
                rewrite_error = self._measure(results, stored, before)
            if before.is_known:
                format_error = self._measure(stored, self._run_exact(before, stored), before)
        self._record(rewrite_error, format_error, "")
        if tables is not None:
            for plan, handles, num_tokens in zip(self._plan.tables, tables, before.num_tokens, strict=True):
                _remember(plan, handles, before, stored, num_tokens)

    def _run(self, args: Sequence[Any]) -> Sequence[Any]:
        """The results of the original graph, whose own state stays as it is."""
        buffers = {name: buffer.clone() for name, buffer in self._original.named_buffers()}
        inputs = tuple(copied(args, self._plan.written))
        outputs: Sequence[Any] = torch.func.functional_call(self._original, buffers, inputs)
        return outputs

    def _run_exact(self, before: ShadowInputs, stored: Sequence[Any]) -> Sequence[Any]:
        if before.is_exact:
            return stored
        with before.random.again():
            return self._run(before.exact)

    def _measure(self, ours: Sequence[Any], reference: Sequence[Any], before: ShadowInputs) -> Figures | None:
        computed = [index for index, source in enumerate(self._plan.results) if isinstance(source, Computed)]
        return measure([ours[index] for index in computed], [reference[index] for index in computed], before.shown)

    def _returned(self, results: Sequence[Any]) -> list[dict[int, PagedKVTensor]] | None:
        """The handles that the call has returned, by table and output; None if it ran without rewriting."""
        tables = [{output.index: results[output.index] for output in plan.outputs} for plan in self._plan.tables]
        is_paged = all(isinstance(handle, PagedKVTensor) for handles in tables for handle in handles.values())
        return tables if is_paged else None


def _outcome(step: Callable[[], Any]) -> Any:
    """What a step of the shadow returns, or the exception that it raises."""
    try:
        with torch.no_grad():
            return step()
    except Exception as error:
        return error


def _rounds_own_row(plan: TablePlan, handles: dict[int, PagedKVTensor], num_tokens: int) -> bool:
    """Whether a decode step has completed a group: it reads its own row rounded, which the original graph cannot."""
    length = next(iter(handles.values())).length
    return plan.layout.is_quantised and num_tokens == 1 and length % plan.layout.group_size == 0


def _remember(
    plan: TablePlan, handles: dict[int, PagedKVTensor], before: ShadowInputs, stored: Sequence[Any], num_tokens: int
) -> None:
    for output in plan.outputs:
        index = (plan.past_keys, plan.past_values)[output.role]
        past = None if index is None else before.exact[index]
        if index is None or past is not None:
            exact_rows.keep(handles[output.index], past, stored[output.index], num_tokens)
