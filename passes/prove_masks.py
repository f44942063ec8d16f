"""Stage: prove which keys each query sees, or say why that cannot be proven. Nothing is assumed."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from gemkv_compile import compat
from gemkv_compile.passes.effects import first_write
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.checking import Subject, check_proof
from gemkv_compile.passes.masks.domain import Domain
from gemkv_compile.passes.masks.indexed import Choice, Indexed, is_condition, replace
from gemkv_compile.passes.masks.linear import Facts
from gemkv_compile.passes.masks.normalise import Findings, normalise
from gemkv_compile.passes.masks.numeric import Mismatch
from gemkv_compile.passes.masks.predicate import AXES, KV, B, H, Q, at_least
from gemkv_compile.passes.masks.proof import MaskProof, Padding, Refused, Unproven, refuse
from gemkv_compile.passes.masks.reading import MaskReader

__all__ = ["MaskProof", "Padding", "Unproven", "prove_mask"]


def prove_mask(
    mask: fx.Node | None,
    *,
    is_causal: bool,
    q_len: int | torch.SymInt,
    kv_len: int | torch.SymInt,
    num_q_heads: int | None = None,
    batch: int | torch.SymInt | None = None,
) -> MaskProof | Unproven:
    """Prove that a mask is a causal bound, a sliding window and a padding vector, or any part of these.

    The mask's graph is read as a formula over (b, h, q, kv), the formula is matched exactly, by the guards on the
    graph's sizes where it takes them, and the result is compared with the graph itself on concrete numbers. A float
    mask counts as hiding a key where it is at most the lowest finite value of its dtype, and as showing it where it
    is 0; any other value is refused, and so is a mask that is written to in place. Index arithmetic is taken to stay
    within int64 (int32 for int32 tensors), as it does for sizes below 2**30.

    Args:
        mask: Broadcastable to [batch, num_q_heads, q_len, kv_len], bool (True: attend) or float (added to the scores);
            None if the attention has none.
        is_causal: PyTorch's flag of that name: query i sees the keys j <= i, aligned at the top left.
        batch: Number of sequences; without it a padding vector of one row is not known to be the only sequence's.
    Returns:
        A MaskProof. With one query and no key hidden after it, causal is True: it says the same as False.
        Or an Unproven with its reason code, sentence and node.
    """
    facts = Facts(compat.shape_env_of(q_len, kv_len, *_graph_inputs(mask)))
    sizes = {Q: facts.resolve(compat.expr_of(q_len)), KV: facts.resolve(compat.expr_of(kv_len))}
    sizes |= {axis: compat.expr_of(size) for axis, size in ((H, num_q_heads), (B, batch)) if size is not None}
    domain = Domain(facts, sizes)
    try:
        # Numbers are real and on the CPU, whatever is being traced and wherever the model runs.
        with compat.outside_fake_mode(), torch.device("cpu"), torch.no_grad():
            return _prove_flag(is_causal, domain) if mask is None else _prove(mask, is_causal, domain)
    except Refused as refused:
        return refused.unproven
    except Mismatch as mismatch:
        return Unproven("mask_residual", f"the mask's proof failed its numeric check: {mismatch}", mask)


def _prove(mask: fx.Node, is_causal: bool, domain: Domain) -> MaskProof:
    if is_causal:
        refuse("mask_residual", "the attention has a mask and is_causal=True, which PyTorch does not allow", mask)
    reader = MaskReader(domain.facts)
    domain, formula = _place(_read(mask, reader), domain, mask)
    proof = normalise(formula, Findings(domain, reader.sources, mask))
    check_proof(proof, Subject(mask, formula, reader.formulas, reader.sources, domain))
    return proof


def _graph_inputs(mask: fx.Node | None) -> Iterator[object]:
    """The example values of a graph's inputs: a mask of constant shape may be computed from symbolic sizes."""
    nodes = mask.graph.nodes if mask is not None else ()
    return (value_of(node) for node in nodes if node.op == "placeholder")


def _prove_flag(is_causal: bool, domain: Domain) -> MaskProof:
    """The proof for an attention without a mask."""
    if is_causal and not domain.facts.equal(domain.offset, sympy.S.Zero):
        sentence = (
            "is_causal=True is aligned at the top left, so query q sees key kv only where kv <= q, "
            f"but the keys outnumber the queries by {domain.offset}, which is not known to be 0"
        )
        refuse("mask_residual", sentence, None)
    return normalise(at_least(Q, KV) if is_causal else sympy.true, Findings(domain, {}, None))


def _read(mask: fx.Node, reader: MaskReader) -> Indexed:
    """Where a mask shows a key, in the mask's own shape."""
    tensor = reader.read(mask)
    writer = first_write(reader.formulas)
    if writer is not None:
        name = getattr(writer.target, "__name__", writer.target)
        sentence = f"the mask is written to in place by `{name}` ({writer.name}), which the mask reader does not follow"
        refuse("mask_unknown_op", sentence, writer)
    return Indexed(tensor.dims, _shown(tensor, value_of(mask).dtype, mask))


def _shown(tensor: Indexed, dtype: torch.dtype, mask: fx.Node) -> Boolean:
    """Where a mask tensor shows a key: where it is True, or where it adds nothing."""
    if is_condition(tensor.value):
        return tensor.value
    if not isinstance(tensor.value, Choice) or not dtype.is_floating_point:
        refuse("mask_residual", f"the mask adds integers ({dtype}) to the scores, which is a bias", mask)
    lowest = torch.finfo(dtype).min
    biases = [number for number in tensor.value.cases if number != 0 and not number <= lowest]
    if biases:
        sentence = f"the mask adds {biases[0]} to some scores: a bias, not a mask, as {dtype} has lower values"
        refuse("mask_residual", sentence, mask)
    return tensor.value.where(lambda number: number == 0)


def _place(tensor: Indexed, domain: Domain, mask: fx.Node) -> tuple[Domain, Boolean]:
    """The formula over the attention's own indices, once the mask is broadcast to its scores."""
    sizes, pinned = dict(domain.sizes), {}
    if len(tensor.dims) > 4:
        refuse("mask_residual", f"the mask has {len(tensor.dims)} dimensions, not batch, heads, queries and keys", mask)
    for axis, own in zip(AXES, reversed(tensor.dims), strict=False):
        wanted = sizes.get(axis)
        if own == 1 and wanted != 1:
            pinned[axis] = sympy.S.Zero
        elif wanted is None:
            sizes[axis] = own
        elif not domain.facts.equal(own, wanted):
            sentence = f"the mask has {own} places along {axis}, where the attention has {wanted}"
            refuse("mask_residual", sentence, mask)
    return Domain(domain.facts, sizes), replace(tensor.value, pinned)
