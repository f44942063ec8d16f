"""Time of one token's append of one layer on a GPU, inside a CUDA graph: what a decode step pays to keep its cache.

    python append.py

Each call is preceded by one that sets the length, so that every call is the same: "token" only writes to the tail,
"commit" completes a group of 64 tokens, quantises it and writes it to its page. The setting is measured alone and
subtracted. Microseconds; "peer" is what StaticCache does in its place, an index_copy_ of keys and one of values into a
dense bf16 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import graph_us, save

from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.layout import KV_FORMATS, PageLayout

SHAPES = [(1, 4, 256), (1, 16, 256), (1, 8, 128), (8, 4, 256), (32, 8, 128), (1, 2, 512)]  # batch, K/V heads, head size
TOKENS, PAGE_SIZE, GROUP_SIZE = 4096, 256, 64


def measure(batch: int, heads: int, dim: int) -> dict[str, Any]:
    """One row."""
    k, v = (torch.randn(batch, heads, 1, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    row: dict[str, Any] = {"batch": batch, "kv_heads": heads, "head_dim": dim}
    row["peer_us"] = graph_us(dense(k, v))
    for kv_format in KV_FORMATS:
        layout = PageLayout(heads, dim, PAGE_SIZE, GROUP_SIZE, kv_format, torch.bfloat16)
        pages = torch.empty(batch * TOKENS // PAGE_SIZE, layout.page_bytes, dtype=torch.uint8, device="cuda")
        addresses = pages.data_ptr() + torch.arange(len(pages), device="cuda") * layout.page_bytes
        table = addresses.view(batch, -1)
        tail = torch.randn(batch, 2, heads, layout.tail_rows, dim, device="cuda").to(torch.bfloat16)
        for kind, length in (("token", TOKENS // 2), ("commit", TOKENS // 2 + GROUP_SIZE - 1)):
            work = partial(append_at, length, k, v, table, lengths, tail, layout)
            row[f"{kv_format}_{kind}_us"] = graph_us(work) - graph_us(partial(lengths.fill_, length))
    return row


def append_at(length: int, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
              tail: torch.Tensor, layout: PageLayout) -> None:  # fmt: skip
    lengths.fill_(length)
    append_kv_triton(k, v, table, lengths, tail, layout)


def dense(k: torch.Tensor, v: torch.Tensor) -> Callable[[], None]:
    cache = [torch.zeros(*k.shape[:2], TOKENS, k.shape[3], dtype=k.dtype, device="cuda") for _ in range(2)]
    position = torch.tensor([TOKENS // 2], device="cuda")

    def run() -> None:
        for rows, new in zip(cache, (k, v), strict=True):
            rows.index_copy_(2, position, new)

    return run


def main() -> None:
    if not torch.cuda.is_available():
        print("append needs a GPU: left out")
        return
    rows = []
    for shape in SHAPES:
        rows.append(measure(*shape))
        print(
            {key: round(value, 2) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
    save("append", rows)


if __name__ == "__main__":
    main()
