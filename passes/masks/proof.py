"""What proving a mask yields: a proof, or a refusal that explains itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import sympy
from torch import fx


@dataclass(frozen=True)
class Padding:
    """A 2-D graph input that says which keys exist.

    Attributes:
        source: The placeholder, [batch, n], bool or integer; nonzero means attend.
        column: Key column j of the attention reads source[b, column + j]; in the graph's own symbols, never negative.
    """

    source: fx.Node
    column: sympy.Expr


@dataclass(frozen=True)
class MaskProof:
    """A mask that is exactly the conjunction of what its fields say, for Q queries and K keys.

    Attributes:
        causal: Key j is visible to query i only if j <= i + (K - Q).
        window: Key j is visible to query i only if j > i + (K - Q) - window; None has no such bound.
        padding: Key j exists only if the padding vector says so; None means that every key exists.
        predicate: The same as one formula over the symbols b, q and kv, for people and reports.
    """

    causal: bool
    window: int | None
    padding: Padding | None
    predicate: sympy.Basic


@dataclass(frozen=True)
class Unproven:
    """Why a mask was not proven.

    Attributes:
        reason: "mask_outside_graph", "mask_residual" or "mask_unknown_op".
        sentence: One sentence for the user; names the operation or the part of the mask that is left over.
        node: Where it stopped; None when the attention has no mask node (its is_causal flag is at fault).
    """

    reason: str
    sentence: str
    node: fx.Node | None


class Refused(Exception):
    """Carries an Unproven from deep inside the reader to the prover."""

    def __init__(self, unproven: Unproven) -> None:
        super().__init__(unproven.sentence)
        self.unproven = unproven


def refuse(reason: str, sentence: str, node: fx.Node | None) -> NoReturn:
    """Stop the proof with a reason code, a sentence and the node at fault."""
    raise Refused(Unproven(reason, sentence, node))
