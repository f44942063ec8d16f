"""compute-sanitizer over every kernel with mixed head sizes: no access outside what was allocated, no race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_devices import is_hopper

SUPPORT = Path(__file__).parent / "support"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"),
]


def sanitise(tool, script, tmp_path):
    """Run a script under a tool, every allocation of torch on its own; what the tool printed."""
    source = tmp_path / "script.py"
    source.write_text(script)
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", sys.executable, str(source)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool, tmp_path):
    code, log = sanitise(tool, "import every_kernel; every_kernel.main()", tmp_path)
    assert code == 0 and "every kernel ran" in log, log[-3000:]


@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
def test_hopper_prefill(tmp_path):
    """Not under racecheck, which has not been tried on barriers that count bytes."""
    code, log = sanitise("memcheck", "import every_kernel; every_kernel.hopper_prefill()", tmp_path)
    assert code == 0 and "every kernel ran" in log, log[-3000:]


def test_memcheck_sees_a_write_outside(tmp_path):
    """The check can fail: pages one group short."""
    script = (
        "import torch, paged_cases as cases\n"
        "from gemkv_compile.kernels.append_kv.kernel import append_kv_triton\n"
        "cache = cases.PagedCache(1, 1, 64, 64, 64, 'int8', torch.bfloat16, 1)\n"
        "memory = torch.zeros(512, dtype=torch.uint8, device='cuda')\n"
        "table = torch.tensor([[memory.data_ptr()]], device='cuda')\n"
        "k = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16, device='cuda')\n"
        "append_kv_triton(k, k, table, cache.seq_lens.cuda(), cache.tail.cuda(), cache.layout)\n"
        "torch.cuda.synchronize()\n"
    )
    code, log = sanitise("memcheck", script, tmp_path)
    assert code != 0 and "Invalid __global__ write" in log, log[-3000:]
