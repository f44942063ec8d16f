"""What is known so far while a mask is taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import sympy
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from gemkv_compile.passes.masks.domain import Domain
from gemkv_compile.passes.masks.predicate import H, Q
from gemkv_compile.passes.masks.proof import Padding, refuse


@dataclass
class Findings:
    """What the conjuncts of one mask say, so far.

    Attributes:
        sources: The 2-D graph inputs, by the function that stands for their values.
        node: The mask, for refusals.
        uppers: Offsets c of the bounds kv <= q + c.
        windows: Window lengths.
    """

    domain: Domain
    sources: Mapping[type[sympy.Function], fx.Node]
    node: fx.Node | None
    uppers: list[sympy.Expr] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    padding: Padding | None = None

    def residual(self, part: Boolean) -> NoReturn:
        """Refuse, naming the part of the mask that is left over."""
        what = "the mask is more than a causal bound, a window and a padding vector"
        if part is sympy.false:
            refuse("mask_residual", f"{what}: it hides every key", self.node)
        for call in part.atoms(AppliedUndef):
            if Q in call.args[0].free_symbols:
                which = f"{self.sources[call.func].name}, an input of the graph that is read by query, not by sequence"
                refuse("mask_outside_graph", f"the mask depends on {which}: {part}", self.node)
        if H in part.free_symbols:
            what = "the mask differs from head to head"
        refuse("mask_residual", f"{what}: query q sees key kv only where {part}", self.node)
