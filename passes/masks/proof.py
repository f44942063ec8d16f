"""What proving a mask yields: a proof, or a refusal that explains itself."""

from __future__ import annotations

from dataclasses import dataclass, field
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
class Documents:
    """A 2-D graph input that numbers the document of each key: queries see the keys of their own document only.

    Attributes:
        source: The node, [batch, n], integer.
        column: Key j is in document source[b, column + j], and query i in source[b, column + i + (K - Q)].
    """

    source: fx.Node
    column: sympy.Expr


@dataclass(frozen=True)
class Prefix:
    """The first keys, which more queries see than the bound and the window say.

    Attributes:
        source: A 1-D graph input, [batch], integer; None if every sequence has the same prefix.
        extra: The prefix has source[b] + extra keys, or `extra` keys; in the graph's own symbols.
        after_bound, before_window: Which of the two it lifts: the bound on later keys, the window on earlier ones.
    """

    source: fx.Node | None
    extra: sympy.Expr
    after_bound: bool = False
    before_window: bool = False


@dataclass(frozen=True)
class Spans:
    """Groups of keys, such as the tokens of an image, that see one another whatever the bound and the window say.

    Attributes:
        source, column: As of Documents: the group of each key and query.
        least: Only groups of this number or more count; None if all do.
        after_bound, before_window: As of Prefix.
    """

    source: fx.Node
    column: sympy.Expr
    least: int | None
    after_bound: bool = False
    before_window: bool = False


@dataclass(frozen=True)
class MaskProof:
    """A mask that is exactly the conjunction of what its fields say, for Q queries and K keys.

    Attributes:
        causal: Key j is visible to query i only if j <= i + (K - Q).
        window: Key j is visible to query i only if j > i + (K - Q) - window; None has no such bound.
        padding: Key j exists only if the padding vector says so; None means that every key exists.
        predicate: The same as one formula over the symbols b, q and kv, for people and reports.
        right: Key j is visible to query i only if j <= i + (K - Q) + right, at least 1; None if causal or unbounded.
        documents: Key j is visible to query i only if both are in one document.
        prefix, spans: Keys that the bound (causal or right), the window or both do not hide.
        text: The predicate in words that Python reads, with past for K - Q, and q_len and kv_len for Q and K.
    """

    causal: bool
    window: int | None
    padding: Padding | None
    predicate: sympy.Basic
    right: int | None = None
    documents: Documents | None = None
    prefix: Prefix | None = None
    spans: Spans | None = None
    text: str = field(default="", compare=False)

    @property
    def dense_kinds(self) -> tuple[str, ...]:
        """What the paged operators cannot be told in numbers and a padding vector."""
        right = "" if self.right is None else f"right window {self.right}"
        kinds = {right: self.right, "documents": self.documents, "prefix": self.prefix, "spans": self.spans}
        return tuple(kind for kind, value in kinds.items() if value is not None)


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
