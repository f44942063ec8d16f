"""Tables of the documents from results/*.json: `python tables.py` writes, `tables.py --check` compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE))  # PYTHONSAFEPATH leaves a script's own folder out

from tables_memory import kv_memory, memory_end_to_end  # noqa: E402


def decode_kernel(result: dict[str, Any]) -> str:
    """Microseconds of one decode step's attention over all tokens, by shape."""
    lines = [
        "| batch | query, K/V heads | head size | tokens | FA2 | cuDNN | FA3 | int8 | k8v4 | k6v4 | int4 | speedup "
        "| GB/s | of a read |",
        "|" + "---:|" * 14,
    ]
    unit = "graph_us" if all("int8_graph_us" in row for row in result["rows"]) else "us"
    for row in result["rows"]:
        times = " | ".join(f"{row[key]:.0f}" if (key := f"{name}_{unit}") in row else "-" for name in COLUMNS)
        rate = (
            f"{row['speedup']:.2f} | {row['int8_gb_per_s']:.0f} | {row['int8_gb_per_s'] / row['stream_gb_per_s']:.2f}"
        )
        lines.append(f"| {_shape(row)} | {times} | {rate} |")
    return "\n".join(lines)


def prefill_kernel(result: dict[str, Any]) -> str:
    """TFLOPS of a prompt's attention, by shape."""
    measured = any("gemkv_hopper_tflops" in row for row in result["rows"])
    ours = {"gemkv": "gemkv", **({"gemkv_hopper": "gemkv, Hopper"} if measured else {})}
    names = {"fa2": "FA2", "cudnn": "cuDNN", "flex": "Flex", "fa3": "FA3"}
    heads = [*names.values(), *(head for name in ours.values() for head in (name, "of FA3"))]
    lines = [
        f"| batch | query, K/V heads | head size | tokens | window | {' | '.join(heads)} | commit |",
        "|" + "---:|" * (6 + len(heads)),
    ]
    for row in result["rows"]:
        rates = {name: row.get(f"{name}_tflops") for name in (*names, *ours)}
        cells = ["-" if rates[name] is None else f"{rates[name]:.0f}" for name in names]
        for name in ours:
            known = rates[name] is not None and rates["fa3"] is not None
            cells.append("-" if rates[name] is None else f"{rates[name]:.0f}")
            cells.append(f"{rates[name] / rates['fa3']:.2f}" if known else "-")
        run = row.get("run", result["about"])  # of a row that an earlier run measured
        lines.append(f"| {_shape(row)} | {row['window'] or '-'} | {' | '.join(cells)} | {run['commit']} |")
    return "\n".join(lines)


def prefill_append(result: dict[str, Any]) -> str:
    """What a prompt's append takes beside another engine's attention, by shape and format."""
    formats = [key.removesuffix("_share") for key in result["rows"][0] if key.endswith("_share")]
    heads = " | ".join(f"{name}, us | of it, % | GB/s" for name in formats)
    lines = [
        f"| batch | query, K/V heads | head size | tokens | attention | us | {heads} |",
        "|---:|---:|---:|---:|---|---:|" + "---:|" * (3 * len(formats)),
    ]
    for row in result["rows"]:
        cells = [ENGINES[row["attention"]], f"{row['attention_us']:.0f}"]
        for name in formats:
            cells += [f"{row[f'{name}_us']:.1f}", f"{100 * row[f'{name}_share']:.1f}", f"{row[f'{name}_gb_per_s']:.0f}"]
        lines.append(f"| {_shape(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prefill_int8(result: dict[str, Any]) -> str:
    """TFLOPS and errors of a prompt's attention with int8 scores, beside others."""
    names = {"fa3": "FA3", "gemkv": "gemkv", "gemkv_int8": "int8 scores"}
    heads = " | ".join(f"{name} | error, %" for name in names.values())
    lines = [
        f"| batch | query, K/V heads | head size | tokens | window | {heads} |",
        "|" + "---:|" * (5 + 2 * len(names)),
    ]
    for row in result["rows"]:
        cells = []
        for name in names:
            there = f"{name}_tflops" in row
            cells += [f"{row[f'{name}_tflops']:.0f}", f"{100 * row[f'{name}_error']:.2f}"] if there else ["-", "-"]
        lines.append(f"| {_shape(row)} | {row['window'] or '-'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def step_split(result: dict[str, Any]) -> str:
    """Where the milliseconds of a decode step are, by model and caller."""
    host = {"package_ms": "package", "dynamo_ms": "Dynamo", "loop_ms": "generate's loop", "wait_ms": "waiting"}
    kernels = {"matmul": "matmul", "lm_head": "LM head", "attention": "attention", "append": "append", "rope": "RoPE"}
    kernels["other"] = "other"
    lines = [
        f"| model | called by | step | {' | '.join(host.values())} | recorded step | {' | '.join(kernels.values())} |",
        "|---|---|" + "---:|" * (2 + len(host) + len(kernels)),
    ]
    for row in result["rows"]:
        parts = [row.get("step_ms"), *(row.get(key) for key in host), row.get("graph_ms")]
        parts += [row.get("kernels_ms", {}).get(key) for key in kernels]
        cells = " | ".join("-" if x is None else f"{x:.2f}" for x in parts)
        lines.append(f"| {row['model']}, {row['batch']} x {row['tokens']} | {row['call']} | {cells} |")
    return "\n".join(lines)


def linears(result: dict[str, Any]) -> str:
    """Products of few rows with the weights of a layer, beside cuBLAS, by model."""
    rows = list(dict.fromkeys(row["rows"] for row in result["rows"]))
    heads = "".join(f" cuBLAS, {each} x | gemkv | ratio | GB/s |" for each in rows)
    lines = [f"| model | product | MB |{heads}", "|---|---|---:|" + "---:|" * (4 * len(rows))]
    for model, part in dict.fromkeys((row["model"], row["part"]) for row in result["rows"]):
        found = {row["rows"]: row for row in result["rows"] if (row["model"], row["part"]) == (model, part)}
        cells = []
        for row in map(found.get, rows):
            ours, peer = (row["gemkv_us"], row["peer_us"]) if row else (None, None)
            if ours is None or peer is None:
                cells += ["-"] * 4
            else:
                cells += [f"{peer:.1f}", f"{ours:.1f}", f"{ours / peer:.2f}", f"{row['bytes'] / 1e3 / ours:.0f}"]
        lines.append(f"| {model} | {part} | {next(iter(found.values()))['bytes'] / 1e6:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


ENGINES = {"fa3": "FA3", "cudnn": "cuDNN"}
MODES = {
    "dynamic": "DynamicCache, eager",
    "inductor": "DynamicCache, Inductor",
    "static": "StaticCache, generate's own compile",
    "quantized": "QuantizedCache, quanto int4",
    "gemkv": "**gemkv**, int8",
    "gemkv-launches": "gemkv, int8, without CUDA graphs",
    "gemkv-unguarded": "gemkv, int8, without guards on modules",
    "gemkv-whole": "gemkv, int8, layers compiled together",
}
OURS = ("gemkv", "gemkv-launches", "gemkv-unguarded", "gemkv-whole")


def end_to_end(result: dict[str, Any]) -> str:
    """First token, step and peaks by model and mode; ours also as a ratio to the best other mode."""
    lines = [
        "| model, prompt | mode | first token, ms | step, ms | peak of the prompt, GiB | peak while decoding, GiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        run = f" (a run of its own, commit {row['run']['commit']})" if "run" in row else ""
        start = f"| {row['model']}, {row['batch']} x {row['tokens']} | {MODES[row['mode']]}{run}"
        if "failed" in row:
            lines.append(f"{start} | {row['failed']} | | | |")
            continue
        same = [r for r in result["rows"] if all(r[k] == row[k] for k in ("model", "batch", "tokens"))]
        cells = []
        for key, form in (("first_token_ms", ".0f"), ("step_ms", ".1f"), ("peak_gib", ".2f"), ("decoding_gib", ".2f")):
            best = min(r[key] for r in same if key in r and r["mode"] not in OURS)
            cells.append(f"{row[key]:{form}}" + (f" ({row[key] / best:.2f}x)" if row["mode"] in OURS else ""))
        lines.append(f"{start} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cold_start(result: dict[str, Any]) -> str:
    """Seconds until the first token and until decode steps are compiled, by model and mode."""
    lines = ["| model, prompt | mode | first token, s | decode steps compiled, s |", "|---|---|---:|---:|"]
    for row in result["rows"]:
        cells = [f"{row[key]:.0f}" if key in row else row["failed"] for key in ("first_token_s", "warm_s")]
        lines.append(f"| {row['model']}, {row['tokens']} | {MODES[row['mode']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prefill_end_to_end(result: dict[str, Any]) -> str:
    """First token and peak by model, length and mode; ours also as a ratio to the best other mode."""
    lines = ["| model | tokens | mode | first token, ms | runs, ms | peak, GiB |", "|---|---:|---|---:|---:|---:|"]
    order = list(dict.fromkeys(row["model"] for row in result["rows"]))
    for row in sorted(result["rows"], key=lambda row: (order.index(row["model"]), row["tokens"])):
        start = f"| {row['model']} | {row['tokens']} | {MODES[row['mode']]}"
        if "failed" in row:
            lines.append(f"{start} | {row['failed']} | | |")
            continue
        others = [
            r for r in result["rows"] if all(r[k] == row[k] for k in ("model", "tokens")) and r["mode"] not in OURS
        ]
        cells = []
        for key, form in (("first_token_ms", ".0f"), ("peak_gib", ".2f")):
            best = min((r[key] for r in others if key in r), default=None)
            ratio = f" ({row[key] / best:.2f}x)" if row["mode"] in OURS and best is not None else ""
            cells.append(f"{row[key]:{form}}{ratio}")
        runs = ", ".join(f"{ms:.0f}" for ms in row["times_ms"])
        lines.append(f"{start} | {cells[0]} | {runs} | {cells[1]} |")
    return "\n".join(lines)


def fidelity(result: dict[str, Any]) -> str:
    """What a format changes in text, by model and prompt, with 95% intervals."""
    lines = [
        "| model, path, device, commit | prompt | format | tokens | perplexity, % | KL, 1e-6 nat | "
        "new top-1, % | needles |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for run in result["rows"]:
        found = {name: [c for c in run["needles"] if c["format"] == name] for name in run["about"]["formats"]}
        for row in run["rows"]:
            reference, floor = run["about"]["formats"][:2]
            if row["format"] == reference or (row["format"] == floor and row["prompt"] is not None):
                continue
            cells = found[row["format"]] if row["prompt"] is None else []
            needles = f"{sum(c['found'] for c in cells)}/{sum(c['asked'] for c in cells)}" if cells else ""
            ratio = _interval(row["ratio"], lambda x: f"{100 * (x - 1):+.2f}")
            kl = _interval(row["kl"], lambda x: f"{1e6 * x:.1f}")
            new = _interval(row["differs"], lambda x: f"{100 * x:.2f}")
            what = ", ".join(run["about"][key] for key in ("model", "path", "device", "commit"))
            start = f"| {what} | {row['prompt'] or 'all'} | {row['format']} | {row['tokens']}"
            lines.append(f"{start} | {ratio} | {kl} | {new} | {needles} |")
    return "\n".join(lines)


def needles(result: dict[str, Any]) -> str:
    """Needles found by format: by length of the context, by depth in it, and in all.

    Runs share a reference: what one has already said in the same words is left out.
    """
    cells = [cell for run in result["rows"] for cell in run["needles"]]
    groups = [(key, each) for key in ("length", "depth") for each in sorted({cell[key] for cell in cells})]
    heads = [f"{each:,} tokens" if key == "length" else f"depth {each:.0%}" for key, each in groups]
    lines = [f"| model, dtype, path | format | {' | '.join(heads)} | all |", "|---|---|" + "---:|" * (len(heads) + 1)]
    for run in result["rows"]:
        what = ", ".join(run["about"][key] for key in ("model", "dtype", "path"))
        for name in run["about"]["formats"]:
            own = [cell for cell in run["needles"] if cell["format"] == name]
            parts = [[cell for cell in own if cell[key] == each] for key, each in groups] + [own]
            found = (f"{sum(c['found'] for c in part)}/{sum(c['asked'] for c in part)}" for part in parts)
            lines.append(f"| {what} | {name} | {' | '.join(found)} |")
    return "\n".join(dict.fromkeys(lines))


def int8_forms(result: dict[str, Any]) -> str:
    """KL and disagreement by way of scaling."""
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    lines = [
        "| scale and zero-point | " + " | ".join(f"{model}: KL, 1e-6 nat | new top-1, %" for model in models) + " |",
        "|---|" + "---:|---:|" * len(models),
    ]
    for form in dict.fromkeys(row["form"] for row in result["rows"]):
        cells = []
        for model in models:
            (row,) = (r for r in result["rows"] if (r["model"], r["form"]) == (model, form))
            kl, new = (dict(zip(("value", "low", "high"), row[key], strict=True)) for key in ("kl", "differs"))
            cells += [_interval(kl, lambda x: f"{1e6 * x:.3g}"), _interval(new, lambda x: f"{100 * x:.2f}")]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def quantised_peers(result: dict[str, Any]) -> str:
    """Bits of a number and what they change in text, by format and peer, most bits first."""
    lines = [
        "| cache | bits | tokens | perplexity, % | KL, 1e-6 nat | new top-1, % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(result["rows"], key=lambda row: -row["bits"]):
        cells = [_interval(row["ratio"], lambda x: f"{100 * (x - 1):+.2f}")]
        cells += [
            _interval(row["kl"], lambda x: f"{1e6 * x:.0f}"),
            _interval(row["differs"], lambda x: f"{100 * x:.2f}"),
        ]
        lines.append(f"| {row['format']} | {row['bits']:.2f} | {row['tokens']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def drop_policies(result: dict[str, Any]) -> str:
    """What a policy's drop changes in text, and needles, by policy."""
    lines = [
        "| policy | tokens | perplexity, % | KL, 1e-6 nat | new top-1, % | needles |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        keys = ("ratio", "kl", "differs")
        ratio, kl, new = (dict(zip(("value", "low", "high"), row[key], strict=True)) for key in keys)
        cells = [_interval(ratio, lambda x: f"{100 * (x - 1):+.2f}"), _interval(kl, lambda x: f"{1e6 * x:.0f}")]
        cells.append(_interval(new, lambda x: f"{100 * x:.2f}"))
        cells.append(f"{row['found']}/{row['asked']}" if row["asked"] else "")
        lines.append(f"| {row['policy']} | {row['tokens']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def drop_shares(result: dict[str, Any]) -> str:
    """Microseconds of a layer's attention shares, by shape and format, beside the plain version."""
    lines = [
        "| batch | query, K/V heads | head size | tokens | format | kernel | in a CUDA graph | plain torch | ratio |",
        "|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        times = [row[key] for key in ("kernel_us", "graph_us", "torch_us")]
        cells = " | ".join(f"{each:.0f}" for each in times)
        lines.append(f"| {_shape(row)} | {row['kv_format']} | {cells} | {times[0] / times[2]:.4f} |")
    return "\n".join(lines)


def matrix(result: dict[str, Any]) -> str:
    """What becomes of each family, attention and cache; how many are rewritten; why the others are not."""
    rows = result["rows"]
    columns = list(dict.fromkeys((row["attention"], row["cache"]) for row in rows))
    lines = ["| family | " + " | ".join(f"{a}, {c}" for a, c in columns) + " |", "|---|" + "---|" * len(columns)]
    for family in dict.fromkeys(row["family"] for row in rows):
        own = {(row["attention"], row["cache"]): row for row in rows if row["family"] == family}
        cells = [_cell(own[column]) if column in own else "" for column in columns]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    offered = [row for row in rows if row["status"] != "not offered"]
    done = sum(row["status"] == "rewritten" for row in offered)
    share = f"{done} of {len(offered)} cells rewritten ({100 * done / max(len(offered), 1):.1f}%)"
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    left_out = f"{len(rows) - len(offered)} more are not offered by Transformers"
    lines += ["", f"{share}; {left_out}. Cells are from commit {commits}.", ""]
    whys: dict[str, int] = {}
    for row in rows:
        if row["status"] != "rewritten":
            why = re.sub(r" \([^()]*\)", "", row["why"]).replace("|", "/")
            why = f"{_cell(row)}: {why}"
            whys[why] = whys.get(why, 0) + 1
    return "\n".join([*lines, *(f"* {why} ({count} cells)" for why, count in whys.items())])


def _cell(row: dict[str, Any]) -> str:
    """A cell of the matrix: "rewritten", the reason codes, or the status."""
    if row["status"] == "rewritten":
        dense = f", {row['dense']} of {row['sites']} masks dense" if row["dense"] else ""
        return "rewritten" + dense + (", converted once" if row.get("copies") else "")
    return ", ".join(f"`{code}`" for code in row.get("reasons", ())) or row["status"]


def passes_time(result: dict[str, Any]) -> str:
    """Seconds by graph: each stage, all passes, once more in CPU time; Dynamo's apart."""
    stages = list(dict.fromkeys(stage for row in result["rows"] for stage in row["stages_s"]))
    lines = [
        f"| graph | nodes | {' | '.join(stages)} | **all passes** | again, CPU | Dynamo |",
        "|---|---:|" + "---:|" * (len(stages) + 3),
    ]
    for row in result["rows"]:
        by_stage = [row["stages_s"].get(stage, 0.0) for stage in stages]
        seconds = (*by_stage, row["passes_s"], row["cpu_s"], row["dynamo_s"])
        lines.append(f"| {row['graph']} | {row['nodes']} | {' | '.join(f'{each:.2f}' for each in seconds)} |")
    return "\n".join(lines)


def step_overhead(result: dict[str, Any]) -> str:
    """Python around a decode step, this package's and Dynamo's."""
    lines = [
        "| layers | package, median | package, quiet | Dynamo, median | Dynamo, quiet | no guards, median | quiet |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        figures = (row[f"{who}_{kind}"] for who in ("package", "dynamo", "unguarded") for kind in ("us", "quiet_us"))
        lines.append(f"| {row['layers']} | {' | '.join(f'{each:.0f}' for each in figures)} |")
    return "\n".join(lines)


def _shape(row: dict[str, Any]) -> str:
    return f"{row['batch']} | {row['q_heads']}, {row['kv_heads']} | {row['head_dim']} | {row['tokens']}"


def _interval(estimate: dict[str, float], show: Callable[[float], str]) -> str:
    return f"{show(estimate['value'])} [{show(estimate['low'])}, {show(estimate['high'])}]"


COLUMNS = ("fa2", "cudnn", "fa3", "int8", "k8v4", "k6v4", "int4")
TABLES: dict[str, tuple[Callable[[dict[str, Any]], str], str, str]] = {  # how, unit, where
    "kv_memory": (kv_memory, "MB", "README.md"),
    "memory_end_to_end": (memory_end_to_end, "PyTorch's allocator", "README.md"),
    "end_to_end": (end_to_end, "medians", "README.md"),
    "prefill_end_to_end": (prefill_end_to_end, "medians", "README.md"),
    "fidelity": (fidelity, "95% intervals", "README.md"),
    "decode_kernel": (decode_kernel, "median microseconds", "README.md"),
    "prefill_kernel": (prefill_kernel, "TFLOPS of medians", "README.md"),
    "prefill_append": (prefill_append, "median microseconds", "DESIGN.md"),
    "prefill_int8": (prefill_int8, "TFLOPS of medians", "DESIGN.md"),
    "cold_start": (cold_start, "a fresh process, no compile caches", "DESIGN.md"),
    "linears": (linears, "median microseconds", "DESIGN.md"),
    "int8_forms": (int8_forms, "95% intervals", "DESIGN.md"),
    "int4_forms": (int8_forms, "95% intervals", "DESIGN.md"),
    "int4_forms_guard": (int8_forms, "95% intervals", "DESIGN.md"),
    "fidelity_4bit": (fidelity, "95% intervals", "DESIGN.md"),
    "needles": (needles, "found of asked", "DESIGN.md"),
    "quantised_peers": (quantised_peers, "95% intervals", "DESIGN.md"),
    "drop_policies": (drop_policies, "95% intervals", "DESIGN.md"),
    "drop_shares": (drop_shares, "median microseconds", "DESIGN.md"),
    "matrix": (matrix, "tiny random models", "docs/matrix.md"),
    "passes_time": (passes_time, "seconds", "DESIGN.md"),
    "step_split": (step_split, "median milliseconds", "DESIGN.md"),
    "step_overhead": (step_overhead, "microseconds", "DESIGN.md"),
}


def rendered(text: str, file: str) -> str:
    """A document with every table of its own made anew.

    Raises:
        ValueError: it lacks the marks of a table.
    """
    for name, (render, unit, where) in TABLES.items():
        if where != file:
            continue
        head, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise ValueError(f"{file} has no <!-- {name} --> ... <!-- /{name} -->.")
        text = f"{head}{begin}{_table(name, render, unit)}\n{end}{tail}"
    return text


def _table(name: str, render: Callable[[dict[str, Any]], str], unit: str) -> str:
    """A table and where it is from, or that nothing has been measured yet."""
    path = HERE / "results" / f"{name}.json"
    if not path.exists():
        return "(not measured yet)"
    result = json.loads(path.read_text())
    about = result["about"]
    note = f"{unit}; {about['device']}, torch {about['torch']}, {about['date']}, commit {about['commit']}"
    return f"{render(result)}\n\n({note})"


def main() -> int:
    """Write or check; returns the exit status."""
    status = 0
    for file in dict.fromkeys(where for _, _, where in TABLES.values()):
        before = (ROOT / file).read_text()
        after = rendered(before, file)
        if "--check" in sys.argv:
            status |= int(before != after)
        else:
            (ROOT / file).write_text(after)
    return status


if __name__ == "__main__":
    sys.exit(main())
