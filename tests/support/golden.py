"""Golden files: compared in tests, accepted by `make goldens` (GEMKV_ACCEPT_GOLDENS=1)."""

import difflib
import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "goldens"


def check_golden(name, text):
    """Compare with the file of that name, or write it if goldens are being accepted."""
    path = FOLDER / f"{name}.expected"
    if os.environ.get("GEMKV_ACCEPT_GOLDENS") == "1":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"no golden {path.name}; look at the text and run `make goldens`:\n{text}"
    expected = path.read_text()
    changes = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "now", lineterm=""))
    assert text == expected, f"{path.name} differs; if the new text is right, run `make goldens`\n{changes}"


def graph_text(report):
    """The sites of a report's one graph, the graph before and after."""
    from gemkv_compile.passes.version import pass_version

    (graph,) = report.graphs
    sites = [
        f"# {s.operator}: {s.mask}; {s.num_q_heads}/{s.num_kv_heads} x {s.head_dim}; {s.rule}" for s in graph.sites
    ]
    before, after = (_inputs_by_name(text) for text in (graph.before, graph.after))
    text = "\n".join([*sites, "", "before:", before, "", "after:", after])
    text = text.replace(repr(pass_version()), "'VERSION'")
    return re.sub(r"\bs\d+\b", "s", text) + "\n"  # Dynamo's names of symbols differ between versions


def _inputs_by_name(graph):
    """Inputs sorted and called by name: their order differs between versions of Dynamo."""
    names = dict(re.findall(r"^(%\d+) = input\((\w+)\)", graph, re.M))
    inputs = re.findall(r"^%\d+ = (input.*)$", graph, re.M)
    rest = re.sub(r"^%\d+ = input.*\n", "", graph, flags=re.M)
    return "\n".join([*sorted(inputs), re.sub(r"%\d+", lambda m: names.get(m[0], m[0]), rest)])
