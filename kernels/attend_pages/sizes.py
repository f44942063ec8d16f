"""Launch sizes of the decode kernel: programs, tiles and stages, by head size and by what a device has."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gemkv_compile.errors import InvalidOption

MAX_SPLITS = 128
FULL = 0.95  # of the places of all waves that programs take: the fewest shares of the keys that reach it are used
USUAL_PROGRAMS = 4  # of a multiprocessor at once, where nothing is known
SMALL_BUFFERS = 12 * 1024  # shared memory for queries and weights
LARGE_STEP = 16 * 1024


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def num_splits(rows: int, groups: int, at_once: int) -> int:
    """Programs that share the keys of one sequence and head: waves of programs should be full.

    Args:
        rows: Sequences times K/V heads.
        groups: 64-token groups that the page table has room for.
        at_once: Programs that the device runs at once.
    """
    most = max(1, min(groups, MAX_SPLITS, -(-8 * at_once // rows)))
    shares = {splits: rows * splits / (-(-rows * splits // at_once) * at_once) for splits in range(1, most + 1)}
    best = max(shares.values())
    return next(splits for splits, share in shares.items() if share >= min(FULL, best))


def combined_channels(rows: int, head_dim: int, multiprocessors: int) -> int:
    """Channels that a program of the second launch adds up: fewer where that leaves multiprocessors without work.

    Args:
        rows: Sequences times query heads.
    """
    channels = padded(head_dim)
    while channels > 32 and rows * -(-head_dim // channels) < 2 * multiprocessors:
        channels //= 2
    return channels


def tile_tokens(head_dim: int, element_bytes: int, group_size: int) -> int:
    """Tokens of a step: a whole group, or a part of it whose keys take 64 KB at most in the model's dtype.

    Raises:
        InvalidOption: the group is no multiple of 16.
    """
    if group_size % 16:
        raise InvalidOption(f"group_size must be a multiple of 16 on a GPU, got {group_size}. Use the default, 64.")
    rows = 65536 // (padded(head_dim) * element_bytes)
    return max(16, min(group_size & -group_size, rows))


def part_padded(head_dim: int, parts: int) -> int:
    """Rows of a tile with one of `parts` equal parts of the channels: a power of two that a tensor core multiplies."""
    return max(16, padded(head_dim) // parts)


def step_bytes(tile: int, head_dim: int, bits: int) -> int:
    """Bytes of the keys and values of a step of `tile` tokens, rows padded; bits of a number of both together."""
    return tile * padded(head_dim) * bits // 8


# Warps of a program by bits of keys and values, for head sizes up to 64, 128, 256 and beyond. With fewer warps less is
# done twice, and a row of scales of which each thread holds 4 bytes can be copied ahead; with too few, numbers spill.
WARPS = {(8, 8): (1, 2, 2, 4), (8, 4): (1, 1, 2, 4), (6, 4): (1, 2, 4, 4), (4, 4): (2, 1, 2, 4)}
WARPS_OF_MODEL = 2, 2, 4, 4


def num_warps(head_dim: int, k_bits: int, v_bits: int) -> int:
    """Warps of a program, measured on an H200 (DESIGN.md)."""
    by_size = WARPS.get((k_bits, v_bits), WARPS_OF_MODEL)
    return by_size[sum(head_dim > size for size in (64, 128, 256))]


def stages(step_bytes: int, shared_bytes: int) -> int:
    """Pipeline stages: 3 for small steps; 2 for large ones, which leaves room for more programs; 1 if no step fits.

    Args:
        step_bytes: Keys and values of a step, as the function of that name gives them.
        shared_bytes: What one program may take.
    """
    room = (shared_bytes - SMALL_BUFFERS) // step_bytes
    return max(1, min(3 if step_bytes < LARGE_STEP else 2, room + 1))


def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that one program may take."""
    if device.type != "cuda":
        return 2, 100 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@functools.lru_cache
def programs_at_once(registers: int, shared_bytes: int, warps: int, device: torch.device) -> int:
    """Programs that a CUDA device runs at once.

    Args:
        registers: Of a thread.
        shared_bytes: Of a program.
    """
    has: Any = torch.cuda.get_device_properties(device)
    # A warp's registers lie in one of the four parts of a multiprocessor, each of which has a quarter of them.
    a_warp = -(-registers // 8) * 8 * 32
    by_registers = 4 * (has.regs_per_multiprocessor // 4 // a_warp) // warps
    by_shared = has.shared_memory_per_multiprocessor // (shared_bytes + 1024)  # of which the driver takes a KB each
    by_threads = has.max_threads_per_multi_processor // (32 * warps)
    return int(has.multi_processor_count) * max(1, min(by_registers, by_shared, by_threads, 32))
