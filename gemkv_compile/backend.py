"""The torch.compile backend: one compile, stage by stage."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemkv_compile.compat import (
    graph_break_counts,
    on_generate_of_optimized_module,
    recompile_reason,
)
from gemkv_compile.compat_flex import inline_create_block_mask, keep_attributes_after_subgraphs
from gemkv_compile.errors import GemkvError, RewriteFailed, StrictError, UncompiledGenerate
from gemkv_compile.inner import InnerCompiler, InnerGraph, by_layers, choose_inner, shared_compiles
from gemkv_compile.memory_formula import CacheMemory
from gemkv_compile.options import Options
from gemkv_compile.passes.boundaries import Boundaries, Break, boundaries_of
from gemkv_compile.passes.canonicalise import canonicalise
from gemkv_compile.passes.decide import Facts, Rewrite, decide
from gemkv_compile.passes.dropping import DropFacts
from gemkv_compile.passes.few_rows import LinearsReport, fuse_linears
from gemkv_compile.passes.find_attention import find_attention
from gemkv_compile.passes.find_updates import find_updates
from gemkv_compile.passes.length_free import LengthReport, prove_length_free
from gemkv_compile.passes.printing import format_graph
from gemkv_compile.passes.rewrite import rewrite_graph
from gemkv_compile.passes.rope import RopeReport, fuse_rope
from gemkv_compile.passes.site_reports import describe_sites
from gemkv_compile.plan import CallPlan
from gemkv_compile.prefill import choices_of, learn, prefill_of
from gemkv_compile.progress import Clock, progress_line
from gemkv_compile.report import GraphReport, Report, Site
from gemkv_compile.report_parts import Drift, EngineChoice, ShadowedCall
from gemkv_compile.runtime.drift import Figures
from gemkv_compile.runtime.dropping import Dropper
from gemkv_compile.runtime.executable import Executable
from gemkv_compile.runtime.recording import RECORDERS
from gemkv_compile.runtime.shadow import Shadowed
from gemkv_compile.runtime.step_graphs import StepGraphs

log = logging.getLogger(__name__)
RECOMPILE_LIMIT = 64
ON_META = "none: without values the graph runs as it was"


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
        self.breaks: list[Break] = []  # which ended a graph of these
        self.counted_before = dict(graph_break_counts())

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph."""
        raise_recompile_limit()
        boundaries = boundaries_of(gm, self.breaks)
        if boundaries.after is not None and boundaries.after not in self.breaks:
            self.breaks.append(boundaries.after)
        with progress_line(f"compiling a graph of {len(gm.graph.nodes)} nodes"):
            compiled, report = compile_graph(gm, example_inputs, self.options, self.mode, boundaries)
        self.graphs.append(report)
        return compiled


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    mode: str | None = None,
    boundaries: Boundaries | None = None,
) -> tuple[Callable[..., Any], GraphReport]:
    """Run all stages on one graph; returns what to call, and the report.

    A graph on the meta device is judged, and runs as it was: there are no values to store.
    """
    clock = Clock()
    inner = choose_inner(options.inner, mode, example_inputs)
    try:
        found = _rewrite(gm, options, clock, boundaries or boundaries_of(gm, ()))
    except GemkvError:
        raise
    except Exception as error:
        if options.strict:
            raise
        warnings.warn(RewriteFailed(error), stacklevel=2)
        return _as_it_was(gm, inner, example_inputs, error, clock)
    if found.plan is None:
        with clock("inner compile"):
            compiled = inner.compile(gm, example_inputs)
        seconds, text = clock.seconds, found.before
        report = GraphReport(found.sites, (), text, text, inner.name, False, seconds, recompiled=recompile_reason())
        return compiled, report
    if found.plan.tables and all(table.device.type == "meta" for table in found.plan.tables):
        return gm.forward, GraphReport(found.sites, found.memory, found.before, "", ON_META, False, clock.seconds)
    if options.split_layers and inner.name == "inductor":
        inner = by_layers(inner)
    with clock("inner compile"):
        rewritten = shared_compiles.compile(inner, found.module, found.example_inputs)
    with clock("describe"):
        after = format_graph(found.module.graph)
    length = found.length
    report = GraphReport(
        found.sites,
        found.memory,
        found.before,
        after,
        inner.name,
        rewritten.is_shared,
        clock.seconds,
        recompiled=recompile_reason(),
        length_free=None if length is None else length.is_free,
        length_reason="" if length is None or length.is_free else f"{length.sentence} {length.source}".strip(),
        engines=found.engines,
        linears="" if found.linears is None else str(found.linears),
        rope="" if found.rope is None else str(found.rope),
    )
    steps = _step_graphs(rewritten, found, options, report)
    executable = Executable(rewritten.call, gm, found.plan, steps, _dropper(options, found.plan, report))
    if not options.shadow or not found.plan.tables:
        return executable, report
    if any(table.buffer is not None for table in found.plan.tables):
        report.shadow.append(
            ShadowedCall(None, None, "a static cache is written in place, which the shadow does not cover")
        )
        return executable, report
    return Shadowed(executable, gm, found.plan, options.shadow, _Recorder(report, found.plan)), report


def _step_graphs(compiled: InnerGraph, found: _Rewritten, options: Options, report: GraphReport) -> StepGraphs | None:
    """What runs the decode steps of a graph as CUDA graphs; None if there is nothing to run so, or they cannot be."""
    if not options.cuda_graphs or found.plan is None or found.length is None:
        return None
    if any(table.device.type not in RECORDERS for table in found.plan.tables):
        return None
    if not found.length.is_free:
        report.cuda_graphs.append("not captured: not the same at every length of its caches")
        return None
    return StepGraphs(compiled.call, found.plan, compiled.captures, report.cuda_graphs.append)


def _drop_facts(options: Options) -> DropFacts | None:
    policy = options.drop
    return None if policy is None else DropFacts(repr(policy), policy.observes, policy.decodes, policy.windowed)


def _dropper(options: Options, plan: CallPlan, report: GraphReport) -> Dropper | None:
    """What asks the policy of the options about a graph's caches; None if it is asked about none of them."""
    if options.drop is None or not any(table.drops for table in plan.tables):
        return None

    def tell(number: int, pages: int) -> None:
        report.dropped[number] = report.dropped.get(number, 0) + pages

    return Dropper(options.drop, plan, tell)


class _Recorder:
    """Puts what the shadow finds into a graph's report, and warns once if rounding does not explain it."""

    def __init__(self, report: GraphReport, plan: CallPlan) -> None:
        self._report = report
        self._digits = max(torch.finfo(table.layout.model_dtype).eps for table in plan.tables) ** 0.5
        self._warned = False

    def __call__(self, rewrite_error: Figures | None, format_error: Figures | None, failure: str) -> None:
        rewrite, of_format = (None if each is None else Drift(*each) for each in (rewrite_error, format_error))
        self._report.shadow.append(ShadowedCall(rewrite, of_format, failure))
        log.info("gemkv: shadowed call: rewrite error %s; format error %s", rewrite, of_format)
        if rewrite is not None and rewrite.relative > self._digits and not self._warned:
            self._warned = True
            log.warning(
                "gemkv: a rewritten graph differs from the graph as it was, on the same cache, by %.1e of its largest "
                "output; rounding explains up to %.1e. This is an error of gemkv, or of another compiler given as "
                "`inner`: please report it, with print(gemkv_compile.report_of(model)).",
                rewrite.relative,
                self._digits,
            )


@dataclass(frozen=True)
class _Rewritten:
    """What the passes make of a graph; the plan is None if it can run as it was."""

    module: GraphModule
    sites: tuple[Site, ...]
    before: str
    memory: tuple[CacheMemory, ...] = ()
    example_inputs: tuple[Any, ...] = ()
    plan: CallPlan | None = None
    length: LengthReport | None = None
    engines: tuple[EngineChoice, ...] = ()
    linears: LinearsReport | None = None
    rope: RopeReport | None = None


def _rewrite(gm: GraphModule, options: Options, clock: Clock, boundaries: Boundaries) -> _Rewritten:
    """All passes, in order."""
    with clock("canonicalise"):
        module, canonical = canonicalise(gm)
    with clock("describe"):
        before = format_graph(module.graph)
    with clock("find attention"):
        attentions = find_attention(module.graph)
    with clock("find updates"):
        updates = find_updates(module.graph, attentions.found, [node for node, _ in attentions.refused])
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    facts = Facts(
        options.kv_format, options.group_size, options.page_size, canonical.handle_inputs, _drop_facts(options)
    )
    with clock("prove and decide"):
        verdicts = decide(updates.caches, placeholders, facts)
    prefill = prefill_of(options.prefill)
    with clock("describe"):
        sites = describe_sites(module.graph, verdicts, attentions, updates, boundaries, prefill)
    if options.strict:
        _enforce_strict(sites)
    if not verdicts.rewrites and not canonical.handle_inputs:
        return _Rewritten(module, sites, before)
    with clock("choose engines"):
        learn(verdicts.rewrites, prefill)
        engines = choices_of(module.graph, verdicts.rewrites, prefill)
    with clock("rewrite"):
        rewritten = rewrite_graph(module, verdicts.rewrites, options.pool_bytes, prefill)
    with clock("length free"):
        length = prove_length_free(module.graph, verdicts.rewrites, rewritten.plan.inputs)
    with clock("few rows"):
        linears = fuse_linears(module) if options.fuse_linears else None
    with clock("rope"):
        rope = fuse_rope(module) if options.fuse_rope else None
    with clock("describe"):
        memory = _memory(verdicts.rewrites)
    plan, examples = rewritten.plan, rewritten.example_inputs
    return _Rewritten(module, sites, before, memory, examples, plan, length, engines, linears, rope)


def _as_it_was(
    gm: GraphModule, inner: InnerCompiler, example_inputs: Sequence[Any], error: Exception, clock: Clock
) -> tuple[Callable[..., Any], GraphReport]:
    """The graph without any rewriting; where it is given cache handles, run node by node, as other compilers refuse."""
    takes_handles = any(is_traceable_wrapper_subclass(value) for value in example_inputs)
    compiled = gm.forward if takes_handles else inner.compile(gm, example_inputs)
    text = format_graph(gm.graph)
    site = Site(0, "", "kept", "internal_error", f"{type(error).__name__}: {error}", "")
    return compiled, GraphReport((site,), (), text, text, inner.name, False, clock.seconds)


def _memory(rewrites: Sequence[Rewrite]) -> tuple[CacheMemory, ...]:
    return tuple(CacheMemory.of(i, rewrite.layout, rewrite.keep) for i, rewrite in enumerate(rewrites))


def _enforce_strict(sites: Sequence[Site]) -> None:
    kept = [site for site in sites if site.status == "kept"]
    if kept:
        report = GraphReport(tuple(sites), (), "", "", "not reached", False)
        raise StrictError(f"strict=True, and {len(kept)} of {len(sites)} attentions are kept:\n{Report((report,))}")


def raise_recompile_limit() -> None:
    """Let Dynamo keep as many graphs as a cache that grows needs; said once."""
    if torch._dynamo.config.recompile_limit < RECOMPILE_LIMIT:
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        log.info("gemkv: torch._dynamo.config.recompile_limit is now %d", RECOMPILE_LIMIT)


def _is_ours(backend: Any) -> bool:
    return backend is gemkv or isinstance(backend, Backend)


# torch.compile imports this file when the backend is named, before anything is traced and anybody can call generate.
inline_create_block_mask()
keep_attributes_after_subgraphs()
on_generate_of_optimized_module(_is_ours, lambda: warnings.warn(UncompiledGenerate(), stacklevel=4))
