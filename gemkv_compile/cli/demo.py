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
    seconds: float
    tokens: int
    kv_bytes: int
    cached: int


def demo(console: Console, prompt: str | None, tokens: int, kv_format: str) -> int:
    """Generate with the eager model and with the compiled one; print both, the verdicts and the bytes."""
    import torch

    from gemkv_compile.backend import Backend
    from gemkv_compile.report import Report

    options = Options(kv_format=kv_format)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("loading the model (the first time it is decoded, about a minute)", total=None)
        model, tokenizer, name = demo_model(torch.float32)
        ids = tokenizer(prompt or default_prompt(), return_tensors="pt")["input_ids"][:, -1024:]
        progress.update(task, description=f"{name}: eager")
        eager = _generate(model, tokenizer, ids, tokens)
        backend = Backend(options)
        model.compile(backend=backend)
        progress.update(task, description=f"{name}: gemkv, first call (compiles)")
        first = _generate(model, tokenizer, ids, tokens)
        progress.update(task, description=f"{name}: gemkv")
        paged = _generate(model, tokenizer, ids, tokens)
    _print_runs(console, name, ids.shape[1], eager, first, paged, kv_format)
    console.print(_verdicts(Report(tuple(backend.graphs))))
    return 0


def default_prompt() -> str:
    """A page of English prose that every Python installation has."""
    from pydoc_data.topics import topics

    return topics["objects"][:3500]


def _generate(model: Any, tokenizer: Any, ids: Any, tokens: int) -> Run:
    import torch

    from gemkv_compile.runtime.ledger import kv_memory

    with torch.no_grad():
        begin = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        seconds = time.perf_counter() - begin
    text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    return Run(text, seconds, tokens, kv_memory(out.past_key_values).total, out.sequences.shape[1] - 1)


def _print_runs(
    console: Console, name: str, prompt_tokens: int, eager: Run, first: Run, paged: Run, kv_format: str
) -> None:
    table = Table(title=f"{name}, {prompt_tokens} prompt tokens, {paged.tokens} new ones", title_justify="left")
    for column in ("", "eager", f"gemkv ({kv_format})"):
        table.add_column(column, overflow="fold")
    table.add_row("continuation", eager.text, paged.text)
    table.add_row(
        "key/value bytes", f"{eager.kv_bytes:,}", f"{paged.kv_bytes:,} ({paged.kv_bytes / eager.kv_bytes:.2f}x)"
    )
    table.add_row("tokens/s", f"{eager.tokens / eager.seconds:.1f}", f"{paged.tokens / paged.seconds:.1f}")
    table.add_row("first call", "", f"{first.seconds:.0f} s (compiles)")
    console.print(table)
    console.print(
        "On a CPU the gain is memory: the operators run as plain PyTorch here, and are slower than eager attention. "
        "The model computes in float32, so its dense cache is float32 as well."
    )


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
