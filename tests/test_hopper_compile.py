"""The Hopper prefill kernel, compiled for sm_90 without one: registers, shared memory, the order of instructions."""

import functools
import re
import subprocess

import interpreted
import pytest
import torch
import triton
from offline import compile_launch, spilled_bytes

from gemkv_compile.kernels.attend_chunk import kernel_hopper as hopper

# Bytes that a thread spills at most, where it does: by head size, place and rules.
SPILLS = {(128, 3, "cwk"): 16, (128, 4, "cwk"): 16}
SPILLS |= {(256, 0, "c"): 40, (256, 0, "w"): 8, (256, 0, "cwk"): 256, (256, 2, "cwk"): 64}
# Head size, place in the list of candidates, rules (causal, windowed, capped), packed heads, dtype.
RULES = ("c", 4, torch.bfloat16), ("cwk", 2, torch.float16), ("w", 1, torch.bfloat16)
EVERY = [
    (head_dim, place, *rules)
    for head_dim, candidates in hopper.CANDIDATES.items()
    for place in range(len(candidates))
    for rules in RULES[: 3 if place == 0 else 2]
]
EVERY += [(256, 1, "cw", 2, torch.bfloat16), (256, 1, "ck", 4, torch.bfloat16)]  # as `tiles_and_pack` has them
SOME = [(128, 0, "c", 4, torch.bfloat16), (256, 0, "c", 4, torch.bfloat16)]
EVERY = [case if case in SOME else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]


def launch(head_dim, tiles, rules, pack, dtype):
    """Call the host's function on tensors [B, S, H, D], transposed; one K/V head, so that Triton specialises on 1."""
    q, k, v = (torch.zeros(1, 200, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (4, 1, 1))
    lengths, softcap, window = torch.zeros(1, dtype=torch.int32), "k" in rules, "w" in rules
    rules = 0.1, 30.0 if softcap else None, "c" in rules, 100 if window else None
    hopper.attend_chunk_hopper(q, k, v, lengths, lengths, *rules, tiles, pack, programs=5)


def instructions(cubin, folder):
    """(name, all of it) of the instructions of a cubin, in their order."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([^;]+);", text)
    return [(line.split()[0], line) for line in lines]


def highest_registers(found):
    """By the number of registers that a part of the kernel asks for, the highest that it names."""
    highest, part = {}, None
    for name, line in found:
        if name.startswith("USETMAXREG"):
            part = int(line.split()[-1], 16)
        numbers = [int(number) for number in re.findall(r"\bR(\d+)\b", line)]
        highest[part] = max(highest.get(part, 0), *numbers, 0)
    return highest


@pytest.mark.skipif(not interpreted.ON, reason="this process compiles")
@pytest.mark.slow
def test_in_a_process_that_compiles(tmp_path):
    interpreted.run_compiled(__file__, tmp_path)


@pytest.mark.skipif(interpreted.ON, reason="kernels are interpreted here")
@pytest.mark.parametrize("head_dim, place, rules, pack, dtype", EVERY)
def test_fits_and_overlaps(head_dim, place, rules, pack, dtype, monkeypatch, tmp_path):
    """No register is spilled, and exponentials are computed while the tensor cores work."""
    tiles = hopper.CANDIDATES[head_dim][place]
    call = functools.partial(launch, head_dim, tiles, rules, pack, dtype)
    compiled = compile_launch(monkeypatch, hopper, "attend_chunk_hopper_kernel", 90, call)
    ours = hopper.shared_bytes(head_dim, tiles)
    assert ours <= compiled.metadata.shared <= min(ours + 1024, hopper.SHARED_BYTES)
    spilled = SPILLS.get((head_dim, place, rules), 0)
    assert spilled_bytes(compiled.asm["ptx"], 90, tmp_path) <= spilled
    first, computing = hopper.REGISTERS[tiles.consumers]
    warps = compiled.metadata.num_warps
    assert warps == 4 * tiles.consumers + 4 and warps * 32 * first <= 65536
    assert 128 * (tiles.consumers * computing + 24) <= warps * 32 * first
    whole = instructions(compiled.asm["cubin"], tmp_path)
    highest, found = highest_registers(whole), [name for name, _ in whole]
    assert highest[24] < 24 and highest[computing] < computing, highest
    assert spilled or not any(name.startswith(("LDL", "STL")) for name in found)
    # A tile's two products, in the first tile, the loops with and without masks, and the last values.
    places = 4 if "w" in rules else 3
    products = (head_dim + tiles.block_n) // 16 * places * tiles.consumers
    assert sum(name.startswith("HGMMA") for name in found) == products
    # Nothing goes on during the softmax of the first tile, and something during all others.
    assert overlapped(found) >= 0.97 * found.count("MUFU.EX2") * (places - 1) / places


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
