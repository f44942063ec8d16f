"""What the groups of warps of the Hopper kernel of `attend_chunk` compute.

While the tensor cores multiply the weights and values of one tile of keys, the softmax of the next tile is computed.
Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2; online softmax, arXiv:1805.02867.
"""

# mypy: disable-error-code="no-untyped-def"
# Gluon reads the annotations of its functions: only constants may have one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemkv_compile.kernels.attend_chunk.kernel_hopper_load import ROWS, advance, count_tiles, find_tile

LN2 = gl.constexpr(0.6931471805599453)
NEVER = gl.constexpr(float("-inf"))


@gluon.jit
def weigh(scores, peak, total, at, view, MASKED: gl.constexpr, F: gl.constexpr):
    """Weights of a tile of scores [ROWS, block_n] whose first token is at, and what they make of peak and total [ROWS].

    Args:
        scores: Products of queries and keys, float32.
        peak: The largest score so far in units of ln 2, -inf before the first.
        view: (tokens of the rows [ROWS], first token there is, tokens there are, window, scales).
        MASKED: Some row may not see some token.
    Returns:
        Weights, the factor [ROWS] for earlier sums, the new peak and total.
    """
    token, low, new_len, window, scales = view
    if F.capped:  # scales: 2 / ln 2 * scale / softcap, softcap / ln 2
        root = gl.rsqrt(1 + gl.exp2(scores * scales[0]))  # its square is the quotient, without a division
        scores = scales[1] - 2 * scales[1] * (root * root)
    if MASKED:
        BLOCK_N: gl.constexpr = F.block_n
        S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        key = at + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        seen = ((key >= low) & (key < new_len))[None, :]
        if F.causal:
            seen = seen & (key[None, :] <= token[:, None])
        if F.windowed:
            seen = seen & (key[None, :] > token[:, None] - window)
        scores = gl.where(seen, scores, NEVER)
    if F.capped:
        new = gl.maximum(peak, gl.max(scores, 1))
    else:  # scales: scale / ln 2, nothing
        new = gl.maximum(peak, gl.max(scores, 1) * scales[0])
    base = new
    if MASKED:
        base = gl.where(new == NEVER, 0.0, new)  # -inf - -inf would be NaN
    if F.capped:
        weights = gl.exp2(scores - base[:, None])
    else:
        weights = gl.exp2(scores * scales[0] - base[:, None])
    decay = gl.exp2(peak - base)
    return weights, decay, new, total * decay + gl.sum(weights, 1)


@gluon.jit
def take_turn(turns, group: gl.constexpr, number, F: gl.constexpr):
    """Wait until the groups before this one have given their work number `number` to the tensor cores."""
    if F.pingpong:
        mbarrier.wait(turns.index(group), number & 1 if group else number & 1 ^ 1)


@gluon.jit
def pass_turn(turns, group: gl.constexpr, F: gl.constexpr):
    """Let the next group give its work to the tensor cores."""
    if F.pingpong:
        mbarrier.arrive(turns.index((group + 1) % F.consumers))


@gluon.jit
def multiply_keys(q, keys, F: gl.constexpr):
    """Issue the products [ROWS, block_n] of queries, (in shared memory, held), with keys [block_n, head_dim]."""
    BLOCK_N: gl.constexpr = F.block_n
    HELD: gl.constexpr = F.held
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    if HELD == 0:
        scores = warpgroup_mma(q[0], keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
    else:
        PARTS: gl.constexpr = F.head_dim // F.held
        part = keys.slice(0, HELD, dim=1).permute([1, 0])
        scores = warpgroup_mma(q[1], part, nothing, use_acc=False, is_async=True)
        for place in gl.static_range(1, PARTS):
            part = keys.slice(place * HELD, HELD, dim=1).permute([1, 0])
            scores = warpgroup_mma(q[0].slice(place * HELD, HELD, dim=1), part, scores, is_async=True)
    return scores


@gluon.jit
def follow(state, q, memory, at, view, group: gl.constexpr, MASKED: gl.constexpr, F: gl.constexpr):
    """Issue the products with the keys at `at`, add the values of the tile before them, and weigh these keys.

    Args:
        state: (weighted sum [ROWS, head_dim], weights of the tile before [ROWS, block_n] in the model's dtype, peak,
            total, slot, phase, number of the turn).
    Returns:
        The state, with the weights of these keys.
    """
    acc, weights, peak, total, slot, phase, number = state
    ring, full, empty, turns = memory[0], memory[2], memory[3], memory[6]
    BLOCK_N: gl.constexpr = F.block_n
    DIM: gl.constexpr = F.head_dim
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    keys = ring.index(slot).reshape([BLOCK_N, DIM])
    value_slot, value_phase = advance(slot, phase, F)
    take_turn(turns, group, number, F)
    scores = multiply_keys(q, keys, F)
    mbarrier.wait(full.index(value_slot), value_phase)
    values = ring.index(value_slot).reshape([BLOCK_N, DIM])
    acc = warpgroup_mma(weights, values, acc, is_async=True)
    pass_turn(turns, group, F)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(empty.index(slot))
    numbers, decay, peak, total = weigh(scores, peak, total, at, view, MASKED, F)
    following = gl.convert_layout(numbers.to(weights.dtype), gl.DotOperandLayout(0, O, 2))
    slot, phase = advance(value_slot, value_phase, F)
    # ptxas moves arithmetic behind a wait for products, but not behind the loop of a wait for a tile.
    mbarrier.wait(full.index(slot), phase)
    acc, weights, following = warpgroup_mma_wait(0, deps=(acc, weights, following))
    mbarrier.arrive(empty.index(value_slot))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O))[:, None]
    return acc, following, peak, total, slot, phase, number + 1


@gluon.jit
def attend_tile(
    q, memory, slot, phase, number, at, count, view, full_begin, full_end,
    group: gl.constexpr, dtype: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Attention of ROWS rows q to count tiles of keys from the token at on; those in full_begin .. need no mask."""
    ring, full, empty, q_empty, turns = memory[0], memory[2], memory[3], memory[5], memory[6]
    BLOCK_N: gl.constexpr = F.block_n
    DIM: gl.constexpr = F.head_dim
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    peak = gl.full([ROWS], NEVER, gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([ROWS, DIM], gl.float32, O)
    mbarrier.wait(full.index(slot), phase)
    take_turn(turns, group, number, F)
    keys = ring.index(slot).reshape([BLOCK_N, DIM])
    scores = multiply_keys(q, keys, F)
    pass_turn(turns, group, F)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty.index(slot))
    numbers, _decay, peak, total = weigh(scores, peak, total, at, view, True, F)
    weights = gl.convert_layout(numbers.to(dtype), P)
    slot, phase = advance(slot, phase, F)
    mbarrier.wait(full.index(slot), phase)
    state = acc, weights, peak, total, slot, phase, number + 1

    left = 1
    if F.windowed:
        left = gl.minimum(gl.maximum(gl.cdiv(full_begin - at, BLOCK_N), 1), count)
        for tile in range(1, left):
            state = follow(state, q, memory, at + tile * BLOCK_N, view, group, True, F)
    right = gl.minimum(gl.maximum((full_end - at) // BLOCK_N, left), count)
    for tile in range(left, right):
        state = follow(state, q, memory, at + tile * BLOCK_N, view, group, False, F)
    for tile in range(right, count):
        state = follow(state, q, memory, at + tile * BLOCK_N, view, group, True, F)

    mbarrier.arrive(q_empty.index(group))
    acc, weights, peak, total, slot, phase, number = state
    acc = warpgroup_mma(weights, ring.index(slot).reshape([BLOCK_N, DIM]), acc, is_async=True)
    if F.held == 0:
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    else:  # the held queries stay in their registers until no product reads them
        acc, weights, _held = warpgroup_mma_wait(0, deps=(acc, weights, q[1]))
    mbarrier.arrive(empty.index(slot))
    slot, phase = advance(slot, phase, F)
    return acc, peak, total, slot, phase, number


@gluon.jit
def consume(results, memory, sizes, rules, scales, tiles, group: gl.constexpr, F: gl.constexpr):
    """Compute the rows of one group of all tiles of this program; four warps.

    Args:
        results: (out, its strides but the last, lse, its strides).
        memory: (ring, rows of queries, barriers: slot full, slot empty, queries full, queries empty, turns).
        sizes, rules: As in `find_tile`.
        scales: As in `weigh`.
        tiles: How many tiles the call has.
    """
    out, out_s, lse, lse_s = results
    q_rows, q_full = memory[1], memory[4]
    BLOCK_N: gl.constexpr = F.block_n
    DIM: gl.constexpr = F.head_dim
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    QUERIES: gl.constexpr = ROWS // F.pack
    HELD: gl.constexpr = F.held
    rows_q = q_rows.index(group).reshape([ROWS, DIM])
    slot, phase, number = 0, 0, 0
    for turn in range(count_tiles(tiles)):
        row, head, query, token, low, begin, count = find_tile(turn, sizes, rules, F)
        query, token = query + group * QUERIES, token + group * QUERIES
        full_begin, full_end = low, sizes[4]
        if F.windowed:
            full_begin = gl.maximum(full_begin, token + QUERIES - rules[4])
        if F.causal:
            full_end = gl.minimum(full_end, token + 1)
        positions = token + gl.arange(0, ROWS, gl.SliceLayout(1, S)) // F.pack
        view = positions, low, sizes[4], rules[4], scales
        mbarrier.wait(q_full.index(group), turn & 1)
        q = (rows_q, rows_q)
        if HELD != 0:
            q = (rows_q, rows_q.slice(0, HELD, dim=1).load(gl.DotOperandLayout(0, S, 2)))
            fence_async_shared()  # TMA will write there what this has read
        acc, peak, total, slot, phase, number = attend_tile(
            q, memory, slot, phase, number, begin * BLOCK_N, count, view, full_begin, full_end,
            group, out.dtype.element_ty, F,
        )  # fmt: skip
        mean = 1 / gl.where(total == 0, 1.0, total)
        acc = acc * gl.convert_layout(mean, gl.SliceLayout(1, O))[:, None]
        rows, column = gl.arange(0, ROWS, gl.SliceLayout(1, O)), gl.arange(0, DIM, gl.SliceLayout(0, O))
        inside = query + rows // F.pack < sizes[3]
        place = gl.cast(row, gl.int64) * out_s[0] + head * out_s[1] + gl.cast(query, gl.int64) * out_s[2]
        offset = rows // F.pack * out_s[2] + rows % F.pack * out_s[1]
        gl.store(out + place + offset[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, S))
        place = gl.cast(row, gl.int64) * lse_s[0] + head * lse_s[1] + query
        inside = query + rows // F.pack < sizes[3]
        gl.store(lse + place + rows % F.pack * lse_s[1] + rows // F.pack, (peak + gl.log2(total)) * LN2, mask=inside)
