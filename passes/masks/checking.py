"""The second opinion on every proof: concrete numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from sympy.logic.boolalg import Boolean
from torch import fx

from gemkv_compile.passes.masks.describing import compare
from gemkv_compile.passes.masks.domain import Domain
from gemkv_compile.passes.masks.indexed import Indexed
from gemkv_compile.passes.masks.inputs import Inputs, inputs_for
from gemkv_compile.passes.masks.numeric import Mismatch, Run
from gemkv_compile.passes.masks.predicate import AXES, KV, Q
from gemkv_compile.passes.masks.proof import MaskProof
from gemkv_compile.passes.masks.sampling import compare_samples

MAX_ELEMENTS = 1 << 20
_FEW_ELEMENTS, _DRAWS = 1 << 12, 8  # a small mask is tried with several draws of its inputs


@dataclass(frozen=True)
class Subject:
    """What a proof is about.

    Attributes:
        mask: The mask node.
        formula: What was read from it.
        formulas: Every tensor node whose values it depends on.
        sources: The graph inputs among them, by the function that stands for their values.
    """

    mask: fx.Node
    formula: Boolean
    formulas: Mapping[fx.Node, Indexed]
    sources: Mapping[type[sympy.Function], fx.Node]
    domain: Domain


def check_proof(proof: MaskProof, subject: Subject) -> None:
    """Compare a proof with its mask on concrete numbers.

    The mask's graph is run at the traced sizes, and at up to two other sets of sizes that satisfy the graph's guards,
    with random inputs (several draws if the mask is small), and compared at every element, as long as no tensor in it
    has more than 2**20 elements. If all are larger, the formula that was read (not the graph itself) is compared with
    the proof at sampled points: corners, both sides of each bound, random ones.

    Raises:
        Mismatch: the proof is wrong, or no concrete numbers were found to check it with.
    """
    checked = False
    every_input = list(inputs_for(subject.domain.facts, _symbols(subject)))
    for inputs in every_input:
        if _largest(subject, inputs) <= MAX_ELEMENTS:
            checked |= _compare_all(proof, subject, inputs, must_run=inputs is every_input[0])
    if not checked:
        sizes = subject.domain.sizes
        run = Run(subject.formulas, every_input[0], sizes[KV])
        compare_samples(proof, subject.formula, sizes, subject.sources, run, every_input[0])


def _compare_all(proof: MaskProof, subject: Subject, inputs: Inputs, must_run: bool) -> bool:
    sizes = subject.domain.sizes[Q], subject.domain.sizes[KV]
    try:
        for seed in range(_DRAWS if subject.sources and _largest(subject, inputs) <= _FEW_ELEMENTS else 1):
            compare(proof, subject.mask, sizes, Run(subject.formulas, inputs, sizes[1], seed), inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as trouble:
        if must_run:
            raise Mismatch(f"the mask's graph does not run on the CPU ({trouble})") from trouble
        return False  # sizes that satisfy the guards, but not every operation: a padding vector that is too short
    return True


def _largest(subject: Subject, inputs: Inputs) -> int:
    return max(math.prod(map(inputs.number, tensor.dims)) for tensor in subject.formulas.values())


def _symbols(subject: Subject) -> set[sympy.Symbol]:
    exprs = [size for tensor in subject.formulas.values() for size in tensor.dims]
    exprs += [*subject.domain.sizes.values(), subject.formula]
    return set().union(*(expr.free_symbols for expr in exprs)) - set(AXES)
