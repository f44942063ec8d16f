"""Time of one token's append of one layer on a GPU, inside a CUDA graph: what a decode step pays to keep its cache.

    python append.py

Of each format: "token" only writes to the tail; "commit" completes a group of 64 tokens, quantises it and writes it to
its page; "mean" is that of 64 appends one after another, of which one commits. Before each "token" and "commit" the
length is set, so that every call is the same; the setting is measured alone and subtracted. Microseconds; "peer" is
what StaticCache does in its place, an index_copy_ of keys and one of values into a dense bf16 cache. The results are
written after each format, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from harness import graph_us, save

from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.layout import KV_FORMATS, PageLayout

# Batch, K/V heads, head size, formats: all of them once, few after that, since compiling is most of the time.
CASES = [(1, 4, 256, KV_FORMATS), (8, 8, 128, ("int8", "k6v4"))]
TOKENS, PAGE_SIZE, GROUP_SIZE = 4096, 256, 64


def measure(batch: int, heads: int, dim: int, formats: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each format."""
    k, v = (torch.randn(batch, heads, 1, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    peer = graph_us(dense(k, v))
    setting = graph_us(partial(lengths.fill_, TOKENS // 2))
    for kv_format in formats:
        layout = PageLayout(heads, dim, PAGE_SIZE, GROUP_SIZE, kv_format, torch.bfloat16)
        pages = torch.empty(batch * TOKENS // PAGE_SIZE, layout.page_bytes, dtype=torch.uint8, device="cuda")
        addresses = pages.data_ptr() + torch.arange(len(pages), device="cuda") * layout.page_bytes
        tail = torch.randn(batch, 2, heads, layout.tail_rows, dim, device="cuda").to(torch.bfloat16)
        append = partial(append_kv_triton, k, v, addresses.view(batch, -1), lengths, tail, layout)
        row: dict[str, Any] = {"batch": batch, "kv_heads": heads, "head_dim": dim, "kv_format": kv_format}
        row["peer_us"] = peer
        for kind, length in (("token", TOKENS // 2), ("commit", TOKENS // 2 + GROUP_SIZE - 1)):
            row[f"{kind}_us"] = graph_us(partial(append_at, length, lengths, append)) - setting
        lengths.zero_()
        row["mean_us"] = graph_us(append, calls=GROUP_SIZE)
        yield row


def append_at(length: int, lengths: torch.Tensor, append: Callable[[], None]) -> None:
    lengths.fill_(length)
    append()


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
    for case in CASES:
        for row in measure(*case):
            rows.append(row)
            print({key: round(x, 2) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
            save("append", rows)


if __name__ == "__main__":
    main()
