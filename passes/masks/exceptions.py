"""Keys that a query sees although a bound or a window would hide them: the alternatives in `bound or ...`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sympy
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.findings import Findings
from gemkv_compile.passes.masks.linear import linear
from gemkv_compile.passes.masks.predicate import KV, AtLeast
from gemkv_compile.passes.masks.proof import Prefix, Spans
from gemkv_compile.passes.masks.recognisers import recognise_bound
from gemkv_compile.passes.masks.sequences import Labels, by_sequence, of_key, of_query, same_label


def claim_exceptions(alternatives: Iterable[frozenset[Boolean]], findings: Findings) -> bool:
    """Claim `bound or window, or exceptions`: alternatives of which all but one are exceptions.

    Args:
        alternatives: Each one is a conjunction of atoms.
    Returns:
        Whether that is what they are; findings may hold part of them if not.
    """
    alternatives = list(alternatives)
    found = {parts: _exception(parts, findings) for parts in alternatives}
    limits = [parts for parts in alternatives if found[parts] is None]
    if len(limits) != 1:
        return False
    findings.unless = frozenset(exception for exception in found.values() if exception is not None)
    claimed = all(recognise_bound(part, findings) for part in limits[0])
    findings.unless = frozenset()
    return claimed


def _exception(parts: frozenset[Boolean], findings: Findings) -> Prefix | Spans | None:
    answers = (recognise(parts, findings) for recognise in EXCEPTIONS)
    return next((answer for answer in answers if answer is not None), None)


def _recognise_prefix(parts: frozenset[Boolean], findings: Findings) -> Prefix | None:
    """kv < n, with n of sizes and constants, or n[b] + such a number."""
    (atom, *others) = parts
    if others or not isinstance(atom, AtLeast):
        return None
    calls = [term for term in sympy.Add.make_args(atom.args[0]) if isinstance(term, AppliedUndef)]
    form = linear(atom.args[0] - sympy.Add(*calls))
    if form is None or dict(form.slope) != {KV: -1} or len(calls) > 1:
        return None
    source = by_sequence(calls[0], findings) if calls and len(calls[0].args) == 1 else None
    if calls and source is None:
        return None
    return Prefix(source, findings.domain.facts.resolve(form.rest + 1))


def _recognise_spans(parts: frozenset[Boolean], findings: Findings) -> Spans | None:
    """ids[b, q + column + (K - Q)] == ids[b, kv + column], and ids[b, ...] >= least of either of them."""
    equal = [labels for part in parts if (labels := same_label(part, findings)) is not None]
    least = [number for part in parts if (number := _least(part, equal, findings)) is not None]
    if len(equal) != 1 or len(equal) + len(least) != len(parts):
        return None
    return Spans(equal[0].source, equal[0].column, max(least, default=None))


def _least(part: Boolean, equal: list[Labels], findings: Findings) -> int | None:
    """n of ids[b, ...] >= n, for ids that are known to be equal at the query and at the key"""
    constant, call = part.args[0].as_coeff_Add() if isinstance(part, AtLeast) else (None, None)
    if constant is None or not isinstance(call, AppliedUndef):
        return None
    labels = [of(call, findings) for of in (of_key, of_query)]
    return -int(constant) if equal and equal[0] in labels else None


EXCEPTIONS: tuple[Callable[[frozenset[Boolean], Findings], Prefix | Spans | None], ...] = (
    _recognise_prefix,
    _recognise_spans,
)
