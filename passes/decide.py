"""Stage 5: a verdict per cache: rewritten, with everything its operators need, or kept, with a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from gemkv_compile.compat import expr_of
from gemkv_compile.errors import GemkvError
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.validate import MAX_GROUPS
from gemkv_compile.passes.dropping import KEEPS, DropFacts, DropVerdict, judge_drop
from gemkv_compile.passes.effects import write_after, writes_of
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.proof import MaskProof, Padding, Unproven
from gemkv_compile.passes.prove_masks import prove_mask
from gemkv_compile.passes.sites import Attention, Cache, Refusal
from gemkv_compile.passes.symbols import is_known, same_size, static_int

FULL_PAGE_SIZE = 256
WINDOW_PAGE_SIZE = 64  # a page of 256 tokens would waste up to half of a window of 512


@dataclass(frozen=True)
class Facts:
    """What the compile knows besides the graph: options, and which inputs are cache handles."""

    kv_format: str
    group_size: int
    page_size: int | None
    handle_inputs: frozenset[int]
    drop: DropFacts | None = None


@dataclass(frozen=True)
class Read:
    """How one attention reads its cache: a proven mask, or the dense one with the reason why."""

    attention: Attention
    causal: bool
    window: int | None
    padding: Padding | None
    dense_mask: Node | None
    unproven: Unproven | None
    window_is_kept_rows: bool = False  # the window is not in the mask: it is the number of rows that the cache keeps
    proof: MaskProof | None = None  # what is proven, also of a mask that is used densely


@dataclass(frozen=True)
class Rewrite:
    """The verdict "rewritten" for a cache and its readers."""

    cache: Cache
    reads: tuple[Read, ...]
    is_decode: bool
    keep: int | None
    window: int | None
    exact_rows: int | None
    layout: PageLayout
    device: torch.device
    requires_grad: bool
    drop: DropVerdict = KEEPS


@dataclass(frozen=True)
class Verdicts:
    """Caches that are rewritten, and attentions that are kept."""

    rewrites: tuple[Rewrite, ...]
    kept: tuple[tuple[Attention, Refusal], ...]


def decide(caches: Iterable[Cache], placeholders: list[Node], facts: Facts) -> Verdicts:
    """Judge each cache as a whole: all its readers are rewritten or none."""
    rewrites: list[Rewrite] = []
    kept: list[tuple[Attention, Refusal]] = []
    proofs: dict[Any, MaskProof | Unproven] = {}
    for cache in caches:
        verdict = _judge(cache, placeholders, facts, proofs)
        if isinstance(verdict, Rewrite):
            rewrites.append(verdict)
        else:
            kept += [(reader, verdict) for reader in cache.readers]
    return Verdicts(tuple(rewrites), tuple(kept))


def _judge(cache: Cache, placeholders: list[Node], facts: Facts, proofs: dict[Any, Any]) -> Rewrite | Refusal:
    new = new_rows(cache)
    kv_grad = torch.is_grad_enabled() and any(map(_requires_grad, (cache.new_keys, cache.new_values)))
    needs_grad = kv_grad or (torch.is_grad_enabled() and any(_requires_grad(r.query) for r in cache.readers))
    refusal = _check_grad(cache, placeholders, facts, kv_grad) or _check_types(cache, new)
    if refusal is not None:
        return refusal
    kept_rows = cache.outputs[0].keep if cache.outputs else None
    if cache.buffer is not None and cache.buffer.rolls:
        kept_rows = cache.buffer.places
    keep = None if kept_rows is None else static_int(kept_rows)
    if kept_rows is not None and keep is None:
        return Refusal("slice_not_constant", "how many rows the cache keeps is no constant.", cache.outputs[0].node)
    is_decode = static_int(new[2]) == 1
    reads: list[Read] = []
    for attention in cache.readers:
        read = _read(cache, attention, keep, is_decode, proofs)
        if isinstance(read, Refusal):
            return read
        reads.append(read)
    windows = [read.window for read in reads]
    is_windowed = keep is not None or None not in windows
    page_size = facts.page_size or page_size_of(is_windowed or facts.drop is not None, facts.group_size)
    try:
        layout = PageLayout(
            new[1], new[3], page_size, facts.group_size, facts.kv_format, value_of(cache.new_keys).dtype
        )
    except GemkvError as error:
        return Refusal("layout_unsupported", str(error), cache.new_keys)
    return Rewrite(
        cache=cache,
        reads=tuple(reads),
        is_decode=is_decode and not needs_grad,
        keep=keep,
        window=None if None in windows else max(w for w in windows if w is not None),
        exact_rows=min((r.window for r in reads if r.window_is_kept_rows and r.window is not None), default=None),
        layout=layout,
        device=value_of(cache.new_keys).device,
        requires_grad=needs_grad,
        drop=judge_drop(facts.drop, cache, is_windowed, is_decode, needs_grad),
    )


def page_size_of(is_windowed: bool, group_size: int) -> int:
    """Tokens in a page where no option says: 64 in a windowed layer or if pages are dropped, else 256; whole groups."""
    return -(-(WINDOW_PAGE_SIZE if is_windowed else FULL_PAGE_SIZE) // group_size) * group_size


def new_rows(cache: Cache) -> tuple[Any, Any, Any, Any]:
    """Shape of this call's rows as (batch, num_kv_heads, q_len, head_dim); heads and head_dim are ints if constant."""
    batch, a, b, dim = value_of(cache.new_keys).shape
    heads, rows = (a, b) if cache.seq_dim == 2 else (b, a)
    return batch, static_int(heads) or heads, rows, static_int(dim) or dim


def _requires_grad(node: Node) -> bool:
    return bool(getattr(value_of(node), "requires_grad", False))


def _check_grad(cache: Cache, placeholders: list[Node], facts: Facts, kv_grad: bool) -> Refusal | None:
    pasts = [past for past in (cache.past_keys, cache.past_values) if past is not None]
    trained = next((past for past in pasts if _requires_grad(past)), None)
    if trained is not None:
        return Refusal(
            "past_requires_grad", "the past requires grad (prefix tuning), and pages are outside autograd.", trained
        )
    masks = [node for reader in cache.readers for node in (reader.mask, reader.sinks) if node is not None]
    if torch.is_grad_enabled() and (trained := next(filter(_requires_grad, masks), None)) is not None:
        return Refusal(
            "grad_enabled", "a mask or sink requires grad, and the paged operators have no gradient for it.", trained
        )
    if kv_grad and cache.buffer is not None:
        sentence = "keys and values require grad, and a static cache is outside autograd; generate under no_grad()."
        return Refusal("grad_enabled", sentence, cache.readers[0].node)
    handles = all(placeholders.index(past) in facts.handle_inputs for past in pasts)
    if kv_grad and not (pasts and handles):
        return Refusal(
            "grad_enabled",
            "keys and values require grad here, so they stay ordinary tensors; generate under torch.no_grad().",
            cache.readers[0].node,
        )
    return None


def _check_types(cache: Cache, new: tuple[Any, ...]) -> Refusal | None:
    batch, heads, rows, dim = new
    keys = value_of(cache.new_keys)
    if not isinstance(heads, int) or not isinstance(dim, int):
        return Refusal("head_dim_unsupported", "head count or head size is no constant of the graph.", cache.new_keys)
    pasts = [value_of(past) for past in (cache.past_keys, cache.past_values) if past is not None]
    for value in (value_of(cache.new_values), *pasts):
        if (value.dtype, value.device) != (keys.dtype, keys.device):
            return Refusal(
                "dtype_differs",
                f"keys, values and past must share dtype and device: {keys.dtype} on {keys.device} and "
                f"{value.dtype} on {value.device}.",
                cache.new_keys,
            )
    for reader in cache.readers:
        query = value_of(reader.query)
        if (query.dtype, query.device) != (keys.dtype, keys.device):
            return Refusal("dtype_differs", f"the query is {query.dtype}, the keys are {keys.dtype}.", reader.node)
        if value_of(reader.node).dtype != query.dtype:
            return Refusal(
                "dtype_differs", "autocast changes the attention's dtype; cast the model instead.", reader.node
            )
        q_heads = static_int(query.shape[1])
        if q_heads is None or q_heads % heads or not 1 <= q_heads // heads <= MAX_GROUPS:
            return Refusal(
                "heads_unsupported", f"{q_heads} query heads do not share {heads} key/value heads.", reader.node
            )
        tokens, result = query.shape[2], value_of(reader.node)
        expected = (batch, q_heads, tokens, dim)
        for shape in (query.shape, result.shape):
            if len(shape) != 4 or not all(same_size(a, b) for a, b in zip(expected, shape, strict=True)):
                sentence = "query, result and new keys differ in batch, heads, tokens or head size."
                return Refusal("query_rows_differ", sentence, reader.node)
        if not is_known(sympy.Le(expr_of(tokens), expr_of(rows)), tokens, rows):
            sentence = f"there are {tokens} queries for {rows} new keys, which are not known to be as many or more."
            return Refusal("query_rows_differ", sentence, reader.node)
    return None


def _read(
    cache: Cache, attention: Attention, keep: int | None, is_decode: bool, proofs: dict[Any, Any]
) -> Read | Refusal:
    if attention.over_places:
        return _read_places(attention, is_decode, keep if cache.buffer is not None and cache.buffer.rolls else None)
    q_len, kv_len = value_of(attention.query).shape[2], value_of(attention.keys).shape[2]
    key = (attention.mask, attention.is_causal, expr_of(q_len), expr_of(kv_len))
    if key not in proofs:
        proofs[key] = _prove(attention, q_len, kv_len)
    proof = proofs[key]
    if isinstance(proof, MaskProof) and proof.dense_kinds:
        return Read(attention, False, None, None, attention.mask, _needs_dense(attention, proof), proof=proof)
    if isinstance(proof, MaskProof) and proof.padding is not None and (refused := _check_padding(attention, proof)):
        proof = refused
    if isinstance(proof, Unproven):
        if attention.mask is None or not isinstance(value_of(attention.mask), torch.Tensor):
            return Refusal(proof.reason, proof.sentence, proof.node or attention.node)
        return Read(attention, False, None, None, attention.mask, proof)
    window = _window(cache, attention, proof, q_len, kv_len, keep, is_decode)
    if isinstance(window, Refusal):
        return window
    from_rows = is_decode and proof.window is None and attention.visible is None and window is not None
    return Read(attention, proof.causal, window, proof.padding, None, None, from_rows, proof)


def _read_places(attention: Attention, is_decode: bool, window: int | None) -> Read | Refusal:
    """A mask over all places of a static cache is used densely; without one, places without a row do not take part."""
    if attention.mask is not None and not attention.is_causal and isinstance(value_of(attention.mask), torch.Tensor):
        sentence = "the mask is over all places of a static cache, and where the rows end is not in the graph"
        return Read(
            attention, False, None, None, attention.mask, Unproven("mask_over_places", sentence, attention.mask)
        )
    if is_decode and attention.mask is None and not attention.is_causal:
        return Read(attention, True, window, None, None, None)
    sentence = "attention without a mask sees all places of a static cache, also those that hold nothing yet."
    return Refusal("rows_hidden", sentence, attention.node)


def _needs_dense(attention: Attention, proof: MaskProof) -> Unproven:
    kinds = " and ".join(proof.dense_kinds)
    sentence = f"the mask is proven, and the paged operators take its {kinds} as a dense tensor only"
    return Unproven("mask_kind_dense", sentence, attention.mask)


def _check_padding(attention: Attention, proof: MaskProof) -> Unproven | None:
    """Padding is read by the executable: from the call's own argument, and for all rows that the cache shows."""
    assert proof.padding is not None
    source = proof.padding.source
    if attention.visible is not None:
        return Unproven("mask_residual", "the padding belongs to the last rows of the cache only", attention.mask)
    if (writer := write_after([source], writes_of(source.graph))) is not None:
        return Unproven("mask_residual", "an input that may share the padding's memory is written in the graph", writer)
    return None


def _prove(attention: Attention, q_len: Any, kv_len: Any) -> MaskProof | Unproven:
    batch, heads = value_of(attention.query).shape[:2]
    return prove_mask(
        attention.mask,
        is_causal=attention.is_causal,
        q_len=q_len,
        kv_len=kv_len,
        num_q_heads=static_int(heads),
        batch=batch,
    )


def _window(
    cache: Cache, attention: Attention, proof: MaskProof, q_len: Any, kv_len: Any, keep: int | None, is_decode: bool
) -> int | Refusal | None:
    """The window to use: the proven one, or the one that follows from which rows the cache keeps and shows."""
    visible = None if attention.visible is None else expr_of(attention.visible)
    if visible is not None and not same_size(kv_len, value_of(cache.all_keys).shape[cache.seq_dim]):
        if is_decode and visible.is_Integer:
            return int(visible) if proof.window is None else min(int(visible), proof.window)
        if proof.window is None or not is_known(visible - expr_of(q_len) >= proof.window - 1, q_len, attention.visible):
            return Refusal(
                "rows_hidden", "attention sees only some of the cached rows, and no mask says which.", cache.all_keys
            )
    if proof.window is not None or keep is None or not proof.causal:
        return proof.window
    if is_decode or is_known(sympy.Le(expr_of(kv_len), keep + 1), kv_len):
        return keep + 1
    return None
