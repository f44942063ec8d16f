"""Attentions of a prompt and nothing else: what other engines may compute as long as nothing is stored before it."""

from __future__ import annotations

from dataclasses import dataclass

from gemkv_compile.passes.decide import Read, Rewrite
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.sites import Cache
from gemkv_compile.passes.symbols import same_size, static_int


@dataclass(frozen=True)
class Prefill:
    """The option `prefill`, and the types of devices on which it may bring in another engine than our kernel."""

    option: str = "triton"
    kinds: frozenset[str] = frozenset()


def takes_engine(rewrite: Rewrite, read: Read, prefill: Prefill) -> bool:
    """Whether an attention becomes `attend_prompt`."""
    return rewrite.device.type in prefill.kinds and not why_no_prompt(rewrite, read)


def why_no_prompt(rewrite: Rewrite, read: Read) -> str:
    """Why an attention is more than that of a prompt to itself and what is stored; "" if it is no more.

    Whether something is stored is known when the graph runs: so the first and later prompts can be one graph.
    """
    attention = read.attention
    if rewrite.is_decode:
        return "it is a decode step"
    if rewrite.requires_grad:
        return "gradients may be asked for"
    if read.dense_mask is not None:
        return "its mask is used densely"
    if attention.sinks is not None:
        return "it has sinks"
    if not same_size(value_of(attention.query).shape[2], value_of(rewrite.cache.new_keys).shape[rewrite.cache.seq_dim]):
        return "only its last tokens have queries"
    return ""


def starts_empty(cache: Cache) -> bool:
    """Whether no call that a graph serves finds a token stored: what its report can say.

    There is no past, or one of no rows; or a static cache of which attention sees the new rows alone, which the
    executable takes from position 0 on.
    """
    if cache.past_keys is None or cache.past_values is None:
        return True
    if cache.buffer is not None:
        return cache.buffer.only_new
    return all(static_int(value_of(past).shape[cache.seq_dim]) == 0 for past in (cache.past_keys, cache.past_values))
