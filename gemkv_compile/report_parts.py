"""Pieces of a report: drift of a shadowed call, and who attends to a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drift:
    """How far a graph's float outputs are from a reference's.

    Args:
        largest: Largest absolute difference.
        relative: Largest difference relative to the largest number of its output.
        changed, rows: Rows of the output with the largest last dimension (the logits, if the graph computes them) whose
            argmax differs, and all rows of it.
    """

    largest: float
    relative: float
    changed: int
    rows: int

    def __str__(self) -> str:
        return f"{self.largest:.1e}, {self.relative:.1e}, {self.changed} of {self.rows}"


@dataclass(frozen=True)
class ShadowedCall:
    """One call with the graph as it was beside it.

    Args:
        rewrite_error: The rewritten graph against the original on what the pages hold; None if not comparable: a decode
            step that completes a quantised group, the call that quantises a dense past, other random numbers.
        format_error: The original graph on what the pages hold against itself on the rows as they were before they were
            quantised; None if these are not known.
        failure: Why the shadow failed, or "".
    """

    rewrite_error: Drift | None
    format_error: Drift | None
    failure: str = ""


@dataclass(frozen=True)
class EngineChoice:
    """Who attends to a prompt in some layers of a graph.

    Args:
        engine: A value of the option `prefill`; "triton" is this package's kernel.
        shortest, longest: For prompts of so many tokens, from bucket to bucket; None for no bound.
        why: The times, or what keeps another engine from it.
    """

    layers: tuple[int, ...]
    engine: str
    shortest: int | None
    longest: int | None
    why: str

    def __str__(self) -> str:
        ends = [f"from {self.shortest} tokens"] * (self.shortest is not None)
        ends += [f"up to {self.longest} tokens"] * (self.longest is not None)
        span = f" {' '.join(ends)}" if ends else ""
        return f"layer {', '.join(map(str, self.layers))}: {self.engine}{span} ({self.why})"
