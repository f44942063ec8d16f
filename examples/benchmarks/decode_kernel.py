"""Time of one decode step's attention and append on a GPU, beside bf16 attention by PyTorch and FlashAttention-3.

    python decode_kernel.py [--quick] [--jobs 8]

Peers read a dense bf16 cache: FlashAttention-2 and cuDNN through torch's sdpa, FlashAttention-3 if `fa3_fwd_interface`
is installed. Medians of repeated runs in microseconds: "us" launched from Python, "graph_us" inside a CUDA graph, as
decode steps run; the result is also compared with float32 attention on the same rows. "split" and "combine" are the two
kernels' own times. Rates are beside those of a kernel that only reads as many bytes. With --jobs so many processes
first compile what is timed.
"""

from __future__ import annotations

import multiprocessing
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import device_us, graph_us, median_us, peers_named, save, stream_gb_per_s
from torch.nn.attention import SDPBackend, sdpa_kernel

from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.attend_pages.kernel import attend_pages_triton
from gemkv_compile.kernels.layout import KV_FORMATS, PageLayout

SHAPES = [  # batch, query heads, K/V heads, head size, tokens
    (1, 32, 8, 128, 1024),
    (1, 32, 8, 128, 4096),
    (1, 32, 8, 128, 32768),
    (1, 32, 8, 128, 131072),
    (8, 16, 8, 128, 32768),
    (8, 32, 8, 128, 32768),
    (8, 64, 8, 128, 32768),
    (64, 32, 8, 128, 32768),
    (32, 32, 8, 128, 8192),
    (1, 16, 8, 256, 32768),
    (8, 16, 8, 256, 32768),
    (1, 8, 4, 256, 4096),
    (1, 8, 4, 256, 32768),
    (8, 8, 4, 256, 32768),
    (64, 8, 4, 256, 32768),
    (32, 4, 1, 256, 8192),
]
PAGE_SIZE, GROUP_SIZE = 256, 64


class Paged:
    """A cache of random codes in shuffled pages, with a tail that is half full."""

    def __init__(self, batch: int, heads: int, dim: int, tokens: int, kv_format: str) -> None:
        self.layout = PageLayout(heads, dim, PAGE_SIZE, GROUP_SIZE, kv_format, torch.bfloat16)
        pages = -(-tokens // PAGE_SIZE)
        self.memory = torch.empty(batch * pages, self.layout.page_bytes, dtype=torch.uint8, device="cuda")
        order = torch.randperm(batch * pages, device="cuda")
        self.table = (self.memory.data_ptr() + order * self.layout.page_bytes).view(batch, pages)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.tail = torch.zeros(batch, 2, heads, self.layout.tail_rows, dim, dtype=torch.bfloat16, device="cuda")

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        append_kv_triton(k, v, self.table, self.lengths, self.tail, self.layout)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        state = self.table, self.lengths, self.starts, self.tail
        return attend_pages_triton(q, *state, None, None, None, q.shape[-1] ** -0.5, None, None, self.layout)[0]


def compile_one(shape: tuple[int, int, int, int, int], kv_format: str) -> None:
    """Run the kernels of a shape once, for one sequence, so that Triton's cache has them."""
    _, q_heads, heads, dim, tokens = shape
    k = torch.randn(1, heads, tokens - GROUP_SIZE // 2, dim, dtype=torch.bfloat16, device="cuda")
    cache = Paged(1, heads, dim, k.shape[2], kv_format)
    cache.append(k, k)
    cache.append(k[:, :, :1], k[:, :, :1])
    cache.attend(torch.randn(1, q_heads, 1, dim, dtype=torch.bfloat16, device="cuda"))


def measure(shape: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """One row: times in microseconds, bytes, and the error against float32 attention on the same bf16 rows."""
    batch, q_heads, heads, dim, tokens = shape
    tokens -= GROUP_SIZE // 2  # so that a tail is read too
    k, v = (torch.randn(batch, heads, tokens, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(batch, q_heads, 1, dim, dtype=torch.bfloat16, device="cuda")
    row: dict[str, Any] = {"batch": batch, "q_heads": q_heads, "kv_heads": heads, "head_dim": dim, "tokens": tokens}
    exact = F.scaled_dot_product_attention(q[:1].float(), k[:1].float(), v[:1].float(), enable_gqa=True)
    for name, peer in _peers(q, k, v).items():
        try:
            row[f"{name}_us"], row[f"{name}_graph_us"] = median_us(peer), graph_us(peer)
        except Exception as error:
            row[f"{name}_failed"] = str(error)[:100]
    for kv_format in KV_FORMATS:
        cache = Paged(batch, heads, dim, tokens, kv_format)
        cache.append(k, v)
        error = (cache.attend(q)[:1].float() - exact).abs().max() / exact.abs().max()
        run = partial(cache.attend, q)
        row[f"{kv_format}_us"], row[f"{kv_format}_graph_us"] = median_us(run), graph_us(run)
        row[f"{kv_format}_error"] = error.item()
        if kv_format == "int8":
            read = batch * (tokens // GROUP_SIZE) * heads * cache.layout.group_bytes
            row["int8_bytes"], row["int8_gb_per_s"] = read, read / row["int8_graph_us"] / 1e3
            row["stream_gb_per_s"] = stream_gb_per_s(read)
            parts = device_us(run, ("attend_split", "combine_splits"))
            row["split_us"], row["combine_us"] = parts["attend_split"], parts["combine_splits"]
            new = k[:, :, :1].contiguous(), v[:, :, :1].contiguous()
            row["append_us"] = median_us(lambda c=cache, new=new: c.append(*new))
    best = min(value for name in peers_named() if (value := row.get(f"{name}_graph_us")) is not None)
    row["speedup"] = best / row["int8_graph_us"]
    return row


def _peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    def sdpa(backend: SDPBackend) -> Any:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return run

    peers = {"fa2": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache
    except ImportError:
        return peers
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device="cuda")
    peers["fa3"] = lambda: flash_attn_with_kvcache(*rows, cache_seqlens=lengths, causal=True)
    return peers


def main() -> None:
    if not torch.cuda.is_available():
        print("decode_kernel needs a GPU: left out")
        return
    rows, shapes = [], SHAPES[2:3] + SHAPES[5:6] if "--quick" in sys.argv else SHAPES
    if "--jobs" in sys.argv:
        kinds = {(q_heads // heads, heads, dim): (1, q_heads, heads, dim, 8192) for _, q_heads, heads, dim, _ in shapes}
        with multiprocessing.get_context("spawn").Pool(int(sys.argv[sys.argv.index("--jobs") + 1])) as pool:
            pool.starmap(compile_one, [(kind, name) for kind in kinds.values() for name in KV_FORMATS], chunksize=1)
    for shape in shapes:
        rows.append(measure(shape))
        torch.cuda.empty_cache()
        print(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
    save("decode_kernel", rows)


if __name__ == "__main__":
    main()
