"""Stage 6: put the paged operators into the graph, and say how the result is to be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gemkv_compile.compat import dynamic_fake_tensor, expr_of, fake_mode_of, rebased_symint
from gemkv_compile.kernels import ops, ops_prompt  # noqa: F401  (registers the operators)
from gemkv_compile.kernels.layout import FIRST_MAX_PAGES
from gemkv_compile.passes.attention_calls import attention_call, format_arguments
from gemkv_compile.passes.decide import Read, Rewrite, new_rows
from gemkv_compile.passes.dropping import add_outputs, newest_queries
from gemkv_compile.passes.effects import writes_of
from gemkv_compile.passes.graph_edits import call, replace_attention, whole_mask
from gemkv_compile.passes.length_free import growing_nodes, is_decode_step
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.liveness import remove_dead
from gemkv_compile.passes.prompts import Prefill, takes_engine
from gemkv_compile.passes.sites import Cache
from gemkv_compile.passes.sizes_as_tensors import lift_sizes
from gemkv_compile.passes.static_buffers import buffer_plan, by_tokens, erase_writes, mask_functions
from gemkv_compile.passes.symbols import SymbolTable, free_symbols
from gemkv_compile.plan import (
    AlignedPadding,
    Argument,
    CallPlan,
    Computed,
    ObservedPlan,
    OutputPlan,
    PaddingPlan,
    Passed,
    Sized,
    SizeTensor,
    State,
    StateField,
    TablePlan,
)

OWN_KERNEL = Prefill()


@dataclass(frozen=True)
class RewriteReport:
    """The rewritten graph's plan and its inputs' example values."""

    plan: CallPlan
    example_inputs: tuple[Any, ...]


class _Builder:
    """Inputs that the rewritten graph gains, in the order in which they are appended."""

    def __init__(self, graph: Graph, prefill: Prefill) -> None:
        self.graph = graph
        self.prefill = prefill
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.symbols = SymbolTable(graph)
        self.sources: dict[Node, State | AlignedPadding | SizeTensor] = {}
        self.paddings: list[PaddingPlan] = []
        self.replaced: dict[Node, Node] = {}  # attentions' outputs, and what stands for them now
        self.masks: dict[Node | None, GraphModule] = {}  # of static caches
        self.observed: dict[int, Node] = {}  # newest queries by table
        self._padding_nodes: dict[tuple[int, int, Any], Node] = {}
        self._size_nodes: dict[tuple[Any, torch.device], Node] = {}
        self._last = self.placeholders[-1] if self.placeholders else None

    def add(self, name: str, value: torch.Tensor, source: State | AlignedPadding | SizeTensor) -> Node:
        """Append a placeholder."""
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_after(self._last) if self._last is not None else self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta.update(example_value=value, _dynamo_source=None)
        self._last = node
        self.sources[node] = source
        return node

    def state(self, rewrite: Rewrite, table: int) -> dict[StateField, Node]:
        """The state tensors of a table."""
        batch, heads, _, dim = new_rows(rewrite.cache)
        layout, device = rewrite.layout, rewrite.device
        mode = fake_mode_of([value_of(rewrite.cache.new_keys)])
        pages = dynamic_fake_tensor(mode, (batch,), FIRST_MAX_PAGES, torch.int64, device, f"gemkv_pages_{table}")
        with mode, torch.inference_mode(False):
            values: dict[StateField, torch.Tensor] = {
                "page_table": pages,
                "seq_lens": torch.empty((batch,), dtype=torch.int32, device=device),
                "starts": torch.empty((batch,), dtype=torch.int32, device=device),
                "tail": torch.empty((batch, 2, heads, layout.tail_rows, dim), dtype=layout.model_dtype, device=device),
            }
            if any(takes_engine(rewrite, read, self.prefill) for read in rewrite.reads):
                values["stored"] = torch.empty((), dtype=torch.int64, device="cpu")
        return {field: self.add(f"{field}_{table}", value, State(table, field)) for field, value in values.items()}

    def padding(self, read: Read, table: int) -> Node | None:
        """The padding mask of a read, aligned with its table; one input for all reads that share it."""
        if read.padding is None:
            return None
        source, index = self.placeholders.index(read.padding.source), len(self.paddings)
        key = (source, table, read.padding.column)
        if key not in self._padding_nodes:
            value = value_of(read.attention.query)
            mode = fake_mode_of([value])
            fake = dynamic_fake_tensor(mode, (value.shape[0],), 64, torch.bool, value.device, f"gemkv_padding_{index}")
            self._padding_nodes[key] = self.add(f"padding_{index}", fake, AlignedPadding(index))
            self.paddings.append(PaddingPlan(source, self.symbols.size(read.padding.column), table))
        return self._padding_nodes[key]

    def size(self, size: torch.SymInt, device: torch.device) -> Node:
        """The input that holds a size; one for equal sizes."""
        key = (expr_of(size), device)
        if key not in self._size_nodes:
            with fake_mode_of([value_of(node) for node in self.placeholders]), torch.inference_mode(False):
                value = torch.empty((), dtype=torch.int64, device=device)
            source = SizeTensor(self.symbols.size(size), device)
            self._size_nodes[key] = self.add(f"size_{len(self._size_nodes)}", value, source)
        return self._size_nodes[key]


def rewrite_graph(
    module: GraphModule, rewrites: tuple[Rewrite, ...], pool_bytes: int | None, prefill: Prefill = OWN_KERNEL
) -> RewriteReport:
    """Replace attentions and cache updates by paged operators; edits `module` (a canonicalised copy) in place."""
    graph = module.graph
    build = _Builder(graph, prefill)
    build.masks = mask_functions(graph, rewrites)
    own = {node for rewrite in rewrites if rewrite.cache.buffer is not None for node in rewrite.cache.buffer.writes}
    changed = set().union(*(memory for node, memory in writes_of(graph).items() if node not in own))
    written = tuple(i for i, node in enumerate(build.placeholders) if node in changed)
    for index, rewrite in enumerate(rewrites):
        _insert_operators(build, rewrite, index)
    results = _sort_outputs(build, rewrites)
    add_outputs(graph, list(build.observed.values()))
    tables = [_table_plan(build, rewrite, index, pool_bytes) for index, rewrite in enumerate(rewrites)]
    remove_dead(graph)
    if is_decode_step(rewrites):
        lift_sizes(graph, growing_nodes(graph, rewrites, set(build.sources)), build.size)
        remove_dead(graph)
    inputs, examples = _keep_used_inputs(graph, build)
    graph.lint()
    module.recompile()
    plan = CallPlan(inputs, tuple(tables), tuple(build.paddings), results, written)
    return RewriteReport(plan, examples)


def _insert_operators(build: _Builder, rewrite: Rewrite, table: int) -> None:
    """Decode: append, then read pages. Chunk: attend to pages and this call's rows, then append."""
    graph, cache = build.graph, rewrite.cache
    if cache.past_keys is None and cache.buffer is None:  # past and new rows together are the new rows
        for rows, new in ((cache.all_keys, cache.new_keys), (cache.all_values, cache.new_values)):
            if rows is not new:
                rows.replace_all_uses_with(new)
    order = {node: i for i, node in enumerate(graph.nodes)}
    readers = sorted(rewrite.reads, key=lambda read: order[read.attention.node])
    state = build.state(rewrite, table)
    first, last = readers[0].attention.node, readers[-1].attention.node
    with graph.inserting_before(first):
        rows_now = [build.replaced.get(node, node) for node in (cache.new_keys, cache.new_values)]
        keys, values = (_rows_first(graph, node, cache) for node in rows_now)
        if rewrite.is_decode:
            _append(graph, rewrite, keys, values, state)
        if rewrite.drop.observes:
            query = rewrite.cache.readers[0].query
            build.observed[table] = newest_queries(graph, build.replaced.get(query, query), rewrite.drop.observes)
    for read in readers:
        with graph.inserting_before(read.attention.node):
            result = _attend(build, rewrite, read, table, keys, values, state)
        build.replaced[read.attention.node] = replace_attention(graph, read.attention.node, result)
    if not rewrite.is_decode:
        with graph.inserting_after(last):
            anchor = graph.call_function(_anchor)
        with graph.inserting_before(anchor):
            _append(graph, rewrite, keys, values, state)
        graph.erase_node(anchor)
    if cache.buffer is not None and cache.buffer.in_place and cache.past_keys is not None:
        erase_writes(graph, cache)


def _anchor() -> None:
    """Marks a place in a graph while nodes are inserted there."""


def _append(graph: Graph, rewrite: Rewrite, keys: Node, values: Node, state: dict[StateField, Node]) -> None:
    if rewrite.requires_grad:
        keys, values = (call(graph, "detach", (node,), value_of(node).detach()) for node in (keys, values))
    arguments = (keys, values, state["page_table"], state["seq_lens"], state["tail"], *format_arguments(rewrite))
    graph.call_function(torch.ops.gemkv.append_kv.default, arguments)


def _attend(
    build: _Builder, rewrite: Rewrite, read: Read, table: int, keys: Node, values: Node, state: dict[StateField, Node]
) -> Node:
    graph, attention = build.graph, read.attention
    mask = whole_mask(graph, build.symbols, read.dense_mask, attention.query, attention.keys)
    rolls = rewrite.cache.buffer is not None and rewrite.cache.buffer.rolls  # its last place is the newest token
    if mask is not None and attention.over_places and not rolls:
        mask = by_tokens(
            graph, build.symbols, mask, state["seq_lens"], 0 if rewrite.is_decode else value_of(keys).shape[2]
        )
    rows = build.replaced.get(attention.query, attention.query), keys, values
    masks = build.padding(read, table), mask, attention.sinks
    return attention_call(graph, rewrite, read, build.prefill, rows, state, masks)


def _rows_first(graph: Graph, node: Node, cache: Cache) -> Node:
    """New rows as [batch, num_kv_heads, q_len, head_dim]."""
    return node if cache.seq_dim == 2 else call(graph, "transpose", (node, 1, 2), value_of(node).transpose(1, 2))


def _observed_plan(build: _Builder, rewrite: Rewrite, table: int) -> ObservedPlan | None:
    if table not in build.observed:
        return None
    output = next(node for node in reversed(build.graph.nodes) if node.op == "output")
    read = next(read for read in rewrite.reads if read.attention is rewrite.cache.readers[0])
    position = len(output.args[0]) - len(build.observed) + list(build.observed).index(table)
    return ObservedPlan(position, read.attention.scale, read.attention.softcap, read.window)


def _table_plan(build: _Builder, rewrite: Rewrite, table: int, pool_bytes: int | None) -> TablePlan:
    cache = rewrite.cache
    batch, _, q_len, _ = new_rows(cache)
    pasts = [None if past is None else build.placeholders.index(past) for past in (cache.past_keys, cache.past_values)]
    return TablePlan(
        past_keys=pasts[0],
        past_values=pasts[1],
        seq_dim=cache.seq_dim,
        batch=build.symbols.size(batch),
        num_tokens=build.symbols.size(q_len),
        keep=rewrite.keep,
        window=rewrite.window,
        exact_rows=rewrite.exact_rows,
        layout=rewrite.layout,
        device=rewrite.device,
        pool_bytes=pool_bytes,
        outputs=tuple(OutputPlan(output.index, output.role, rewrite.keep) for output in cache.outputs),
        buffer=buffer_plan(cache, build.placeholders, build.symbols, build.masks),
        drops=rewrite.drop.drops,
        observed=_observed_plan(build, rewrite, table),
    )


def _sort_outputs(build: _Builder, rewrites: tuple[Rewrite, ...]) -> tuple[Computed | Passed | Sized | None, ...]:
    """Let the graph return only what it computes; where each original output comes from, None for caches."""
    output = next(node for node in reversed(build.graph.nodes) if node.op == "output")
    cached = {cache_output.index for rewrite in rewrites for cache_output in rewrite.cache.outputs}
    computed: list[Any] = []
    sources: list[Computed | Passed | Sized | None] = []
    for index, result in enumerate(output.args[0]):
        source: Computed | Passed | Sized | None = None if index in cached else _outside(build, result)
        if source is None and index not in cached:
            source = Computed(len(computed))
            computed.append(result)
        sources.append(source)
    output.args = (tuple(computed),)
    return tuple(sources)


def _outside(build: _Builder, result: Any) -> Passed | Sized | None:
    """How to give a result without the graph: an argument, or arithmetic on lengths."""
    if isinstance(result, Node) and result in build.placeholders:
        return Passed(build.placeholders.index(result))
    value = value_of(result)
    if isinstance(value, torch.SymInt):
        # A number that comes from data has a symbol of its own, which only the graph can compute.
        return Sized(build.symbols.size(value)) if build.symbols.knows(value) else None
    return Sized(result) if isinstance(result, int) and not isinstance(result, bool) else None


def _keep_used_inputs(graph: Graph, build: _Builder) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Erase placeholders that nothing needs; where the others come from, and their example values."""
    needed = [n for n in graph.nodes if n.op == "placeholder" and (n.users or n in build.sources)]
    tensors = [value_of(n) for n in needed]
    symbols = free_symbols(v for v in tensors if isinstance(v, torch.Tensor))
    for node in build.placeholders:
        value = value_of(node)
        if not node.users and isinstance(value, torch.SymInt) and free_symbols([value]) & symbols:
            needed.append(node)
        elif not node.users:
            graph.erase_node(node)
    inputs, examples = [], []
    mode = fake_mode_of(tensors)
    bound = {expr_of(size) for v in tensors if isinstance(v, torch.Tensor) for size in v.shape}
    for node in (n for n in graph.nodes if n.op == "placeholder"):
        inputs.append(build.sources.get(node) or Argument(build.placeholders.index(node)))
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            node.meta["example_value"] = value = rebased_symint(value, bound, mode, node.name)
        examples.append(value)
    return tuple(inputs), tuple(examples)
