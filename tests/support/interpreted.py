"""Kernels on a CPU: Triton decides when it is imported whether its functions are compiled or interpreted."""

import os
import subprocess
import sys
from pathlib import Path

ON = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels."""


def run_compiled(file, folder):
    """Run a file's tests, but slow ones and those for a GPU, in a process that compiles, from an empty folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow", str(Path(file).resolve())]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def repair_interpreter():
    """Make Triton 3.6 interpret what it compiles: loops to a bound that a kernel computes, bfloat16, and fma.

    Its scalars are arrays of shape [1], which NumPy 2.4 refuses as an int. It multiplies the bits of bfloat16 numbers
    instead of the numbers, and cuts float32 numbers off where it should round them. It rounds the product of an fma.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    def patch_tensor(tensor, scope):
        original_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(x):
        return cast(builder, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot(self, a, b, *args):
        return dot(self, widened(a), widened(b), *args)

    def cast_impl(self, src, to):
        if (src.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, to)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    def create_fma(self, x, y, z):
        """Of float32 numbers: their product is exact in float64."""
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    builder, kind = interpreter.interpreter_builder, interpreter.InterpreterBuilder
    original_patch, interpreter._patch_lang_tensor = interpreter._patch_lang_tensor, patch_tensor
    dot, kind.create_dot = kind.create_dot, create_dot
    cast, kind.cast_impl = kind.cast_impl, cast_impl
    kind.create_fma = create_fma


if ON:
    repair_interpreter()
