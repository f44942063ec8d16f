"""What is known so far while a mask is taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import sympy
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.domain import Domain
from gemkv_compile.passes.masks.predicate import H, Q
from gemkv_compile.passes.masks.proof import Documents, Padding, Prefix, Spans, refuse


@dataclass(frozen=True)
class Limit:
    """A bound or a window that some keys are excepted from.

    Attributes:
        value: c of the bound kv <= q + c, or the length of a window.
        unless: Keys that it does not hide.
    """

    value: sympy.Expr
    unless: frozenset[Prefix | Spans]


@dataclass
class Findings:
    """What the conjuncts of one mask say, so far.

    Attributes:
        sources: The graph inputs that the mask reads, by the function that stands for their values.
        node: The mask, for refusals.
        unless: What the limits that are found now are alternatives to.
    """

    domain: Domain
    sources: Mapping[type[sympy.Function], fx.Node]
    node: fx.Node | None
    uppers: list[Limit] = field(default_factory=list)
    windows: list[Limit] = field(default_factory=list)
    padding: Padding | None = None
    documents: Documents | None = None
    unless: frozenset[Prefix | Spans] = frozenset()

    def residual(self, part: Boolean) -> NoReturn:
        """Refuse, naming the part of the mask that is left over."""
        what = "the mask is more than bounds, padding, documents, a prefix and spans"
        if part is sympy.false:
            refuse("mask_residual", f"{what}: it hides every key", self.node)
        for call in part.atoms(AppliedUndef):
            self._refuse_source(call, part)
        if H in part.free_symbols:
            what = "the mask differs from head to head"
        refuse("mask_residual", f"{what}: query q sees key kv only where {part}", self.node)

    def _refuse_source(self, call: AppliedUndef, part: Boolean) -> None:
        """Refuse a part that reads a graph input in a way that is not known to be by sequence."""
        source = self.sources[call.func]
        if len(call.args) == 1:
            kind = f"a 1-D {str(value_of(source).dtype).removeprefix('torch.')} input of the graph"
            sentence = f"the mask depends on {source.name}, {kind}, not as the length of a prefix: {part}"
            refuse("mask_outside_graph", sentence, self.node)
        if Q in call.args[0].free_symbols:
            which = f"{source.name}, an input of the graph that is read by query, not by sequence"
            refuse("mask_outside_graph", f"the mask depends on {which}: {part}", self.node)
