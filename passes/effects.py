"""What a node does besides returning a value: which memory it writes, and whether a graph may lose it."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from gemkv_compile import compat, compat_flex
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.names import operation_name

_RETURN_THEIR_INPUT = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
_IN_PLACE = frozenset([*_RETURN_THEIR_INPUT.split(), "setitem", "delitem"])
# Operations whose result may be the memory of their input; splitting ones give a tuple that getitem picks from.
_VIEWS = frozenset(
    f"""
    getitem view view_as reshape reshape_as expand expand_as broadcast_to broadcast_tensors transpose permute swapaxes
    swapdims movedim moveaxis t adjoint squeeze unsqueeze flatten unflatten ravel contiguous to type type_as bool int
    long float half bfloat16 double cpu cuda detach alias narrow select slice chunk split tensor_split hsplit vsplit
    dsplit unbind diagonal as_strided unfold real imag getattr atleast_1d atleast_2d atleast_3d meshgrid positive
    dropout {_RETURN_THEIR_INPUT}
    """.split()
)


def has_effect(node: fx.Node) -> bool:
    """Whether a node does more than return a value (an in-place method, an assertion, a context switch, ...)."""
    if node.op not in ("call_function", "call_method", "get_attr"):
        return True
    if node.op == "get_attr":
        return False
    if written_by(node):
        return True
    return node.op == "call_function" and (node.is_impure() or value_of(node) is None)


def private_memory(node: fx.Node) -> set[fx.Node] | None:
    """All that a node does, if that is to write tensors that the graph itself has made: these, else None.

    What opens and closes a vmap does so for the tensors that go in and come out.
    """
    if compat_flex.is_vmap(node, compat_flex.VMAP_BRACKETS):
        return {other for other in node.graph.nodes if compat_flex.is_vmap(other, compat_flex.VMAP_TENSORS)}
    written = written_by(node)
    if not written or any(position is None for position, _ in _written_arguments(node.op, node.target)):
        return None
    memory = memory_of(written)
    return None if any(part.op in ("placeholder", "get_attr") for part in memory) else memory


def first_write(tensors: Iterable[fx.Node]) -> fx.Node | None:
    """The first node of the graph that writes into the memory of one of these tensors, or None."""
    wanted = set(tensors)
    graph = next(iter(wanted)).graph if wanted else fx.Graph()
    return next((node for node in graph.nodes if wanted & memory_of(written_by(node))), None)


def writes_of(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Each node that writes memory, and the tensors whose memory that may be."""
    return {node: memory_of(written) for node in graph.nodes if (written := written_by(node))}


def write_after(nodes: Collection[fx.Node], writes: Mapping[fx.Node, set[fx.Node]]) -> fx.Node | None:
    """A node that writes into the memory of one of these tensors after it was computed, or None.

    Two inputs of the graph of one dtype may be the same memory. A write that is itself one of the nodes, such as
    `scores += mask`, is a step of the computation if nothing else uses what it writes into.
    """
    if not writes or not nodes:
        return None
    order = {node: i for i, node in enumerate(next(iter(nodes)).graph.nodes)}
    memories = {node: memory_of([node]) for node in nodes}
    for writer, written in writes.items():
        steps = _consumed_by(writer) if writer in memories else set()
        for node, memory in memories.items():
            comes_first = order[node] < order[writer] and node not in steps
            if comes_first and (memory & written or _inputs_alias(memory, written)):
                return writer
    return None


def _inputs_alias(left: Iterable[fx.Node], right: Iterable[fx.Node]) -> bool:
    """Whether the two have inputs that the caller may have made views of one tensor."""
    return bool(_input_dtypes(left) & _input_dtypes(right))


def _input_dtypes(nodes: Iterable[fx.Node]) -> set[torch.dtype]:
    values = [value_of(node) for node in nodes if node.op == "placeholder"]
    return {v.dtype for v in values if isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter)}


def _consumed_by(writer: fx.Node) -> set[fx.Node]:
    """What an in-place node and those before it write into, as far as nothing else uses it."""
    found: set[fx.Node] = set()
    while written_by(writer) == [writer.args[0]] and isinstance(writer.args[0], fx.Node):
        if len(writer.args[0].users) > 1:
            break
        writer = writer.args[0]
        found.add(writer)
    return found


def memory_of(tensors: Iterable[fx.Node]) -> set[fx.Node]:
    """The tensors and all that they may be views of."""
    found: set[fx.Node] = set()
    pending = list(tensors)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        name = operation_name(node) if node.op in ("call_method", "call_function") else ""
        # An unnamed operation may be in place, and return its input.
        if (name is None and not _only_calls_pure_bodies(node)) or name in _VIEWS:
            pending.extend(node.all_input_nodes)
    return found


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node changes; for a function that is not known, all of them."""
    if node.op not in ("call_function", "call_method") or _only_calls_pure_bodies(node):
        return []
    written: list[object] = [node.kwargs.get("out")]
    for position, name in _written_arguments(node.op, node.target):
        if position is None:
            written += node.all_input_nodes
        else:
            written.append(node.args[position] if position < len(node.args) else node.kwargs.get(name))
    if node.op == "call_function":
        written += _written_if_asked(node)
    found: list[fx.Node] = []
    for argument in written:
        fx.node.map_arg(argument, found.append)  # type: ignore[type-var]
    return found


def subgraph(node: object) -> fx.GraphModule | None:
    """The body that a node stands for as an argument of a higher-order operator."""
    owner = node.graph.owning_module if isinstance(node, fx.Node) and node.op == "get_attr" else None
    body = getattr(owner, str(node.target), None) if owner is not None else None  # type: ignore[attr-defined]
    return body if isinstance(body, fx.GraphModule) else None


def _only_calls_pure_bodies(node: fx.Node) -> bool:
    """Whether the node is a FlexAttention whose score_mod and mask_mod write nothing; itself it does not."""
    if node.target is not torch.ops.higher_order.flex_attention:
        return False
    bodies = [subgraph(arg) for arg in node.all_input_nodes if arg.op == "get_attr"]
    inside = [inner for body in bodies if body is not None for inner in body.graph.nodes]
    pure = not any(has_effect(inner) for inner in inside if inner.op not in ("placeholder", "output"))
    return pure and None not in bodies and len(bodies) > 0


def _written_if_asked(node: fx.Node) -> list[object]:
    """What a function of torch writes because of its other arguments: inplace=True, running statistics, max_norm."""
    parameters = _parameters(node.target)
    if not parameters & {"inplace", "running_mean", "max_norm"}:
        return []
    given = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    written = [given.get("running_mean"), given.get("running_var")]
    if given.get("inplace", False) is not False:
        written += node.all_input_nodes[:1]
    if given.get("max_norm") is not None:
        written.append(given.get("weight"))
    return written


@functools.cache
def _parameters(target: object) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # built in
        return frozenset()


@functools.cache
def _written_arguments(op: str, target: object) -> tuple[tuple[int | None, str], ...]:
    """Position and name of each argument that any call to this target writes; position None: any of them."""
    schemas = compat.schemas_of(target) if op == "call_function" else []
    if schemas:
        arguments = [pair for schema in schemas for pair in enumerate(schema.arguments)]
        written = [(at, arg.name) for at, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
        return tuple(dict.fromkeys(written))
    name = str(target) if op == "call_method" else getattr(target, "__name__", "")
    if op == "call_function" and not _is_plain_function(target, name):
        return ((None, ""),)
    ends_in_place = name.endswith("_") and not name.startswith("__") and getattr(operator, name, None) is not target
    return ((0, "input"),) if ends_in_place or name.strip("_") in _IN_PLACE else ()


def _is_plain_function(target: object, name: str) -> bool:
    """Whether a function without a schema is one of Python's or torch's, whose name tells what it writes."""
    is_norm = name in ("batch_norm", "native_batch_norm", "instance_norm", "cudnn_batch_norm")
    if isinstance(target, torch._ops.HigherOrderOperator) or (is_norm and "running_mean" not in _parameters(target)):
        return False
    module = getattr(target, "__module__", None) or "torch"  # torch's own built-in functions name no module
    return module.split(".")[0] in ("torch", "_operator", "operator", "builtins", "math")
