"""Stage 9: RMSNorm and rotary embedding of a decode step's queries and keys, by one operator ahead of the append.

A layer is taken if its queries and its keys come from projections by the same norm (or none) and the same rotation, in
a form that `rope_forms` reads, and nothing else uses what is on the way. Values that get a norm without a weight, as
Gemma 3n and 4 have it, go with them. Nothing else of the graph changes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemkv_compile.kernels import ops
from gemkv_compile.kernels.ops_rope import DTYPES, qk_norm_rope
from gemkv_compile.passes.effects import has_effect, write_after, writes_of
from gemkv_compile.passes.graph_edits import call
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.rope_forms import Chain, read_chain
from gemkv_compile.passes.symbols import same_size, static_int
from gemkv_compile.passes.version import pass_version

DEVICES = frozenset({"cuda"})
APPEND, ATTEND = ops.append_kv._opoverload, ops.attend_pages._opoverload
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"}
_VIEWS = {"view", "reshape", "transpose", "permute", "unsqueeze", "unflatten", "chunk", "split", "getitem"}


@dataclass(frozen=True)
class RopeReport:
    """What was done: in how many `layers`, a launch each; those left, counted by reason."""

    layers: int
    left: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        left = "".join(f"; {count} left: {reason}" for reason, count in self.left)
        return f"queries and keys of {self.layers} layers normalised and rotated in a launch each{left}"


@dataclass(frozen=True)
class _Layer:
    """A layer's append, and the chains of its queries, keys and, if they have a norm, values."""

    append: Node
    queries: Chain
    keys: Chain
    values: Chain | None

    @property
    def chains(self) -> list[Chain]:
        return [self.queries, self.keys, *([] if self.values is None else [self.values])]


def fuse_rope(module: GraphModule) -> RopeReport | None:
    """Let the operator `gemkv::qk_norm_rope` make queries and keys of a graph's decode steps, and say of how many.

    Returns:
        None if the graph has no decode step, on a device that the operator has a kernel for.
    """
    graph = module.graph
    attends = [n for n in graph.nodes if n.target is ATTEND and value_of(n.args[0]).device.type in DEVICES]
    if not attends:
        return None
    if torch.is_grad_enabled():
        return RopeReport(0, (("gradients may be asked for", len(attends)),))
    # An append writes to the state of a cache, which is nobody else's memory.
    writes = {node: memory for node, memory in writes_of(graph).items() if node.target is not APPEND}
    order = {node: i for i, node in enumerate(graph.nodes)}
    paged = [node for node in order if node.target in (APPEND, ATTEND)]
    left: Counter[str] = Counter()
    layers = 0
    for attend in attends:
        found = _layer(paged, attend)
        why = found if isinstance(found, str) else _why_not(order, found, writes)
        if why:
            left[why] += 1
        elif isinstance(found, _Layer):
            _replace(graph, found)
            layers += 1
    module.recompile()
    return RopeReport(layers, tuple(left.items()))


def _layer(paged: Sequence[Any], attend: Any) -> _Layer | str:
    """The layer of a decode step's attention, or why it has none that can be taken."""
    same_cache = [node for node in paged if _table(node) is _table(attend)]
    append = same_cache[0]
    if append.target is not APPEND or same_cache[1] is not attend:
        return "its keys are another layer's"
    queries, keys = read_chain(attend.args[0]), read_chain(append.args[0])
    if queries is None or keys is None:
        return "its queries or keys are not rotated in a form that is known"
    values = read_chain(append.args[1], rotated=False)
    layer = _Layer(append, queries, keys, values)
    return layer if _takes_values(layer) else _Layer(append, queries, keys, None)


def _table(node: Node) -> Any:
    return node.args[2 if node.target is APPEND else 1]


def _takes_values(layer: _Layer) -> bool:
    """Whether values have the norm of the queries, but without a weight."""
    own, norm = layer.queries.norm, layer.values.norm if layer.values else None
    if own is None or norm is None or norm.weight is not None or (own.name, own.eps) != ("weight", norm.eps):
        return False
    return layer.values is not None and not _why_not_heads(layer.values) and _is_private(layer.values)


def _why_not(order: Mapping[Node, int], layer: _Layer, writes: Mapping[Node, set[Node]]) -> str:
    """Why a layer is left, or ""."""
    queries, keys = layer.queries, layer.keys
    if why := _why_not_heads(queries) or _why_not_heads(keys) or _why_not_tables(layer):
        return why
    if not _is_same_norm(queries, keys):
        return "its queries and keys have different norms"
    if any(chain.norm and chain.norm.weight and not _is_weight(chain) for chain in (queries, keys)):
        return "its norm has a weight that is not one number a channel"
    if not all(map(_is_private, layer.chains)):
        return "something else uses queries or keys on their way"
    inputs, append = _inputs(layer), order[layer.append]
    users = [user for chain in layer.chains for user in chain.steps[0].users]
    if any(order[node] > append for node in inputs) or any(order[node] < append for node in users):
        return "its queries are computed after its keys are stored"
    if write_after({*inputs, *(node for chain in layer.chains for node in chain.steps)}, writes) is not None:
        return "what they are computed from is written in place"
    return ""


def _why_not_heads(chain: Chain) -> str:
    """Why heads are left, or ""."""
    end, source = value_of(chain.steps[0]) if chain.steps else None, value_of(chain.source)
    rotated = source if chain.rotation is None else value_of(chain.rotation.source)
    if end is None or end.dtype not in DTYPES or {source.dtype, rotated.dtype} != {end.dtype}:
        return "its queries or keys change their dtype on the way, or are not of 16 bits or float32"
    if is_traceable_wrapper_subclass(source):
        return "its queries or keys are tensor subclasses"
    heads, one, dim = map(static_int, end.shape[1:])
    if not same_size(source.shape[0], end.shape[0]):
        return "its heads have no fixed number or size"
    wanted = (one, heads, dim) if chain.is_swapped else (heads, one, dim)
    if one != 1 or None in wanted or tuple(map(static_int, source.shape[1:])) != wanted:
        return "its heads have no fixed number or size"
    return "" if _is_projection(chain.source) else "its queries or keys are no view of what a projection gives"


def _is_projection(node: Any) -> bool:
    """Whether a node is a view of a product, or of what an operator gives that nothing is fused into."""
    while isinstance(node, Node) and operation_name(node) in _VIEWS:
        node = node.args[0]
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return False
    opaque = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")
    return opaque or operation_name(node) in _PRODUCTS


def _why_not_tables(layer: _Layer) -> str:
    """Why cos and sin do not do, or ""."""
    both = layer.queries.rotation, layer.keys.rotation
    if (
        both[0] is None
        or both[1] is None
        or not (_is_same(both[0].cos, both[1].cos) and _is_same(both[0].sin, both[1].sin))
    ):
        return "its queries and keys have different cos and sin"
    heads = value_of(layer.queries.steps[0])
    for table in (value_of(both[0].cos), value_of(both[0].sin)):
        if table.dtype != heads.dtype:
            return f"its cos and sin are {str(table.dtype).removeprefix('torch.')}, its queries are not"
        rotary = static_int(table.shape[-1]) or 0
        batch = table.ndim == 4 and (static_int(table.shape[0]) == 1 or same_size(table.shape[0], heads.shape[0]))
        if not batch or tuple(table.shape[1:3]) != (1, 1) or rotary % 2 or not 0 < rotary <= heads.shape[-1]:
            return "its cos and sin are not one row a sequence"
    return ""


def _is_same(left: Node, right: Node) -> bool:
    """Whether two nodes are one, or the same view of one."""
    if left is right:
        return True
    is_view = (
        operation_name(left) == operation_name(right) == "unsqueeze" and value_of(left).ndim == value_of(right).ndim
    )
    return is_view and left.args[1:] == right.args[1:] and left.args[0] is right.args[0]


def _is_same_norm(queries: Chain, keys: Chain) -> bool:
    norms = [(norm.name, norm.eps, norm.weight is None) if norm else None for norm in (queries.norm, keys.norm)]
    return norms[0] == norms[1]


def _is_weight(chain: Chain) -> bool:
    norm, heads = chain.norm, value_of(chain.steps[0])
    weight: Any = value_of(norm.weight) if norm else None
    dtypes = (heads.dtype,) if norm and norm.name == "rounded_weight" else DTYPES
    fits = weight.shape == heads.shape[-1:] and weight.is_contiguous() and weight.dtype in dtypes
    return fits and not is_traceable_wrapper_subclass(weight)


def _is_private(chain: Chain) -> bool:
    """Whether nothing but the steps uses a step, and only operators over pages use the last."""
    end, inside = chain.steps[0], {*chain.steps}
    operators = {APPEND, ATTEND, ops.newest_queries._opoverload}
    return all(user.target in operators for user in end.users) and all(
        user in inside for step in chain.steps[1:] for user in step.users
    )


def _inputs(layer: _Layer) -> list[Node]:
    """What the operator reads."""
    rotation = layer.queries.rotation
    weights = [chain.norm.weight for chain in layer.chains if chain.norm and chain.norm.weight]
    tables = [] if rotation is None else [rotation.cos, rotation.sin]
    return [*(chain.source for chain in layer.chains), *weights, *tables]


def _replace(graph: Graph, layer: _Layer) -> None:
    """Put the operator before the append."""
    chains, norm, rotation = layer.chains, layer.queries.norm, layer.queries.rotation
    assert rotation is not None
    weights = [chain.norm.weight if chain.norm else None for chain in (layer.queries, layer.keys)]
    ends = [chain.steps[0] for chain in chains]
    with graph.inserting_before(layer.append):
        heads = [_heads_first(graph, chain) for chain in chains]
        values = heads[2] if len(heads) > 2 else None
        name, eps = ("none", 0.0) if norm is None else (norm.name, norm.eps)
        arguments = (*heads[:2], values, *weights, rotation.cos, rotation.sin, name, eps, pass_version())
        results = graph.call_function(qk_norm_rope._opoverload, arguments)
        examples = [torch.empty_like(value_of(end), memory_format=torch.contiguous_format) for end in ends]
        results.meta = dict(ends[0].meta) | {"example_value": examples}
        for i, (end, example) in enumerate(zip(ends, examples, strict=True)):
            result = graph.call_function(operator.getitem, (results, i))
            result.meta = dict(end.meta) | {"example_value": example}
            end.replace_all_uses_with(result)
    _erase(graph, ends)


def _heads_first(graph: Graph, chain: Chain) -> Node:
    """The source as [B, H, 1, D]."""
    source = chain.source
    if not chain.is_swapped:
        return source
    node = call(graph, "transpose", (source, 1, 2), value_of(source).transpose(1, 2))
    node.meta = dict(source.meta) | node.meta
    return node


def _erase(graph: Graph, ends: Sequence[Node]) -> None:
    """Erase nodes that nothing uses, and what they alone used."""
    pending, gone = list(ends), set()
    while pending:
        node = pending.pop()
        if node in gone or node.users or node.op not in ("call_function", "call_method") or has_effect(node):
            continue
        pending += node.all_input_nodes
        graph.erase_node(node)
        gone.add(node)
