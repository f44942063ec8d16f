"""From a formula over (b, h, q, kv) to what a proof has fields for, or to the part that is left over."""

from __future__ import annotations

import sympy
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.assembling import assemble
from gemkv_compile.passes.masks.exceptions import claim_exceptions
from gemkv_compile.passes.masks.findings import Findings
from gemkv_compile.passes.masks.linear import linear
from gemkv_compile.passes.masks.predicate import AtLeast, Zero, at_least, negation
from gemkv_compile.passes.masks.proof import MaskProof
from gemkv_compile.passes.masks.recognisers import RECOGNISERS


def normalise(formula: Boolean, findings: Findings) -> MaskProof:
    """The proof that the formula is exactly a conjunction of known kinds.

    Raises:
        Refused: something is left over ("mask_residual").
    """
    _claim(formula, findings)
    return assemble(findings)


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
    possible = _possible(alternatives, findings)
    if possible is None:
        return
    shared = frozenset.intersection(*possible) if possible else frozenset([sympy.false])
    if not shared:
        if not claim_exceptions(possible, findings):
            findings.residual(sympy.Or(*(sympy.And(*parts) for parts in possible)))
        return
    for part in sorted(shared, key=str):  # (a & b) | (a & c) is a & (b | c)
        _claim(part, findings)
    _claim(sympy.Or(*(sympy.And(*parts - shared) for parts in possible)), findings)


def _possible(alternatives: Boolean, findings: Findings) -> list[frozenset[Boolean]] | None:
    """What decides each alternative that may hold somewhere and fail somewhere; None if one of them always holds."""
    decide = findings.domain.decide
    answers = {part: decide(part) for part in alternatives.args}
    if True in answers.values() or any(negation(part) in answers for part in answers):
        return None
    unknown = [_conjuncts_of_all(part) for part, answer in answers.items() if answer is None]
    unknown = [parts for parts in unknown if all(decide(part) is not False for part in parts)]
    # a | (~a & b) is a | b
    open_parts = [frozenset(p for p in parts if decide(p) is None and negation(p) not in answers) for parts in unknown]
    return open_parts if all(open_parts) else None


def _conjuncts_of_all(formula: Boolean) -> list[Boolean]:
    return [atom for part in sympy.And.make_args(formula) for atom in _conjuncts(part)]
