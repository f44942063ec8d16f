"""Masks that are proven and computed densely: documents, prefixes, spans, a right window; and what is said of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from mask_graphs import attend, causal, checks_of, pad, same, windowed

from gemkv_compile import Options, PagedKVTensor
from gemkv_compile.backend import Backend
from gemkv_compile.passes.masks.checking import check_proof
from gemkv_compile.passes.masks.numeric import Mismatch
from gemkv_compile.passes.masks.proof import Documents, MaskProof, Prefix, Spans

QUERIES, KEYS = 5, 9
FLAGS = ("after_bound", "before_window")
LENGTHS = torch.tensor([2, 7])


def groups() -> torch.Tensor:
    return torch.tensor([[-1, -1, 0, 0, -1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0, -1, -1]])


def first(k: int, n: Any) -> torch.Tensor:
    return torch.arange(k) < (n[:, None, None, None] if isinstance(n, torch.Tensor) else n)


def spans(ids: torch.Tensor, q: int, k: int) -> torch.Tensor:
    return same(ids, q, k) & (ids[:, None, k - q : k, None] >= 0)


# name: (mask, its inputs, fields of the proof beside the predicate, its text)
KINDS: dict[str, tuple[Callable, tuple[torch.Tensor, ...], dict[str, Any], str]] = {
    "documents": (
        lambda q, k, ids: causal(q, k) & same(ids, q, k),
        (groups(),),
        {"causal": True, "documents": 0},
        "kv <= q + 4 and inputs_0[b, q + 4] == inputs_0[b, kv]",
    ),
    "documents_that_pad": (
        lambda q, k, ids: causal(q, k) & same(ids, q, k) & (ids != 0)[:, None, None, :k],
        (groups(),),
        {"causal": True, "documents": 0, "padding": 0},
        "kv <= q + 4 and inputs_0[b, kv] != 0 and inputs_0[b, q + 4] == inputs_0[b, kv]",
    ),
    "documents_of_a_longer_vector": (
        lambda q, k, ids: ids[:, None, k - q + 1 : k + 1, None] == ids[:, None, None, 1:],
        (pad(KEYS + 1),),
        {"documents": 1},
        "inputs_0[b, q + 4 + 1] == inputs_0[b, kv + 1]",
    ),
    "prefix": (
        lambda q, k: causal(q, k) | first(k, 6),
        (),
        {"causal": True, "prefix": (6, True, False)},
        "(kv <= q + 4 or kv < 6)",
    ),
    "prefix_by_sequence": (
        lambda q, k, n: torch.where(causal(q, k) | first(k, n), 0.0, -float("inf")),
        (LENGTHS,),
        {"causal": True, "prefix": (0, True, False)},
        "(kv <= q + 4 or kv < inputs_0[b])",
    ),
    "prefix_in_a_window": (
        lambda q, k, n: (causal(q, k) | first(k, n + 1)) & windowed_only(q, k, 3),
        (LENGTHS,),
        {"causal": True, "window": 3, "prefix": (1, True, False)},
        "(kv <= q + 4 or kv < inputs_0[b] + 1) and kv > q + 4 - 3",
    ),
    "prefix_beyond_a_window": (
        lambda q, k, n: windowed(q, k, 3) | first(k, n),
        (LENGTHS,),
        {"causal": True, "window": 3, "prefix": (0, True, True)},
        "(kv <= q + 4 or kv < inputs_0[b]) and (kv > q + 4 - 3 or kv < inputs_0[b])",
    ),
    "first_keys_are_kept": (
        lambda q, k: causal(q, k) & (windowed_only(q, k, 3) | first(k, 2)),
        (),
        {"causal": True, "window": 3, "prefix": (2, False, True)},
        "kv <= q + 4 and (kv > q + 4 - 3 or kv < 2)",
    ),
    "right_window": (lambda q, k: causal(q, k, 2), (), {"right": 2}, "kv <= q + 4 + 2"),
    "both_windows": (
        lambda q, k: (torch.arange(q)[:, None] + (k - q) - torch.arange(k)).abs() <= 2,
        (),
        {"right": 2, "window": 3},
        "kv <= q + 4 + 2 and kv > q + 4 - 3",
    ),
    "spans": (
        lambda q, k, ids: torch.where(spans(ids, q, k), True, causal(q, k)),
        (groups(),),
        {"causal": True, "spans": (0, 0, True, False)},
        "(kv <= q + 4 or inputs_0[b, q + 4] == inputs_0[b, kv] and inputs_0[b, kv] >= 0)",
    ),
    "spans_within_a_window": (
        lambda q, k, ids: (causal(q, k) | spans(ids, q, k)) & windowed_only(q, k, 3),
        (groups(),),
        {"causal": True, "window": 3, "spans": (0, 0, True, False)},
        "(kv <= q + 4 or inputs_0[b, q + 4] == inputs_0[b, kv] and inputs_0[b, kv] >= 0) and kv > q + 4 - 3",
    ),
    "spans_across_a_window": (
        lambda q, k, ids: (windowed(q, k, 3) | spans(ids, q, k)) & first(k, 9),
        (groups(),),
        {"causal": True, "window": 3, "spans": (0, 0, True, True)},
        "(kv <= q + 4 or inputs_0[b, q + 4] == inputs_0[b, kv] and inputs_0[b, kv] >= 0)"
        " and (kv > q + 4 - 3 or inputs_0[b, q + 4] == inputs_0[b, kv] and inputs_0[b, kv] >= 0)",
    ),
}


def windowed_only(q: int, k: int, window: int) -> torch.Tensor:
    return torch.arange(k) > torch.arange(q)[:, None] + (k - q - window)


def fields(proof: MaskProof) -> dict[str, Any]:
    """What a proof says, in numbers."""
    found: dict[str, Any] = {"causal": proof.causal, "window": proof.window, "right": proof.right}
    for name in ("padding", "documents"):
        found[name] = getattr(proof, name) and int(getattr(proof, name).column)
    for name, own in (("prefix", ("extra",)), ("spans", ("column", "least"))):
        kind = getattr(proof, name)
        found[name] = kind and (*(int(getattr(kind, part)) for part in own), kind.after_bound, kind.before_window)
    return {name: value for name, value in found.items() if value is not None and value is not False}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_proven_and_said(name: str) -> None:
    make, inputs, wanted, text = KINDS[name]
    (proof,) = attend(make, QUERIES, KEYS, *inputs).proofs()
    assert fields(proof) == wanted
    assert proof.text == text
    assert bool(proof.dense_kinds)


@pytest.mark.parametrize("name", KINDS)
def test_the_text_is_the_mask(name: str) -> None:
    """It is Python: evaluated for every query and key, it gives the mask."""
    make, inputs, _, text = KINDS[name]
    mask = make(QUERIES, KEYS, *inputs)
    shown = (mask if mask.dtype is torch.bool else mask == 0).expand(2, 1, QUERIES, KEYS)
    values = {"inputs_0": Table(inputs[0])} if inputs else {}
    for b, _, q, kv in torch.cartesian_prod(*map(torch.arange, shown.shape)).tolist():
        assert eval(text, values | {"b": b, "q": q, "kv": kv}) == bool(shown[b, 0, q, kv])


class Table:
    """A tensor that is indexed as the text says."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __getitem__(self, at: Any) -> int:
        return int(self._values[at])


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("documents", 1), ("prefix", 2), ("prefix_by_sequence", 2), ("both_windows", 2), ("spans_across_a_window", 1)],
)
def test_symbolic_sizes(name: str, dynamic: int) -> None:
    make, inputs, wanted, text = KINDS[name]
    (proof,) = attend(make, QUERIES, KEYS, *inputs, dynamic=dynamic).proofs()
    assert fields(proof) == wanted
    assert proof.text == text.replace("q + 4", "q + past")


def test_one_query_sees_its_own_document() -> None:
    (proof,) = attend(lambda q, k, ids: causal(q, k) & same(ids, q, k), 1, KEYS, groups()).proofs()
    assert (proof.causal, proof.dense_kinds) == (True, ("documents",))
    (proof,) = attend(lambda q, k: causal(q, k, 2) | first(k, 3), 1, KEYS).proofs()
    assert (proof.causal, proof.dense_kinds) == (True, ())


@pytest.mark.parametrize(("queries", "keys"), [(9, 14), (1200, 1300)])
def test_a_wrong_proof_fails_its_check(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int) -> None:
    def make(q: int, k: int, ids: torch.Tensor, n: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        limit = (causal(q, k, 2) | first(k, n) | spans(blocks, q, k)) & (windowed_only(q, k, 4) | first(k, n))
        return limit & same(ids, q, k)

    inputs = (pad(keys), LENGTHS, pad(keys + 1))
    ((proof, subject),) = checks_of(monkeypatch, make, queries, keys, *inputs)
    check_proof(proof, subject)
    assert isinstance(proof.prefix, Prefix) and isinstance(proof.spans, Spans)
    assert isinstance(proof.documents, Documents)
    changes = [{"right": 1}, {"right": 3}, {"right": None}, {"causal": True, "right": None}]
    changes += [{"documents": None}, {"prefix": None}, {"spans": None}, {"window": 3}, {"window": None}]
    changes += [{"prefix": dataclasses.replace(proof.prefix, extra=sympy.Integer(n))} for n in (-1, 1)]
    changes += [
        {"prefix": dataclasses.replace(proof.prefix, **{flag: False})} for flag in ("after_bound", "before_window")
    ]
    changes += [{"spans": dataclasses.replace(proof.spans, **change)} for change in ({"least": 1}, {"least": None})]
    changes += [{"spans": dataclasses.replace(proof.spans, before_window=True)}]
    changes += [{"documents": Documents(proof.spans.source, sympy.S.Zero)}]
    for change in changes:
        with pytest.raises(Mismatch):
            check_proof(dataclasses.replace(proof, **change), subject)


def image_layer(clamped: bool) -> Callable:
    """A sliding layer (window 4) whose image tokens see one another, as Gemma 3 and 4 have it.

    `clamped`: the window cuts the image, as since transformers#46850; before, the image reached across the window.
    """

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: Any, groups: torch.Tensor) -> Any:
        k, v = (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))
        queries, keys = q.shape[2], k.shape[2]
        own, others = groups[:, None, -queries:, None], groups[:, None, None, -keys:]
        image, near = (own == others) & (own >= 0), windowed_only(queries, keys, 4)
        late = causal(queries, keys)
        mask = (late | image) & near if clamped else (late & near) | image
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out, (k[:, :, -3:, :], v[:, :, -3:, :])

    return layer


@pytest.mark.parametrize("clamped", [True, False])
def test_an_image_across_the_sliding_window_is_exact(clamped: bool) -> None:
    """transformers#46850, #48482: images of 7 and 3 tokens, a window of 4; a prompt, a chunk with an image, steps."""
    groups = torch.tensor([[-1, 0, 0, 0, 0, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1], [0] * 7 + [-1] * 3 + [1] * 5])
    layer, backend = image_layer(clamped), Backend(Options(kv_format="model", strict=True))
    compiled = torch.compile(layer, backend=backend, dynamic=False)
    random, end, ours, theirs = torch.Generator().manual_seed(0), 0, None, None
    for tokens in (9, 4, 1, 1):
        end += tokens
        q, k, v = (torch.randn(2, heads, tokens, 16, generator=random) for heads in (4, 2, 2))
        with torch.no_grad():
            out, ours = compiled(q, k, v, ours, groups[:, :end].clone())
            expected, theirs = layer(q, k, v, theirs, groups[:, :end].clone())
        assert isinstance(ours[0], PagedKVTensor)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    sites = [site for graph in backend.graphs for site in graph.sites]
    assert {site.status for site in sites} == {"rewritten"}
    assert sites[0].reason == "mask_kind_dense" and "spans" in sites[0].mask
    across = "and kv > q - 4" if clamped else "kv > q - 4 or "
    assert across in sites[0].predicate
