"""From a formula over (b, h, q, kv) to causal, window and padding, or to the part that is left over."""

from __future__ import annotations

import sympy
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.findings import Findings
from gemkv_compile.passes.masks.linear import linear
from gemkv_compile.passes.masks.predicate import KV, AtLeast, B, Q, Zero, at_least, negation
from gemkv_compile.passes.masks.proof import MaskProof
from gemkv_compile.passes.masks.recognisers import RECOGNISERS


def normalise(formula: Boolean, findings: Findings) -> MaskProof:
    """The proof that the formula is exactly a causal bound, a window and a padding vector.

    Raises:
        Refused: something is left over ("mask_residual").
    """
    _claim(formula, findings)
    causal, window = _is_causal(findings), min(findings.windows, default=None)
    return MaskProof(causal, window, findings.padding, _predicate(findings, causal, window))


def _claim(formula: Boolean, findings: Findings) -> None:
    parts = _conjuncts(formula)
    if len(parts) > 1:
        for part in parts:
            _claim(part, findings)
    elif isinstance(formula, sympy.Or):
        _claim_one_of(formula, findings)
    elif formula is not sympy.true and not any(recognise(formula, findings) for recognise in RECOGNISERS):
        findings.residual(formula)


def _conjuncts(formula: Boolean) -> list[Boolean]:
    """Formulas that hold together exactly where this one does."""
    if isinstance(formula, Zero) and linear(formula.args[0]) is not None:
        return [at_least(side, sympy.S.Zero) for side in (formula.args[0], -formula.args[0])]  # x >= 0 and -x >= 0
    sizes = formula.args[0].atoms(sympy.Abs) if isinstance(formula, AtLeast) else set()
    if len(sizes) == 1:
        (size,) = sizes
        if formula.args[0].coeff(size) == -1:
            sides = (formula.args[0].xreplace({size: side}) for side in (size.args[0], -size.args[0]))
            return [at_least(side, sympy.S.Zero) for side in sides]  # r >= |x| is r >= x and r >= -x
    return list(sympy.And.make_args(formula))


def _claim_one_of(alternatives: Boolean, findings: Findings) -> None:
    decide = findings.domain.decide
    answers = {part: decide(part) for part in alternatives.args}
    if True in answers.values() or any(negation(part) in answers for part in answers):
        return
    open_parts = [sympy.And.make_args(part) for part, answer in answers.items() if answer is None]
    possible = [{part for part in parts if decide(part) is None} for parts in open_parts]
    shared = set.intersection(*possible) if possible else {sympy.false}
    if not shared:
        findings.residual(sympy.Or(*(sympy.And(*parts) for parts in possible)))
    for part in sorted(shared, key=str):  # (a & b) | (a & c) is a & (b | c)
        _claim(part, findings)
    _claim(sympy.Or(*(sympy.And(*parts - shared) for parts in possible)), findings)


def _is_causal(findings: Findings) -> bool:
    """Whether a causal bound is there, aligned at the last query; refuses any bound that hides more than that."""
    domain = findings.domain
    exact = any(domain.facts.equal(upper, domain.offset) for upper in findings.uppers)
    for upper in findings.uppers:
        bound = AtLeast(sympy.expand(Q - KV + upper))
        implied = exact and domain.facts.nonnegative(upper - domain.offset)
        if not implied and domain.decide(bound) is not True:
            findings.residual(bound)
    return exact or domain.one_query


def _predicate(findings: Findings, causal: bool, window: int | None) -> sympy.Basic:
    """The proven mask in sympy's own relations, which print and evaluate."""
    offset, parts = findings.domain.offset, []
    if causal:
        parts.append(sympy.Le(KV, Q + offset, evaluate=False))
    if window is not None:
        parts.append(sympy.Gt(KV, Q + offset - window, evaluate=False))
    if findings.padding is not None:
        values = sympy.Function(findings.padding.source.name, integer=True)
        parts.append(sympy.Ne(values(B, KV + findings.padding.column), 0, evaluate=False))
    return sympy.And(*parts, evaluate=False) if len(parts) > 1 else parts[0] if parts else sympy.true
