"""Every family x attention implementation x kind of cache, compiled beside eager: `python matrix.py [family ...]`.

With families named, only their cells are run and the others' stay as they are in results/matrix.json.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

from harness import RESULTS, about, save

sys.path.append(str(RESULTS.parent.parent.parent / "tests" / "support"))


def main() -> None:
    """Run cells and save after each family, every row with the commit that it is from."""
    from matrix_cells import ALL_FAMILIES, ATTENTIONS, CACHES, run_cell

    warnings.filterwarnings("ignore")
    wanted = sys.argv[1:] or ALL_FAMILIES
    path = RESULTS / "matrix.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() and sys.argv[1:] else []
    commit = about()["commit"]
    for family in wanted:
        rows = [row for row in rows if row["family"] != family]
        for attention in ATTENTIONS:
            for cache in CACHES:
                begin = time.perf_counter()
                row = run_cell(family, attention, cache) | {"commit": commit}
                rows.append(row)
                seconds = time.perf_counter() - begin
                print(family, attention, cache, row["status"], row.get("reasons", ""), f"{seconds:.0f} s", flush=True)
        save("matrix", sorted(rows, key=lambda row: ALL_FAMILIES.index(row["family"])))


if __name__ == "__main__":
    main()
