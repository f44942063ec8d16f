"""RMSNorm and rotary embedding of heads for devices that are not here: no spills, wide loads, all roundings."""

import interpreted
import pytest
import torch
from offline import compile_launch, spilled_bytes

from gemkv_compile.kernels.qk_norm_rope import kernel

CASES = [  # architecture, head size, rotated channels, norm, values as well
    (80, 64, 64, "rounded_weight", False),
    (90, 256, 256, "one_plus_weight", False),
    (90, 128, 128, "none", False),
    (100, 128, 128, "rounded_weight", False),
    (100, 256, 64, "weight", True),
]


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, dim, rotary, norm, values", CASES)
def test_spills_nothing_loads_wide_and_rounds(arch, dim, rotary, norm, values, monkeypatch, tmp_path):
    q, k, v = (torch.zeros(8, 1, heads, dim, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2))
    weight = None if norm == "none" or values else torch.zeros(dim, dtype=torch.bfloat16)
    cos = torch.zeros(8, 1, 1, rotary, dtype=torch.bfloat16)
    args = q, k, v if values else None, weight, weight, cos, cos, norm, 1e-6
    compiled = compile_launch(monkeypatch, kernel, "norm_and_rotate", arch, lambda: kernel.qk_norm_rope_triton(*args))
    ptx = compiled.asm["ptx"]
    assert spilled_bytes(ptx, arch, tmp_path) == 0
    # Nothing that eager rounds is fused; sm_80 has no other bfloat16 arithmetic, and multiplies by adding -0.
    assert ("fma.rn.f32" if arch == 80 else "fma.rn") not in ptx
    if dim >= 128:
        assert "ld.global.b32" in ptx or "ld.global.v" in ptx
