"""Products of few rows compiled for devices that are not here: nothing spills, and weights are read in wide pieces."""

import re

import interpreted
import pytest
import torch
from offline import compile_launch, spilled_bytes

from gemkv_compile.kernels.linears import kernel

CASES = [(80, 1, 2560), (90, 1, 2560), (100, 1, 3072), (80, 8, 2560), (90, 8, 2560), (90, 16, 576), (100, 8, 2560)]


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, rows, features", CASES)
def test_spills_nothing_and_loads_wide(arch, rows, features, monkeypatch, tmp_path):
    x = torch.zeros(rows, features, dtype=torch.bfloat16)
    weights = [torch.zeros(width, features, dtype=torch.bfloat16) for width in (64, 48, 80)]
    name = "one_row" if rows == 1 else "few_rows"
    compiled = compile_launch(monkeypatch, kernel, name, arch, lambda: kernel.linears_triton(x, weights, []))
    ptx = compiled.asm["ptx"]
    assert spilled_bytes(ptx, arch, tmp_path) == 0
    if rows == 1:
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and not re.search(r"ld\.global\S*\.b16", ptx)
    else:
        assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)
