"""Stage 3: find the caches of the graph: who reads them, how they grow, where they leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from gemkv_compile.passes.lens import module_path, op_of, rank_of, shape_of
from gemkv_compile.passes.liveness import live_nodes
from gemkv_compile.passes.rules import update_cat
from gemkv_compile.passes.rules.update_cat import Rows
from gemkv_compile.passes.sites import Attention, Cache, CacheOutput, Refusal
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
    readers: dict[tuple[Node, Node], list[Attention]] = {}
    rows: dict[tuple[Node, Node], tuple[Rows, Rows]] = {}
    without: list[tuple[Attention, Refusal]] = []
    for attention in attentions:
        pair = _rows_of(attention, leaving)
        if isinstance(pair, Refusal):
            without.append((attention, pair))
            continue
        key = (pair[0].all_rows, pair[1].all_rows)
        rows.setdefault(key, pair)
        readers.setdefault(key, []).append(attention)
    caches: list[Cache] = []
    for key, pair in rows.items():
        cache = _cache(pair, tuple(readers[key]), returned)
        refusal = _check(graph, cache)
        if refusal is None:
            caches.append(cache)
        else:
            without.extend((attention, refusal) for attention in readers[key])
    seen = [attention.node for attention in attentions] + list(refused)
    unread = _unread(leaving - {node for start in seen for node in _nearby(start)})
    return UpdateReport(tuple(caches), tuple(without), unread)


def _returned(graph: Graph) -> list[Any]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]


def _leaving(returned: list[Any]) -> Iterable[Node]:
    """Nodes that the graph returns as they are or as their last rows."""
    for node in returned:
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
        visible=keys.visible,
        outputs=tuple(outputs),
        readers=readers,
        rule=update_cat.NAME,
    )


def _outputs(rows: Rows, role: int, returned: list[Any]) -> Iterable[CacheOutput]:
    for index, node in enumerate(returned):
        if node is rows.all_rows:
            yield CacheOutput(index, role, None, node)
        elif isinstance(node, Node) and node.args and node.args[0] is rows.all_rows:
            keep = update_cat.last_rows(node, rows.seq_dim)
            if keep is not None:
                yield CacheOutput(index, role, keep, node)


def _check(graph: Graph, cache: Cache) -> Refusal | None:
    """Everything that touches the cached rows is an attention that was read, or a graph output."""
    node = cache.readers[0].node
    new = shape_of(cache.new_keys), shape_of(cache.new_values)
    if not all(same_size(a, b) for a, b in zip(new[0] or (), new[1] or (), strict=True)):
        return Refusal("cache_shapes_differ", "keys and values have different head counts or head sizes.", node)
    if {output.role for output in cache.outputs} != {KEYS, VALUES}:
        return Refusal("cache_not_returned", "the graph reads a past but does not return the cache that it made.", node)
    keeps = [output.keep for output in cache.outputs]
    if any(not _same_visible(keep, keeps[0]) for keep in keeps):
        return Refusal("cache_not_returned", "the graph returns different rows of one cache.", node)
    return _used_elsewhere(graph, cache)


def _used_elsewhere(graph: Graph, cache: Cache) -> Refusal | None:
    """The past, and past and new rows together, must serve attention and the returned cache only."""
    if cache.past_keys is None or cache.past_values is None:
        return None  # new rows that start a cache stay in the graph: anyone may use them
    inputs = (cache.new_keys, cache.new_values)
    replaced = {r.node: [n for n in (r.query, r.mask, *inputs) if n is not None] for r in cache.readers}
    live = live_nodes(graph, replaced, {output.index for output in cache.outputs})
    for rows in (cache.past_keys, cache.past_values, cache.all_keys, cache.all_values):
        if rows in live:
            user = next((user for user in rows.users if user in live and user not in replaced), rows)
            what = "the past is" if rows.op == "placeholder" else "the cached rows are"
            return Refusal(
                "cache_used_elsewhere", f"{what} also used by something that is no attention ({user}).", user
            )
    return None


def _nearby(node: Node) -> set[Node]:
    """Nodes from which an attention gets its keys and values: back from it along [batch, heads, rows, dim] tensors."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg not in found and (rank_of(arg) in (4, 5) or op_of(arg) in ("reshape", "flatten")):
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
