"""Kernels compiled for GPUs that are not here: what they may take, and what ptxas says that they spill."""

import re
import subprocess
import types

import triton
from triton.backends.compiler import GPUTarget

# Compute capability: shared memory that a program may have.
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def spilled_bytes(ptx, arch, folder):
    """Bytes that ptxas says are stored to local memory for want of registers."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    tools = triton.knobs.nvidia
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    command = [(tools.ptxas_blackwell if arch >= 100 else tools.ptxas).path, "-v", f"--gpu-name={name}", str(path)]
    log = subprocess.run([*command, "-o", str(folder / "cubin")], capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", log).group(1))


def compile_launch(monkeypatch, module, kernel, arch, call):
    """What Triton compiles when `call` launches a module's kernel (its name) on a device that is not here."""
    target = GPUTarget("cuda", arch, 32)
    driver = dict(get_current_device=int, get_current_stream=int, get_current_target=lambda: target)
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace(**driver))
    function, compiled = getattr(module, kernel), []
    function.device_caches.clear()  # what was compiled for another target has the same key

    class Launches:
        def __getitem__(self, grid):
            return lambda *args, **options: compiled.append(function.warmup(*args, grid=grid, **options))

    monkeypatch.setattr(module, kernel, Launches())
    call()
    return compiled[0]
