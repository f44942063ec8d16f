"""The kernels of attention shares compiled for devices that are not here: shared memory, registers, keys in flight."""

import collections
import re

import interpreted
import pytest
import torch
from offline import SHARED, compile_launch, spilled_bytes

from gemkv_compile.kernels.attention_shares import kernel
from gemkv_compile.kernels.layout import PageLayout

KERNELS = ("sum_weights", "share_out")
SOME = [(90, 256, "int8", "share_out"), (80, 128, "k6v4", "sum_weights"), (100, 128, "int4", "share_out")]
LATER = [(arch, dim, name) for arch in (80, 90, 100) for dim in (64, 128, 256) for name in ("int8", "int4", "model")]
LATER += [(86, 512, "int8"), (86, 256, "model"), (90, 512, "k6v4"), (100, 512, "int8"), (90, 80, "k6v4")]
SOME += [pytest.param(*case, name, marks=pytest.mark.slow) for case in LATER for name in KERNELS]
SPILLS = {90: 8, 100: 16}  # bytes that a thread spills at most, at some sizes


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, head_dim, kv_format, name", SOME)
def test_fits_a_device(arch, head_dim, kv_format, name, monkeypatch, tmp_path):
    """Keys are copied ahead, in wide pieces, where shared memory has room; hardly anything is spilled."""
    layout, observed, tokens = PageLayout(2, head_dim, 64, 64, kv_format, torch.bfloat16), 32, 500
    q = torch.zeros(1, 8, observed, head_dim, dtype=torch.bfloat16)
    tail = torch.zeros(1, 2, 2, layout.tail_rows, head_dim, dtype=torch.bfloat16)
    state = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), tail
    rules = torch.ones(1, tokens, dtype=torch.bool), 0.1, 30.0, None, tokens, layout
    monkeypatch.setattr(kernel, "device_limits", lambda device: (132, SHARED[arch]))
    for other in set(KERNELS) - {name}:
        monkeypatch.setattr(kernel, other, collections.defaultdict(lambda: lambda *args, **options: None))
    positions = torch.arange(tokens - observed, tokens)
    compiled = compile_launch(
        monkeypatch, kernel, name, arch, lambda: kernel.attention_shares_triton(q, positions, *state, *rules)
    )
    assert compiled.metadata.shared <= SHARED[arch]
    assert spilled_bytes(compiled.asm["ptx"], arch, tmp_path) <= SPILLS.get(arch, 0)
    pieces = re.findall(r"cp\.async\.c\S+ \[[^\]]*\], \[[^\]]*\], (0x\w+)", compiled.asm["ptx"])
    assert {"0x8", "0x10"} & set(pieces) or arch == 86 or head_dim == 80  # rows of no 8 bytes
