"""README tables from results/*.json: `python tables.py` writes them, `python tables.py --check` compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"


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


def decode_kernel(result: dict[str, Any]) -> str:
    """Microseconds of one decode step's attention over all tokens, by shape."""
    lines = [
        "| batch | query, K/V heads | head size | tokens | FA2 | cuDNN | FA3 | int8 | speedup | GB/s | append |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        times = " | ".join(f"{row[f'{name}_us']:.0f}" if f"{name}_us" in row else "-" for name in COLUMNS)
        shape = f"{row['batch']} | {row['q_heads']}, {row['kv_heads']} | {row['head_dim']} | {row['tokens']}"
        rate = f"{row['speedup']:.2f} | {row['int8_gb_per_s']:.0f} | {row['append_us']:.1f}"
        lines.append(f"| {shape} | {times} | {rate} |")
    return "\n".join(lines)


COLUMNS = ("fa2", "cudnn", "fa3", "int8")
TABLES = {"kv_memory": (kv_memory, "MB"), "decode_kernel": (decode_kernel, "median microseconds")}


def rendered(readme: str) -> str:
    """The README with every table made anew."""
    for name, (render, unit) in TABLES.items():
        result = json.loads((HERE / "results" / f"{name}.json").read_text())
        about = result["about"]
        note = f"{unit}; {about['device']}, torch {about['torch']}, {about['date']}, commit {about['commit']}"
        head, _, rest = readme.partition(f"<!-- {name} -->\n")
        _, _, tail = rest.partition(f"<!-- /{name} -->")
        readme = f"{head}<!-- {name} -->\n{render(result)}\n\n({note})\n<!-- /{name} -->{tail}"
    return readme


def main() -> int:
    """Write or check; returns the exit status."""
    before = README.read_text()
    after = rendered(before)
    if "--check" in sys.argv:
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
