"""A function's work on a device, recorded once and replayed: a CUDA graph."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gemkv_compile.compat import end_failed_capture


class Recording:
    """A function's work on the device, recorded once without being done."""

    def __init__(self, function: Callable[[], Sequence[Any]], device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        others = _recordings(device)
        # One pool for all recordings: they run one after another, and their results are copied at once. A pool ends
        # with the last graph that has it, and its name is of no use then.
        pool = next((other._graph.pool() for other in others), None) or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(device), torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
                self._results = function()
        except BaseException:
            end_failed_capture(device, pool)
            raise
        others.add(self)

    def replay(self) -> Sequence[Any]:
        """Do the work, on the memory that it was recorded with; returns the results, which the next one overwrites."""
        self._graph.replay()
        return self._results


@functools.cache
def _recordings(device: torch.device) -> weakref.WeakSet[Recording]:
    return weakref.WeakSet()


RECORDERS: dict[str, Callable[[Callable[[], Sequence[Any]], torch.device], Any]] = {"cuda": Recording}
"""How to record on a type of device; on others there is nothing to gain."""
