"""Times of the engines of the option `prefill`, by class of prompt and length; and the table that the package ships.

    python prefill_engines.py           times them on this GPU: results/prefill_engines.json
    python prefill_engines.py --ship    makes kernels/engines/shipped.json of results/prefill_*.json
    python prefill_engines.py --check   whether it is what the results say

In `prefill_kernel.json` "fa2" is PyTorch's own FlashAttention-2, no engine here, and left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, save

from gemkv_compile.kernels.engines.engine import Prompt
from gemkv_compile.kernels.engines.measure import measure
from gemkv_compile.kernels.engines.times import SHIPPED

CLASSES = [  # K/V heads, query heads for each, head size, window, softcap
    (8, 4, 128, None, None),
    (8, 2, 256, None, None),
    (4, 2, 256, None, None),
    (1, 4, 256, None, None),
    (16, 1, 256, None, None),
    (4, 2, 256, 1024, None),
    (8, 2, 256, None, 50.0),
    (4, 2, 512, None, None),
]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
NAMES = {"gemkv": "triton", "cudnn": "cudnn", "fa3": "fa3"}
SOURCE = Path(__file__).parents[2] / "kernels" / "engines" / "shipped.json"


def timed() -> list[dict[str, Any]]:
    """A row for each class and length."""
    rows = []
    for heads, groups, dim, window, softcap in CLASSES:
        prompt = Prompt(torch.bfloat16, dim, groups, True, window, softcap)
        for tokens in LENGTHS:
            us = measure(prompt, tokens, torch.device("cuda", torch.cuda.current_device()), heads)
            rows.append(_row(dim, groups, None if window is None or window >= tokens else window, tokens, us, softcap))
            print(rows[-1], flush=True)
    return rows


def shipped() -> dict[str, Any]:
    """The table, by GPU: newer results of a class and length replace older ones."""
    table: dict[str, Any] = {}
    for name in ("prefill_kernel", "prefill_engines"):
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        about = result["about"]
        runs = {
            json.dumps(run): run for run in (about, *(row["run"] for row in result["rows"] if "run" in row))
        }.values()
        source = "; ".join(
            f"{name}.py on {run['device']}, torch {run['torch']}, {run['date']}, commit {run['commit']}" for run in runs
        )
        gpu = table.setdefault(about["device"], {"about": source, "rows": []})
        rows = [_of_kernel_row(row) if "us" not in row else row for row in result["rows"]]
        new = [_key(row) for row in rows]
        kept = [row for row in gpu["rows"] if _key(row) not in new]
        gpu["about"] = f"{gpu['about']}; {source}" if kept else source
        gpu["rows"] = kept + rows
    return table


def _of_kernel_row(row: dict[str, Any]) -> dict[str, Any]:
    us = {ours: round(row[f"{name}_us"], 1) for name, ours in NAMES.items() if f"{name}_us" in row}
    if "gemkv_hopper_us" in row:  # what runs on such a GPU
        us["triton"] = round(row["gemkv_hopper_us"], 1)
    return _row(row["head_dim"], row["q_heads"] // row["kv_heads"], row["window"], row["tokens"], us)


def _row(
    head_dim: int, groups: int, window: int | None, tokens: int, us: dict[str, float], softcap: float | None = None
) -> dict[str, Any]:
    shape = {"dtype": "bfloat16", "head_dim": head_dim, "groups": groups, "causal": True}
    return {**shape, "window": window, "softcap": softcap, "tokens": tokens, "us": us}


def _key(row: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in row.items() if key != "us"})


def main() -> int:
    if "--ship" in sys.argv:
        SOURCE.write_text(json.dumps(shipped(), indent=1) + "\n")
    elif "--check" in sys.argv:
        if json.loads(SHIPPED.read_text()) != shipped():
            print("kernels/engines/shipped.json is not what the results say: python prefill_engines.py --ship")
            return 1
    elif not torch.cuda.is_available():
        print("prefill_engines needs a GPU: left out")
    else:
        save("prefill_engines", timed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
