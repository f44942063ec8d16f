"""Page tables filled with known rows."""

import torch

from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.runtime.importing import import_dense
from gemkv_compile.runtime.pool import PagePool

CPU = torch.device("cpu")


def layout_of(kv_format="model", heads=2, head_dim=16, page_size=128, group_size=64, dtype=torch.float32):
    return PageLayout(heads, head_dim, page_size, group_size, kv_format, dtype)


def dense_rows(batch, tokens, heads=2, head_dim=16, seed=0, dtype=torch.float32):
    """Random keys and values, each [batch, heads, tokens, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, heads, tokens, head_dim, generator=generator).to(dtype).unbind(0)


def table_of(batch, tokens, kv_format="model", pool=None, seed=0, **layout):
    """A table of `dense_rows`."""
    pool = pool or PagePool(layout_of(kv_format, **layout), CPU)
    return import_dense(pool, *dense_rows(batch, tokens, pool.layout.num_kv_heads, pool.layout.head_dim, seed))
