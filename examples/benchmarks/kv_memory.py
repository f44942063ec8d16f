"""Bytes of the key/value cache while decoding: the worst of 256 consecutive positions, with Gemma 3 270M's layers.

The cache is filled with random keys and values to the wanted length, then 256 tokens are decoded through the backend
and every byte is counted after each: codes, scales, tails and tables of pages in use. Slab reserve is apart. Bytes
depend neither on what attention gives nor on what is no key and no value: decode steps attend to nothing, and the model
has the layers, windows, heads and head size of the real one, but is narrow otherwise.

    python examples/benchmarks/kv_memory.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from harness import save
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache

import gemkv_compile
from gemkv_compile.cli.models import named_config
from gemkv_compile.kernels import ops
from gemkv_compile.kernels.layout import KV_FORMATS
from gemkv_compile.kernels.results import empty_results
from gemkv_compile.runtime.ledger import kv_memory

POSITIONS = 256
LENGTHS = (2048, 8192, 32768)
NARROW = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}


def main() -> None:
    """Measure every length and format, print the rows and save them."""
    config, name = named_config("gemma3-270m")
    for key, value in NARROW.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    rows = []
    for kv_format in KV_FORMATS:
        torch._dynamo.reset()
        model._compiled_call_impl = None
        gemkv_compile.compile(model, kv_format=kv_format, strict=True)
        for tokens in LENGTHS:
            with patch.object(ops, "implementation", attending_to_nothing(ops.implementation)):
                row = {"model": name, "format": kv_format, "tokens": tokens} | measure(model, tokens)
            print(row, flush=True)
            rows.append(row)
    print(f"saved to {save('kv_memory', rows)}")


def attending_to_nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    """Implementations of the operators, of which a decode step's attention gives zeros."""

    def implementation(operator: str, device: Any) -> Any:
        if operator != "attend_pages":
            return real(operator, device)
        return lambda query, *_: tuple(part.zero_() for part in empty_results(query))

    return implementation


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
