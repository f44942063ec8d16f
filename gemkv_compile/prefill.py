"""Which engine attends to the prompts of a graph: measured where nothing is known yet, and told to the report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch.fx import Graph

from gemkv_compile.compat import shape_env_of, size_hints
from gemkv_compile.kernels.engines.choice import choose, usable_engines
from gemkv_compile.kernels.engines.engine import OWN, Place, Prompt
from gemkv_compile.kernels.engines.measure import measure
from gemkv_compile.kernels.engines.registry import AUTO, ENGINES, device_kinds
from gemkv_compile.kernels.engines.times import bucket_of, known_times
from gemkv_compile.passes.decide import Read, Rewrite
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.prompts import Prefill, starts_empty, takes_engine, why_no_prompt
from gemkv_compile.passes.site_reports import layer_number
from gemkv_compile.report_parts import EngineChoice

log = logging.getLogger(__name__)
STORED = "tokens may be stored before its own"
UNLESS = "; triton where the padding mask hides a token"
LONGEST = 1 << 20  # tokens of the longest bucket that a report looks at
WORTH_TIMING = 1 << 10  # tokens of the shortest prompt that engines are timed for
MOST_TIMED = 1 << 15


def prefill_of(option: str) -> Prefill:
    """What the passes need of the option `prefill`."""
    return Prefill(option, frozenset() if option == OWN else device_kinds(option))


def class_of(rewrite: Rewrite, read: Read) -> Prompt:
    """The class of an attention's prompts."""
    layout = rewrite.layout
    groups = int(value_of(read.attention.query).shape[1]) // layout.num_kv_heads
    return Prompt(layout.model_dtype, layout.head_dim, groups, read.causal, read.window, read.attention.softcap)


def learn(rewrites: Sequence[Rewrite], prefill: Prefill) -> None:
    """Time the engines for classes of prompts of which no times are known, at the traced length; once, then kept.

    A failure costs nothing but the times: this package's kernel attends then.
    """
    if prefill.option != AUTO:
        return
    seen = dict.fromkeys(
        (class_of(rewrite, read).at(tokens), bucket_of(tokens), rewrite.device, rewrite.layout.num_kv_heads)
        for rewrite in rewrites
        for read in rewrite.reads
        if takes_engine(rewrite, read, prefill)
        and starts_empty(rewrite.cache)
        and (tokens := _traced_tokens(read)) >= WORTH_TIMING
    )
    for prompt, bucket, device, kv_heads in seen:
        if known_times(prompt, bucket, Place.of(device)) is not None or not usable_engines(prompt, device):
            continue
        try:
            us = measure(prompt, min(bucket, MOST_TIMED), device, kv_heads)
            log.info("gemkv: timed engines for %s at %d tokens: %s us", prompt, min(bucket, MOST_TIMED), us)
        except (RuntimeError, OSError) as error:  # no memory, or a folder that cannot be written
            log.warning("gemkv: engines were not timed (%s: %s); gemkv's kernel attends.", type(error).__name__, error)


def choices_of(graph: Graph, rewrites: Sequence[Rewrite], prefill: Prefill) -> tuple[EngineChoice, ...]:
    """Who attends to prompts, by layers and length; nothing where the option cannot bring in another engine."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    reads = [(rewrite, read) for rewrite in rewrites for read in rewrite.reads if not rewrite.is_decode]
    reads.sort(key=lambda pair: order[pair[1].attention.node])
    layers: dict[tuple[EngineChoice, ...], list[int]] = {}
    for position, (rewrite, read) in enumerate(reads):
        if prefill.option == OWN or (prefill.option == AUTO and rewrite.device.type not in prefill.kinds):
            continue
        why = why_no_prompt(rewrite, read) or ("" if starts_empty(rewrite.cache) else STORED)
        found = (EngineChoice((), OWN, None, None, why),) if why else tuple(_by_length(rewrite, read, prefill.option))
        layers.setdefault(found, []).append(layer_number(read.attention.node, position))
    return tuple(
        EngineChoice(tuple(numbers), each.engine, each.shortest, each.longest, each.why)
        for found, numbers in layers.items()
        for each in found
    )


def _by_length(rewrite: Rewrite, read: Read, option: str) -> Iterator[EngineChoice]:
    prompt = class_of(rewrite, read)
    buckets = [1 << i for i in range(LONGEST.bit_length())]
    chosen = [(bucket, choose(option, prompt, bucket, rewrite.device)) for bucket in buckets]
    for choice, same in groupby(chosen, key=lambda pair: pair[1]):
        first, *_, last = [bucket for bucket, _ in same] * 2
        shortest, longest = (None if first == 1 else first), (None if last == LONGEST else 2 * last - 1)
        pads = choice.engine == OWN or ENGINES[choice.engine].takes_padding
        but = "" if read.padding is None or pads else UNLESS
        yield EngineChoice((), choice.engine, shortest, longest, choice.why + but)


def _traced_tokens(read: Read) -> int:
    """How many tokens the traced call had."""
    tokens = value_of(read.attention.query).shape[2]
    if isinstance(tokens, int):
        return tokens
    hints = size_hints(shape_env_of(tokens))
    value = tokens.node.expr.subs(hints)
    return int(value) if value.is_Integer else 0
