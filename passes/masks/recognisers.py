"""The atoms that a proof has a field for. Each recogniser records what it claims, or returns False.

A new kind of mask (a document mask, say) is one more recogniser here and one more field of the proof.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from gemkv_compile import compat
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.findings import Findings
from gemkv_compile.passes.masks.linear import linear
from gemkv_compile.passes.masks.predicate import KV, AtLeast, B, Nonzero, Q
from gemkv_compile.passes.masks.proof import Padding


def _recognise_bound(atom: Boolean, findings: Findings) -> bool:
    """kv <= q + c, or kv >= q - c; a single query has index 0, so its slope is free."""
    form = linear(atom.args[0]) if isinstance(atom, AtLeast) else None
    if form is None or abs(form.slope.get(KV, 0)) != 1 or not form.slope.keys() <= {Q, KV}:
        return False
    if not findings.domain.one_query and form.slope.get(Q, 0) != -form.slope[KV]:
        return False
    rest = findings.domain.facts.resolve(form.rest)
    if form.slope[KV] < 0:
        findings.uppers.append(rest)
        return True
    return _add_window(rest, findings)


def _add_window(rest: sympy.Expr, findings: Findings) -> bool:
    # kv - q + rest >= 0 is kv > q + offset - window
    window = findings.domain.facts.resolve(sympy.expand(findings.domain.offset + rest + 1))
    if not (window.is_Integer and window > 0):
        return False
    findings.windows.append(int(window))
    return True


def _recognise_padding(atom: Boolean, findings: Findings) -> bool:
    """source[b, kv + column] != 0, with one column that is never negative."""
    if not isinstance(atom, Nonzero) or not isinstance(atom.args[0], AppliedUndef):
        return False
    (row, position), source = atom.args[0].args, findings.sources[atom.args[0].func]
    form, one_key = linear(position), findings.domain.sizes[KV] == 1
    if form is None or not form.slope.keys() <= {KV} or not (form.slope.get(KV) == 1 or one_key):
        return False
    one_row = compat.expr_of(value_of(source).shape[0]) == 1 and findings.domain.sizes.get(B) == 1
    padding = Padding(source, findings.domain.facts.resolve(form.rest))
    if not (row == B or one_row) or not findings.domain.facts.nonnegative(padding.column):
        return False
    if findings.padding not in (None, padding):
        return False
    findings.padding = padding
    return True


def _recognise_trivial(atom: Boolean, findings: Findings) -> bool:
    """What holds for every query and key says nothing."""
    return findings.domain.decide(atom) is True


# A bound comes before what is trivial: a window longer than the keys is still the mask's window.
RECOGNISERS: tuple[Callable[[Boolean, Findings], bool], ...] = (
    _recognise_bound,
    _recognise_padding,
    _recognise_trivial,
)
