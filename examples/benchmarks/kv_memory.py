"""Bytes of the key/value cache while decoding: the worst of 256 consecutive positions, on a real Gemma 3 270M.

The cache is filled with random keys and values to the wanted length (bytes do not depend on them), then 256 tokens are
decoded and every byte is counted after each: codes, scales, tails and tables of pages in use. Slab reserve is apart.

    python examples/benchmarks/kv_memory.py
"""

from __future__ import annotations

from typing import Any

import torch
from harness import save
from rich.progress import track
from transformers import DynamicCache

import gemkv_compile
from gemkv_compile.cli.models import demo_model
from gemkv_compile.kernels.layout import KV_FORMATS
from gemkv_compile.runtime.ledger import kv_memory

POSITIONS = 256
LENGTHS = (2048, 8192, 32768)


def main() -> None:
    """Measure every length and format, print the rows and save them."""
    model, _, name = demo_model(torch.bfloat16)
    rows = []
    for kv_format in KV_FORMATS:
        torch._dynamo.reset()
        model._compiled_call_impl = None
        gemkv_compile.compile(model, kv_format=kv_format, strict=True)
        for tokens in LENGTHS:
            row = {"model": name, "format": kv_format, "tokens": tokens} | measure(model, tokens)
            print(row)
            rows.append(row)
    print(f"saved to {save('kv_memory', rows)}")


def measure(model: Any, tokens: int) -> dict[str, Any]:
    """Decode 256 tokens from a length on; the position with the largest ratio to a dense bfloat16 cache."""
    cache = filled(model.config, tokens - 1)
    worst: dict[str, Any] = {"ratio": 0.0}
    with torch.no_grad():
        for length in track(range(tokens, tokens + POSITIONS), f"{tokens} tokens"):
            model(torch.tensor([[7]]), past_key_values=cache)
            ledger, dense = kv_memory(cache), dense_bytes(model.config, length)
            if ledger.total / dense > worst["ratio"]:
                parts = {
                    k: sum(getattr(layer, k) for layer in ledger.layers) for k in ("codes", "scales", "tail", "tables")
                }
                worst = {"ratio": ledger.total / dense, "at": length, "bytes": ledger.total, "dense": dense, **parts}
    return worst | {"reserve": ledger.reserve}


def filled(config: Any, tokens: int) -> DynamicCache:
    """A dense cache of random keys and values, as eager decoding leaves it."""
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        rows = min(tokens, config.sliding_window - 1) if layer.is_sliding else tokens
        shape = (1, config.num_key_value_heads, rows, config.head_dim)
        both = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(2)]
        layer.lazy_initialization(*both)
        layer.keys, layer.values = both
        if layer.is_sliding:
            layer.cumulative_length = tokens
    return cache


def dense_bytes(config: Any, tokens: int) -> int:
    """Bytes of the same rows in a dense bfloat16 DynamicCache."""
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    rows = sum(min(tokens, config.sliding_window - 1) if w else tokens for w in windowed)
    return rows * 2 * config.num_key_value_heads * config.head_dim * 2


if __name__ == "__main__":
    main()
