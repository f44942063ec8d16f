"""The tables of `tables.py` that are about memory."""

from __future__ import annotations

from typing import Any


def kv_memory(result: dict[str, Any]) -> str:
    """Bytes by length and format."""
    lines = [
        "| tokens | format | dense bfloat16 | paged (worst of 256) | ratio | codes | scales | tails | tables |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        parts = " | ".join(f"{row[key] / 1e6:.2f}" for key in ("codes", "scales", "tail", "tables"))
        dense, paged = row["dense"] / 1e6, row["bytes"] / 1e6
        lines.append(
            f"| {row['tokens']} | {row['format']} | {dense:.2f} | {paged:.2f} | {row['ratio']:.3f} | {parts} |"
        )
    return "\n".join(lines)


def memory_end_to_end(result: dict[str, Any]) -> str:
    """What a GPU's allocator holds for a cache, the cut against DynamicCache step by step, and peaks."""
    lines = [
        "| model, prompt | cache | held, MiB | cut, % | of all tokens in all layers, % | counted, MiB "
        "| unused in slabs, MiB | peak of the prompt, GiB | peak while decoding, GiB |",
        "|---|---|" + "---:|" * 7,
    ]
    for row in result["rows"]:
        start = f"| {row['model']}, {row['batch']} x {row['tokens']} | {row['mode']}"
        if "failed" in row:
            lines.append(f"{start} | {row['failed']} |" + " |" * 6)
            continue
        cells = [f"{row['held'] / 2**20:.1f}", "", f"{-100 * (1 - row['held'] / row['unwindowed']):.1f}"]
        cells += [f"{row[key] / 2**20:.1f}" if key in row else "" for key in ("ledger", "reserve")]
        cells += [f"{row[key] / 2**30:.2f}" if key in row else "" for key in ("peak_prompt", "peak_decoding")]
        peer = [r for r in result["rows"] if (r["model"], r["mode"]) == (row["model"], "dynamic") and "held" in r]
        if peer and row["mode"] != "dynamic":
            worst = max(a / b for a, b in zip(row["held_by_step"], peer[0]["held_by_step"], strict=True))
            cells[1] = f"{-100 * (1 - worst):.1f}"
        lines.append(f"{start} | {' | '.join(cells)} |")
    return "\n".join(lines)
