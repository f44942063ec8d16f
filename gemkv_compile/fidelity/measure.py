"""Runs windows and needles through a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gemkv_compile.fidelity.formats import REFERENCE
from gemkv_compile.fidelity.metrics import Floats, token_scores
from gemkv_compile.fidelity.needle import Context, ask
from gemkv_compile.fidelity.result import NeedleCell, Window
from gemkv_compile.fidelity.text import Batch

Advance = Callable[[int], None]
"""Told of every few tokens that are done."""


def measure_text(path: Any, batches: Iterable[Batch], device: Any, advance: Advance) -> list[Window]:
    """Score every decoded token of every window.

    Args:
        path: A `DecodePath` or a `ParallelPath`.
        batches: Windows and their prompts.
        device: Where the model is.
        advance: Called with a number of decoded tokens.
    """
    windows = []
    for batch in batches:
        targets, parts = batch.targets.to(device), list[dict[str, Floats]]()
        for first, logits in path(batch.ids.to(device), batch.prompt):
            count = next(iter(logits.values())).shape[1]
            parts.append(token_scores(logits, REFERENCE, targets[:, first : first + count]))
            advance(count * len(targets))
        scores = {name: np.concatenate([part[name] for part in parts], 2) for name in parts[0]}
        windows += [Window(batch.prompt, {n: s[:, i] for n, s in scores.items()}) for i in range(len(targets))]
    return windows


def measure_needles(path: Any, contexts: Iterable[Context], device: Any, advance: Advance) -> tuple[NeedleCell, ...]:
    """Ask for every needle; `advance` is called with the tokens of each context."""
    found, asked = Counter[tuple[str, int, float]](), Counter[tuple[str, int, float]]()
    for context in contexts:
        for name, answers in ask(path, context, device).items():
            for depth, right in answers:
                cell = (name, len(context.ids), depth)
                asked[cell] += 1
                found[cell] += right
        advance(len(context.ids))
    return tuple(NeedleCell(*cell, found[cell], asked[cell]) for cell in asked)


def tokens_to_run(batches: Sequence[Batch], contexts: Sequence[Context]) -> int:
    """How much `advance` will be told in all."""
    return sum(batch.decoded for batch in batches) + sum(len(context.ids) for context in contexts)
