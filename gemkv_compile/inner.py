"""The inner compiler: what turns a rewritten graph into something that runs."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gemkv_compile.compat import compile_settings
from gemkv_compile.errors import InvalidOption
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.printing import describe, format_graph
from gemkv_compile.passes.split_layers import NUMBERS, Part, split_layers
from gemkv_compile.passes.symbols import free_symbols

Compiled = Callable[..., Any]
MAX_SHARED = 64


@dataclass(frozen=True)
class InnerCompiler:
    """A named compiler of FX graphs: (graph module, example inputs) -> callable."""

    name: str
    compile: Callable[[GraphModule, Sequence[Any]], Compiled]
    adds_guards: bool  # whether its result may hold for some sizes only
    identity: Any  # equal for compilers that do the same


def choose_inner(inner: str | Callable[..., Any], mode: str | None, example_inputs: Sequence[Any]) -> InnerCompiler:
    """The inner compiler for a graph.

    Args:
        inner: The option of that name.
        mode: torch.compile's mode, for Inductor.
        example_inputs: Inputs of the graph; "auto" is Inductor if one of them is on a GPU.
    Raises:
        InvalidOption: no such compiler, or a mode for a compiler that has none.
    """
    if inner == "auto":
        on_gpu = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in example_inputs)
        inner = "inductor" if on_gpu or mode is not None else "eager"
    if inner == "inductor":
        return InnerCompiler("inductor", _inductor(mode), True, ("inductor", mode))
    if mode is not None:
        raise InvalidOption(f"mode={mode!r} needs inner='inductor'; the inner compiler is {inner!r}.")
    if inner == "eager":
        return InnerCompiler("eager", lambda module, _: module.forward, False, "eager")
    if callable(inner):
        return InnerCompiler(getattr(inner, "__name__", repr(inner)), inner, True, inner)
    try:
        backend: Any = torch._dynamo.lookup_backend(inner)
    except Exception as error:
        raise InvalidOption(
            f"inner={inner!r} is no torch.compile backend; see torch.compiler.list_backends()."
        ) from error
    return InnerCompiler(inner, backend, True, inner)


def _inductor(mode: str | None) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
    def compile_with_inductor(module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        # Inductor's own CUDA graphs know nothing of pages that change behind addresses; decode steps get ours instead.
        patches = None if mode is None else list_mode_options(mode) | {"triton.cudagraphs": False}
        compiled: Any = compile_fx(module, list(example_inputs), config_patches=patches)
        return compiled

    return compile_with_inductor


@dataclass(frozen=True)
class InnerGraph:
    """A compiled graph; `captures` is where whoever runs it keeps what it was captured as, for all that share it."""

    call: Compiled
    captures: list[Any] = field(default_factory=list)
    is_shared: bool = False  # whether an earlier graph's result serves


class SharedCompiles:
    """Compiles each distinct graph once: graphs that differ in names only share the result."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, InnerGraph] = OrderedDict()
        self._lock = threading.Lock()
        self.compiles = 0

    def compile(self, inner: InnerCompiler, module: GraphModule, examples: Sequence[Any]) -> InnerGraph:
        """The compiled graph."""
        key = (inner.identity, compile_settings(), graph_key(module, examples), _targets(module))
        shareable = not any(node.op in ("get_attr", "call_module") for node in module.graph.nodes)
        shareable = shareable and not (inner.adds_guards and free_symbols(_sizes(module, of_the_call=True)))
        with self._lock:
            if shareable and key in self._known:
                self._known.move_to_end(key)
                return replace(self._known[key], is_shared=True)
        compiled = InnerGraph(inner.compile(module, examples))
        with self._lock:
            self.compiles += 1
            if shareable:
                self._known[key] = compiled
                while len(self._known) > MAX_SHARED:
                    self._known.popitem(last=False)
        return compiled

    def clear(self) -> None:
        """Forget every compiled graph."""
        with self._lock:
            self._known.clear()
            self.compiles = 0


shared_compiles = SharedCompiles()


def by_layers(inner: InnerCompiler) -> InnerCompiler:
    """A compiler that compiles the layers of a graph one by one, equal ones once, and calls them one after another.

    A graph without layers, or one that may need gradients, is compiled as a whole.
    """

    def compile_parts(module: GraphModule, examples: Sequence[Any]) -> Compiled:
        parts = [] if torch.is_grad_enabled() else split_layers(module.graph)
        if not parts:
            return inner.compile(module, examples)
        known: dict[Any, Compiled] = {}
        calls = []
        for part in parts:
            given = [value_of(node) for node in part.inputs]
            # Within one graph a compile may rely on the call's symbols; `shared_compiles` knows none.
            key = (_part_key(part.module, given), _targets(part.module))
            if key not in known:
                known[key] = shared_compiles.compile(inner, part.module, given).call
            calls.append(known[key])
        return Chain(module.graph, parts, calls)

    return InnerCompiler(f"{inner.name}, layer by layer", compile_parts, inner.adds_guards, ("layers", inner.identity))


class Chain:
    """Calls the parts of a graph in order.

    Args:
        graph: The whole graph.
        parts, calls: Its parts, and what each was compiled to.
    """

    def __init__(self, graph: Graph, parts: Sequence[Part], calls: Sequence[Compiled]) -> None:
        places: dict[Node, int] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                places[node] = len(places)
        last_use: dict[Node, int] = {}
        for i, part in enumerate(parts):
            last_use |= dict.fromkeys(part.inputs, i)
            places |= {node: len(places) + j for j, node in enumerate(part.outputs)}
        (output,) = (node for node in graph.nodes if node.op == "output")
        kept = set(output.all_input_nodes)
        self._outputs = [places[each] if isinstance(each, Node) else each for each in output.args[0]]
        self._is_place = [isinstance(each, Node) for each in output.args[0]]
        self._num_places = len(places)
        self._steps = []
        for i, (part, call) in enumerate(zip(parts, calls, strict=True)):
            done = [places[node] for node, last in last_use.items() if last == i and node not in kept]
            self._steps.append((call, [places[n] for n in part.inputs], [places[n] for n in part.outputs], done))

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        values = [*args, *[None] * (self._num_places - len(args))]
        for call, inputs, outputs, done in self._steps:
            results = call(*[values[i] for i in inputs])
            for place, result in zip(outputs, results, strict=True):
                values[place] = result
            for place in done:  # memory of what no later part takes
                values[place] = None
        pairs = zip(self._outputs, self._is_place, strict=True)
        return tuple(values[each] if is_place else each for each, is_place in pairs)


def _targets(module: GraphModule) -> tuple[Any, ...]:
    """The functions themselves: two may have one name."""
    return tuple(node.target for node in module.graph.nodes if node.op == "call_function")


def _part_key(module: GraphModule, examples: Sequence[Any]) -> str:
    """Text that two parts of one trace share only if they compute the same of the same symbols of the call.

    Sizes of caches' state, which nothing guards, have symbols of each cache's own: they are numbered.
    """
    text = [format_graph(module.graph), *map(_layout, examples), *map(str, filter(_is_number, examples))]
    own = free_symbols(_sizes(module, of_the_call=False)) - free_symbols(_sizes(module, of_the_call=True))
    return _numbered("\n".join(text), set(map(str, own)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, *NUMBERS))


def graph_key(module: GraphModule, examples: Sequence[Any]) -> str:
    """Text that two graphs share only if one's compiled form serves the other."""
    text = re.sub(r"input\(.*?\) :", "input :", format_graph(module.graph))
    return _numbered("\n".join([text, *map(_layout, examples)]))


def _numbered(text: str, symbols: set[str] | None = None) -> str:
    """The text with symbols, these or all, by the order in which they come."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        is_one = symbols is None or found[0] in symbols
        return numbers.setdefault(found[0], f"n{len(numbers)}") if is_one else found[0]

    return re.sub(r"\b[su]\d+\b", number, text)


def _layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return describe(value)
    return f"{describe(value)} {tuple(map(str, value.stride()))} {value.device} {value.requires_grad}"


def _sizes(module: GraphModule, *, of_the_call: bool) -> list[Any]:
    """Example values of the inputs that come from the call, or of the state of caches, whose sizes nothing guards."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    own = [node for node in inputs if ("_dynamo_source" not in node.meta) == of_the_call]
    return [value for node in own if isinstance(value := node.meta.get("example_value"), (torch.Tensor, torch.SymInt))]
