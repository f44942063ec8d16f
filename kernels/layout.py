"""Where the bytes of a page are.

A page holds `page_size` consecutive tokens of one sequence and one layer, for all its K/V heads, as one contiguous run
of bytes at one address. It is a grid of groups [num_kv_heads, page_size / group_size]; a group holds `group_size`
tokens of one head:

    K rows      [group_size, head_dim]      element dtype (int8, or the model's for format "model")
    V columns   [head_dim, group_size]      element dtype; transposed, so that P @ V needs no transposing 8-bit load
    K scale     [head_dim]  float16         only in quantised formats
    K zero      [head_dim]  float16
    V scale     [head_dim]  float16
    V zero      [head_dim]  float16

With int8 a group takes 2 * group_size * head_dim + 8 * head_dim bytes, which is a multiple of 128 for every head_dim
that is a multiple of 16 and group_size 64: each group is one aligned, contiguous tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from gemkv_compile.errors import InvalidOption, UnsupportedDtype, UnsupportedHeadDim

FORMAT_VERSION = 1
"""Changes whenever the meaning of a byte in a page changes; part of every operator call, hence of every cache key."""

KV_FORMATS = ("int8", "model")
MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FIRST_MAX_PAGES = 8  # columns of a new page table; they grow in powers of two
SCALE_DTYPE = torch.float16
SCALE_PLANES = 4  # K scale, K zero, V scale, V zero


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of one page.

    Args:
        num_kv_heads: K/V heads in a page.
        head_dim: Channels of a head, a multiple of 16 in [16, 512].
        page_size: Tokens in a page, a multiple of group_size.
        group_size: Tokens that share a scale and a zero-point.
        kv_format: "int8" or "model".
        model_dtype: Dtype of the model's keys and values (float16, bfloat16 or float32).
    Raises:
        UnsupportedHeadDim, UnsupportedDtype, InvalidOption: a value outside these ranges.
    """

    num_kv_heads: int
    head_dim: int
    page_size: int
    group_size: int
    kv_format: str
    model_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.head_dim % 16 or not 16 <= self.head_dim <= 512:
            raise UnsupportedHeadDim(self.head_dim)
        if self.model_dtype not in MODEL_DTYPES:
            raise UnsupportedDtype(self.model_dtype)
        if self.kv_format not in KV_FORMATS:
            raise InvalidOption(f"kv_format must be one of {', '.join(KV_FORMATS)}, got {self.kv_format!r}.")
        if self.group_size <= 0 or self.page_size <= 0 or self.page_size % self.group_size:
            raise InvalidOption(
                f"page_size must be a positive multiple of group_size ({self.group_size}), got {self.page_size}."
            )

    @property
    def is_quantised(self) -> bool:
        """Whether pages hold integer codes with scales."""
        return self.kv_format != "model"

    @property
    def element_dtype(self) -> torch.dtype:
        """Dtype of the stored K and V elements."""
        return torch.int8 if self.is_quantised else self.model_dtype

    @property
    def groups_per_page(self) -> int:
        """Groups of one head in a page."""
        return self.page_size // self.group_size

    @cached_property
    def plane_bytes(self) -> int:
        """Bytes of the K rows (equally of the V columns) of one group."""
        return self.group_size * self.head_dim * self.element_dtype.itemsize

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of all scales and zero-points of one group."""
        return SCALE_PLANES * self.head_dim * SCALE_DTYPE.itemsize if self.is_quantised else 0

    @cached_property
    def group_bytes(self) -> int:
        """Bytes of one group of one head."""
        return 2 * self.plane_bytes + self.scale_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.num_kv_heads * self.groups_per_page * self.group_bytes

    @property
    def page_code_bytes(self) -> int:
        """Bytes of the elements of one page's keys and values."""
        return self.num_kv_heads * self.groups_per_page * 2 * self.plane_bytes

    @property
    def page_scale_bytes(self) -> int:
        """Bytes of one page's scales and zero-points."""
        return self.num_kv_heads * self.groups_per_page * self.scale_bytes

    @property
    def page_padding_bytes(self) -> int:
        """Bytes of one page that are there for alignment only."""
        return self.page_bytes - self.page_code_bytes - self.page_scale_bytes

    def group_offset(self, head: int, group: int) -> int:
        """Byte offset of a group in its page; `group` counts within the page."""
        return (head * self.groups_per_page + group) * self.group_bytes
