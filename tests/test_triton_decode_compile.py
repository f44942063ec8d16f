"""The kernels of a decode step compiled for devices that are not here: shared memory, registers, loads in flight."""

import interpreted
import pytest
import torch
import triton
from offline import SHARED, spilled_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemkv_compile.kernels.append_kv import kernel as append
from gemkv_compile.kernels.append_kv.kernel_token import NUM_WARPS, launch_sizes
from gemkv_compile.kernels.attend_pages import kernel as attend
from gemkv_compile.kernels.attend_pages import sizes as launch
from gemkv_compile.kernels.layout import KV_FORMATS, PageLayout

HEADS, GROUPS = 4, 2
SOME = [(86, 256, "int8"), (86, 512, "int8"), (90, 128, "int8"), (90, 512, "int8"), (100, 256, "int8")]
SOME += [(90, 256, "k8v4"), (90, 256, "k6v4")]
LATER = [(80, 128, "int4"), (90, 512, "int4"), (100, 256, "int4")]
LATER += [(80, 128, "k6v4"), (90, 512, "k6v4"), (100, 256, "k6v4")]
SOME += [pytest.param(*case, marks=pytest.mark.slow) for case in LATER]


def sizes(layout):
    return {
        "HEADS": HEADS,
        "D": layout.head_dim,
        "GROUP": layout.group_size,
        "TAIL_ROWS": layout.tail_rows,
        "GROUPS_PER_PAGE": layout.groups_per_page,
        "K_BITS": layout.k_bits,
        "V_BITS": layout.v_bits,
        "K_BYTES": layout.k_bytes,
        "V_BYTES": layout.v_bytes,
        "GROUP_BYTES": layout.group_bytes,
        "QUANTISED": layout.is_quantised,
    }


def compiled(function, pointers, floats, constants, arch, **options):
    """A kernel for aligned pointers and tails; every other argument is an int32."""
    names = function.arg_names
    kinds = pointers | dict.fromkeys(floats, "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "tail_batch")}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


def attention(arch, head_dim, kv_format, dtype):
    """The decode kernel as it is launched on a device, and its pipeline stages."""
    layout = PageLayout(HEADS, head_dim, 256, 64, kv_format, dtype)
    tile = launch.tile_tokens(head_dim, dtype.itemsize, 64)
    absent = [name for name in attend.attend_split.arg_names if name.startswith(("padding", "mask"))]
    constants = sizes(layout) | dict.fromkeys(absent) | {"GROUPS": GROUPS, "TILE": tile, "q_dim": 1}
    constants |= {"HAS_CAP": False, "HAS_WINDOW": False, "D_PADDED": head_dim, "GROUPS_PADDED": 8}
    constants |= {"HALVES": dtype.itemsize == 2, "BITS": True}
    constants |= {
        f"{name}_PADDED": launch.part_padded(head_dim, parts) for name, parts in (("HALF", 2), ("QUARTER", 4))
    }
    number = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    pointers = {"q": number, "page_table": "*i64", "seq_lens": "*i32", "starts": "*i32", "tail": number}
    pointers |= {"sums": "*fp32", "peaks": "*fp32"}
    stages = launch.stages(launch.step_bytes(tile, head_dim, layout.k_bits + layout.v_bits), SHARED[arch])
    options = {"num_warps": launch.num_warps(head_dim, layout.k_bits, layout.v_bits), "num_stages": stages}
    return compiled(attend.attend_split, pointers, ("scale", "softcap"), constants, arch, **options), stages


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("arch, head_dim, kv_format", SOME)
def test_attention_fits_a_device_and_copies_ahead(arch, head_dim, kv_format, tmp_path):
    kernel, stages = attention(arch, head_dim, kv_format, torch.bfloat16)
    assert kernel.metadata.shared <= SHARED[arch]
    assert spilled_bytes(kernel.asm["ptx"], arch, tmp_path) == 0
    copies = [x for x in kernel.asm["ttgir"].splitlines() if "async_copy_global_to_local" in x]
    codes = [line for line in copies if "ptr<i8>" in line]
    assert stages >= 2 and codes and all("contiguity = 16" in line for line in codes)
    if kv_format == "int8":  # nothing in the loop is waited for but the address of the step after next
        loop = kernel.asm["ttgir"].split("scf.for", 1)[1].split("scf.yield")[0]
        assert loop.count("tt.load") == 1 and "async_copy" in loop


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_attention_compiles_for_models_of_other_dtypes(kv_format):
    for dtype in (torch.float16, torch.float32):
        assert attention(90, 64, kv_format, dtype)[0].metadata.shared <= SHARED[90]


@pytest.mark.parametrize("shared", sorted(set(SHARED.values())))
@pytest.mark.parametrize("bits", [8, 10, 12, 16, 32, 64])  # of a key and a value together
def test_tile_sizes(shared, bits):
    """Keys and values in flight, queries and weights fit any device, at every head size."""
    for head_dim in range(16, 513, 16):
        dim = triton.next_power_of_2(head_dim)
        tile = launch.tile_tokens(head_dim, max(bits // 16, 2), 64)
        step = launch.step_bytes(tile, head_dim, bits)
        assert step >= tile * dim * bits // 8
        stages = launch.stages(step, shared)
        assert 16 <= tile <= 64 and 1 <= stages <= 3
        assert (stages - 1) * step + launch.SMALL_BUFFERS <= shared


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize(
    "arch, head_dim, kv_format",
    [
        (80, 512, "int8"),
        (90, 256, "int8"),
        (100, 128, "int8"),
        (80, 256, "int4"),
        (90, 512, "k8v4"),
        (90, 256, "k6v4"),
        (100, 128, "int4"),
    ],
)
def test_append_fits_a_device(arch, head_dim, kv_format, tmp_path):
    layout = PageLayout(HEADS, head_dim, 256, 64, kv_format, torch.bfloat16)
    pointers = {"k": "*bf16", "v": "*bf16", "tail": "*bf16", "page_table": "*i64", "seq_lens": "*i32"}
    constants = sizes(layout) | {"BLOCK_D": append.BLOCK_D, "k_dim": 1, "v_dim": 1}
    step = launch_sizes(1, HEADS, head_dim)[1]
    for function, own, warps in ((append.append_token, step, NUM_WARPS), (append.append_chunk, {}, 4)):
        kernel = compiled(function, pointers, (), constants | own, arch, num_warps=warps)
        assert kernel.metadata.shared <= SHARED[arch]
        assert spilled_bytes(kernel.asm["ptx"], arch, tmp_path) == 0
