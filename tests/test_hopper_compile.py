"""The Hopper prefill kernel, compiled for sm_90 without one: registers, shared memory, the order of instructions."""

import re
import subprocess

import interpreted
import pytest
import triton
from offline import spilled_bytes
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from gemkv_compile.kernels.attend_chunk import kernel_hopper as hopper
from gemkv_compile.kernels.attend_chunk.kernel_hopper_load import HopperForm

# Head size, place in the list of candidates, rules (causal, windowed, capped), packed heads, dtype.
EVERY = [
    (head_dim, place, rules, pack, dtype)
    for head_dim, candidates in hopper.CANDIDATES.items()
    for place in range(len(candidates))
    for rules, pack, dtype in (("c", 4, "bf16"), ("w", 1, "bf16"), ("cwk", 2, "fp16"))
]
SOME = [(128, 0, "c", 4, "bf16"), (256, 0, "w", 1, "bf16")]
EVERY = [case if case in SOME else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]


def source(form, dtype):
    """The kernel for contiguous tensors."""
    element = gl.bfloat16 if dtype == "bf16" else gl.float16

    def descriptor(block):
        return f"tensordesc<{dtype}{block},{gl.NVMMASharedLayout.get_default_for(block, element)!r}>"

    names = hopper.attend_chunk_hopper_kernel.arg_names
    rows = hopper.ROWS.value // form.pack
    signature = dict.fromkeys(names, "i32") | dict(q_desc=descriptor([1, 1, rows, form.pack, form.head_dim]))
    signature |= dict.fromkeys(("k_desc", "v_desc"), descriptor([1, 1, form.block_n, form.head_dim]))
    signature |= dict(seq_lens="*i32", starts="*i32", out=f"*{dtype}", lse="*fp32", lens_s=("i32",), starts_s=("i32",))
    signature |= dict(out_s=("i32",) * 3, lse_s=("i32", "i32", "constexpr"), scales=("fp32", "fp32"))
    signature |= dict(REGISTERS="constexpr", F="constexpr")
    aligned = [["tt.divisibility", 16]]
    attributes = {(names.index(name),): aligned for name in ("out", "lse", "seq_lens", "starts")}
    attributes |= {(names.index("out_s"), axis): aligned for axis in range(3)}
    constants = {"F": form, "REGISTERS": hopper.REGISTERS[form.consumers][1], (names.index("lse_s"), 2): 1}
    return GluonASTSource(hopper.attend_chunk_hopper_kernel, signature, constants, attributes)


def opcodes(cubin, folder):
    """The instructions of a cubin, in their order."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)", text)


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("head_dim, place, rules, pack, dtype", EVERY)
def test_fits_and_overlaps(head_dim, place, rules, pack, dtype, tmp_path):
    """No register is spilled, and exponentials are computed while the tensor cores work."""
    tiles = hopper.CANDIDATES[head_dim][place]
    form = HopperForm(head_dim, pack, *tiles, "c" in rules, "w" in rules, "k" in rules)
    first, computing = hopper.REGISTERS[tiles.consumers]
    options = {"num_warps": 4, "maxnreg": first}
    compiled = triton.compile(source(form, dtype), target=GPUTarget("cuda", 90, 32), options=options)
    ours = hopper.shared_bytes(head_dim, tiles)
    assert ours <= compiled.metadata.shared <= min(ours + 1024, hopper.SHARED_BYTES)
    assert spilled_bytes(compiled.asm["ptx"], 90, tmp_path) == 0
    warps = compiled.metadata.num_warps
    assert warps == 4 * tiles.consumers + 4 and warps * 32 * first <= 65536
    assert 128 * (tiles.consumers * computing + 24) <= warps * 32 * first
    found = opcodes(compiled.asm["cubin"], tmp_path)
    assert not any(name.startswith(("LDL", "STL")) for name in found)
    # A tile's two products, in the first tile, the loops with and without masks, and the last values.
    products = (head_dim + tiles.block_n) // 16 * (4 if "w" in rules else 3) * tiles.consumers
    assert sum(name.startswith("HGMMA") for name in found) == products
    assert overlapped(found) >= tiles.consumers * (tiles.block_n // 2 + 2), found


def overlapped(found):
    """Exponentials between two waits for products that no product stands between: the second one's go on meanwhile."""
    total = current = 0
    waiting = False
    for name in found:
        if name.startswith("HGMMA"):
            waiting = False
        elif name.startswith("WARPGROUP.DEPBAR"):
            total += current if waiting else 0
            waiting, current = True, 0
        elif name == "MUFU.EX2":
            current += 1
    return total
