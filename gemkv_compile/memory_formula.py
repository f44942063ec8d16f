"""Bytes of a paged cache as a formula in the number of sequences and tokens."""

from __future__ import annotations

import functools

import sympy

from gemkv_compile.kernels.layout import FIRST_MAX_PAGES, PageLayout
from gemkv_compile.report import BATCH, TOKENS

LENGTH_BYTES = 8  # seq_lens and starts, int32 each


@functools.cache  # sympy takes its time, and most layers are alike
def paged_bytes(layout: PageLayout, keep: int | None) -> sympy.Expr:
    """Bytes of pages, tail and tables while decoding token by token, in B and S.

    Args:
        keep: Rows that the cache keeps visible, None for all.
    """
    groups = sympy.floor(TOKENS / layout.group_size)
    last_page = sympy.ceiling(groups / layout.groups_per_page)
    # The handle that the last step was given still shows one row more than the cache keeps.
    first_page = 0 if keep is None else sympy.floor(sympy.Max(0, TOKENS - 1 - keep) / layout.page_size)
    pages = sympy.Max(0, last_page - first_page)
    columns = sympy.Max(FIRST_MAX_PAGES, 2 ** sympy.ceiling(sympy.log(sympy.Max(1, pages), 2)))
    return BATCH * (pages * layout.page_bytes + tail_bytes(layout) + columns * 8 + LENGTH_BYTES)


def tail_bytes(layout: PageLayout) -> int:
    """Bytes of one sequence's tail."""
    return 2 * layout.num_kv_heads * layout.group_size * layout.head_dim * layout.model_dtype.itemsize


def dense_bytes(layout: PageLayout, keep: int | None) -> sympy.Expr:
    """Bytes of keys and values as dense tensors of the model's dtype, in B and S."""
    rows = TOKENS if keep is None else sympy.Min(TOKENS, keep)
    return BATCH * rows * 2 * layout.num_kv_heads * layout.head_dim * layout.model_dtype.itemsize
