"""A decode step's append: one launch, whose programs share a sequence and find out among themselves who is last."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from gemkv_compile.kernels.append_kv.kernel_commit import BLOCK_D, commit
from gemkv_compile.kernels.append_kv.kernel_quantise import token_norms
from gemkv_compile.kernels.layout import MAX_TOKENS

MAX_PARTS = 64  # programs for the keys of a sequence, and as many for its values
PROGRAMS = 256  # about as many as a large GPU holds at once: of many sequences each gets fewer
NUM_WARPS = 8  # with 4, tiles of bfloat16 spill 4 bytes a thread
_COUNT_ONE = tl.constexpr(MAX_TOKENS)  # a length and a count of programs share 32 bits
_COUNT_BITS = tl.constexpr(2 * MAX_PARTS - 1)
_LENGTH_BITS = tl.constexpr(MAX_TOKENS - 1)
_LENGTH_WIDTH = tl.constexpr(MAX_TOKENS.bit_length() - 1)
assert 2 * MAX_PARTS * MAX_TOKENS == 1 << 32


def launch_sizes(batch: int, heads: int, head_dim: int) -> tuple[int, dict[str, int]]:
    """How `append_token` is launched: programs for a sequence's keys, as many for its values; constants."""
    parts = min(heads * triton.cdiv(head_dim, BLOCK_D), MAX_PARTS, max(1, PROGRAMS // (2 * batch)))
    rows = triton.next_power_of_2(triton.cdiv(heads, parts))
    return parts, {"ROWS": rows, "D_PADDED": triton.next_power_of_2(head_dim)}


@triton.jit
def append_token(
    k, v, k_batch, k_head, k_dim, v_batch, v_head, v_dim,
    page_table, table_batch, table_page, max_pages, seq_lens, lens_batch, tail, tail_batch,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, GROUP_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, TAIL_ROWS: tl.constexpr, ROWS: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, keys or values: some heads' rows for the tail, some tiles of a group it completes.

    No program reads what another one writes, but for the length: the tail's rows that a group is made of are of earlier
    launches, its last one is read from k or v, and a guarded format's first group writes that one only.
    """
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    is_value = tl.program_id(2) == 1
    if is_value:
        new, head_stride, dim_stride = v + row * v_batch, v_head, v_dim
    else:
        new, head_stride, dim_stride = k + row * k_batch, k_head, k_dim
    head = part * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    dim = tl.arange(0, D_PADDED)[None, :]
    inside = (head < HEADS) & (dim < D)
    x = tl.load(new + head * head_stride + dim * dim_stride, mask=inside)  # arrives while the length is waited for
    word = seq_lens + row * lens_batch
    # Each program counts itself in the bits above the length, and so learns the length and how many came before it.
    # Relaxed: changes of one word have one order, in which each sees the one before, and nothing else is handed over.
    # The last to come knows that all have read the length. An exchange, unlike a plain store, is part of that order.
    seen = tl.atomic_add(word, _COUNT_ONE, sem="relaxed")
    length = seen & _LENGTH_BITS
    if ((seen >> _LENGTH_WIDTH) & _COUNT_BITS) == 2 * parts - 1:
        tl.atomic_xchg(word, length + 1, sem="relaxed")
    fill = length % GROUP
    tail += row * tail_batch + is_value.to(tl.int64) * (HEADS * TAIL_ROWS * D)
    is_first = (length < GROUP) & (TAIL_ROWS > GROUP)  # of a guarded format, whose first group stays in the tail
    tail += tl.where(is_first, 0, TAIL_ROWS - GROUP) * D
    if (fill < GROUP - 1) | is_first:
        tl.store(tail + (head * TAIL_ROWS + fill) * D + dim, x, mask=inside)
    if (fill == GROUP - 1) & (max_pages > 0):
        group = length // GROUP
        address = tl.load(page_table + row * table_batch + (group // GROUPS_PER_PAGE) % max_pages * table_page)
        if address != 0:
            BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
            for tile in range(part, HEADS * BLOCKS, parts):
                at, first = row * 0 + tile // BLOCKS, tile % BLOCKS * BLOCK_D  # int64 and int32
                block = address + (at * GROUPS_PER_PAGE + group % GROUPS_PER_PAGE) * GROUP_BYTES
                rows, last = tail + at * (TAIL_ROWS * D), new + at * head_stride
                if is_value:  # every tile's program makes the norms of all channels: less to wait for than to share
                    norms = token_norms(rows, last, 0, dim_stride, 0, fill, V_BITS, D, GROUP, BLOCK_D)
                    commit(rows, last, 0, dim_stride, 0, fill, norms, first, block,
                           True, V_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
                else:
                    commit(rows, last, 0, dim_stride, 0, fill, (0, 0), first, block,
                           False, K_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
