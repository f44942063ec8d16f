"""The chunk kernel compiled for devices that are not here: it fits their shared memory, and nearly all their registers.

GEMKV_EVERY_DEVICE=1 compiles all head sizes for all devices, which takes minutes.
"""

import dataclasses
import os

import interpreted
import pytest
import torch
import triton
from offline import SHARED, spilled_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemkv_compile.kernels.attend_chunk import kernel
from gemkv_compile.kernels.layout import KV_FORMATS, PageLayout

HEAD_DIMS = (64, 128, 256, 512)
EVERY = [(arch, head_dim, kv_format) for arch in SHARED for head_dim in HEAD_DIMS for kv_format in KV_FORMATS]
SOME = [(80, 64, "int8"), (86, 512, "int8"), (90, 256, "int8"), (100, 128, "int8"), (90, 256, "int4")]
LATER = [(80, 128, "int4"), (90, 256, "k8v4"), (90, 256, "k6v4"), (100, 64, "k6v4"), (100, 64, "int4")]
# Queries, and heads that share keys and, where queries are few, tiles: head size and device.
PACKED = [(90, 256, 30)]
PACKED_LATER = [(90, 256, 4), (90, 512, 30), (80, 256, 30), (90, 128, 63), (100, 512, 4)]
PACKED += [pytest.param(*case, marks=pytest.mark.slow) for case in PACKED_LATER]
SOME += [pytest.param(*case, marks=pytest.mark.slow) for case in LATER]
# Bytes that a thread spills at most, where it does: the sums of a large head take half of the registers there are.
SPILLS = {(90, 256): 104, (90, 512): 96, (100, 512): 160}
DIMENSIONS = {"q": 4, "k": 4, "v": 4, "table": 2, "lens": 1, "starts": 1, "tail": 5, "padding": 2, "mask": 4}
DIMENSIONS |= {"sinks": 1, "out": 4, "lse": 3}


def source(form):
    """The kernel for contiguous, aligned bfloat16 tensors, without padding, mask and sinks."""
    pointers = dict.fromkeys(("q", "k", "v", "tail", "out"), "*bf16") | {"page_table": "*i64", "lse": "*fp32"}
    pointers |= {"seq_lens": "*i32", "starts": "*i32"}
    names = kernel.attend_chunk_kernel.arg_names
    signature, constants, attributes = {}, {"F": form}, {}
    for place, name in enumerate(names):
        signature[name] = pointers.get(name, "i32")
        if name in pointers:
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif name.endswith("_s"):
            last = DIMENSIONS[name[:-2]] - 1
            signature[name] = ("i32",) * last + ("constexpr",)
            constants[(place, last)] = 1
            if name[:-2] in pointers:
                attributes |= {(place, axis): [["tt.divisibility", 16]] for axis in range(last)}
        elif name == "scales":
            signature[name] = ("fp32", "fp32")
        elif name in ("padding", "mask", "sinks"):
            signature[name], constants[name] = "constexpr", None
    return ASTSource(kernel.attend_chunk_kernel, signature | {"F": "constexpr"}, constants, attributes)


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch, head_dim, kv_format", EVERY if os.environ.get("GEMKV_EVERY_DEVICE") else SOME)
def test_fits_a_device(arch, head_dim, kv_format, own, monkeypatch, tmp_path):
    spilled = compiled_spills(arch, head_dim, kv_format, 1, 1000, monkeypatch, tmp_path, own)
    assert spilled <= SPILLS.get((arch, head_dim), 0)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, head_dim, q_len", PACKED)
def test_tiles_of_several_heads_spill_nothing(arch, head_dim, q_len, monkeypatch, tmp_path):
    assert compiled_spills(arch, head_dim, "int8", 4, q_len, monkeypatch, tmp_path) == 0


def compiled_spills(arch, head_dim, kv_format, groups, q_len, monkeypatch, folder, own=True):
    """Compile, check the shared memory; bytes that a thread spills."""
    monkeypatch.setattr(kernel, "_shared_bytes", lambda device: SHARED[arch])
    q = torch.empty(1, groups, q_len, head_dim, dtype=torch.bfloat16, device="meta")
    layout = PageLayout(1, head_dim, 256, 64, kv_format, torch.bfloat16)
    form, sizes = kernel._form(q, None, None, None, True, None, layout)
    form = dataclasses.replace(form, own=own)
    options = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
    compiled = triton.compile(source(form), target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.metadata.shared <= SHARED[arch]
    return spilled_bytes(compiled.asm["ptx"], arch, folder)


@pytest.mark.parametrize("shared", sorted(set(SHARED.values())))
@pytest.mark.parametrize("element", [2, 4])
def test_tile_sizes(shared, element):
    """Powers of two that a tensor core takes; queries, and the keys and values in flight, fit."""
    for head_dim in range(16, 513, 16):
        block_m, block_n, num_warps, num_stages = kernel.tiles(head_dim, shared, element)
        assert all(size & (size - 1) == 0 for size in (block_m, block_n, num_warps))
        assert min(block_m, block_n) >= 16 and num_warps in (4, 8)
        dim = triton.next_power_of_2(head_dim)
        assert (block_m + 2 * num_stages * block_n) * dim * element <= shared
