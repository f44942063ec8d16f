"""What is proven of real models' masks and of dynamic ones, and each near miss with its refusal."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from mask_graphs import Recorder, attend, causal, checks_of, pad, same, windowed
from torch._subclasses.fake_tensor import FakeTensorMode

from gemkv_compile.passes import prove_masks
from gemkv_compile.passes.masks.checking import check_proof
from gemkv_compile.passes.masks.numeric import Mismatch
from gemkv_compile.passes.masks.proof import MaskProof, Padding, Unproven
from gemkv_compile.passes.prove_masks import prove_mask

LOWEST = torch.finfo(torch.float32).min


# --- real models


def small(kind: str, implementation: str) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    model, config, extra = {
        "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, layers),
        "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, layers),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    }[kind]
    torch.manual_seed(0)
    return model._from_config(config(**common, **extra), attn_implementation=implementation).eval()


def generate(model: Any, prompt: int, new: int, padded: bool) -> Recorder:
    torch._dynamo.reset()
    recorder = Recorder()
    model.compile(backend=recorder)
    tokens = torch.randint(5, 60, (2 if padded else 1, prompt), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :3] = 0
    with torch.no_grad():
        model.generate(tokens, attention_mask=mask, max_new_tokens=new, do_sample=False)
    return recorder


def test_gemma3_beyond_its_window() -> None:
    proofs = generate(small("gemma3", "sdpa"), 20, 2, padded=False).proofs()
    assert all(proof.causal for proof in proofs)
    assert [proof.window for proof in proofs] == [16, None, 16, None]
    if all(proof.padding is None for proof in proofs):  # older Transformers keep a mask of ones
        assert str(proofs[0].predicate) == "(kv <= q) & (kv > q - 16)"


def test_gemma3_with_padding_grows_beyond_its_window() -> None:
    proofs = generate(small("gemma3", "sdpa"), 14, 4, padded=True).proofs()
    assert all(proof.causal and proof.padding for proof in proofs)
    assert [proof.window for proof in proofs] == [16, None] * (len(proofs) // 2)
    assert {proof.padding.source.name for proof in proofs} == {"l_kwargs_attention_mask_"}  # type: ignore[union-attr]
    columns = [str(proof.padding.column) for proof in proofs]  # type: ignore[union-attr]
    assert set(columns[1::2]) == {"0"} and columns[0] == "0"
    assert re.fullmatch(r"s\d+ - 15", columns[-2])


def test_gemma2_adds_its_mask() -> None:
    proofs = generate(small("gemma2", "eager"), 18, 1, padded=True).proofs()
    assert all(proof.causal and proof.padding for proof in proofs)
    assert [proof.window for proof in proofs] == [16, None]


def test_llama_with_padding() -> None:
    proofs = generate(small("llama", "sdpa"), 9, 2, padded=True).proofs()
    assert all(proof.causal and proof.window is None for proof in proofs)
    assert all(proof.padding and proof.padding.column == 0 for proof in proofs)


# --- sizes and alignment


@pytest.mark.parametrize("dynamic", [0, 1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 9), (2, 7)])
def test_constant_and_symbolic_sizes(dynamic: int, queries: int, keys: int) -> None:
    (proof,) = attend(lambda q, k: windowed(q, k, 4), queries, keys, dynamic=dynamic).proofs()
    assert (proof.causal, proof.window, proof.padding) == (True, 4, None)


def test_the_offset_is_proven_by_a_guard() -> None:
    def make(q: int, k: int) -> torch.Tensor:
        past = k - q
        start = torch.sym_max(past - 15, 0) if past >= 15 else 0
        row, column = torch.arange(q)[:, None] + past, torch.arange(k) + start - torch.sym_max(past - 15, 0)
        return (column <= row) & (column > row - 16)

    (proof,) = attend(make, 1, 40, dynamic=1).proofs()
    assert (proof.causal, proof.window) == (True, 16)


@pytest.mark.parametrize("window", [3, 4, 5])
def test_a_window_is_exact(window: int) -> None:
    (proof,) = attend(lambda q, k: windowed(q, k, window), 6, 6).proofs()
    assert proof.window == window


def test_a_window_longer_than_the_keys_is_reported() -> None:
    (proof,) = attend(lambda q, k: windowed(q, k, 100), 3, 5).proofs()
    assert proof.window == 100
    (proof,) = attend(lambda q, k: windowed(q, k, 100), 1, 1).proofs()
    assert proof.window == 100


def test_a_window_without_a_causal_bound() -> None:
    (proof,) = attend(lambda q, k: torch.arange(k) > torch.arange(q)[:, None] - 2, 4, 4).proofs()
    assert (proof.causal, proof.window) == (False, 2)


def test_a_padding_vector_of_one_row_needs_a_known_batch() -> None:
    """Without the batch, one row might have to serve several sequences, and a padding vector has a row for each."""
    found = []

    def backend(module: torch.fx.GraphModule, _: list) -> Callable:
        (node,) = (node for node in module.graph.nodes if node.target is F.scaled_dot_product_attention)
        found.extend(
            prove_mask(node.kwargs["attn_mask"], is_causal=False, q_len=3, kv_len=5, batch=batch) for batch in (None, 1)
        )
        return module.forward

    @torch.compile(backend=backend)
    def attention(query: torch.Tensor, key: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=row[:, None, None, :])

    attention(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.ones(1, 5, dtype=torch.bool))
    unknown, known = found
    assert isinstance(unknown, Unproven) and unknown.reason == "mask_residual"
    assert isinstance(known, MaskProof) and known.padding is not None


def test_one_query_is_causal_whenever_nothing_is_hidden() -> None:
    assert prove_mask(None, is_causal=False, q_len=1, kv_len=7).causal  # type: ignore[union-attr]
    (proof,) = attend(lambda q, k: torch.arange(k)[None, :] >= k - 3, 1, 7).proofs()
    assert (proof.causal, proof.window) == (True, 3)


def test_no_mask() -> None:
    open_to_all = prove_mask(None, is_causal=False, q_len=4, kv_len=7)
    assert open_to_all == MaskProof(False, None, None, sympy.true)
    square = prove_mask(None, is_causal=True, q_len=4, kv_len=4)
    assert isinstance(square, MaskProof) and square.causal
    top_left = prove_mask(None, is_causal=True, q_len=4, kv_len=7)
    assert isinstance(top_left, Unproven)
    assert (top_left.reason, top_left.node) == ("mask_residual", None)
    assert "aligned at the top left" in top_left.sentence and "by 3" in top_left.sentence


def test_an_alternative_that_never_holds_is_none() -> None:
    """|q - kv| < 0 says so only once it is taken apart."""

    def make(q: int, k: int, n: torch.Tensor) -> torch.Tensor:
        near = (torch.arange(q)[:, None] - torch.arange(k)).abs() < 0
        return (causal(q, k) & near) | (torch.arange(k) < n[:, None, None, None])

    (verdict,) = attend(make, 1, 1, torch.ones(2, dtype=torch.int64)).verdicts
    assert isinstance(verdict, Unproven) and "numeric check" not in verdict.sentence


def test_a_mask_that_hides_nothing_is_no_mask() -> None:
    (proof,) = attend(lambda q, k: torch.ones(q, k, dtype=torch.bool), 4, 7).proofs()
    assert proof == MaskProof(False, None, None, sympy.true)


def test_a_padding_row_that_serves_every_sequence_is_no_padding_vector() -> None:
    (proof,) = attend(
        lambda q, k, pad: pad[:, None, None, :], 3, 5, torch.ones(1, 5, dtype=torch.bool), batch=1
    ).proofs()
    assert proof.padding is not None
    (verdict,) = attend(lambda q, k, pad: pad[:, None, None, :], 3, 5, torch.ones(1, 5, dtype=torch.bool)).verdicts
    assert isinstance(verdict, Unproven) and verdict.reason == "mask_residual"


# --- near misses


NEAR_MISSES: dict[str, tuple[str, str, Callable, tuple[torch.Tensor, ...]]] = {
    "top_left": ("mask_residual", "only where kv <= q$", lambda q, k: torch.arange(k) <= torch.arange(q)[:, None], ()),
    "strict": ("mask_residual", r"only where kv <= q \+ 2$", lambda q, k: causal(q, k, -1), ()),
    "head": (
        "mask_residual",
        "differs from head to head",
        lambda q, k: causal(q, k) & (torch.arange(k) > torch.arange(q)[:, None] - torch.arange(2).view(2, 1, 1)),
        (),
    ),
    "bias": (
        "mask_residual",
        "adds -10000.0 to some scores",
        lambda q, k: torch.where(causal(q, k), 0.0, -10000.0),
        (),
    ),
    "small_bias": ("mask_residual", "adds 1.0 to some", lambda q, k: causal(q, k).float(), ()),
    "half_lowest": (
        "mask_residual",
        "adds -65504.0 to some",
        lambda q, k: torch.where(causal(q, k), 0.0, torch.finfo(torch.float16).min),
        (),
    ),
    "documents_from_the_first_query": (
        "mask_residual",
        r"only where l_inputs_0_\(b, (kv|q)\) == l_inputs_0_\(b, (kv|q)\)",
        lambda q, k, ids: (ids[:, None, None, :] == ids[:, None, :q, None]) & causal(q, k),
        (pad(),),
    ),
    "two_documents": (
        "mask_residual",
        r"only where l_inputs_._\(b, (kv|q \+ 3)\) == l_inputs_._\(b, (kv|q \+ 3)\)",
        lambda q, k, ids, other: same(ids, q, k) & same(other, q, k),
        (pad(), pad() * 2),
    ),
    "documents_or_older": (
        "mask_residual",
        r"only where .*\| .*l_inputs_0_|only where .*l_inputs_0_.*\|",
        lambda q, k, ids: causal(q, k) & (same(ids, q, k) | (torch.arange(k) >= 6)),
        (pad(),),
    ),
    "suffix": (
        "mask_residual",
        r"only where .*6 <= kv",
        lambda q, k: causal(q, k) | (torch.arange(k) >= 6),
        (),
    ),
    "prefix_by_query": (
        "mask_outside_graph",
        r"l_inputs_0_, a 1-D int64 input of the graph, not as the length of a prefix",
        lambda q, k, n: causal(q, k) | (torch.arange(k) < n[:, None]),
        (torch.full((5,), 2),),
    ),
    "two_prefixes": (
        "mask_residual",
        "prefix of two kinds beside its bound",
        lambda q, k, n: causal(q, k) | (torch.arange(k) < n[:, None, None, None]) | (torch.arange(k) < 5),
        (torch.full((2,), 2),),
    ),
    "prefix_of_some_queries": (
        "mask_residual",
        r"only where .*3 <= q",
        lambda q, k: causal(q, k) | ((torch.arange(k) < 6) & (torch.arange(q) >= 3)[:, None]),
        (),
    ),
    "prefix_of_one_bound": (
        "mask_residual",
        r"only where kv <= q \+ 4",
        lambda q, k: (causal(q, k) | (torch.arange(k) < 7)) & causal(q, k, 1),
        (),
    ),
    "spans_of_the_key_only": (
        "mask_residual",
        r"only where .*l_inputs_0_\(b, kv\)",
        lambda q, k, ids: causal(q, k) | (ids >= 0)[:, None, None, :],
        (pad(),),
    ),
    "padding_by_query": (
        "mask_residual",
        r"only where l_inputs_0_\(b, q\) != 0",
        lambda q, k, pad: causal(q, k) & pad[:, None, :q, None].bool(),
        (pad(),),
    ),
    "padding_inverted": (
        "mask_residual",
        r"only where l_inputs_0_\(b, kv\) == 0",
        lambda q, k, pad: causal(q, k) & ~pad[:, None, None, :].bool(),
        (pad(),),
    ),
    "padding_positive": (
        "mask_residual",
        r"only where 1 <= l_inputs_0_\(b, kv\)",
        lambda q, k, pad: causal(q, k) & (pad > 0)[:, None, None, :],
        (pad(),),
    ),
    "padding_of_the_first_sequence": (
        "mask_residual",
        r"only where l_inputs_0_\(0, kv\) != 0",
        lambda q, k, pad: causal(q, k) & pad[:1, None, None, :].bool(),
        (pad(),),
    ),
    "two_paddings": (
        "mask_residual",
        r"only where l_inputs_._\(b, kv( \+ 1)?\) != 0",
        lambda q, k, pad: causal(q, k) & pad[:, None, None, :-1].bool() & pad[:, None, None, 1:].bool(),
        (pad(9),),
    ),
    "key_limit": ("mask_residual", "only where kv <= 6", lambda q, k: causal(q, k) & (torch.arange(k) < k - 1), ()),
    "query_limit": (
        "mask_residual",
        "only where 1 <= q",
        lambda q, k: causal(q, k) & (torch.arange(q) > 0)[:, None],
        (),
    ),
    "nothing": ("mask_residual", "it hides every key", lambda q, k: torch.zeros(q, k, dtype=torch.bool), ()),
    "empty_window": ("mask_residual", r"only where q \+ 4 <= kv", lambda q, k: windowed(q, k, 0), ()),
    "chunks": (
        "mask_residual",
        "floor",
        lambda q, k: (torch.arange(k) // 4 == (torch.arange(q)[:, None] + 3) // 4) & causal(q, k),
        (),
    ),
    "every_other": (
        "mask_residual",
        r"only where 2\*kv",
        lambda q, k: 2 * torch.arange(k) <= 3 * torch.arange(q)[:, None],
        (),
    ),
    "four_dimensional_input": (
        "mask_outside_graph",
        "a 4-D bool input of the graph",
        lambda q, k, mask: mask & causal(q, k),
        (torch.ones(2, 1, 5, 8, dtype=torch.bool),),
    ),
    "float_input": ("mask_outside_graph", "a 2-D float32 input", lambda q, k, mask: mask, (torch.zeros(5, 8),)),
    "position_input": (
        "mask_outside_graph",
        "a 1-D int64 input of the graph",
        lambda q, k, position: torch.arange(k) <= position[:, None],
        (torch.arange(5),),
    ),
    "two_dimensional_input": (
        "mask_outside_graph",
        "read by query, not by sequence",
        lambda q, k, mask: mask,
        (torch.ones(5, 8, dtype=torch.bool),),
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_refused(name: str) -> None:
    reason, text, make, inputs = NEAR_MISSES[name]
    (verdict,) = attend(make, 5, 8, *inputs).verdicts
    assert isinstance(verdict, Unproven), verdict
    assert verdict.reason == reason
    assert re.search(text, verdict.sentence), verdict.sentence
    assert verdict.node is not None


def test_a_column_of_unknown_sign_is_refused() -> None:
    def make(q: int, k: int, vector: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(2)[:, None, None, None]
        return causal(q, k) & vector[rows, torch.arange(k) + (k - 20)]

    (verdict,) = attend(make, 5, 30, pad(40, torch.bool), dynamic=2).verdicts
    assert isinstance(verdict, Unproven)
    assert verdict.reason == "mask_unknown_op" and "may be negative" in verdict.sentence


# --- the numeric check


@pytest.mark.parametrize(("queries", "keys"), [(5, 8), (1200, 1300)])
def test_a_wrong_proof_fails_its_check(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int) -> None:
    def make(q: int, k: int, vector: torch.Tensor) -> torch.Tensor:
        return windowed(q, k, 4) & vector[:, None, None, 1 : k + 1].bool()

    ((proof, subject),) = checks_of(monkeypatch, make, queries, keys, pad(keys + 2))
    check_proof(proof, subject)
    wrong = [{"causal": False}, {"window": 3}, {"window": 5}, {"window": None}, {"padding": None}]
    wrong += [{"padding": Padding(proof.padding.source, sympy.Integer(column))} for column in (0, 2)]
    for change in wrong:
        with pytest.raises(Mismatch):
            check_proof(dataclasses.replace(proof, **change), subject)


def test_the_check_computes_real_numbers_whatever_is_traced() -> None:
    class Surrounded(Recorder):
        def prove(self, *args: Any) -> None:
            with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
                super().prove(*args)

    recorder = Surrounded()

    @torch.compile(backend=recorder)
    def attention(query: torch.Tensor, key: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        mask = torch.where(windowed(5, 8, 3) & vector[:, None, None, :], 0.0, LOWEST)
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)

    attention(torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 8, 4), pad(8, torch.bool))
    (proof,) = recorder.proofs()
    assert (proof.causal, proof.window, proof.padding is None) == (True, 3, False)


def test_a_failed_check_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise Mismatch("it differs from the mask at (b, h, q, kv) = (0, 0, 1, 2)")

    monkeypatch.setattr(prove_masks, "check_proof", fail)
    (verdict,) = attend(causal, 3, 3).verdicts
    assert isinstance(verdict, Unproven) and verdict.reason == "mask_residual"
    assert "failed its numeric check: it differs from the mask at" in verdict.sentence
