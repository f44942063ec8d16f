"""What the Hopper kernel of `attend_chunk` loads, and in which order: the part of its one loading warp.

A row of a tile is a query of one head; a group of four warps has ROWS of them. Keys and values go through one ring of
shared memory, in the order in which they are used: K0, then K1 V0, K2 V1 and so on, the last values.
Source: warp specialisation, FlashAttention-3, arXiv:2407.08608, section 3.1.
"""

# mypy: disable-error-code="no-untyped-def"
# Gluon reads the annotations of its functions: only constants may have one.

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS = gl.constexpr(64)  # what one group of four warps multiplies at once


@dataclass(frozen=True)
class HopperForm:
    """What one compiled kernel is for.

    Args:
        head_dim: 64, 128 or 256.
        pack: Query heads of a K/V head that share a tile of queries, a power of two; ROWS // pack queries a group.
        block_n: Keys in a tile.
        stages: Tiles of keys or values that the ring holds.
        consumers: Groups of four warps that compute.
        pingpong: The groups take turns in giving work to the tensor cores.
        held: First channels of a group's queries that it keeps in registers, which spares reads of shared memory; 0, or
            a divisor of head_dim that TMA's rows of 64 channels allow.
        causal, windowed, capped: Which rules there are.
    """

    head_dim: int
    pack: int
    block_n: int
    stages: int
    consumers: int
    pingpong: bool
    held: int
    causal: bool
    windowed: bool
    capped: bool


@gluon.jit
def count_tiles(tiles):
    """How many of a call's tiles of queries this program does.

    Programs take one tile each, then one each in reverse order, and so on: tiles are ordered by their work, and what a
    program gets too much in one round it gets too little in the next.
    """
    programs, program = gl.num_programs(0), gl.program_id(0)
    rounds = tiles // programs
    rest = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + gl.where(rounds * programs + rest < tiles, 1, 0)


@gluon.jit
def find_tile(turn, sizes, rules, F: gl.constexpr):
    """What the tile of this program's turn is.

    Args:
        sizes: (batch, query heads, heads of a group, queries, tokens of the chunk).
        rules: (seq_lens, its stride, starts, its stride, window), as in `gemkv_compile.kernels.ops`.
    Returns:
        Sequence, first query head, first query, its token; first token that the sequence shows, first tile of keys, and
        how many of them, at least one. Tokens count from the first of the chunk.
    """
    batch, heads, q_len, new_len = sizes[0], sizes[1], sizes[3], sizes[4]
    programs, program = gl.num_programs(0), gl.program_id(0)
    index = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    units = batch * (heads // F.pack)
    QUERIES: gl.constexpr = F.consumers * ROWS // F.pack
    block, unit = index // units, index % units
    if F.causal:
        block = gl.cdiv(q_len, QUERIES) - 1 - block  # the last queries have most to do: they start first
    row, head = unit // (heads // F.pack), unit % (heads // F.pack) * F.pack
    low = gl.load(rules[2] + row * rules[3]) - gl.load(rules[0] + row * rules[1])
    low = gl.maximum(low, 0)
    query = block * QUERIES
    token = new_len - q_len + query
    begin, stop = low, new_len
    if F.windowed:
        begin = gl.maximum(begin, token - rules[4] + 1)
    if F.causal:
        stop = gl.minimum(stop, token + QUERIES)
    begin = gl.minimum(begin, new_len - 1) // F.block_n
    return row, head, query, token, low, begin, gl.maximum(gl.cdiv(stop, F.block_n) - begin, 1)


@gluon.jit
def advance(slot, phase, F: gl.constexpr):
    """The next slot of the ring, and the phase that its barriers are in."""
    slot += 1
    return gl.where(slot == F.stages, 0, slot), gl.where(slot == F.stages, phase ^ 1, phase)


@gluon.jit
def load_tile(desc, row, head, token, slot, phase, ring, full, empty, F: gl.constexpr):
    """Load keys or values from a token on into a slot, once it is empty; the next slot and phase."""
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, head, token, 0], full.index(slot), ring.index(slot))
    return advance(slot, phase, F)


@gluon.jit
def produce(descs, memory, sizes, rules, tiles, F: gl.constexpr):
    """Load the queries, keys and values of all tiles of this program; one warp. Arguments as in `consume`."""
    q_desc, k_desc, v_desc = descs
    ring, q_rows, full, empty, q_full, q_empty = memory[:6]
    CONSUMERS: gl.constexpr = F.consumers
    QUERIES: gl.constexpr = ROWS // F.pack
    slot, phase = 0, 0
    for turn in range(count_tiles(tiles)):
        row, head, query, _token, _low, begin, count = find_tile(turn, sizes, rules, F)
        kv_head, token = head // sizes[2], begin * F.block_n
        slot, phase = load_tile(k_desc, row, kv_head, token, slot, phase, ring, full, empty, F)
        for group in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(group), turn & 1 ^ 1)
            mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
            place = [row, head // F.pack, query + group * QUERIES, 0, 0]
            tma.async_copy_global_to_shared(q_desc, place, q_full.index(group), q_rows.index(group))
        for _tile in range(1, count):
            later = token + F.block_n
            slot, phase = load_tile(k_desc, row, kv_head, later, slot, phase, ring, full, empty, F)
            slot, phase = load_tile(v_desc, row, kv_head, token, slot, phase, ring, full, empty, F)
            token = later
        slot, phase = load_tile(v_desc, row, kv_head, token, slot, phase, ring, full, empty, F)
