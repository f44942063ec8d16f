"""`gemkv demo`: one prompt on a real model, eager beside gemkv."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gemkv_compile.cli.models import demo_model
from gemkv_compile.options import Options


@dataclass(frozen=True)
class Run:
    """What one generation gave."""

    text: str
    first_token: float  # seconds from the call on
    tokens_per_second: float  # after the first
    kv_bytes: int


class Clock:
    """A Transformers streamer that notes when each token arrives."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, _: Any) -> None:
        """Called with the prompt, then with each token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def demo(console: Console, prompt: str | None, tokens: int, kv_format: str) -> int:
    """Generate with the eager model and with the compiled one; print both, the verdicts and the bytes."""
    import torch

    from gemkv_compile.backend import Backend
    from gemkv_compile.report import Report

    options = Options(kv_format=kv_format)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("loading the model (the first time it is decoded, about a minute)", total=None)
        model, tokenizer, name = demo_model(torch.bfloat16)
        ids = tokenizer(prompt or default_prompt(), return_tensors="pt")["input_ids"][:, -1024:]
        progress.update(task, description=f"{name}: eager")
        eager = _generate(model, tokenizer, ids, tokens)
        backend = Backend(options)
        model.compile(backend=backend)
        progress.update(task, description=f"{name}: gemkv, first call (compiles)")
        first = _generate(model, tokenizer, ids, tokens)
        progress.update(task, description=f"{name}: gemkv")
        paged = _generate(model, tokenizer, ids, tokens)
    title = f"{name} in bfloat16, {ids.shape[1]} prompt tokens, {tokens} new ones"
    console.print(_comparison(title, eager, first, paged, kv_format))
    console.print(
        "On a CPU the gain is memory: the operators run as plain PyTorch here, and are no faster than eager attention."
    )
    report = Report(tuple(backend.graphs))
    console.print(_verdicts(report))
    console.print(_longer(report, kv_format))
    return 0


def default_prompt() -> str:
    """A page of English prose that every Python installation has."""
    from pydoc_data.topics import topics

    return topics["objects"][:3500].rpartition(".")[0] + "."


def _generate(model: Any, tokenizer: Any, ids: Any, tokens: int) -> Run:
    import torch

    from gemkv_compile.runtime.ledger import kv_memory

    clock = Clock()
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            streamer=clock,
        )
    text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    begin, _, first, *later = clock.times
    rate = len(later) / (later[-1] - first) if later else float("nan")
    return Run(text, first - begin, rate, kv_memory(out.past_key_values).total)


def _comparison(title: str, eager: Run, first: Run, paged: Run, kv_format: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "eager", f"gemkv ({kv_format})"):
        table.add_column(column, overflow="fold")
    table.add_row("continuation", eager.text, paged.text)
    table.add_row(
        "key/value bytes", f"{eager.kv_bytes:,}", f"{paged.kv_bytes:,} ({paged.kv_bytes / eager.kv_bytes:.2f}x)"
    )
    table.add_row("first token", f"{eager.first_token:.1f} s", f"{paged.first_token:.1f} s")
    table.add_row("then tokens/s", f"{eager.tokens_per_second:.1f}", f"{paged.tokens_per_second:.1f}")
    table.add_row("first call", "", f"{first.first_token:.0f} s to the first token (compiles)")
    return table


def _longer(report: Any, kv_format: str) -> Table:
    """Bytes of one sequence's cache at lengths that would take a CPU too long, by the report's formulas."""
    table = Table(title="key/value bytes at other lengths (exact, by formula)", title_justify="left")
    for column in ("tokens", "dense", f"gemkv ({kv_format})", "ratio"):
        table.add_column(column, justify="right")
    for tokens in (2048, 8192, 32768, 131072):
        dense, paged = report.dense_bytes(1, tokens), report.memory_bytes(1, tokens)
        table.add_row(f"{tokens:,}", f"{dense:,}", f"{paged:,}", f"{paged / dense:.2f}")
    return table


def _verdicts(report: Any) -> Table:
    """One line per layer: what happened to it in prefill and in decode."""
    table = Table(title="verdict per layer", title_justify="left")
    for column in ("layer", "prefill", "decode"):
        table.add_column(column)
    layers: dict[int, dict[str, str]] = {}
    for site in report.sites:
        phase = "decode" if site.operator == "attend_pages" else "prefill"
        text = f"{site.status}: {site.mask}" if site.status == "rewritten" else f"kept: {site.reason}"
        layers.setdefault(site.layer, {})[phase] = text
    for layer, phases in sorted(layers.items()):
        table.add_row(str(layer), phases.get("prefill", ""), phases.get("decode", ""))
    return table
