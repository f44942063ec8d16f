"""Every private PyTorch name this project uses, in one place; tested on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


def bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over `num_bytes` of existing memory at `address`.

    The tensor owns nothing: whoever calls keeps the memory alive for as long as the view is used.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


_compare_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # in builds with CUDA


def same_addresses(tensors: Sequence[torch.Tensor], addresses: list[int]) -> bool:
    """Whether the tensors are at these addresses; fast, since each step asks it of all weights."""
    if _compare_addresses is None:
        return list(map(torch.Tensor.data_ptr, tensors)) == addresses
    return bool(_compare_addresses(list(tensors), addresses, list(range(len(addresses)))))


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Undo what a CUDA graph capture that failed leaves behind, which PyTorch does only for one that succeeded.

    The allocator may still give memory of the capture's pool, and the default generator of random numbers may still
    believe that it is captured, and refuse every later call. Its seed and offset stay.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    try:
        torch.rand(1, device=device)
        generator.set_offset(offset)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())


def autocast_off() -> Any:
    """A context without autocast on any device; cheaper than `torch.autocast(..., enabled=False)`, which names one."""
    return torch._C._DisableAutocast()


def fake_mode_of(values: Any) -> Any:
    """The FakeTensorMode that the given values (or the active trace) belong to, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def expr_of(value: int | torch.SymInt) -> Any:
    """The sympy expression of a size: a constant, or a formula over the graph's own symbols."""
    import sympy

    if isinstance(value, int):
        return sympy.Integer(value)
    constant = value.node.maybe_as_int()
    return value.node.expr if constant is None else sympy.Integer(constant)


def shape_env_of(*values: Any) -> Any | None:
    """The ShapeEnv behind the first symbolic size among sizes and tensors, or None when all of them are constant."""
    for value in values:
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
                return size.node.shape_env
    return None


def known_true(shape_env: Any | None, condition: Any) -> bool | None:
    """Whether a sympy condition over sizes holds by the guards recorded so far; None if unknown. Adds no guard."""
    if condition.is_Boolean and not condition.free_symbols:
        return bool(condition)
    if shape_env is None:
        return None
    answer = shape_env._maybe_evaluate_static(condition)
    if answer is None:
        # Guards keep the symbols that they were recorded with; some of these are constants by now.
        guards = tuple(shape_env.simplify(guard) for guard in shape_env.get_axioms())
        answer = shape_env._maybe_evaluate_static(condition, axioms=guards)
    return None if answer is None else bool(answer)


def max_min_nodes(expr: Any) -> list[tuple[Any, bool]]:
    """Each Max (True) and Min (False) inside a size expression, PyTorch's own classes and sympy's."""
    import sympy
    from torch.utils._sympy.functions import Max, Min

    if expr.is_Atom:
        return []
    return [(node, isinstance(node, (Max, sympy.Max))) for node in expr.atoms(Max, Min, sympy.Max, sympy.Min)]


def size_hints(shape_env: Any) -> dict[Any, int]:
    """The sizes that the traced call had, by symbol."""
    values = getattr(shape_env, "backed_var_to_val", None)  # named var_to_val in older releases
    values = shape_env.var_to_val if values is None else values
    return {symbol: int(value) for symbol, value in values.items() if value.is_Integer}


def size_guards(shape_env: Any) -> list[Any]:
    """The conditions under which the graph may run, as sympy conditions over its symbols."""
    asserts = [each.expr for group in shape_env.deferred_runtime_asserts.values() for each in group]
    return [guard.expr for guard in shape_env.guards] + asserts


def size_range(shape_env: Any, symbol: Any) -> tuple[int | None, int | None]:
    """The lowest and highest value that a symbol may have; None where there is no such bound."""
    ends = shape_env.var_to_range.get(symbol)
    if ends is None:
        return None, None
    lower, upper = (int(end) if end.is_Integer else None for end in (ends.lower, ends.upper))
    return lower, upper


def schemas_of(target: Any) -> list[Any]:
    """The schemas of an operator from torch.ops, or of its overloads; empty for any other callable."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else []


def outside_fake_mode() -> Any:
    """A context in which torch computes with real tensors even while a graph is being compiled."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def dynamic_fake_tensor(
    mode: Any, leading: tuple[Any, ...], hint: int, dtype: torch.dtype, device: torch.device, name: str
) -> torch.Tensor:
    """A fake tensor [*leading, n] whose last size is a new symbol that shares nothing with the graph's own.

    Args:
        mode: The FakeTensorMode of the graph.
        leading: Ints or SymInts of the graph.
        hint: A value that n may have.
        name: What messages call the input.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    with torch.inference_mode(False):
        real = torch.empty(hint, dtype=dtype)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        size = mode.from_tensor(real, symbolic_context=context, source=ConstantSource(name)).shape[0]
        with mode:
            return torch.empty((*leading, size), dtype=dtype, device=device)


def rebased_symint(value: torch.SymInt, bound: set[Any], mode: Any, name: str) -> torch.SymInt:
    """An example value for a SymInt input of a graph that has lost other inputs.

    A guard may have replaced the symbol of an input by that of another one. Inductor binds the input's own symbol and
    computes with what replaced it, which nothing defines once the other input is gone.

    Args:
        value: The input's value.
        bound: Symbols that the sizes of the remaining inputs define.
        mode: The FakeTensorMode of the graph.
        name: What messages call the input.
    Returns:
        `value` if it is its own symbol or all symbols in it are bound; the symbol that replaced its own; or, if that
        is a formula, a new symbol.
    """
    node = value.node
    if node.maybe_as_int() is not None or node._expr == node.expr or node.expr.free_symbols <= bound:
        return value
    if node.expr.is_Symbol:
        rebased: torch.SymInt = node.shape_env.create_symintnode(node.expr, hint=node.hint)
        return rebased
    fresh: Any = dynamic_fake_tensor(mode, (), max(node.hint, 2), torch.bool, torch.device("cpu"), name).shape[0]
    return fresh


def is_tracing_aten() -> bool:
    """Whether operations are being recorded into an ATen graph (AOTAutograd, make_fx, export)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def compile_settings() -> str:
    """Everything outside a graph that decides what a compiler makes of it."""
    import torch._inductor.config as inductor_config

    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in devices]
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled())
    return f"{autocast} {modes} {inductor_config.get_hash().hex()}"


def number_of(value: Any) -> float | None:
    """A number: of Python, or a symbolic float's value, which Dynamo then guards on; None for what sizes decide."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, torch.SymFloat):
        return None
    if value.node.expr.is_number:
        return float(value.node.expr)
    is_input = all(symbol_is_type(symbol, SymT.FLOAT) for symbol in value.node.expr.free_symbols)
    return float(value) if is_input and value.node.has_hint() else None


def graph_break_of(module: Any) -> tuple[str, str, tuple[str, int]] | None:
    """The graph break that ended a graph of Dynamo's, or None if its function returned.

    Returns:
        Dynamo's reason; "file:line, in function: code" of the innermost frame; file and line of the graph's own frame.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    own, inner = reason.user_stack[0], reason.user_stack[-1]
    place = f"{inner.filename}:{inner.lineno}, in {inner.name}: {inner.line}"
    return reason.reason, place, (own.filename, own.lineno)


def graph_break_counts() -> dict[str, int]:
    """How often Dynamo broke a graph in this process, by its reason."""
    counts: dict[str, int] = torch._dynamo.utils.counters["graph_break"]
    return counts


def recompile_reason() -> str:
    """Why Dynamo traces the function once more that is being compiled: the guard that failed; "" for the first time."""
    from torch._dynamo.utils import get_metrics_context

    metrics = getattr(get_metrics_context(), "_metrics", {})
    return " ".join(str(metrics.get("recompile_reason") or "").split("User stack trace")[0].split())


def on_generate_of_optimized_module(is_ours: Callable[[Any], bool], tell: Callable[[], None]) -> None:
    """Call `tell` when `generate` is taken from a torch.compile(module) whose backend is ours.

    Such a module answers for the original's methods, and calls in them do not come back to it: nothing is compiled, and
    no backend is ever called. Only the lookup of the name can be seen.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    lookup = OptimizedModule.__getattr__

    def watched(module: Any, name: str) -> Any:
        found = lookup(module, name)
        # A model that was also compiled in place runs compiled.
        if name == "generate" and module._orig_mod._compiled_call_impl is None and is_ours(_backend_of(module)):
            tell()
        return found

    OptimizedModule.__getattr__ = watched  # type: ignore[method-assign]


def _backend_of(module: Any) -> Any:
    """The backend function of an OptimizedModule."""
    backend = module.dynamo_ctx.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", backend)


def forget_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Take tensors out of weak dictionaries, as if they had died: those of fake tensors know what they are made of.

    torch.utils.swap_tensors refuses a tensor that has weak references.
    """
    references = {id(r): r for tensor in tensors for r in weakref.getweakrefs(tensor)}
    for owner in gc.get_referrers(*references.values()) if references else ():
        if isinstance(owner, dict) and owner is not references:
            for key in [key for key in owner if id(key) in references]:
                del owner[key]


def swap_with(tensor: torch.Tensor, handle: torch.Tensor) -> bool:
    """Put `handle` where `tensor` stands in everything that refers to it, and the other way round.

    Returns:
        Whether it was done; if not, both are as they were.
    """
    try:
        torch.utils.swap_tensors(tensor, handle)
    except RuntimeError:
        return False
    return True
