"""Attention of a whole window in which every query reads the keys and values that it would read while decoding.

A decoded query reads complete groups as they are stored and the rest exactly; its own row may be the one that completes
a group. So the queries from a group's last row on, up to the next group's last but one, all read the same rows: one
fused call each, with a group stored in between. Causality does the rest, and the result equals decoding row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.errors import GemkvError
from gemkv_compile.fidelity.drops import holes_of, window_of
from gemkv_compile.fidelity.formats import Format

NAME = "gemkv_fidelity"
FOREIGN = ("s_aux", "position_bias")  # arguments of attentions that this one does not compute


def runs(tokens: int, prompt: int, group: int) -> Iterator[tuple[int, int, int]]:
    """Cut a window's queries into runs that read the same rows.

    Args:
        tokens, prompt: Tokens of the window, and those that are given in one call.
        group: Tokens that are stored together.
    Yields:
        (first query, end, rows stored by then): the prompt, which reads its own rows exactly, then the decoded ones.
        A prompt of one token is a step like any other.
    """
    prompt = 0 if prompt == 1 else prompt
    if prompt:
        yield 0, prompt, 0
    if group == 1:  # what a query may see is stored; what is stored beyond, causality hides
        if prompt < tokens:
            yield prompt, tokens, tokens
        return
    first = prompt
    while first < tokens:
        stored = (first + 1) // group * group
        end = min(tokens, stored + group - 1)
        yield first, end, stored
        first = end


def window_attention(form: Format, prompt: int) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for Transformers' registry that emulates decoding after a prompt.

    It takes query [B, Hq, T, D], key and value [B, Hkv, T, D] of one dtype and a boolean mask [B, 1, T, T], and gives
    [B, T, Hq, D].
    """

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        _check(query, key, attention_mask, options)
        keys, values, done, parts = key.clone(), value.clone(), 0, list[Tensor]()
        guard = form.guard if form.guards_windows or window_of(module, options) is None else 0
        holes = holes_of(form.drop, module, query, attention_mask, options, guard)
        for first, end, stored in holes.split(runs(query.shape[2], prompt, form.group)):
            before = min(stored, first // form.group * form.group)
            for until in (before, stored):
                if until > done:
                    new = slice(max(done, guard), max(until, guard))
                    for rows, store in zip((keys, values), form.stores, strict=True):
                        rows[:, :, new] = store(rows[:, :, new])
                    done = until
                if until == before:  # the policy sees what is stored before this run
                    holes.ask(first, prompt, keys)
            seen = holes.seen(first, end)
            low = int(seen.any(2).any(1).any(0).to(torch.uint8).argmax())  # a windowed layer's reads start later
            some = slice(low, end)
            out = _attend(query[:, :, first:end], keys[:, :, some], values[:, :, some], seen[..., low:], form, options)
            parts.append(out)
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None

    return attention


def _check(query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
    foreign = [name for name in FOREIGN if options.get(name) is not None]
    if foreign or not isinstance(mask, Tensor) or query.shape[2] != key.shape[2]:
        what = f"an attention with {foreign[0]}" if foreign else "an attention without a square mask"
        raise GemkvError(f"--path parallel cannot emulate {what}; use --path decode.")


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, form: Format, options: dict[str, Any]) -> Tensor:
    scale, softcap = options.get("scaling"), options.get("softcap")
    if softcap is None and not form.written_out:
        fused = torch.nn.functional.scaled_dot_product_attention
        return fused(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


@contextmanager
def attention_named(model: Any, name: str) -> Iterator[None]:
    """Let a model of Transformers use another attention implementation in a block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def emulated(model: Any, form: Format, prompt: int) -> Iterator[None]:
    """Let a model read its keys and values as while decoding after a prompt, in a block."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def full_mask(*args: Any, **options: Any) -> Tensor | None:
        return sdpa_mask(*args, **options | {"allow_is_causal_skip": False})

    AttentionInterface.register(NAME, window_attention(form, prompt))
    AttentionMaskInterface.register(NAME, full_mask)
    with attention_named(model, NAME):
        yield
