"""Exact bytes of caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemkv_compile.runtime.handle import PagedKVTensor
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PoolStats, pools

PARTS = ("layers", "self_attention_cache", "cross_attention_cache")  # of a cache, as Transformers names them
STATES = ("keys", "values", "conv_states", "recurrent_states")  # of a layer


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer's cache.

    Args:
        pages: Whole pages: codes, scales and padding. One that several tables share is counted in the first of them.
        codes, scales: Of these; also those of groups that are not complete yet.
        tail: Rows in the model's precision: of the newest, incomplete group, and in guarded formats of the first.
        tables: Page addresses, lengths and starts.
        padding: Bytes of pages that are there for alignment only.
        unwritten: Bytes of codes and scales that no row has been written to yet.
        temporary: What an append under way holds besides: a copy of the tail, pages that new ones stand for.
    """

    pages: int
    codes: int
    scales: int
    tail: int
    tables: int
    padding: int = 0
    unwritten: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """Pages, tail, tables, and what is temporary."""
        return self.pages + self.tail + self.tables + self.temporary


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
        cache: A Transformers cache, or any nesting of lists, tuples and dicts of caches, keys and values.
    Raises:
        TypeError: something in it is neither a tensor nor a cache.
    Dense tensors that share memory are counted once.
    """
    leaves, counted = list(_tensors(cache)), set[int]()
    layers = tuple(_measure(table, counted) for table in tables_of(leaves))
    dense = _dense_bytes([leaf for leaf in leaves if not isinstance(leaf, PagedKVTensor)])
    return Ledger(layers, dense, tuple(pools.stats()))


def tables_of(cache: Any) -> list[PageTable]:
    """The page tables of a cache, as `kv_memory` takes it, each once and in order."""
    handles = [leaf for leaf in _tensors(cache) if isinstance(leaf, PagedKVTensor)]
    return list({id(handle.table): handle.table for handle in handles}.values())


def trim() -> int:
    """Give all empty slabs back to PyTorch's allocator; returns the bytes given back."""
    return pools.trim()


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    """Every tensor of keys, values or other state in a cache."""
    if cache is None:
        return
    if isinstance(cache, torch.Tensor):
        yield cache
        return
    parts: Any = [getattr(cache, name) for name in PARTS + STATES if hasattr(cache, name)]
    if isinstance(cache, Mapping):
        parts = cache.values()
    elif isinstance(cache, (list, tuple)):
        parts = cache
    elif not parts and not hasattr(cache, "is_initialized"):  # a layer without state of its own has that
        raise TypeError(
            "kv_memory takes a Transformers cache, or lists, tuples and dicts of caches and tensors; "
            f"it met a {type(cache).__name__}. Pass the cache itself, for example output.past_key_values."
        )
    for part in parts:
        yield from _tensors(part)


def _dense_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of dense tensors: a storage counts for no more than it has, however many views of it there are."""
    views: dict[tuple[Any, ...], tuple[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        where = (tensor.device, storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        views[where] = (tensor.numel() * tensor.element_size(), storage.nbytes())
    storages: dict[tuple[Any, ...], int] = {}
    for where, (own, most) in views.items():
        storages[where[:2]] = min(storages.get(where[:2], 0) + own, most)
    return sum(storages.values())


def _measure(table: PageTable, counted: set[int]) -> LayerMemory:
    layout = table.pool.layout
    pages = {address: index for index, addresses in list(table.pages.items()) for address in addresses if address}
    own = pages.keys() - counted
    counted |= own
    groups = table.length // layout.group_size
    missing = sum(max(0, (pages[address] + 1) * layout.groups_per_page - groups) for address in own)
    tables = (table.page_table, table.seq_lens, table.starts)
    saved, replaced = table.under_way()
    extra = set(replaced) - counted
    counted |= extra
    return LayerMemory(
        pages=len(own) * layout.page_bytes,
        codes=len(own) * layout.page_code_bytes,
        scales=len(own) * layout.page_scale_bytes,
        tail=table.tail.nbytes,
        tables=sum(tensor.nbytes for tensor in tables),
        padding=len(own) * layout.page_padding_bytes,
        unwritten=missing * layout.num_kv_heads * layout.group_bytes,
        temporary=(0 if saved is None else saved.nbytes) + len(extra) * layout.page_bytes,
    )
