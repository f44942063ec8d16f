"""Every family x attention implementation x kind of cache, compiled beside eager.

    python matrix.py [--families gemma3,llama] [--attentions sdpa] [--caches static]

With some of them named, only their cells are run and the others' stay as they are in results/matrix.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from typing import Any

from harness import RESULTS, about, save

sys.path.append(str(RESULTS.parent.parent.parent / "tests" / "support"))


def main() -> None:
    """Run cells and save after each family, every row with the commit that it is from."""
    from matrix_cells import ALL_FAMILIES, ATTENTIONS, CACHES, run_cell

    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=lambda text: text.split(","), default=ALL_FAMILIES)
    parser.add_argument("--attentions", type=lambda text: text.split(","), default=ATTENTIONS)
    parser.add_argument("--caches", type=lambda text: text.split(","), default=CACHES)
    arguments = parser.parse_args()
    path, commit = RESULTS / "matrix.json", about()["commit"]
    rows = {_cell(row): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for family in arguments.families:
        for cell in itertools.product([family], arguments.attentions, arguments.caches):
            begin = time.perf_counter()
            row = rows[cell] = run_cell(*cell) | {"commit": commit}
            seconds = time.perf_counter() - begin
            print(*cell, row["status"], row.get("reasons", ""), f"{seconds:.0f} s", flush=True)
        order = list(itertools.product(ALL_FAMILIES, ATTENTIONS, CACHES))
        save("matrix", [rows[cell] for cell in sorted(rows, key=order.index)])


def _cell(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["family"], row["attention"], row["cache"]


if __name__ == "__main__":
    main()
