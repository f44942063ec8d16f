"""Where the bytes of a page are.

A page holds `page_size` consecutive tokens of one sequence and one layer, for all its K/V heads, as one contiguous run
of bytes at one address. It is a grid of groups [num_kv_heads, page_size / group_size]; a group holds `group_size`
tokens of one head:

    K rows      [group_size, head_dim]      element dtype (int8, or the model's for format "model")
    V columns   [head_dim, group_size]      element dtype; transposed, so that P @ V needs no transposing 8-bit load
    K scale     [head_dim]  float16         only in quantised formats
    K zero      [head_dim]  float16
    V scale     [head_dim]  float16
    V zero      [head_dim]  float16         values of 8 bits
    V norms     [2, group_size]  float16    values of 4 bits: a scale per half of the channels and token

4-bit codes are packed by channel: K rows are [group_size, head_dim / 2] and V columns [head_dim / 2, group_size] bytes,
with channel d in the low nibble and channel d + head_dim / 2 in the high one, each in two's complement. So the two
nibbles of a loaded tile are the two halves of the channels of the same tokens: q . k is the sum of two products, one
per half of q, and P @ V is two products with the same weights, without any exchange between threads. Packing tokens
instead would split the softmax.

6-bit keys are rows of 3 head_dim / 4 bytes: the upper four bits of each code as above, then head_dim / 4 bytes with the
lower two bits, those of channel d + i * head_dim / 4 in bits 2 i and 2 i + 1 of byte d. So the bytes d,
d + head_dim / 4 and d + head_dim / 2 of a row hold the codes of the same four channels, one in each quarter: four
products.

Formats with codes of fewer than 8 bits have a guard: a sequence's first group, which much attention goes to and whose
tokens are far from the others, is read in the model's precision from where it was before it was complete. So the tail
has two groups of rows there: tokens 0 .. group_size - 1, which stay, and behind them the newest, incomplete group of a
longer sequence. Pages have the first group's codes too, which nobody reads.

Every part of a group starts at a multiple of 16 bytes for every head_dim and group_size that is a multiple of 16; with
group_size 64 each group is one contiguous tile whose size is a multiple of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from gemkv_compile.errors import InvalidOption, UnsupportedDtype, UnsupportedHeadDim

FORMAT_VERSION = 2
"""Changes whenever the meaning of a byte in a page changes; part of every operator call, hence of every cache key."""

CODE_BITS = {"int8": (8, 8), "k8v4": (8, 4), "k6v4": (6, 4), "int4": (4, 4)}
"""Bits of a key's and of a value's code, by quantised format."""

GUARDED = tuple(name for name, bits in CODE_BITS.items() if min(bits) < 8)
"""Formats that keep a sequence's first group in the model's precision."""

KV_FORMATS = (*CODE_BITS, "model")
MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_TOKENS = 1 << 25  # of a sequence: a decode step counts its programs in the bits of seq_lens above them
FIRST_MAX_PAGES = 8  # columns of a new page table; they grow in powers of two
SCALE_DTYPE = torch.float16
SCALE_PLANES = 3  # K scale, K zero, V scale; V zero or V norms behind them


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of one page.

    Args:
        num_kv_heads: K/V heads in a page.
        head_dim: Channels of a head, a multiple of 16 in [16, 512].
        page_size: Tokens in a page, a multiple of group_size.
        group_size: Tokens that share a scale and a zero-point.
        kv_format: One of KV_FORMATS.
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
        """Dtype of the stored K and V elements; smaller codes are int8, packed."""
        return torch.int8 if self.is_quantised else self.model_dtype

    @property
    def k_bits(self) -> int:
        """Bits of a stored number of a key."""
        return CODE_BITS[self.kv_format][0] if self.is_quantised else 8 * self.model_dtype.itemsize

    @property
    def v_bits(self) -> int:
        """Bits of a stored number of a value."""
        return CODE_BITS[self.kv_format][1] if self.is_quantised else 8 * self.model_dtype.itemsize

    @property
    def has_norms(self) -> bool:
        """Whether values have scales per token, and no zero-points."""
        return self.v_bits == 4

    @property
    def is_guarded(self) -> bool:
        """Whether a sequence's first group stays in the model's precision, in the tail."""
        return self.kv_format in GUARDED

    @property
    def tail_rows(self) -> int:
        """Tokens that a sequence's tail has room for."""
        return (2 if self.is_guarded else 1) * self.group_size

    def tail_row(self, length: int) -> int:
        """The row of the tail where the newest, incomplete group of a sequence of `length` tokens begins."""
        return self.group_size if self.is_guarded and length >= self.group_size else 0

    @property
    def groups_per_page(self) -> int:
        """Groups of one head in a page."""
        return self.page_size // self.group_size

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of the K rows of one group."""
        return self.group_size * self.head_dim * self.k_bits // 8

    @cached_property
    def v_bytes(self) -> int:
        """Bytes of the V columns of one group."""
        return self.group_size * self.head_dim * self.v_bits // 8

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of all scales and zero-points of one group."""
        last = 2 * self.group_size if self.has_norms else self.head_dim
        return (SCALE_PLANES * self.head_dim + last) * SCALE_DTYPE.itemsize if self.is_quantised else 0

    @cached_property
    def group_bytes(self) -> int:
        """Bytes of one group of one head."""
        return self.k_bytes + self.v_bytes + self.scale_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.num_kv_heads * self.groups_per_page * self.group_bytes

    @property
    def page_code_bytes(self) -> int:
        """Bytes of the elements of one page's keys and values."""
        return self.num_kv_heads * self.groups_per_page * (self.k_bytes + self.v_bytes)

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
