"""Bytes of a paged cache, part by part: as a formula in the number of sequences and tokens, and as exact integers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import sympy

from gemkv_compile.kernels.layout import FIRST_MAX_PAGES, PageLayout

BATCH, TOKENS = sympy.symbols("B S", integer=True, positive=True)
LENGTH_BYTES = 8  # seq_lens and starts, int32 each
PARTS = ("codes", "scales", "padding", "tail", "tables")


@dataclass(frozen=True)
class CacheMemory:
    """Memory of one cache: exact bytes as a formula in B (sequences) and S (tokens of each)."""

    layer: int
    kv_format: str
    page_size: int
    keep: int | None
    formula: sympy.Expr
    dense_formula: sympy.Expr
    layout: PageLayout

    @classmethod
    def of(cls, layer: int, layout: PageLayout, keep: int | None) -> CacheMemory:
        """The memory of a cache with these pages that keeps its last `keep` rows visible, or all (None)."""
        formulas = paged_bytes(layout, keep), dense_bytes(layout, keep)
        return cls(layer, layout.kv_format, layout.page_size, keep, *formulas, layout)


class _Integers:
    """What formulas are made of, on ints."""

    @staticmethod
    def floor(a: int, b: int) -> int:
        return a // b

    @staticmethod
    def ceiling(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def power_of_two(n: int) -> int:
        """The smallest power of two of at least n >= 1."""
        return 1 << (n - 1).bit_length()

    maximum = staticmethod(max)


class _Symbols:
    """The same on sympy's expressions."""

    @staticmethod
    def floor(a: Any, b: int) -> Any:
        return sympy.floor(a / b)

    @staticmethod
    def ceiling(a: Any, b: int) -> Any:
        return sympy.ceiling(a / b)

    @staticmethod
    def power_of_two(n: Any) -> Any:
        return 2 ** sympy.ceiling(sympy.log(n, 2))

    maximum = staticmethod(sympy.Max)


def paged_parts(layout: PageLayout, keep: int | None, tokens: Any, numbers: Any = _Integers) -> dict[str, Any]:
    """Bytes of one sequence's cache while decoding token by token: those of each of `PARTS`.

    Args:
        keep: Rows that the cache keeps visible, None for all.
        tokens: How many, an int; or a sympy symbol, with `numbers` for these.
    "codes" and "scales" are those of whole pages, also of groups that are not complete yet; "padding" is what a page
    takes beside them to be aligned.
    """
    groups = numbers.floor(tokens, layout.group_size)
    last_page = numbers.ceiling(groups, layout.groups_per_page)
    # The handle that the last step was given still shows one row more than the cache keeps.
    hidden = 0 if keep is None else numbers.floor(numbers.maximum(0, tokens - 1 - keep), layout.page_size)
    pages = numbers.maximum(0, last_page - hidden)
    columns = numbers.maximum(FIRST_MAX_PAGES, numbers.power_of_two(numbers.maximum(1, pages)))
    return {
        "codes": pages * layout.page_code_bytes,
        "scales": pages * layout.page_scale_bytes,
        "padding": pages * layout.page_padding_bytes,
        "tail": tail_bytes(layout),
        "tables": columns * 8 + LENGTH_BYTES,
    }


@functools.cache  # sympy takes its time, and most layers are alike
def paged_bytes(layout: PageLayout, keep: int | None) -> sympy.Expr:
    """Bytes of pages, tail and tables while decoding token by token, in B and S; `keep` as in `paged_parts`."""
    return BATCH * sum(paged_parts(layout, keep, TOKENS, _Symbols).values())


def tail_bytes(layout: PageLayout) -> int:
    """Bytes of one sequence's tail."""
    return 2 * layout.num_kv_heads * layout.tail_rows * layout.head_dim * layout.model_dtype.itemsize


def dense_bytes(layout: PageLayout, keep: int | None) -> sympy.Expr:
    """Bytes of keys and values as dense tensors of the model's dtype, in B and S."""
    rows = TOKENS if keep is None else sympy.Min(TOKENS, keep)
    return BATCH * rows * 2 * layout.num_kv_heads * layout.head_dim * layout.model_dtype.itemsize
