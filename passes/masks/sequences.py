"""What graph inputs say about each sequence: values of keys and queries, and one number a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from gemkv_compile import compat
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.findings import Findings
from gemkv_compile.passes.masks.linear import Linear, linear
from gemkv_compile.passes.masks.predicate import KV, B, Q, Zero


@dataclass(frozen=True)
class Labels:
    """source[b, column + kv] of a key, or source[b, column + q + (K - Q)] of a query."""

    source: fx.Node
    column: sympy.Expr


def by_sequence(call: AppliedUndef, findings: Findings) -> fx.Node | None:
    """The graph input whose row b the call reads for sequence b."""
    source = findings.sources[call.func]
    one_row = compat.expr_of(value_of(source).shape[0]) == 1 and findings.domain.sizes.get(B) == 1
    return source if call.args[0] == B or one_row else None


def of_key(expr: sympy.Basic, findings: Findings) -> Labels | None:
    """source[b, kv + column], with a column that is never negative."""
    form = _position(expr)
    if form is None or not form.slope.keys() <= {KV}:
        return None
    one_key = findings.domain.sizes[KV] == 1
    return _labels(expr, form.rest, findings) if form.slope.get(KV) == 1 or one_key else None


def of_query(expr: sympy.Basic, findings: Findings) -> Labels | None:
    """source[b, q + column + (K - Q)]: the value of the key at the query's own position."""
    form = _position(expr)
    if form is None or not form.slope.keys() <= {Q}:
        return None
    aligned = form.slope.get(Q) == 1 or findings.domain.one_query
    return _labels(expr, form.rest - findings.domain.offset, findings) if aligned else None


def same_label(atom: Boolean, findings: Findings) -> Labels | None:
    """source[b, q + column + (K - Q)] == source[b, kv + column]"""
    terms = sympy.Add.make_args(atom.args[0]) if isinstance(atom, Zero) else ()
    factors, sides = [term.as_coeff_Mul()[0] for term in terms], [term.as_coeff_Mul()[1] for term in terms]
    if sorted(factors) != [-1, 1]:
        return None
    for key, query in (sides, reversed(sides)):
        found, other = of_key(key, findings), of_query(query, findings)
        if found is None or other is None or found.source is not other.source:
            continue
        if findings.domain.facts.equal(found.column, other.column):
            return found
    return None


def _position(expr: sympy.Basic) -> Linear | None:
    return linear(expr.args[1]) if isinstance(expr, AppliedUndef) and len(expr.args) == 2 else None


def _labels(call: AppliedUndef, column: sympy.Expr, findings: Findings) -> Labels | None:
    source, column = by_sequence(call, findings), findings.domain.facts.resolve(sympy.expand(column))
    if source is None or not findings.domain.facts.nonnegative(column):
        return None
    return Labels(source, column)
