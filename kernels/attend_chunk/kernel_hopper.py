"""Attention of a chunk of new tokens to themselves on Hopper GPUs (sm_90), as one Gluon kernel. Not yet run on a GPU.

A program has one warp that loads tiles by TMA and two or three groups of four warps that compute, each on rows of its
own (`kernel_hopper_load`, `kernel_hopper_rows`). Programs are as many as the device has multiprocessors, and share the
tiles of queries among them. Sums are float32; the weights are rounded to the model's dtype for the tensor cores.
Source: FlashAttention-3, arXiv:2407.08608.
"""

# mypy: disable-error-code="no-untyped-def"
# Gluon reads the annotations of its functions: only constants may have one.

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.attend_chunk.kernel_hopper_load import ROWS, HopperForm, produce
from gemkv_compile.kernels.attend_chunk.kernel_hopper_rows import consume
from gemkv_compile.kernels.results import empty_results

LOG2E = 1.4426950408889634
HOPPER = (9, 0)  # compute capability
SHARED_BYTES = 227 << 10  # that a program may have there


class HopperTiles(NamedTuple):
    """Keys in a tile, tiles in the ring, groups that compute, whether these take turns, channels held in registers."""

    block_n: int
    stages: int
    consumers: int
    pingpong: bool
    held: int = 0


# By head size: `tiles_and_pack` says which are used, the benchmark's --sweep tries all. Those of 64 are not timed yet.
CANDIDATES: dict[int, tuple[HopperTiles, ...]] = {
    64: (
        HopperTiles(128, 8, 2, True),
        HopperTiles(128, 8, 2, False),
        HopperTiles(64, 12, 3, False),
        HopperTiles(64, 12, 3, True),
    ),
    128: (
        HopperTiles(128, 6, 2, True),
        HopperTiles(128, 6, 2, False),
        HopperTiles(64, 11, 2, True),
        HopperTiles(64, 11, 3, False),
        HopperTiles(64, 11, 3, True),
    ),
    256: (
        HopperTiles(64, 5, 2, False, 128),
        HopperTiles(64, 5, 2, False),
        HopperTiles(64, 5, 2, False, 64),
        HopperTiles(64, 5, 2, True),
        HopperTiles(32, 10, 2, False),
    ),
}
# By groups that compute: registers of a thread of any warp at first, then of a computing one. A loading one keeps 24.
REGISTERS = {2: (168, 240), 3: (128, 160)}


@gluon.jit(do_not_specialize=["window", "q_len", "new_len", "tiles"])
def attend_chunk_hopper_kernel(
    q_desc, k_desc, v_desc, seq_lens, starts, out, lse, lens_s, starts_s, out_s, lse_s,
    scales, window, batch, heads, groups, q_len, new_len, tiles, REGISTERS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Tensors as in `gemkv_compile.kernels.ops.attend_chunk`, and their strides; the rest of `attend_chunk_hopper`.

    q_desc is [B, Hq / pack, Q, pack, D], k_desc and v_desc are [B, Hkv, N, D]. Grid: programs, any number.
    """
    STAGES: gl.constexpr = F.stages
    CONSUMERS: gl.constexpr = F.consumers
    dtype: gl.constexpr = k_desc.dtype
    ring = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    q_rows = gl.allocate_shared_memory(dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    for group in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(q_empty.index(group), count=1)
        mbarrier.init(turns.index(group), count=1)
    memory = ring, q_rows, full, empty, q_full, q_empty, turns
    sizes = batch, heads, groups, q_len, new_len
    rules = seq_lens, lens_s[0], starts, starts_s[0], window
    descs = q_desc, k_desc, v_desc
    results = out, out_s, lse, lse_s
    if F.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (results, memory, sizes, rules, scales, tiles, 0, F)),
                (consume, (results, memory, sizes, rules, scales, tiles, 1, F)),
                (produce, (descs, memory, sizes, rules, tiles, F)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (results, memory, sizes, rules, scales, tiles, 0, F)),
                (consume, (results, memory, sizes, rules, scales, tiles, 1, F)),
                (consume, (results, memory, sizes, rules, scales, tiles, 2, F)),
                (produce, (descs, memory, sizes, rules, tiles, F)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def eligible(q: Tensor, k: Tensor, v: Tensor, scale: float, capability: tuple[int, int]) -> str:
    """Why the Hopper kernel cannot attend q [B, Hq, Q, D] to k and v [B, Hkv, N, D]; "" if it can. Reads no memory."""
    if capability != HOPPER:
        return f"the device has compute capability {capability}, and the kernel is for {HOPPER}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not multiplied by wgmma at full precision; use bfloat16 or float16"
    if q.shape[-1] not in CANDIDATES:
        return f"head size {q.shape[-1]} is none of {', '.join(map(str, CANDIDATES))}"
    if q.shape[2] * packed_heads(q.shape[1], k.shape[1]) < ROWS.value:
        return f"{q.shape[2]} queries are too few: they leave most of a tile of {ROWS.value} rows empty"
    if not scale > 0:
        return f"scale must be positive, got {scale}"
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if x.stride(-1) != 1:
            return f"{name} have a stride of {x.stride(-1)} between channels; TMA needs 1"
        if x.data_ptr() % 16 or any(
            size > 1 and (step <= 0 or step * x.element_size() % 16)
            for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        ):
            return f"{name} have strides {x.stride()}; TMA needs multiples of 16 bytes, and no overlap"
    return ""


def packed_heads(q_heads: int, kv_heads: int) -> int:
    """Query heads that share a tile of queries: the largest power of two that divides a K/V head's group."""
    groups = q_heads // kv_heads
    return groups & -groups


def tiles_and_pack(
    head_dim: int, q_heads: int, kv_heads: int, q_len: int, window: int | None, softcap: float | None
) -> tuple[HopperTiles, int]:
    """What is used, by what an H200 took (DESIGN.md): the tiles, and how many query heads share a tile of queries.

    Few queries share tiles so that these are full; with windows sharing makes the reach of a tile shorter.
    """
    candidates = CANDIDATES[head_dim]
    packed = packed_heads(q_heads, kv_heads)
    if q_len < 2 * ROWS.value:
        return candidates[1], packed
    if head_dim > 128 and (window is not None or softcap is not None):  # held queries spill then
        return candidates[1], packed
    return candidates[0], 1


def shared_bytes(head_dim: int, tiles: HopperTiles) -> int:
    """Shared memory of a program for 16-bit numbers, without what Triton adds for its own use."""
    barriers = 2 * tiles.stages + 3 * tiles.consumers
    return 2 * head_dim * (tiles.stages * tiles.block_n + tiles.consumers * ROWS.value) + 8 * barriers


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A TMA descriptor of x for tiles of a shape. TMA checks strides even of dimensions of size 1."""
    unit = 16 // x.element_size()
    strides = [step if size > 1 else unit for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def attend_chunk_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    tiles: HopperTiles | None = None,
    pack: int | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a chunk's queries to the chunk's own keys: no pages, tail, padding, mask or sinks.

    Args:
        q, k, v, seq_lens, starts, scale, softcap, causal, window: As in `gemkv_compile.kernels.ops.attend_chunk`, and
            such that `eligible` says "". Tokens of the chunk before a sequence's start are not attended to.
        tiles, pack, programs: Other tiles, packed heads and programs than those that are used; for measuring.
    Returns:
        out [B, Hq, Q, D] in q's dtype, the heads of a token side by side; lse [B, Hq, Q] float32, natural logarithm.
    Raises:
        InvalidOption: the tiles do not fit the shared memory, or pack does not divide a group of heads.
    """
    out, lse = empty_results(q)
    if not out.numel():
        return out, lse
    batch, heads, q_len, head_dim = q.shape
    kv_heads, new_len = k.shape[1:3]
    usual = tiles_and_pack(head_dim, heads, kv_heads, q_len, window, softcap)
    tiles = usual[0] if tiles is None else tiles
    pack = usual[1] if pack is None else pack
    if shared_bytes(head_dim, tiles) > SHARED_BYTES:
        raise InvalidOption(f"{tiles} need {shared_bytes(head_dim, tiles)} bytes of shared memory. Use fewer stages.")
    if pack < 1 or ROWS.value % pack or heads // kv_heads % pack:
        raise InvalidOption(f"pack must divide {ROWS.value} and the {heads // kv_heads} heads of a group, got {pack}.")
    form = HopperForm(head_dim, pack, *tiles, causal, window is not None, softcap is not None)
    count = -(-q_len // (tiles.consumers * ROWS.value // pack)) * (heads // pack) * batch
    programs = min(count, processors(q.device) if programs is None else programs)
    packed = q.unflatten(1, (heads // pack, pack)).transpose(2, 3)
    rows = [_descriptor(packed, [1, 1, ROWS.value // pack, pack, head_dim])]
    rows += [_descriptor(x, [1, 1, tiles.block_n, head_dim]) for x in (k, v)]
    scales = (scale * LOG2E, 0.0) if softcap is None else (2 * LOG2E * scale / softcap, softcap * LOG2E)
    at_start, computing = REGISTERS[tiles.consumers]
    with torch.cuda.device_of(q):
        attend_chunk_hopper_kernel[(programs,)](
            *rows, seq_lens, starts, out, lse, seq_lens.stride(), starts.stride(), out.stride()[:3], lse.stride(),
            scales, window or 0, batch, heads, heads // kv_heads, q_len, new_len, count, computing, form,
            num_warps=4, maxnreg=at_start,
        )  # fmt: skip
    return out, lse
