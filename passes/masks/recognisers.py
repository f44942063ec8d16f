"""The atoms that a proof has a field for. Each recogniser records what it claims, or returns False.

A new kind of mask is one more recogniser here, or in `exceptions` if it shows keys that a bound hides, and one more
field of the proof.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.findings import Findings, Limit
from gemkv_compile.passes.masks.linear import linear
from gemkv_compile.passes.masks.predicate import KV, AtLeast, Nonzero, Q
from gemkv_compile.passes.masks.proof import Documents, Padding
from gemkv_compile.passes.masks.sequences import of_key, same_label


def recognise_bound(atom: Boolean, findings: Findings) -> bool:
    """kv <= q + c, or kv >= q - c; a single query has index 0, so its slope is free."""
    form = linear(atom.args[0]) if isinstance(atom, AtLeast) else None
    if form is None or abs(form.slope.get(KV, 0)) != 1 or not form.slope.keys() <= {Q, KV}:
        return False
    if not findings.domain.one_query and form.slope.get(Q, 0) != -form.slope[KV]:
        return False
    rest = findings.domain.facts.resolve(form.rest)
    if form.slope[KV] < 0:
        findings.uppers.append(Limit(rest, findings.unless))
        return True
    return _add_window(rest, findings)


def _add_window(rest: sympy.Expr, findings: Findings) -> bool:
    # kv - q + rest >= 0 is kv > q + offset - window
    window = findings.domain.facts.resolve(sympy.expand(findings.domain.offset + rest + 1))
    if not (window.is_Integer and window > 0):
        return False
    findings.windows.append(Limit(window, findings.unless))
    return True


def _recognise_padding(atom: Boolean, findings: Findings) -> bool:
    """source[b, kv + column] != 0, with one column that is never negative."""
    labels = of_key(atom.args[0], findings) if isinstance(atom, Nonzero) else None
    if labels is None or findings.padding not in (None, padding := Padding(labels.source, labels.column)):
        return False
    findings.padding = padding
    return True


def _recognise_documents(atom: Boolean, findings: Findings) -> bool:
    """ids[b, q + column + (K - Q)] == ids[b, kv + column]"""
    labels = same_label(atom, findings)
    if labels is None or findings.documents not in (None, documents := Documents(labels.source, labels.column)):
        return False
    findings.documents = documents
    return True


def _recognise_trivial(atom: Boolean, findings: Findings) -> bool:
    """What holds for every query and key says nothing."""
    return findings.domain.decide(atom) is True


# A bound comes before what is trivial: a window longer than the keys is still the mask's window.
RECOGNISERS: tuple[Callable[[Boolean, Findings], bool], ...] = (
    recognise_bound,
    _recognise_padding,
    _recognise_documents,
    _recognise_trivial,
)
