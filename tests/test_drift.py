"""A release of Transformers that changes an idiom fails here, instead of costing speed in silence (openvino#35971)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_reports import CELLS, family_report
from golden import check_golden
from tiers import tiers

MODULES = {"gemma1": "gemma", "llama3": "llama"}
SUPPORT = Path(__file__).parent / "support"
OLDEST = Path(__file__).parent.parent / ".venv" / "oldest"


@pytest.mark.parametrize("family, attention", CELLS)
def test_report_of_a_family(family, attention):
    """A5: every attention of every supported family is rewritten, and how."""
    pytest.importorskip(f"transformers.models.{MODULES.get(family, family)}")
    text = family_report(family, attention)
    assert "kept" not in text
    check_golden(f"families/{family}-{attention}", text)


@pytest.mark.skipif(not OLDEST.exists(), reason="`make test` installs the oldest Transformers into .venv/oldest")
@pytest.mark.parametrize("first", tiers([0], [(1,)]))
def test_the_oldest_transformers_gives_the_same_reports(first):
    """Of every second family from the first one on."""
    environment = os.environ | {"PYTHONPATH": f"{OLDEST}{os.pathsep}{SUPPORT}"}
    command = [sys.executable, str(SUPPORT / "family_reports.py"), str(first), str(len(CELLS)), "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transformers"].startswith("5.17")
    for name, text in found["reports"].items():
        check_golden(f"families/{name}", text)
    assert len(found["reports"]) == len(CELLS[first::2])
