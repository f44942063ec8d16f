"""What `gemkv eval` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

FEW_BLOCKS = 20
CAPTION = "decoded tokens only; below each value its 95% interval"


def text_table(result: Any) -> Table:
    """Perplexity, divergence and disagreement by prompt length and format, with 95% intervals; 80 columns."""
    about = result.about
    title = f"{about['model']} in {about['dtype']}, {about['path']} path, windows of {about['windows']:,} tokens"
    table = Table(
        title=title, title_justify="left", caption=CAPTION, caption_justify="left", box=SIMPLE, pad_edge=False
    )
    table.add_column("", no_wrap=True)
    for column in ("perplexity", "change, %", "KL, 1e-6 nat", "new top-1, %"):
        table.add_column(column, justify="right", no_wrap=True)
    before = object()
    for row in result.rows:
        if row.prompt != before:
            table.add_section()
            name = "all prompts" if row.prompt is None else f"prompt {row.prompt}"
            table.add_row(f"[bold]{name}[/bold]", f"{row.tokens:,} tokens")
            before = row.prompt
        table.add_row(*_text_cells(row, row.format == about["formats"][0]))
    return table


def _text_cells(row: Any, is_reference: bool) -> Iterator[str]:
    yield row.format
    yield _interval(row.perplexity, "{:.2f}".format)
    if not is_reference:
        yield _interval(row.ratio, lambda ratio: f"{100 * (ratio - 1):+.2f}")
        yield _interval(row.kl, lambda kl: f"{kl * 1e6:.3g}")
        yield _interval(row.differs, lambda share: f"{100 * share:.2f}")


def needle_table(result: Any) -> Table:
    """Share of needles found, by length, format and depth."""
    from gemkv_compile.fidelity.result import found_in_all

    depths = sorted({cell.depth for cell in result.needles})
    table = Table(title="needles found, by depth in the context", title_justify="left", box=SIMPLE)
    for column in ("context", "format"):
        table.add_column(column)
    for depth in depths:
        table.add_column(f"{depth:.0%}", justify="right")
    cells = {(cell.length, cell.format, cell.depth): cell for cell in result.needles}
    for length in sorted({cell.length for cell in result.needles}):
        table.add_section()
        for name in result.about["formats"]:
            row = [cells[length, name, depth] for depth in depths]
            table.add_row(f"{length:,}", name, *(f"{cell.found}/{cell.asked}" for cell in row))
    table.add_section()
    for name in result.about["formats"]:
        table.add_row("all", name, *_interval(found_in_all(result.needles, name), "{:.0%}".format).split("\n"))
    return table


def notes(result: Any) -> Iterator[str]:
    """What a reader of the tables has to know."""
    floor = result.about["formats"][1]
    yield f"Noise floor: {floor!r}. Divergence is KL(reference || format); the reference keeps exact keys and values."
    blocks = min(row.blocks for row in result.rows)
    if blocks < FEW_BLOCKS:
        yield f"Some rows have as few as {blocks} block(s) of tokens: too narrow intervals. Use more --tokens."
    yield f"Took {result.about['seconds']:,.0f} s."


def _interval(estimate: Any, show: Callable[[float], str]) -> str:
    return f"{show(estimate.value)}\n\\[{show(estimate.low)}, {show(estimate.high)}]"
