"""What a recorded decode step does on a GPU: its time, and its kernels by kind."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemkv_compile.runtime import recording

KINDS = {  # of kernels, by name; the first that fits
    "attention": r"attend|combine_splits",
    "append": r"append_token|append_chunk",
    "rope": r"norm_and_rotate",
    "matmul": r"one_row|few_rows|gemm|gemv|cutlass|nvjet|cublas|splitk|[a-z0-9]_mma|dot_kernel|_mm(_|$)|_addmm(_|$)|"
    "triton_tem",
    "copies": r"memcpy|memset",
    "other": r"",
}


def kernels_of(seen: Any) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels, copies and fills of a profile."""
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.elapsed_us()) for event in events]


@contextmanager
def replays_timed() -> Iterator[list[tuple[Any, Any]]]:
    """Puts events around each replay; yields the pairs."""
    pairs: list[tuple[Any, Any]] = []
    replay = recording.Recording.replay

    def timed(self: Any) -> Any:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        results = replay(self)
        last.record()
        pairs.append((first, last))
        return results

    recording.Recording.replay = timed  # type: ignore[method-assign]
    try:
        yield pairs
    finally:
        recording.Recording.replay = replay  # type: ignore[method-assign]


def kernels_by_kind(profiles: list[list[tuple[str, float]]]) -> dict[str, Any]:
    """Medians over steps: milliseconds by kind and of all kernels, launches, and the kernels that take longest.

    Args:
        profiles: For each step, names and microseconds.
    The longest matrix product of a step is its LM head, the largest matrix by far.
    """
    sums: list[dict[str, float]] = []
    by_name: dict[str, float] = {}
    for step in profiles:
        own = dict.fromkeys([*KINDS, "lm_head"], 0.0)
        for name, us in step:
            own[kind_of(name)] += us
            by_name[name] = by_name.get(name, 0.0) + us / len(profiles)
        own["lm_head"] = max((us for name, us in step if kind_of(name) == "matmul"), default=0.0)
        own["matmul"] -= own["lm_head"]
        sums.append(own | {"all": sum(us for _, us in step)})
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:16]
    return {
        "kernels_ms": {kind: statistics.median(own[kind] for own in sums) / 1e3 for kind in sums[0]},
        "launches": statistics.median(len(step) for step in profiles),
        "longest_us": {name[:120]: round(us, 1) for name, us in longest},
    }


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))
