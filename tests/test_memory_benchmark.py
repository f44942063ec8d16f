"""The benchmark of memory on a GPU, tried out on a CPU: what is held is what the ledger counts, and its table."""

import gc
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("memory_end_to_end")
    torch.set_default_dtype(torch.float32)
    for name in ("memory_end_to_end", "end_to_end", "harness", "tables_memory"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_what_is_held_is_what_is_counted(benchmark):
    """After 97 to 100 tokens, of which two of the four layers keep 95; the rest is one row that a view keeps alive."""
    gc.collect()  # on a CPU living tensors are counted: none that an earlier test left in a cycle may die meanwhile
    row_bytes, cpu = 2 * 2 * 16 * 2, torch.device("cpu")
    dense = benchmark.measure("tiny", "dynamic", 96, 4, cpu)
    over = [held - (2 * tokens + 2 * 95) * row_bytes for tokens, held in enumerate(dense["held_by_step"], 97)]
    assert all(0 <= each <= 1024 for each in over), over
    assert dense["unwindowed"] == 4 * dense["at"] * row_bytes
    paged = benchmark.measure("tiny", "int8", 96, 4, cpu)
    assert paged["ledger"] == paged["formula"]
    assert 0 <= paged["held"] - paged["ledger"] - paged["reserve"] <= 1024
    measured = {"dynamic": dense, "int8": paged, "model": {"failed": "out of memory"}}
    rows = [{"model": "tiny", "mode": mode, "batch": 1, "tokens": 96} | row for mode, row in measured.items()]
    table = __import__("tables_memory").memory_end_to_end({"rows": rows}).splitlines()
    assert len({line.count("|") for line in table}) == 1 and len(table) == 5
