"""The torch.compile backend: one compile, stage by stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from gemkv_compile.errors import StrictError
from gemkv_compile.inner import choose_inner, shared_compiles
from gemkv_compile.memory_formula import dense_bytes, paged_bytes
from gemkv_compile.options import Options
from gemkv_compile.passes.canonicalise import canonicalise
from gemkv_compile.passes.decide import Facts, Rewrite, decide
from gemkv_compile.passes.find_attention import find_attention
from gemkv_compile.passes.find_updates import find_updates
from gemkv_compile.passes.printing import format_graph
from gemkv_compile.passes.rewrite import rewrite_graph
from gemkv_compile.passes.site_reports import describe_sites
from gemkv_compile.progress import progress_line
from gemkv_compile.report import CacheMemory, GraphReport, Report, Site
from gemkv_compile.runtime.executable import Executable

log = logging.getLogger(__name__)
RECOMPILE_LIMIT = 64


def gemkv(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend "gemkv" of torch.compile.

    Args:
        gm: Dynamo's graph; it is not changed.
        example_inputs: Its inputs, fake tensors and SymInts.
        mode: A mode of Inductor, which then is the inner compiler.
        options: See `Options`.
    Raises:
        InvalidOption: an option is unknown or has a value that this version does not have.
        StrictError: strict is set and an attention is kept.
    """
    return Backend(Options.from_mapping(options), mode)(gm, example_inputs)


class Backend:
    """The backend with its options, for torch.compile(backend=...); keeps the reports of what it compiled."""

    def __init__(self, options: Options, mode: str | None = None) -> None:
        self.options = options
        self.mode = mode
        self.graphs: list[GraphReport] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph."""
        raise_recompile_limit()
        with progress_line(f"compiling a graph of {len(gm.graph.nodes)} nodes"):
            compiled, report = compile_graph(gm, example_inputs, self.options, self.mode)
        self.graphs.append(report)
        return compiled


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None = None
) -> tuple[Callable[..., Any], GraphReport]:
    """Run all stages on one graph; returns what to call, and the report."""
    clock = _Clock()
    with clock("canonicalise"):
        module, canonical = canonicalise(gm)
    with clock("find attention"):
        attentions = find_attention(module.graph)
    with clock("find updates"):
        updates = find_updates(module.graph, attentions.found, [node for node, _ in attentions.refused])
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    facts = Facts(options.kv_format, options.group_size, options.page_size, canonical.handle_inputs)
    with clock("prove and decide"):
        verdicts = decide(updates.caches, placeholders, facts)
    sites = describe_sites(module.graph, verdicts, attentions, updates)
    if options.strict:
        _enforce_strict(sites)
    before = format_graph(module.graph)
    inner = choose_inner(options.inner, mode, example_inputs)
    if not verdicts.rewrites and not canonical.handle_inputs:
        with clock("inner compile"):
            compiled = inner.compile(gm, example_inputs)
        return compiled, GraphReport(sites, (), before, before, inner.name, False, clock.seconds)
    with clock("rewrite"):
        rewritten = rewrite_graph(module, verdicts.rewrites, options.pool_bytes)
    with clock("inner compile"):
        compiled, shared = shared_compiles.compile(inner, module, rewritten.example_inputs)
    after, memory = format_graph(module.graph), _memory(verdicts.rewrites)
    report = GraphReport(sites, memory, before, after, inner.name, shared, clock.seconds)
    return Executable(compiled, gm, rewritten.plan), report


def _memory(rewrites: Sequence[Rewrite]) -> tuple[CacheMemory, ...]:
    layouts = [(rewrite.layout, rewrite.keep) for rewrite in rewrites]
    return tuple(
        CacheMemory(i, layout.kv_format, layout.page_size, keep, paged_bytes(layout, keep), dense_bytes(layout, keep))
        for i, (layout, keep) in enumerate(layouts)
    )


def _enforce_strict(sites: Sequence[Site]) -> None:
    kept = [site for site in sites if site.status == "kept"]
    if kept:
        report = GraphReport(tuple(sites), (), "", "", "not reached", False)
        raise StrictError(f"strict=True, and {len(kept)} of {len(sites)} attentions are kept:\n{Report((report,))}")


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - begin


def raise_recompile_limit() -> None:
    """Let Dynamo keep as many graphs as a cache that grows needs; said once."""
    if torch._dynamo.config.recompile_limit < RECOMPILE_LIMIT:
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        log.info("gemkv: torch._dynamo.config.recompile_limit is now %d", RECOMPILE_LIMIT)
