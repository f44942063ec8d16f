"""Stage 3: find the caches of the graph: who reads them, how they grow, where they leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from gemkv_compile.passes.effects import write_after, writes_of
from gemkv_compile.passes.lens import module_path, op_of, rank_of, shape_of
from gemkv_compile.passes.liveness import Effects, effects_of, live_nodes
from gemkv_compile.passes.rules import update_cat, update_write
from gemkv_compile.passes.rules.folding import split_of
from gemkv_compile.passes.rules.update_cat import Rows
from gemkv_compile.passes.sites import Attention, Buffer, Cache, CacheOutput, Refusal
from gemkv_compile.passes.symbols import same_size

KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class UpdateReport:
    """Caches found; per attention that has none, why; updates of caches that no attention was seen to read."""

    caches: tuple[Cache, ...]
    without: tuple[tuple[Attention, Refusal], ...]
    unread: tuple[Refusal, ...]


def find_updates(graph: Graph, attentions: Sequence[Attention], refused: Sequence[Node] = ()) -> UpdateReport:
    """Group the attentions by the cache that they read.

    Args:
        attentions: Those that were read.
        refused: Outputs of those that were seen but not read; what they read is not reported twice.
    """
    returned = _returned(graph)
    leaving = frozenset(_leaving(returned))
    buffers = update_write.find_writes(graph)
    readers: dict[tuple[Node, Node], list[Attention]] = {}
    rows: dict[tuple[Node, Node], tuple[Rows, Rows]] = {}
    without: list[tuple[Attention, Refusal]] = []
    for attention in attentions:
        pair = update_write.match(attention, buffers) or _rows_of(attention, leaving)
        if isinstance(pair, Refusal):
            without.append((attention, pair))
            continue
        key = (pair[0].all_rows, pair[1].all_rows)
        rows.setdefault(key, pair)
        over_places = pair[0].write is not None and pair[0].first is None
        readers.setdefault(key, []).append(replace(attention, visible=pair[0].visible, over_places=over_places))
    own = {node for pair in rows.values() for part in pair if part.write is not None for node in part.write.nodes}
    writes, effects = (_without(of(graph), own) for of in (writes_of, effects_of))
    caches: list[Cache] = []
    for key, pair in rows.items():
        cache = _cache(pair, tuple(readers[key]), returned)
        refusal = _check(graph, cache, writes, effects)
        if refusal is None:
            caches.append(cache)
        else:
            without.extend((attention, refusal) for attention in readers[key])
    seen = {node for attention in attentions for node in (attention.node, attention.keys, attention.values)}
    unread = _unread(leaving - seen.union(*(_nearby(start) for start in (*seen, *refused))))
    return UpdateReport(tuple(caches), tuple(without), unread)


def _without(mapping: Mapping[Node, Any], nodes: set[Node]) -> dict[Node, Any]:
    """The mapping without writes that pages replace: a buffer that two caches are views of is refused by the call."""
    return {node: value for node, value in mapping.items() if node not in nodes}


def _returned(graph: Graph) -> list[Any]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]


def _leaving(returned: list[Any]) -> Iterable[Node]:
    """Nodes that the graph returns as they are or as their last rows."""
    for node in map(_without_copies, returned):
        if isinstance(node, Node):
            yield node
            if any(update_cat.last_rows(node, dim) is not None for dim in (1, 2)):
                yield node.args[0]  # type: ignore[misc]


def _rows_of(attention: Attention, leaving: frozenset[Node]) -> tuple[Rows, Rows] | Refusal:
    keys, values = update_cat.match(attention.keys, leaving), update_cat.match(attention.values, leaving)
    for rows, source in ((keys, attention.keys), (values, attention.values)):
        if rows is None and leaving & (_nearby(source) | {source}):
            how = f"the cached rows reach this attention through an operation that is not read ({source})."
            return Refusal("cache_read_changed", how, source)
    refusal = next((rows for rows in (keys, values) if isinstance(rows, Refusal)), None)
    if refusal is not None:
        return refusal
    if not isinstance(keys, Rows) or not isinstance(values, Rows):
        return Refusal("no_cache", "this attention reads no cache and leaves none behind.", attention.node)
    alike = keys.seq_dim == values.seq_dim and (keys.past is None) == (values.past is None)
    if not alike or not _same_visible(keys.visible, values.visible):
        return Refusal("cache_shapes_differ", "keys and values are not cached in the same way.", attention.node)
    return keys, values


def _cache(pair: tuple[Rows, Rows], readers: tuple[Attention, ...], returned: list[Any]) -> Cache:
    keys, values = pair
    outputs = [*_outputs(keys, KEYS, returned), *_outputs(values, VALUES, returned)]
    return Cache(
        new_keys=keys.new,
        new_values=values.new,
        past_keys=keys.past,
        past_values=values.past,
        all_keys=keys.all_rows,
        all_values=values.all_rows,
        seq_dim=keys.seq_dim,
        outputs=tuple(outputs),
        readers=readers,
        rule=update_cat.NAME if keys.write is None else update_write.NAME,
        buffer=None if keys.write is None else _buffer(keys, values, readers),
    )


def _buffer(keys: Rows, values: Rows, readers: tuple[Attention, ...]) -> Buffer:
    shape = shape_of(keys.all_rows)
    assert shape is not None
    only_new = any(not reader.over_places for reader in readers)
    nodes = (*keys.write.nodes, *values.write.nodes)
    in_place = not keys.write.gives_new
    return Buffer(shape[keys.seq_dim], keys.write.position, nodes, only_new, keys.write.rolls, in_place)


def _outputs(rows: Rows, role: int, returned: list[Any]) -> Iterable[CacheOutput]:
    for index, result in enumerate(returned):
        node = _without_copies(result)
        if node is rows.all_rows or (rows.write is not None and rows.past is None and node is rows.write.node):
            fills = rows.write is not None and rows.write.fills
            keep = shape_of(rows.all_rows)[rows.seq_dim] if fills else None  # type: ignore[index]
            yield CacheOutput(index, role, keep, result)
        elif isinstance(node, Node) and node.args and _without_copies(node.args[0]) is rows.all_rows:
            keep = update_cat.last_rows(node, rows.seq_dim)
            if keep is not None:
                yield CacheOutput(index, role, keep, result)


def _without_copies(node: Any) -> Any:
    while op_of(node) == "contiguous":
        node = node.args[0]
    return node


def _check(graph: Graph, cache: Cache, writes: Mapping[Node, set[Node]], effects: Effects) -> Refusal | None:
    """Everything that touches the cached rows is an attention that was read, or a graph output."""
    node = cache.readers[0].node
    new = shape_of(cache.new_keys) or (), shape_of(cache.new_values) or ()
    if len(new[0]) != len(new[1]) or not all(same_size(a, b) for a, b in zip(*new, strict=True)):
        return Refusal("cache_shapes_differ", "keys and values have different head counts or head sizes.", node)
    if (moved := update_write.check(cache)) is not None:
        return moved
    in_place = cache.buffer is not None and cache.buffer.in_place and cache.past_keys is not None
    if not in_place and {output.role for output in cache.outputs} != {KEYS, VALUES}:
        return Refusal("cache_not_returned", "the graph reads a past but does not return the cache that it made.", node)
    keeps = [output.keep for output in cache.outputs]
    if any(not _same_visible(keep, keeps[0]) for keep in keeps):
        return Refusal("cache_not_returned", "the graph returns different rows of one cache.", node)
    writer = write_after(_computation(graph, cache), writes)
    if writer is not None:
        name = getattr(writer.target, "__name__", writer.target)
        what = f"`{name}` writes in place into a tensor that this attention or its cache is made of."
        return Refusal("written_in_place", what, writer)
    return _used_elsewhere(graph, cache, effects)


def _computation(graph: Graph, cache: Cache) -> set[Node]:
    """Every tensor from the queries, masks, new and past rows to the attentions' outputs, these left out."""
    readers = [reader.node for reader in cache.readers]
    inputs = [cache.new_keys, cache.new_values, cache.past_keys, cache.past_values]
    inputs += [node for reader in cache.readers for node in (reader.query, reader.mask, reader.sinks)]
    forward = {node for node in inputs if node is not None}
    backward = {*readers, *(output.node for output in cache.outputs)}
    starts = frozenset(forward)
    for node in graph.nodes:
        if forward & set(node.all_input_nodes):
            forward.add(node)
    for node in reversed(graph.nodes):
        if node in backward and node not in starts:
            backward.update(node.all_input_nodes)
    return (forward & backward | starts) - set(readers)


def _used_elsewhere(graph: Graph, cache: Cache, effects: Effects) -> Refusal | None:
    """The past, and past and new rows together, must serve attention and the returned cache only."""
    if cache.buffer is None and (cache.past_keys is None or cache.past_values is None):
        return None  # new rows that start a cache stay in the graph: anyone may use them
    inputs = (cache.new_keys, cache.new_values)
    replaced = {r.node: [n for n in (r.query, r.mask, r.sinks, *inputs) if n is not None] for r in cache.readers}
    live = live_nodes(graph, replaced, {output.index for output in cache.outputs}, effects)
    for rows in (cache.past_keys, cache.past_values, cache.all_keys, cache.all_values):
        if rows is not None and rows in live:
            user = _user(rows, live - replaced.keys())
            what = "the past is" if rows.op == "placeholder" else "the cached rows are"
            return Refusal(
                "cache_used_elsewhere", f"{what} also used by something that is no attention ({user}).", user
            )
    return None


def _user(rows: Node, live: set[Node]) -> Node:
    """The first live user that is more than a copy or another view of cached rows."""
    user = next((user for user in rows.users if user in live), None)
    while user is not None and (user.op != "output" and op_of(user) in _ROWS_STILL):
        rows, user = user, next((after for after in user.users if after in live), None)
    return rows if user is None or user.op == "output" else user


_ROWS_STILL = frozenset("cat contiguous transpose permute getitem reshape expand unsqueeze repeat_interleave".split())


def _nearby(node: Node) -> set[Node]:
    """Nodes from which an attention gets its keys and values: back from it along [batch, heads, rows, dim] tensors.

    Where batch and heads are one dimension, also along those of three that the rules read.
    """
    found: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        is_folded = rank_of(node) == 3 or split_of(node) is not None
        for arg in node.all_input_nodes:
            is_near = rank_of(arg) in (4, 5) or op_of(arg) in ("reshape", "flatten")
            if arg not in found and (is_near or (is_folded and rank_of(arg) == 3 and op_of(arg) != "")):
                found.add(arg)
                stack.append(arg)
    return found


def _unread(candidates: Iterable[Node]) -> tuple[Refusal, ...]:
    """Caches that grow by a cat, with no attention that was seen to read them; one refusal for keys and values."""
    cats = sorted(node for node in candidates if op_of(node) == "cat")
    grown = [n for n in cats if isinstance(rows := update_cat.match(n, frozenset()), Rows) and rows.past is not None]
    places = {module_path(node) or f"pair {i // 2}": node for i, node in reversed(list(enumerate(grown)))}
    return tuple(
        Refusal(
            "attention_not_recognised",
            "a cache is updated here, but what reads it is no attention that this version knows; "
            "with Transformers, set attn_implementation='sdpa'.",
            node,
        )
        for node in places.values()
    )


def _same_visible(left: Any, right: Any) -> bool:
    return (left is None) == (right is None) and (left is None or same_size(left, right))
