"""Plots of a fidelity run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gemkv_compile.errors import GemkvError
from gemkv_compile.fidelity.formats import REFERENCE
from gemkv_compile.fidelity.result import NeedleCell, Result

INSTALL_HINT = "Plots need matplotlib: pip install 'gemkv-compile[report]'"


def pyplot() -> Any:
    """Matplotlib for files.

    Raises:
        GemkvError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise GemkvError(INSTALL_HINT) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_plots(result: Result, folder: Path) -> list[Path]:
    """Write divergence.png and positions.png, and needles.png if there are any; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"divergence": _divergence(result), "positions": _positions(result)}
    if result.needles:
        figures["needles"] = _needles(result.needles)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150, bbox_inches="tight")
        pyplot().close(figure)
    return paths


def _divergence(result: Result) -> Any:
    """KL with its interval, by prompt length and format."""
    figure, axes = pyplot().subplots(figsize=(7, 3.5))
    labels = list(dict.fromkeys(row.prompt for row in result.rows))
    for shift, name in enumerate(name for name in result.curves if name != REFERENCE):
        rows = [row for row in result.rows if row.format == name]
        values = np.array([(row.kl.value, row.kl.low, row.kl.high) for row in rows]) * 1e6
        where = np.array([labels.index(row.prompt) for row in rows]) + 0.12 * shift
        reach = np.abs(values[:, 1:] - values[:, :1]).T
        axes.errorbar(where, values[:, 0], reach, fmt="o", capsize=3, label=name)
    axes.set_xticks(range(len(labels)), ["all" if prompt is None else str(prompt) for prompt in labels])
    axes.set(xlabel="prompt (tokens)", ylabel="KL from the reference (1e-6 nats a token)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{result.about['model']}: divergence while decoding, 95% intervals")
    axes.legend()
    return figure


def _positions(result: Result) -> Any:
    """KL by position in the window."""
    figure, axes = pyplot().subplots(figsize=(7, 3.5))
    for name, curve in result.curves.items():
        if name != REFERENCE:
            axes.plot([start for start, _ in curve], [1e6 * kl for _, kl in curve], label=name)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="position (tokens)", ylabel="KL from the reference (1e-6 nats a token)")
    axes.set_title(f"{result.about['model']}: divergence by position")
    axes.legend()
    return figure


def _needles(cells: tuple[NeedleCell, ...]) -> Any:
    """Share of needles found, by length and depth; one picture a format."""
    names, lengths, depths = (sorted({getattr(c, k) for c in cells}) for k in ("format", "length", "depth"))
    names.sort(key=lambda name: name != REFERENCE)
    figure, all_axes = pyplot().subplots(1, len(names), figsize=(3.2 * len(names), 2.8), squeeze=False, sharey=True)
    for axes, name in zip(all_axes[0], names, strict=True):
        share = {(c.length, c.depth): c.found / c.asked for c in cells if c.format == name}
        grid = [[share.get((length, depth), np.nan) for depth in depths] for length in lengths]
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_yticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set(title=name, xlabel="depth")
    all_axes[0][0].set_ylabel("context (tokens)")
    figure.colorbar(image, ax=all_axes[0].tolist(), label="needles found")
    return figure
