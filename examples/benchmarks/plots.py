"""Plots of the README from results/*.json: `python plots.py` writes docs/plots/*.svg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from tables import MODES

HERE = Path(__file__).parent
PLOTS = HERE.parent.parent / "docs" / "plots"
OURS, OTHERS = "#c0392b", ("#34495e", "#7f8c8d", "#bdc3c7", "#d4ac6e")


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((HERE / "results" / f"{name}.json").read_text())["rows"]
    return rows


def grouped_bars(axes: Any, groups: list[str], series: dict[str, list[float | None]], unit: str) -> None:
    """Bars side by side; what is missing leaves a gap."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        color = OURS if name.startswith("gemkv") else OTHERS[i % len(OTHERS)]
        places = [group + i * width for group in range(len(groups))]
        axes.bar(places, [value or 0.0 for value in values], width, label=name, color=color)
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(groups))], groups, fontsize=8)
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)


def end_to_end() -> Any:
    """First token, step and peak by model and mode."""
    rows = rows_of("end_to_end")
    models = list(dict.fromkeys(row["model"] for row in rows))
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2))
    units = {"first_token_ms": "first token, ms", "step_ms": "decode step, ms", "peak_gib": "peak over weights, GiB"}
    for axes, (key, unit) in zip(panels, units.items(), strict=True):
        found = {(row["model"], row["mode"]): row.get(key) for row in rows}
        series = {MODES[mode].replace("*", ""): [found.get((model, mode)) for model in models] for mode in modes}
        grouped_bars(axes, models, series, unit)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(modes), fontsize=8, frameon=False
    )
    return figure


def decode_kernel() -> Any:
    """Time of a decode step's attention inside a CUDA graph, by shape, as in the table."""
    rows = rows_of("decode_kernel")
    groups = [f"{r['batch']} x {r['tokens']}\n{r['q_heads']}/{r['kv_heads']} x {r['head_dim']}" for r in rows]
    names = {"FA2": "fa2", "cuDNN": "cudnn", "FA3": "fa3", "gemkv int8": "int8"}
    figure, axes = plt.subplots(figsize=(11, 3.2))
    grouped_bars(
        axes, groups, {k: [row.get(f"{v}_graph_us") for row in rows] for k, v in names.items()}, "microseconds"
    )
    axes.legend(fontsize=7, frameon=False)
    return figure


def prefill_kernel() -> Any:
    """TFLOPS of a prompt's attention by shape."""
    rows = rows_of("prefill_kernel")
    groups = [f"{r['batch']} x {r['tokens']}\n{r['q_heads']}/{r['kv_heads']} x {r['head_dim']}" for r in rows]
    groups = [g + (f"\nwindow {r['window']}" if r["window"] else "") for g, r in zip(groups, rows, strict=True)]
    names = {
        "FA2": "fa2",
        "cuDNN": "cudnn",
        "Flex": "flex",
        "FA3": "fa3",
        "gemkv": "gemkv",
        "gemkv, Hopper": "gemkv_hopper",
    }
    series = {k: [row.get(f"{v}_tflops") for row in rows] for k, v in names.items()}
    figure, axes = plt.subplots(figsize=(11, 3.2))
    grouped_bars(axes, groups, {k: v for k, v in series.items() if any(v)}, "TFLOPS")
    axes.legend(fontsize=7, frameon=False)
    return figure


def fidelity() -> Any:
    """Mean divergence by position in the window, beside the noise floor."""
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for run, style in zip(rows_of("fidelity"), ("-", "--", ":"), strict=False):
        for name, points in run["curves"].items():
            if name in (run["about"]["formats"][1], "int8"):
                color = OURS if name == "int8" else OTHERS[0]
                axes.plot(
                    *zip(*points[1:], strict=True),
                    style,
                    color=color,
                    label=f"{run['about']['model']}, {run['about']['path']}, {name}",
                    linewidth=1,
                )
    axes.set(yscale="log", xlabel="position in the window, tokens", ylabel="KL, nat a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return figure


def quantised_peers() -> Any:
    """Divergence by the bits of a number: this package's formats and Transformers' quantised caches."""
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for row in rows_of("quantised_peers"):
        kl, ours = row["kl"], not row["format"].startswith(("quanto", "hqq", "bfloat16"))
        reach = [[kl["value"] - kl["low"]], [kl["high"] - kl["value"]]]
        axes.errorbar(row["bits"], kl["value"], reach, fmt="o", color=OURS if ours else OTHERS[0], capsize=2)
        axes.annotate(row["format"], (row["bits"], kl["value"]), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(yscale="log", xlabel="bits of a number, scales included", ylabel="KL, nat a token")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "gemkv"  # equal results give equal files
    for draw in (end_to_end, decode_kernel, prefill_kernel, fidelity, quantised_peers):
        figure = draw()
        figure.tight_layout(rect=(0, 0.08 if figure.legends else 0, 1, 1))
        figure.savefig(PLOTS / f"{draw.__name__}.svg", metadata={"Date": None})
        print(f"wrote docs/plots/{draw.__name__}.svg")


if __name__ == "__main__":
    main()
