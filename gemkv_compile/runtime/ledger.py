"""Exact bytes of caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gemkv_compile.runtime.handle import PagedKVTensor
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PoolStats, pools


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer's cache: pages (of which codes and scales; the rest is rows not yet written), tail, tables.

    A page that several tables share is counted in the first of them.
    """

    pages: int
    codes: int
    scales: int
    tail: int
    tables: int

    @property
    def total(self) -> int:
        """Pages, tail and tables."""
        return self.pages + self.tail + self.tables


@dataclass(frozen=True)
class Ledger:
    """Bytes of a cache, layer by layer, and of dense tensors beside it; slab reserve apart."""

    layers: tuple[LayerMemory, ...]
    dense: int
    pools: tuple[PoolStats, ...]

    @property
    def total(self) -> int:
        """Bytes that the cache itself takes."""
        return sum(layer.total for layer in self.layers) + self.dense

    @property
    def reserve(self) -> int:
        """Bytes in slabs of this process that no page uses."""
        return sum(pool.reserved - pool.in_use for pool in self.pools)


def kv_memory(cache: Any) -> Ledger:
    """Count the bytes of a cache.

    Args:
        cache: A Transformers cache, or any nesting of lists, tuples and dicts of keys and values.
    """
    tables: dict[int, PageTable] = {}
    dense = 0
    for leaf in _tensors(cache):
        if isinstance(leaf, PagedKVTensor):
            tables.setdefault(id(leaf.table), leaf.table)
        else:
            dense += leaf.numel() * leaf.element_size()
    counted: set[int] = set()
    layers = tuple(_measure(table, counted) for table in tables.values())
    return Ledger(layers, dense, tuple(pools.stats()))


def trim() -> int:
    """Give all empty slabs back to PyTorch's allocator; returns the bytes given back."""
    return pools.trim()


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    layers = getattr(cache, "layers", None)
    tree = [[layer.keys, layer.values] for layer in layers] if layers is not None else cache
    yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _measure(table: PageTable, counted: set[int]) -> LayerMemory:
    layout = table.pool.layout
    own = {address for addresses in table.pages.values() for address in addresses} - counted
    counted |= own
    tables = (table.page_table, table.seq_lens, table.starts)
    codes = 2 * layout.num_kv_heads * layout.page_size * layout.head_dim * layout.element_dtype.itemsize
    return LayerMemory(
        pages=len(own) * layout.page_bytes,
        codes=len(own) * codes,
        scales=len(own) * (layout.page_bytes - codes),
        tail=table.tail.numel() * table.tail.element_size(),
        tables=sum(tensor.numel() * tensor.element_size() for tensor in tables),
    )
