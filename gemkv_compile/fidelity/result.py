"""What a fidelity run gives, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gemkv_compile.fidelity.metrics import (
    DIFFERS,
    EXCESS,
    KL,
    NLL,
    Estimate,
    Floats,
    blocks_of,
    estimate,
    proportion,
)

CURVE = 64  # tokens of a point of the curve over positions


@dataclass(frozen=True)
class Window:
    """Scores of the decoded tokens of one window: by format [4, tokens] float64, see `metrics.token_scores`."""

    prompt: int
    scores: dict[str, Floats]


@dataclass(frozen=True)
class Row:
    """One format after prompts of one length (None: all), over `tokens` decoded tokens in `blocks` blocks.

    `ratio` is the perplexity over the reference's; `kl` is KL(reference || format) in nats a token, `worst_kl` its
    largest value; `differs` is the share of tokens where another token is the most likely one.
    """

    format: str
    prompt: int | None
    tokens: int
    blocks: int
    perplexity: Estimate
    ratio: Estimate
    kl: Estimate
    worst_kl: float
    differs: Estimate


@dataclass(frozen=True)
class NeedleCell:
    """Needles of one depth in contexts of one length: how many of `asked` each format found."""

    format: str
    length: int
    depth: float
    found: int
    asked: int


@dataclass(frozen=True)
class Result:
    """Everything that a run found; `about` says how it was run."""

    about: dict[str, Any]
    rows: tuple[Row, ...]
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # (position, mean KL) by format
    needles: tuple[NeedleCell, ...] = ()

    def to_json(self) -> str:
        """The result as JSON; numbers that are not finite become null."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)


def rows_of(windows: Sequence[Window], seed: int) -> tuple[Row, ...]:
    """Summarise windows: a row for each format over all prompts, then over each prompt."""
    lengths = sorted({window.prompt for window in windows})
    rows = []
    for prompt in [None, *lengths] if len(lengths) > 1 else lengths:
        mine = [window for window in windows if prompt in (None, window.prompt)]
        rows += [_row(name, prompt, [window.scores[name] for window in mine], seed) for name in mine[0].scores]
    return tuple(rows)


def _row(name: str, prompt: int | None, scores: Sequence[Floats], seed: int) -> Row:
    parts = [blocks_of(one) for one in scores]
    sums, counts = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    return Row(
        name,
        prompt,
        int(counts.sum()),
        len(counts),
        estimate(sums, counts, NLL, seed, np.exp),
        estimate(sums, counts, EXCESS, seed, np.exp),
        estimate(sums, counts, KL, seed),
        float(max(one[KL].max() for one in scores)),
        estimate(sums, counts, DIFFERS, seed),
    )


def curves_of(windows: Sequence[Window]) -> dict[str, list[tuple[int, float]]]:
    """Mean KL by position in the window, in steps of 64 tokens."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in windows[0].scores:
        steps: dict[int, list[Floats]] = {}
        for window in windows:
            kl = window.scores[name][KL]
            where = (window.prompt + np.arange(len(kl))) // CURVE * CURVE
            for start in np.unique(where):
                steps.setdefault(int(start), []).append(kl[where == start])
        curves[name] = [(start, float(np.concatenate(parts).mean())) for start, parts in sorted(steps.items())]
    return curves


def found_in_all(cells: Sequence[NeedleCell], name: str) -> Estimate:
    """Share of all needles that a format found, with its interval."""
    mine = [cell for cell in cells if cell.format == name]
    return proportion(sum(cell.found for cell in mine), sum(cell.asked for cell in mine))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
