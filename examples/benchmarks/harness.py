"""What every benchmark shares: where results go, and what stands in each of them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows to results/<name>.json, with device, versions, date and commit."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")
    return path


def median_us(run: Callable[[], Any], warm_up_ms: int = 25, measure_ms: int = 60) -> float:
    """Median time of a GPU call in microseconds, caches flushed between calls."""
    from triton.testing import do_bench

    return 1e3 * do_bench(run, warmup=warm_up_ms, rep=measure_ms, return_mode="median")


def device_us(run: Callable[[], Any], names: tuple[str, ...], calls: int = 10) -> dict[str, float]:
    """Time on the device of kernels by name, microseconds a call of `run`: without gaps between launches."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    events = seen.key_averages()
    return {name: sum(one.device_time_total for one in events if name in one.key) / calls for name in names}


def graph_us(run: Callable[[], Any], calls: int = 10) -> float:
    """Median time of a call inside a CUDA graph, microseconds: without launches, caches flushed between calls.

    A graph that only flushes is measured too and subtracted.
    """
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def repeat(work: Callable[[], Any] | None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                flush.zero_()
                if work is not None:
                    work()
        return graph

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles and loads what a capture may not
        run()
    torch.cuda.synchronize()
    both, alone = (median_us(repeat(work).replay) for work in (run, None))
    return (both - alone) / calls


def stream_gb_per_s(num_bytes: int) -> float:
    """Bytes a second of a kernel that only reads, the ceiling of everything that reads a cache."""
    import triton
    from stream_kernel import BLOCK, read_stream  # needs Triton, as its callers do

    data = torch.ones(num_bytes // 4, dtype=torch.int32, device="cuda")
    programs = torch.cuda.get_device_properties(0).multi_processor_count * 8
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    steps = triton.cdiv(data.numel(), programs * BLOCK)
    read_stream[(programs,)](data, sums, data.numel(), steps, num_warps=8)
    assert sums.sum().item() == data.numel(), "the stream kernel does not read all of its input"
    return num_bytes / 1e3 / median_us(lambda: read_stream[(programs,)](data, sums, data.numel(), steps, num_warps=8))


def peers_named() -> tuple[str, ...]:
    """bf16 attention that our kernels are measured against."""
    return ("fa2", "cudnn", "fa3")


def about() -> dict[str, str]:
    """Where and with what a benchmark ran."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "gemkv-compile")}
    return {"device": device, "python": platform.python_version(), **versions, "date": _today(), "commit": _commit()}


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _today() -> str:
    return datetime.date.today().isoformat()


def _commit() -> str:
    """The commit, marked if the tree differs from it; GEMKV_COMMIT names it where the repository is not."""
    if named := os.environ.get("GEMKV_COMMIT"):
        return named
    run = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    result = subprocess.run(run, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
