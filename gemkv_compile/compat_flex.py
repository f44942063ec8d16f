"""Private PyTorch names around FlexAttention and vmap; tested on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def flex_attention_file() -> str:
    """The file of PyTorch's flex_attention, as stack traces name it."""
    from torch.nn.attention import flex_attention

    return str(flex_attention.__file__)


def inline_create_block_mask() -> bool:
    """Let Dynamo trace create_block_mask(..., _compile=True) as create_block_mask(...), whose values are the same.

    With `_compile` it warns and compiles itself. Dynamo breaks the graph at the warning, and what follows is given the
    blocks as inputs, of which nothing can be proven. Outside a trace nothing changes.

    Returns:
        Whether it did: not if this PyTorch has no such argument, or another package did something of the kind.
    """
    import inspect
    from types import FunctionType

    from torch.nn.attention.flex_attention import create_block_mask as original

    if not isinstance(original, FunctionType) or "_compile" not in inspect.signature(original).parameters:
        return False
    # Dynamo would take the original for what replaces it, again and again.
    plain = FunctionType(original.__code__, original.__globals__, original.__name__, original.__defaults__)
    plain.__kwdefaults__ = original.__kwdefaults__

    def create_block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    try:
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(create_block_mask)
    except ValueError:
        return False
    return True


VMAP_BRACKETS = frozenset(("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"))
VMAP_TENSORS = frozenset(("_add_batch_dim", "_remove_batch_dim"))
"""Names of the functions that Dynamo writes down for torch.vmap: around it, and for what goes in and comes out."""


def is_vmap(node: Any, names: frozenset[str]) -> bool:
    """Whether a node calls one of these functions of PyTorch's vmap."""
    module = str(getattr(node.target, "__module__", ""))
    return node.op == "call_function" and getattr(node.target, "__name__", "") in names and "functorch" in module


def trace_flex_attention_with(stand_in: Callable[[Any], Any]) -> None:
    """Let FlexAttention's operator be traced with `stand_in(argument)` for each of its arguments (a tree map).

    Its rule for fake tensors refuses tensors of a subclass.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    operator = torch.ops.higher_order.flex_attention
    rule = operator.python_key_table[FakeTensorMode]

    def traced(mode: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            args, kwargs = stand_in(args), stand_in(kwargs)
        return rule(mode, *args, **kwargs)

    operator.python_key_table[FakeTensorMode] = traced
    operator._dispatch_cache.clear()


def keep_attributes_after_subgraphs() -> bool:
    """Let Dynamo see what is set on an object of the trace after an operator with subgraphs, such as FlexAttention.

    PyTorch 2.13 replaces its record of side effects after such an operator, and what stands for an object's `__dict__`
    goes on reading the former one: an attribute of an object that the trace made is then missing, and the graph breaks.
    This reads the record that is in force.

    Returns:
        Whether it did: not if this PyTorch has no such class.
    """
    from torch._dynamo.variables import dicts

    proxy: Any = getattr(dicts, "SideEffectsProxyDict", None)
    if proxy is None:
        return False

    def record(self: Any) -> Any:
        output = self._gemkv_side_effects.output_graph_weakref()
        return self._gemkv_side_effects if output is None else output.side_effects

    def remember(self: Any, value: Any) -> None:
        self._gemkv_side_effects = value

    proxy.side_effects = property(record, remember)
    return True
