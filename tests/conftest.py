"""Guards and fixtures for all tests."""

import importlib.util
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

# Read when Triton is imported: without a GPU its kernels run interpreted, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# pytest 9.2 listens to every logger that does not propagate, and where anybody listens to this one PyTorch writes out
# each graph and its guards, in every test that compiles.
logging.getLogger("torch.__trace").propagate = True

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser):
    parser.addoption("--results", help="write the tests' outcomes, device and versions to this JSON file")


def pytest_terminal_summary(terminalreporter, config):
    """With --results: what ran where, for a device that CI does not have."""
    path = config.getoption("--results")
    if path:
        sys.path.append(str(ROOT / "examples" / "benchmarks"))
        from harness import about

        stats = terminalreporter.stats
        outcomes = {kind: sorted(r.nodeid for r in stats.get(kind, ())) for kind in ("passed", "failed", "skipped")}
        Path(path).write_text(json.dumps({"about": about(), **outcomes}, indent=1) + "\n")


def pytest_configure(config):
    """Stop with one clear line if this repository's `kernels` folder hides the package of that name."""
    spec = importlib.util.find_spec("kernels")
    if spec is not None and any(
        Path(place).resolve() == ROOT / "kernels" for place in spec.submodule_search_locations or ()
    ):
        pytest.exit(
            "`kernels` imports this repository's folder: run `pytest`, not `python -m pytest`, or set PYTHONSAFEPATH=1."
        )
    if str(ROOT) in sys.path:
        sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def compilers():
    """What fresh_compiler has made for a file's tests."""
    return []


@pytest.fixture(autouse=True)
def fresh_compiler(request, compilers):
    """Each test compiles for itself, or each file if its tests share compiles."""
    from gemkv_compile.inner import shared_compiles

    if not compilers or request.node.get_closest_marker("shares_compiles") is None:
        torch._dynamo.reset()
        shared_compiles.clear()
        compilers.append(request.node.name)
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
