"""Kernels compiled for GPUs that are not here: what they may take, and what ptxas says that they spill."""

import re
import subprocess

import triton

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
