"""Benchmarks in a small form on a CPU, and the tables that are made of their results."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples" / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Import a benchmark by name; it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.mark.slow
def test_first_tokens_by_length(script, tmp_path, monkeypatch):
    """Every length has its runs; one that does not fit says so, and those after it are measured."""
    benchmark = script("prefill_end_to_end")
    first_token = benchmark.first_token

    def too_long(model, ids, options, device):
        if ids.shape[1] == 50:
            raise torch.OutOfMemoryError
        return first_token(model, ids, options, device)

    monkeypatch.setattr(benchmark, "first_token", too_long)
    monkeypatch.setattr(benchmark, "LONG_S", 0.0)
    try:
        benchmark.measure("tiny", "dynamic", [40, 50, 60], tmp_path / "dynamic.json")
        benchmark.measure("tiny", "gemkv", [40], tmp_path / "gemkv.json")
    finally:
        torch.set_default_dtype(torch.float32)
    rows = json.loads((tmp_path / "dynamic.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [40, 50, 60]
    assert rows[1] == {"tokens": 50, "failed": "out of memory"}
    assert rows[2]["times_ms"] == [rows[2]["warm_up_ms"]]  # of a run so long that there is one
    (ours,) = json.loads((tmp_path / "gemkv.json").read_text())["rows"]
    assert len(ours["times_ms"]) == 3 and sorted(ours["times_ms"])[1] == ours["first_token_ms"] < ours["warm_up_ms"]


def test_the_table_of_first_tokens(script):
    tables = script("tables")
    same = {"model": "m", "batch": 1, "tokens": 32, "times_ms": [9.0, 10.0, 11.0]}
    rows = [
        {**same, "mode": "dynamic", "first_token_ms": 20.0, "peak_gib": 4.0},
        {**same, "mode": "static", "first_token_ms": 10.0, "peak_gib": 8.0},
        {**same, "mode": "gemkv", "first_token_ms": 5.0, "peak_gib": 3.0},
        {"model": "m", "batch": 1, "tokens": 64, "mode": "dynamic", "failed": "out of memory"},
        {**same, "tokens": 64, "mode": "gemkv", "first_token_ms": 7.0, "peak_gib": 3.0},
    ]
    lines = tables.prefill_end_to_end({"rows": rows}).splitlines()[2:]
    assert lines[2] == "| m | 32 | **gemkv**, int8 | 5 (0.50x) | 9, 10, 11 | 3.00 (0.75x) |"
    assert lines[3] == "| m | 64 | DynamicCache, eager | out of memory | | |"
    assert lines[4] == "| m | 64 | **gemkv**, int8 | 7 | 9, 10, 11 | 3.00 |"


def test_results_that_are_gathered_keep_their_own_commit(script, tmp_path, monkeypatch):
    """A run that does not say its commit and date gets those of the gathering; one that does keeps what it says."""
    fidelity = script("fidelity")
    monkeypatch.setenv("GEMKV_COMMIT", "now")
    monkeypatch.setattr(script("harness"), "RESULTS", tmp_path)
    runs = tmp_path / "new.json", tmp_path / "old.json"
    for path, about in zip(runs, ({"model": "m"}, {"model": "m", "commit": "then"}), strict=True):
        path.write_text(json.dumps({"about": about}))
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--from", *map(str, runs), "--save-as", "both"])
    fidelity.main()
    new, old = (row["about"] for row in json.loads((tmp_path / "both.json").read_text())["rows"])
    assert new["commit"] == "now" and "date" in new
    assert old == {"model": "m", "commit": "then"}


def test_the_table_of_needles_says_once_what_two_runs_found(script):
    def run(*counts):
        cells = [{"format": name, "length": 64, "depth": 0.5, "found": found, "asked": 8} for name, found in counts]
        about = {"model": "m", "dtype": "bfloat16", "path": "decode", "formats": [name for name, _ in counts]}
        return {"about": about, "needles": cells}

    rows = [run(("reference", 7), ("floor", 7), ("int8", 6)), run(("reference", 7), ("floor", 5), ("int4", 3))]
    lines = script("tables").needles({"rows": rows}).splitlines()[2:]
    found = [("reference", 7), ("floor", 7), ("int8", 6), ("floor", 5), ("int4", 3)]
    assert lines == [f"| m, bfloat16, decode | {name} | {n}/8 | {n}/8 | {n}/8 |" for name, n in found]


def test_kinds_of_kernels(script):
    kind_of = script("device_work").kind_of
    names = ("norm_and_rotate", "append_token", "one_row", "attend_split", "triton_per_fused_add_mean_mul_pow_rsqrt_3")
    assert [kind_of(name) for name in names] == ["rope", "append", "matmul", "attention", "other"]
