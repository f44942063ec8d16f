"""What a compile did, did not do, and why."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sympy
from rich.console import Console
from rich.table import Table

from gemkv_compile.memory_formula import BATCH, TOKENS, CacheMemory
from gemkv_compile.report_parts import Drift, EngineChoice, ShadowedCall


@dataclass(frozen=True)
class Site:
    """One attention, or one cache update that no attention was seen to read."""

    layer: int
    module: str
    status: str  # "rewritten" or "kept"
    reason: str  # "" or a code from `reasons.REASONS`
    sentence: str
    source: str
    operator: str = ""
    mask: str = ""  # in words
    predicate: str = ""  # when query q sees key kv, as proven; "" if nothing is
    num_q_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    rule: str = ""
    drop: str = ""  # the policy that drops pages of its cache, or why the cache is kept whole; "" without the option


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph; `shadow` grows with the option of that name while the graph is called.

    Args:
        recompiled: The guard that failed, if Dynamo traced the function once more; "" for its first graph.
        length_free: Whether nothing in a decode graph but its caches' state depends on their length (CUDA graphs need
            that); None for other graphs.
        length_reason: What depends on it, with the source line, or "".
        engines: Who attends to a prompt, by layers and length; empty where only this package's kernel could.
        cuda_graphs: What was captured as a CUDA graph, or why it was not; grows while the graph is called.
        linears: Which products of few rows with weights this package's kernel computes, and why not others; "" where
            there are none, or the option `fuse_linears` is off.
        rope: Of how many layers one launch makes queries and keys from their projections, and why not of others; ""
            where there is no decode step, or the option `fuse_rope` is off.
        dropped: Pages that the calls of this graph have dropped, by the number of the cache in it; grows too.
    """

    sites: tuple[Site, ...]
    caches: tuple[CacheMemory, ...]
    before: str
    after: str
    inner: str
    inner_shared: bool
    stages: dict[str, float] = field(default_factory=dict)  # seconds by stage
    shadow: list[ShadowedCall] = field(default_factory=list)
    recompiled: str = ""
    length_free: bool | None = None
    length_reason: str = ""
    cuda_graphs: list[str] = field(default_factory=list)
    engines: tuple[EngineChoice, ...] = ()
    linears: str = ""
    rope: str = ""
    dropped: dict[int, int] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[Site, ...]:
        """Sites that were not rewritten."""
        return tuple(site for site in self.sites if site.status == "kept")

    @property
    def rewrite_error(self) -> Drift | None:
        """The worst rewrite error of the shadowed calls, rows added up; None if none is known."""
        return _worst([call.rewrite_error for call in self.shadow])

    @property
    def format_error(self) -> Drift | None:
        """The same of the format error."""
        return _worst([call.format_error for call in self.shadow])


@dataclass(frozen=True)
class Report:
    """What a call of a model compiles to: one entry per graph, in the order of compilation."""

    graphs: tuple[GraphReport, ...]
    graph_breaks: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites of all graphs."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def memory(self) -> sympy.Expr:
        """Bytes of all caches of the graph that has most of them, in B and S, when S tokens were decoded."""
        caches = max((graph.caches for graph in self.graphs), key=len, default=())
        return sum((cache.formula for cache in caches), sympy.Integer(0))

    @property
    def dense_memory(self) -> sympy.Expr:
        """Bytes of the same caches as dense tensors of the model's dtype."""
        caches = max((graph.caches for graph in self.graphs), key=len, default=())
        return sum((cache.dense_formula for cache in caches), sympy.Integer(0))

    def memory_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of all caches for `batch` sequences of `tokens` tokens."""
        return int(self.memory.subs({BATCH: batch, TOKENS: tokens}))

    def dense_bytes(self, batch: int, tokens: int) -> int:
        """The same for dense caches."""
        return int(self.dense_memory.subs({BATCH: batch, TOKENS: tokens}))

    def to_json(self, indent: int | None = None) -> str:
        """Everything in the report as JSON; formulas as text that sympy reads back."""
        return json.dumps(asdict(self) | {"memory": str(self.memory)}, indent=indent, default=str)

    def print(self, console: Console) -> None:
        """Print the sites of each graph, why and where, the memory, and what the shadow found."""
        for index, graph in enumerate(self.graphs):
            console.print(_site_table(index, graph))
            for line in _places(graph):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if graph.recompiled:
                console.print(f"  traced again: {graph.recompiled}", markup=False, highlight=False, soft_wrap=True)
            if graph.length_free is not None:
                console.print(_length_line(graph), markup=False, highlight=False, soft_wrap=True)
            for choice in graph.engines:
                console.print(f"  prompt, {choice}", markup=False, highlight=False, soft_wrap=True)
            if graph.linears:
                console.print(f"  linears: {graph.linears}", markup=False, highlight=False, soft_wrap=True)
            if graph.rope:
                console.print(f"  rope: {graph.rope}", markup=False, highlight=False, soft_wrap=True)
            for line in _drop_lines(graph):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            for line in graph.cuda_graphs:
                console.print(f"  CUDA graph: {line}", markup=False, highlight=False, soft_wrap=True)
        console.print(_memory_table(self))
        if guard := _guard_line(self):
            console.print(guard, markup=False, highlight=False, soft_wrap=True)
        if any(graph.shadow for graph in self.graphs):
            console.print(_shadow_table(self))
        for index, graph in enumerate(self.graphs):
            for failure in dict.fromkeys(call.failure for call in graph.shadow if call.failure):
                line = f"shadow of graph {index} failed: {failure}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        for reason in self.graph_breaks:
            console.print(f"graph break: {reason}", markup=False, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        self.print(console)
        return console.file.getvalue()  # type: ignore[attr-defined]


def _site_table(index: int, graph: GraphReport) -> Table:
    shared = ", shared with an earlier graph" if graph.inner_shared else ""
    table = Table(title=f"graph {index} (inner compiler: {graph.inner}{shared})", title_justify="left")
    table.add_column("layer", no_wrap=True)
    table.add_column("attention", overflow="fold")
    for column in ("status", "operator", "heads", "mask"):
        table.add_column(column, no_wrap=True)
    for site in graph.sites:
        heads = f"{site.num_q_heads}/{site.num_kv_heads} x {site.head_dim}" if site.num_q_heads else ""
        table.add_row(str(site.layer), site.module, site.status, site.operator or site.reason, heads, site.mask)
    if not graph.sites:
        table.add_row("", "no attention in this graph", "", "", "", "")
    return table


def _places(graph: GraphReport) -> Iterator[str]:
    """Why and where, and what is proven of the mask, once for all layers that share it."""
    layers: dict[tuple[str, str, str, str, str], list[str]] = {}
    for site in graph.sites:
        shared = (site.status, site.reason, site.sentence, site.predicate, site.source)
        layers.setdefault(shared, []).append(str(site.layer))
    for (status, reason, sentence, predicate, source), numbers in layers.items():
        why = f": {reason}: {sentence}" if reason else ""
        proven = f"\n    sees: {predicate}" if predicate else ""
        yield f"  layer {', '.join(numbers)} {status}{why}{proven}\n    {source}"


def _drop_lines(graph: GraphReport) -> Iterator[str]:
    """What is dropped, once for all layers of which the same is said, and how much it was so far."""
    layers: dict[str, list[str]] = {}
    for site in graph.sites:
        if site.drop:
            layers.setdefault(site.drop, []).append(str(site.layer))
    for sentence, numbers in layers.items():
        yield f"  layer {', '.join(dict.fromkeys(numbers))} drop: {sentence}"
    if layers:
        yield f"  pages dropped so far: {sum(graph.dropped.values())}; bytes below are those without any drop"


def _length_line(graph: GraphReport) -> str:
    if graph.length_free:
        return "  the same at every length of its caches"
    return f"  not the same at every length of its caches: {graph.length_reason}"


def _memory_table(report: Report) -> Table:
    table = Table(title="key/value cache, bytes", title_justify="left")
    for column in ("tokens", "dense", "paged", "ratio"):
        table.add_column(column, justify="right")
    for tokens in (1024, 8192, 32768):
        dense, paged = report.dense_bytes(1, tokens), report.memory_bytes(1, tokens)
        table.add_row(f"1 x {tokens}", f"{dense:,}", f"{paged:,}", f"{paged / dense:.3f}" if dense else "-")
    return table


def _guard_line(report: Report) -> str:
    """What is kept in the model's precision whatever the format; "" if nothing is."""
    caches = max((graph.caches for graph in report.graphs), key=len, default=())
    guarded = [cache for cache in caches if cache.layout.is_guarded]
    if not guarded:
        return ""
    tokens, heads = guarded[0].layout.group_size, sum(cache.layout.num_kv_heads for cache in guarded)
    return (
        f"guard: the first {tokens} tokens of each sequence stay in the model's precision ({len(guarded)} layers, one "
        f"group of {heads} K/V heads); gemkv_compile.group_errors(cache) counts the groups that are far off"
    )


def _worst(drifts: Sequence[Drift | None]) -> Drift | None:
    known = [drift for drift in drifts if drift is not None]
    if not known:
        return None
    largest, relative = max(drift.largest for drift in known), max(drift.relative for drift in known)
    return Drift(largest, relative, sum(drift.changed for drift in known), sum(drift.rows for drift in known))


def _shadow_table(report: Report) -> Table:
    title = "shadow: largest difference of the outputs, relative to the largest one, rows with another argmax"
    table = Table(title=title, title_justify="left", min_width=len(title))
    for column in ("graph", "rewrite error", "in calls", "format error", "in calls"):
        table.add_column(column, no_wrap=True)
    for index, graph in enumerate(report.graphs):
        calls = graph.shadow
        columns = ([call.rewrite_error for call in calls], [call.format_error for call in calls])
        cells = [(str(_worst(drifts) or "unknown"), f"{_count(drifts)} of {len(calls)}") for drifts in columns]
        if calls:
            table.add_row(str(index), *cells[0], *cells[1])
    return table


def _count(drifts: Sequence[Drift | None]) -> int:
    return sum(drift is not None for drift in drifts)


def count_by_status(sites: Sequence[Site]) -> dict[str, int]:
    """How many sites have each status."""
    return dict(Counter(site.status for site in sites))


def describe_mask(
    causal: bool, window: int | None, padding: Any, dense: bool, kinds: Sequence[str] | None = None
) -> str:
    """A mask in words: "causal", "causal, window 512, padding", "dense", "dense (causal, documents)", "none"."""
    parts = ["causal"] * causal + [f"window {window}"] * (window is not None) + ["padding"] * (padding is not None)
    words = ", ".join([*parts, *(kinds or ())]) or "none"
    return (f"dense ({words})" if kinds else "dense") if dense else words
