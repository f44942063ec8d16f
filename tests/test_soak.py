"""A short soak: random calls, early ends and kept caches leave nothing behind."""

import sys
from pathlib import Path

import pytest

import gemkv_compile
from gemkv_compile.runtime.ledger import kv_memory


@pytest.mark.slow
def test_thirty_calls(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples" / "benchmarks"))
    soak = __import__("soak")
    monkeypatch.setattr(soak, "BLOCK", 10)
    rows = soak.soak(30, compare_every=3)
    sys.modules.pop("soak")
    assert [row["calls"] for row in rows] == [10, 20, 30]
    assert sum(row["compared"] for row in rows) >= 4
    ends = {end for row in rows for end in row["ends"]}
    assert ends == set(soak.ENDS)
    for row in rows:
        assert row["in_use_over_baseline"] == 0
        for kind in ("outer_fragmentation", "inner_fragmentation"):
            assert 0 < row[kind]["mean"] <= row[kind]["most"] < 1
    gemkv_compile.trim()
    assert all(pool.reserved == 0 for pool in kv_memory(()).pools if not pool.in_use)
    assert max(row["reserved"] for row in rows) <= rows[0]["reserved"] + (4 << 20)
