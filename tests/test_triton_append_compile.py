"""A prompt's append compiled for devices that are not here: nothing spills, and codes are stored in wide pieces."""

import re

import interpreted
import pytest
import torch
from offline import compile_launch, spilled_bytes
from tiers import tiers

from gemkv_compile.kernels.append_kv import kernel
from gemkv_compile.kernels.layout import PageLayout

CASES = tiers(
    [(90, 256, "int8"), (90, 128, "int4"), (80, 128, "int8")],
    [(90, 256, "k8v4"), (90, 256, "k6v4"), (100, 256, "int8"), (90, 256, "model"), (80, 64, "int4")],
)


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, head_dim, kv_format", CASES)
def test_spills_nothing_and_stores_wide(arch, head_dim, kv_format, monkeypatch, tmp_path):
    layout = PageLayout(4, head_dim, 256, 64, kv_format, torch.bfloat16)
    k, v = (torch.zeros(1, 4096, 4, head_dim, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    state = torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    tail = torch.zeros(1, 2, 4, layout.tail_rows, head_dim, dtype=torch.bfloat16)
    append = lambda: kernel.append_kv_triton(k, v, *state, tail, layout)  # noqa: E731
    ptx = compile_launch(monkeypatch, kernel, "append_chunk", arch, append).asm["ptx"]
    assert spilled_bytes(ptx, arch, tmp_path) == 0
    if kv_format != "k6v4":  # whose rests are rows of 16 bytes in pieces
        assert "st.global.b8" not in ptx
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 8
