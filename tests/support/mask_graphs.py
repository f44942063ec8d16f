"""Captures an attention with a mask, and proves the mask."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gemkv_compile.passes import prove_masks
from gemkv_compile.passes.masks.proof import MaskProof, Unproven
from gemkv_compile.passes.prove_masks import prove_mask


class Recorder:
    """A backend that proves the mask of every attention, and then runs the graph as it is."""

    def __init__(self) -> None:
        self.verdicts: list[MaskProof | Unproven] = []

    def __call__(self, module: torch.fx.GraphModule, _: list) -> Callable:
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                (batch, heads, q_len, _), key = (arg.meta["example_value"].shape for arg in node.args[:2])
                mask, flag = node.kwargs.get("attn_mask"), node.kwargs.get("is_causal", False)
                self.prove(mask, flag, batch, heads, q_len, key[2])
            elif node.target is F.softmax:  # softmax(scores + mask)
                batch, heads, q_len, kv_len = node.meta["example_value"].shape
                assert node.args[0].target is operator.add
                self.prove(node.args[0].args[1], False, batch, heads, q_len, kv_len)
        return module.forward

    def prove(self, mask: Any, flag: bool, batch: Any, heads: Any, q_len: Any, kv_len: Any) -> None:
        sizes = {"q_len": q_len, "kv_len": kv_len, "num_q_heads": heads, "batch": batch}
        self.verdicts.append(prove_mask(mask, is_causal=flag, **sizes))

    def proofs(self) -> list[MaskProof]:
        """The verdicts, all of which have to be proofs."""
        refused = [verdict for verdict in self.verdicts if isinstance(verdict, Unproven)]
        assert not refused
        return self.verdicts  # type: ignore[return-value]


def attend(
    make: Callable, queries: int, keys: int, *inputs: torch.Tensor, batch: int = 2, dynamic: int = 0
) -> Recorder:
    """Capture one attention with the mask make(Q, K, *inputs); the first `dynamic` of (Q, K) are symbols."""
    recorder = Recorder()

    @torch.compile(backend=recorder, fullgraph=True)
    def attention(query: torch.Tensor, key: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        mask = make(query.shape[2], key.shape[2], *inputs)
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)

    torch._dynamo.reset()
    query, key = torch.zeros(batch, 2, queries, 4), torch.zeros(batch, 2, keys, 4)
    for tensor in (key, query)[:dynamic]:
        torch._dynamo.mark_dynamic(tensor, 2)
    attention(query, key, *inputs)
    return recorder


def causal(q: int, k: int, shift: int = 0) -> torch.Tensor:
    return torch.arange(k) <= torch.arange(q)[:, None] + (k - q + shift)


def same(ids: torch.Tensor, q: int, k: int) -> torch.Tensor:
    return ids[:, None, k - q : k, None] == ids[:, None, None, :k]


def windowed(q: int, k: int, window: int) -> torch.Tensor:
    return causal(q, k) & (torch.arange(k) > torch.arange(q)[:, None] + (k - q - window))


def pad(columns: int = 8, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.ones(2, columns, dtype=dtype)


def checks_of(monkeypatch: pytest.MonkeyPatch, make: Callable, queries: int, keys: int, *inputs: torch.Tensor) -> list:
    """The (proof, subject) pairs that were checked while proving."""
    pairs = []
    monkeypatch.setattr(prove_masks, "check_proof", lambda *pair: pairs.append(pair))
    attend(make, queries, keys, *inputs)
    return pairs
