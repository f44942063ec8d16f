"""The kernels of `prefill="int8"` compiled for devices that are not here: nothing spills, and products are of int8."""

import interpreted
import pytest
import torch
from offline import SHARED, compile_launch, spilled_bytes
from tiers import tiers

from gemkv_compile.kernels.attend_chunk import kernel_int8, kernel_int8_keys

RULES = {"plain": {}, "all": {"softcap": 20.0, "window": 100, "padded": True}}
FAST = [(90, 256, "all"), (90, 128, "plain"), (80, 128, "all"), (100, 128, "all")]
EVERY = [(arch, dim, rules) for arch in (80, 86, 90, 100) for dim in (64, 128, 256) for rules in RULES]
PRODUCTS = {80: "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", 90: "wgmma.mma_async.sync.aligned.m64"}


class NoLaunch:
    """A kernel that is not run."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


def call(head_dim, softcap=None, window=None, padded=False):
    """A prompt of 512 tokens, two query heads for each K/V head."""
    q = torch.zeros(1, 512, 4, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    padding = torch.ones(1, 512, dtype=torch.bool) if padded else None
    kernel_int8.attend_int8_triton(q, q[:, :2], q[:, :2], padding, 0.1, softcap, True, window)


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, head_dim, rules", tiers(FAST, [case for case in EVERY if case not in FAST]))
def test_attention_fits_a_device(arch, head_dim, rules, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_int8, "capability", lambda device: divmod(arch, 10))
    for name in ("sum_keys_kernel", "quantise_keys_kernel"):
        monkeypatch.setattr(kernel_int8_keys, name, NoLaunch())
    run = lambda: call(head_dim, **RULES[rules])  # noqa: E731
    compiled = compile_launch(monkeypatch, kernel_int8, "attend_int8_kernel", arch, run)
    assert compiled.metadata.shared <= SHARED[arch]
    assert spilled_bytes(compiled.asm["ptx"], arch, tmp_path) == 0
    assert PRODUCTS[90 if arch == 90 else 80] in compiled.asm["ptx"] and ".s8" in compiled.asm["ptx"]


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, head_dim", [(90, 256), (80, 128)])
@pytest.mark.parametrize("kernel", ["sum_keys_kernel", "quantise_keys_kernel"])
def test_quantising_fits_a_device(kernel, arch, head_dim, monkeypatch, tmp_path):
    others = {"sum_keys_kernel", "quantise_keys_kernel"} - {kernel}
    for name in others:
        monkeypatch.setattr(kernel_int8_keys, name, NoLaunch())
    monkeypatch.setattr(kernel_int8, "attend_int8_kernel", NoLaunch())
    compiled = compile_launch(monkeypatch, kernel_int8_keys, kernel, arch, lambda: call(head_dim, padded=True))
    assert compiled.metadata.shared <= SHARED[arch]
    assert spilled_bytes(compiled.asm["ptx"], arch, tmp_path) == 0
