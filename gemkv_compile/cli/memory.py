"""`gemkv memory`: what a cache takes in each format, and what fits on a GPU, without loading weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gemkv_compile.cli.gpus import memory_size
from gemkv_compile.cli.models import named_config
from gemkv_compile.estimate import ModelMemory, estimate, most_that_fits

WINDOWED, UNWINDOWED = "dense, windowed", "dense, no window"
FITS_MORE = "every layer has a window: any length fits"


@dataclass(frozen=True)
class Row:
    """One kind of cache: bytes by part, and in `size` the most bytes on the way to a number of tokens."""

    name: str
    parts: dict[str, int]
    size: Callable[[int, int], int]

    @property
    def total(self) -> int:
        """Bytes of the whole cache."""
        return sum(self.parts.values())


def memory(console: Console, arguments: argparse.Namespace) -> int:
    """Print what a model's cache takes and what fits; returns 0."""
    import torch

    if arguments.plot:
        from gemkv_compile.fidelity.plots import pyplot

        pyplot()  # before the work
    given = memory_size(arguments.gpu_memory) if arguments.gpu_memory else None
    reserve = 0 if arguments.reserve == "0" else memory_size(arguments.reserve)
    config, title = named_config(arguments.model)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else getattr(config, "dtype", None) or torch.bfloat16
    with console.status(f"tracing {title} without weights"):
        model = estimate(config, title, dtype)
    rows = rows_of(model, arguments.batch, arguments.tokens)
    room = None if given is None else given - model.weights - reserve
    result = _about(model, arguments, given, reserve) | {"formats": [_entry(row, arguments, room) for row in rows]}
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print(console, model, result)
    if arguments.plot:
        _plot(rows, result, room, arguments.plot)
        console.print(f"wrote {arguments.plot}", markup=False, soft_wrap=True)
    return 0


def rows_of(model: ModelMemory, batch: int, tokens: int) -> list[Row]:
    """Transformers' dense cache with and without its windows, in the model's dtype; then every format."""
    rows = []
    for name, windowed in ((WINDOWED, True), (UNWINDOWED, False)):
        size = partial(model.dense, windowed=windowed)
        rows.append(Row(name, {"dense": size(batch, tokens)}, size))
    return rows + [Row(each.kv_format, each.parts(batch, tokens), each.peak) for each in model.formats]


def _about(model: ModelMemory, arguments: argparse.Namespace, given: int | None, reserve: int) -> dict[str, Any]:
    windows = sorted({layer.keep + 1 for layer in model.layers if layer.keep is not None})
    kept = {each.kv_format: list(each.reasons) for each in model.formats if each.kept or each.reasons}
    return {
        "model": model.title,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.weights,
        "layers": len(model.layers),
        "windows": windows,
        "positions": model.positions,
        "source": model.source,
        "kept": kept,
        "batch": arguments.batch,
        "tokens": arguments.tokens,
        "gpu_memory": given,
        "reserve": reserve,
    }


def _entry(row: Row, arguments: argparse.Namespace, room: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"format": row.name, "bytes": row.total, "parts": row.parts}
    if room is not None:
        # With weights that do not fit, not even a cache of nothing does.
        entry["most_tokens"] = most_that_fits(lambda t: row.size(arguments.batch, t), room) if room >= 0 else 0
        entry["most_batch"] = most_that_fits(lambda b: row.size(b, arguments.tokens), room) if room >= 0 else 0
    return entry


def _print(console: Console, model: ModelMemory, result: dict[str, Any]) -> None:
    title = f"{model.title}, {result['dtype']}: cache of {result['batch']} x {result['tokens']:,} tokens, MiB"
    table = Table(title=title, title_justify="left", min_width=len(title))
    entries = result["formats"]
    table.add_column("", no_wrap=True)
    for entry in entries:
        table.add_column(entry["format"], justify="right")
    table.add_row("all", *(f"{entry['bytes'] / 2**20:,.1f}" for entry in entries))
    table.add_row(
        "ratio", *(f"{entry['bytes'] / max(1, entries[0]['bytes']):.3f}" for entry in entries), end_section=True
    )
    for part in dict.fromkeys(part for entry in entries for part in entry["parts"]):
        sizes = (f"{entry['parts'][part] / 2**20:,.1f}" if part in entry["parts"] else "" for entry in entries)
        table.add_row(part, *sizes)
    console.print(table)
    if result["gpu_memory"] is not None:
        console.print(_fits(result))
    for note in _notes(model, result):
        console.print(note, markup=False, soft_wrap=True, highlight=False)


def _fits(result: dict[str, Any]) -> Table:
    title = f"fits in {result['gpu_memory'] / 2**30:,.1f} GiB beside {result['weights'] / 2**30:,.2f} GiB of weights"
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column("format", no_wrap=True)
    for column in (f"most tokens, batch {result['batch']}", f"largest batch, {result['tokens']:,} tokens"):
        table.add_column(column, justify="right")
    for entry in result["formats"]:
        both = (entry["most_tokens"], entry["most_batch"])
        table.add_row(entry["format"], *("any" if most is None else f"{most:,}" for most in both))
    return table


def _notes(model: ModelMemory, result: dict[str, Any]) -> list[str]:
    windows = f", windows {', '.join(map(str, result['windows']))}" if result["windows"] else ""
    notes = [
        f"{result['layers']} layers with keys and values{windows}; weights {model.weights:,} bytes, {result['dtype']}."
    ]
    if model.source == "trace":
        notes.append("Layers are from a trace of the model without weights, judged by the passes of a compile.")
    else:
        notes.append(
            f"No trace: layers are read from the config, which is a guess at what a compile does ({model.source})."
        )
    for name, reasons in result["kept"].items():
        notes.append(f"{name}: some layers stay dense: {'; '.join(reasons) or 'no attention was found to read them'}")
    if result["gpu_memory"] is not None:
        notes.append("Activations and CUDA's own memory come on top: leave room for them with --reserve.")
        if any(entry["most_tokens"] is None for entry in result["formats"]):
            notes.append(f'"any": {FITS_MORE}.')
        if model.positions:
            notes.append(f"The config names {model.positions:,} positions.")
    return notes


def _plot(rows: list[Row], result: dict[str, Any], room: int | None, path: Path) -> None:
    """Bytes of each kind of cache by tokens, to four times the tokens asked for."""
    from gemkv_compile.fidelity.plots import pyplot

    figure, axes = pyplot().subplots(figsize=(7, 4))
    steps = sorted({max(1, result["tokens"] * 4 * i // 128) for i in range(129)})
    for row in rows:
        axes.plot(steps, [row.size(result["batch"], step) / 2**30 for step in steps], label=row.name)
    if room is not None and room > 0:
        axes.axhline(room / 2**30, color="black", linestyle=":", label="left beside the weights")
    axes.set(xlabel="tokens of each sequence", ylabel="GiB", title=f"{result['model']}: cache, batch {result['batch']}")
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot().close(figure)
