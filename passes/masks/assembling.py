"""From what a mask's conjuncts say to one proof: the strongest bound and window, and what is excepted from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import sympy

from gemkv_compile.passes.masks.findings import Findings, Limit
from gemkv_compile.passes.masks.predicate import KV, AtLeast, Q
from gemkv_compile.passes.masks.proof import MaskProof, Prefix, Spans, refuse
from gemkv_compile.passes.masks.wording import predicate_of, text_of

Kind = TypeVar("Kind", Prefix, Spans)


def assemble(findings: Findings) -> MaskProof:
    """The proof of what was found.

    Raises:
        Refused: a limit is left over beside the strongest one, or two prefixes or spans are.
    """
    bound, window = _strongest(_rights(findings)), _strongest(findings.windows)
    _check_bounds(bound, findings)
    _check_windows(window, findings)
    proof = MaskProof(
        causal=findings.domain.one_query if bound is None else bool(bound.value == 0) or findings.domain.one_query,
        window=None if window is None else int(window.value),
        padding=findings.padding,
        predicate=sympy.true,
        right=None if bound is None or bound.value == 0 else int(bound.value),
        documents=findings.documents,
        prefix=_exception(Prefix, bound, window, findings),
        spans=_exception(Spans, bound, window, findings),
    )
    domain = findings.domain
    return replace(proof, predicate=predicate_of(proof, domain.offset), text=text_of(proof, domain))


def _rights(findings: Findings) -> Iterator[Limit]:
    """The bounds that hide only keys after the query, as limits r of kv <= q + (K - Q) + r."""
    domain = findings.domain
    for upper in findings.uppers:
        right = domain.facts.resolve(sympy.expand(upper.value - domain.offset))
        if domain.facts.equal(upper.value, domain.offset):
            yield Limit(sympy.S.Zero, upper.unless)
        elif right.is_Integer and right > 0 and domain.decide(_bound(upper)) is not True:
            yield Limit(right, upper.unless)


def _strongest(limits: Iterable[Limit]) -> Limit | None:
    return min(limits, key=lambda limit: (int(limit.value), len(limit.unless)), default=None)


def _check_bounds(bound: Limit | None, findings: Findings) -> None:
    domain = findings.domain
    for upper in findings.uppers:
        implied = bound is not None and bound.unless <= upper.unless
        implied = implied and domain.facts.nonnegative(upper.value - domain.offset - bound.value)  # type: ignore[union-attr]
        if not implied and domain.decide(_bound(upper)) is not True:
            findings.residual(_bound(upper))


def _check_windows(window: Limit | None, findings: Findings) -> None:
    for other in findings.windows:
        hides = AtLeast(sympy.expand(KV - Q - findings.domain.offset + other.value - 1))
        if not window.unless <= other.unless and findings.domain.decide(hides) is not True:  # type: ignore[union-attr]
            findings.residual(hides)


def _bound(upper: Limit) -> AtLeast:
    return AtLeast(sympy.expand(Q - KV + upper.value))


def _exception(kind: type[Kind], bound: Limit | None, window: Limit | None, findings: Findings) -> Kind | None:
    """The one prefix, or the one kind of spans, with what it lifts."""
    after, before = (frozenset() if limit is None else limit.unless for limit in (bound, window))
    found = [exception for exception in after | before if isinstance(exception, kind)]
    if len(found) > 1:
        name = kind.__name__.lower()
        sentence = f"the mask has {name} of two kinds beside its bound and window, and one is what is proven"
        refuse("mask_residual", sentence, findings.node)
    return next((replace(e, after_bound=e in after, before_window=e in before) for e in found), None)
