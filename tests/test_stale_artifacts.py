"""What one process has compiled serves another only while passes and operators are the same."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, sys

sys.path.insert(0, FOLDER)
sys.path += PACKAGES
import torch
import gemkv_compile
from gemkv_compile.passes.version import pass_version
from torch._dynamo.utils import counters

assert gemkv_compile.__file__.startswith(FOLDER), gemkv_compile.__file__

def attend(q, k, v, past):
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v), (k, v)

torch.manual_seed(0)
rows, past = torch.randn(3, 1, 2, 1, 16).unbind(), torch.randn(2, 1, 2, 5, 16).unbind()
with torch.no_grad():
    out, _ = gemkv_compile.compile(attend, inner="inductor", kv_format="model", strict=True)(*rows, past)
    torch.testing.assert_close(out, attend(*rows, past)[0])
found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
found |= {"aot hit": counters["aot_autograd"]["autograd_cache_hit"], "version": pass_version()}
print(json.dumps(found))
"""


def compiled_in_a_process(folder, caches):
    """What the caches had for a graph, in a process of its own; the package comes from `folder` alone."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    code = f"FOLDER, PACKAGES = {str(folder)!r}, {packages!r}\n{SCRIPT}"
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    # -S: an editable install's finder would find the checkout first.
    run = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("part", ["passes/lens.py", "kernels/append_kv/reference.py"])
def test_the_version_follows_the_source(part, tmp_path, monkeypatch):
    """B3: the version is a hash of every pass and operator."""
    from gemkv_compile.passes import version

    before, read = version.pass_version.__wrapped__(), Path.read_bytes
    changed = ROOT / part
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * path.samefile(changed))
    assert version.pass_version.__wrapped__() != before


def test_a_changed_pass_is_compiled_anew(tmp_path):
    """B3 (pytorch/pytorch#187319, #136883): processes that share one cache folder, before and after a change."""
    package, caches = tmp_path / "source" / "gemkv_compile", tmp_path / "caches"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gemkv_compile", package, ignore=ignored)
    for name in ("passes", "kernels"):
        shutil.copytree(ROOT / name, package / name, ignore=ignored)
    first, second = (compiled_in_a_process(package.parent, caches) for _ in range(2))
    with (package / "passes" / "lens.py").open("a") as file:
        file.write("# changed\n")
    third = compiled_in_a_process(package.parent, caches)
    assert (first["hit"], first["miss"]) == (0, 1)
    assert (second["hit"], second["miss"], second["version"]) == (1, 0, first["version"])  # the cache does work
    assert (third["hit"], third["miss"], third["aot hit"]) == (0, 1, 0) and third["version"] != first["version"]
