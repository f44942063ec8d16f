"""Launch sizes of the decode kernel: programs, tiles and stages, by head size and by what a device has."""

from __future__ import annotations

import torch

from gemkv_compile.errors import InvalidOption

# Measured on an H200: many sequences and heads want waves of programs that level each other out; few of them, where all
# programs are there at once, want no more partial results than that.
PROGRAMS_PER_SM, PROGRAMS_PER_SM_OF_FEW = 12, 4
FEW_ROWS, FEW_HEAD_DIM = 8, 128
MAX_SPLITS = 128
SMALL_BUFFERS = 12 * 1024  # shared memory for queries and weights


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def num_splits(rows: int, groups: int, multiprocessors: int, head_dim: int) -> int:
    """Programs that share the keys of one sequence and head.

    Args:
        rows: Sequences times K/V heads.
        groups: 64-token groups that the page table has room for.
    """
    few = rows <= FEW_ROWS and head_dim <= FEW_HEAD_DIM
    programs = PROGRAMS_PER_SM_OF_FEW if few else PROGRAMS_PER_SM
    wanted = -(-programs * multiprocessors // rows)
    return max(1, min(wanted, groups, MAX_SPLITS))


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


def num_warps(head_dim: int, k_bits: int) -> int:
    """Warps of a program: as few as hold its numbers in registers; keys of 6 bits, and of 16 or more, take more."""
    return 4 if head_dim > (128 if k_bits == 6 or k_bits >= 16 else 256) else 2


def stages(step_bytes: int, shared_bytes: int) -> int:
    """Pipeline stages: 3 if the keys and values of two steps fit into shared memory, 2 for one, 1 for none.

    Args:
        step_bytes: Keys and values of a step, as the function of that name gives them.
        shared_bytes: What one program may take.
    """
    room = (shared_bytes - SMALL_BUFFERS) // step_bytes
    return max(1, min(3, room + 1))


def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that one program may take."""
    if device.type != "cuda":
        return 2, 100 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
