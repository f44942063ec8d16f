"""A thousand generate calls of random lengths, batch sizes and ends: what is allocated comes back.

A call may run to its end, be stopped by a criterion, fail in one, or leave its cache to the next call, which goes on
with it. Every so often its tokens are compared with eager ones. Pages are of the model's dtype, so they are equal.

Fragmentation, of two kinds, is measured while a call's cache is alive:

* outer: 1 - bytes of pages in use / bytes reserved in slabs, the share of memory that no page uses (a slab has 1 MiB at
  least, so it is large for these tiny caches);
* inner: bytes of groups that no row has been written to yet / bytes of pages in use.

    python examples/benchmarks/soak.py            # or --calls 30
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import Counter
from statistics import fmean
from typing import Any

import psutil
import torch
from harness import save
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, StoppingCriteria, StoppingCriteriaList

import gemkv_compile
from gemkv_compile.runtime.ledger import kv_memory

ENDS = ("runs out", "is stopped", "fails", "is continued")
VOCABULARY = 256
BLOCK = 100  # calls a row


class Ends(StoppingCriteria):
    """Stops, or raises, after a number of tokens."""

    def __init__(self, at: int, fails: bool) -> None:
        self.at, self.fails = at, fails

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
        is_over = input_ids.shape[1] >= self.at
        if is_over and self.fails:
            raise RuntimeError("this call was to fail")
        return torch.full((input_ids.shape[0],), is_over)


def tiny_model() -> Any:
    """A Gemma 3 of one sliding and one full layer, random and in float32."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def soak(calls: int, seed: int = 0, compare_every: int = 25) -> list[dict[str, Any]]:
    """Make the calls; returns a row for every `BLOCK` of them: bytes (in use, reserved, resident) and fragmentation.

    Raises:
        AssertionError: tokens differ from eager ones.
    """
    chance, eager = random.Random(seed), tiny_model()
    model = gemkv_compile.compile(tiny_model(), kv_format="model", strict=True)
    process, (baseline, _), rows = psutil.Process(), _pools(), []
    past: Any = None
    ids = torch.empty(0, 0, dtype=torch.int64)
    for first in range(0, calls, BLOCK):
        ends: Counter[str] = Counter()
        outer: list[float] = []
        inner: list[float] = []
        compared = 0
        for call in range(first, min(calls, first + BLOCK)):
            end = chance.choice(ENDS)
            ends[end] += 1
            if past is None:
                ids = torch.randint(5, VOCABULARY, (chance.choice([1, 1, 2, 3, 4]), chance.randint(1, 200)))
            else:
                ids = torch.cat([ids, torch.randint(5, VOCABULARY, (ids.shape[0], chance.randint(1, 20)))], 1)
            tokens = _call(model, ids, past, end, chance)
            past = None
            if tokens is None:
                continue
            ledger = kv_memory(tokens.past_key_values)
            used = sum(pool.in_use for pool in ledger.pools)
            if used:
                outer.append(ledger.reserve / (used + ledger.reserve))
                inner.append(sum(layer.unwritten for layer in ledger.layers) / used)
            if call % compare_every == 0:
                compared += 1
                _compare(eager, ids, tokens.sequences)
            if end == "is continued" and tokens.sequences.shape[1] < 1000:
                past, ids = tokens.past_key_values, tokens.sequences
            del tokens
        kept, past = past is not None, None  # a block's last cache is dropped
        in_use, reserved = _pools()
        rows.append(
            {
                "calls": first + sum(ends.values()),
                "ends": dict(ends),
                "compared": compared,
                "ended_with_a_cache": kept,
                "in_use_over_baseline": in_use - baseline,
                "reserved": reserved,
                "outer_fragmentation": {"mean": fmean(outer), "most": max(outer)} if outer else {},
                "inner_fragmentation": {"mean": fmean(inner), "most": max(inner)} if inner else {},
                "resident": process.memory_info().rss,
            }
        )
    return rows


def _call(model: Any, ids: torch.Tensor, past: Any, end: str, chance: random.Random) -> Any:
    """One call of generate; None if it failed as it was told to."""
    new = chance.randint(2, 40)
    at = ids.shape[1] + chance.randint(1, new) if end in ("is stopped", "fails") else 1 << 30
    stops = StoppingCriteriaList([Ends(at, end == "fails")])
    kwargs = {} if past is None else {"past_key_values": past}
    try:
        with torch.no_grad():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                stopping_criteria=stops,
                return_dict_in_generate=True,
                **kwargs,
            )
    except RuntimeError as error:
        if "this call was to fail" not in str(error):
            raise
        return None


def _compare(eager: Any, ids: torch.Tensor, sequences: torch.Tensor) -> None:
    new = sequences.shape[1] - ids.shape[1]
    with torch.no_grad():
        expected = eager.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
    assert torch.equal(sequences, expected), "tokens differ from eager ones"


def _pools() -> tuple[int, int]:
    """Bytes in use and reserved, once garbage is collected."""
    gc.collect()
    pools = kv_memory(()).pools
    return sum(pool.in_use for pool in pools), sum(pool.reserved for pool in pools)


def main() -> None:
    """Run, print the rows and save them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    rows = soak(parser.parse_args().calls)
    for row in rows:
        print(row)
    print(f"trimmed {gemkv_compile.trim()} bytes; reserved now: {_pools()[1]}")
    print(f"saved to {save('soak', rows)}")


if __name__ == "__main__":
    main()
