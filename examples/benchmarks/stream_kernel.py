"""A kernel that only reads: what memory can deliver on this machine, in the same run as what is measured against it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 8192  # int32 numbers of a step


@triton.jit
def read_stream(data, sums, size, steps, BLOCK: tl.constexpr = 8192):
    """The sum of int32 numbers, a share for each program; programs take turns, block by block."""
    place = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.range(steps, num_stages=4):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.cast(step, tl.int64) * (tl.num_programs(0) * BLOCK)
        total += tl.load(data + at + place, mask=at + place < size, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
