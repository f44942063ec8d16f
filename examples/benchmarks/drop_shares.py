"""Time of what a drop policy observes on a GPU: the attention shares of the newest 32 queries of one layer.

    python drop_shares.py

"kernel" is launched from Python, as a call that completes a page does it, "graph" the same inside a CUDA graph: what
the device takes. "torch" is the plain version, which goes through sequences and pages one by one. Medians in
microseconds; "error" is the largest difference between the two, in units of a token's mean share. The results are
written after each row, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from harness import graph_us, median_us, save

from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.attention_shares.kernel import attention_shares_triton
from gemkv_compile.kernels.attention_shares.reference import attention_shares_reference
from gemkv_compile.kernels.layout import PageLayout

SHAPES = [(1, 32, 8, 128), (8, 32, 8, 128), (1, 8, 4, 256), (8, 8, 4, 256)]  # batch, query heads, K/V heads, head size
FORMATS = ("int8", "k6v4", "int4", "model")  # k8v4 has the keys of int8
TOKENS, OBSERVES = 32768, 32
PAGE_SIZE, GROUP_SIZE = 64, 64  # as with a policy


def measure(batch: int, q_heads: int, heads: int, dim: int, kv_format: str) -> dict[str, Any]:
    """A row: random keys in shuffled pages, with a tail that is half full."""
    tokens = TOKENS - GROUP_SIZE // 2
    layout = PageLayout(heads, dim, PAGE_SIZE, GROUP_SIZE, kv_format, torch.bfloat16)
    pages = -(-tokens // PAGE_SIZE)
    memory = torch.empty(batch * pages, layout.page_bytes, dtype=torch.uint8, device="cuda")
    order = torch.randperm(batch * pages, device="cuda")
    table = (memory.data_ptr() + order * layout.page_bytes).view(batch, pages)
    lengths, starts = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(2))
    tail = torch.zeros(batch, 2, heads, layout.tail_rows, dim, dtype=torch.bfloat16, device="cuda")
    keys = torch.randn(batch, heads, tokens, dim, dtype=torch.bfloat16, device="cuda")
    append_kv_triton(keys, keys, table, lengths, tail, layout)
    q = torch.randn(batch, q_heads, OBSERVES, dim, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(tokens - OBSERVES, tokens, device="cuda")
    args = q, positions, table, starts, tail, None, dim**-0.5, None, None, tokens, layout
    kernel, plain = partial(attention_shares_triton, *args), partial(attention_shares_reference, *args)
    row: dict[str, Any] = {"batch": batch, "q_heads": q_heads, "kv_heads": heads, "head_dim": dim, "tokens": tokens}
    row |= {"observes": OBSERVES, "kv_format": kv_format, "error": (kernel() - plain()).abs().max().item() * tokens}
    return row | {"kernel_us": median_us(kernel), "graph_us": graph_us(kernel), "torch_us": median_us(plain)}


def main() -> None:
    if not torch.cuda.is_available():
        print("drop_shares needs a GPU: left out")
        return
    rows = []
    for shape in SHAPES:
        for kv_format in FORMATS:
            rows.append(measure(*shape, kv_format))
            torch.cuda.empty_cache()
            print({key: round(x, 3) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
            save("drop_shares", rows)


if __name__ == "__main__":
    main()
