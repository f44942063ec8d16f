"""Launch sizes of the decode kernel on a GPU: warps, tokens in a step, stages and waves of programs, best first.

    python decode_sweep.py [--formats int8,k8v4,k6v4,int4] [--head-dims 64,128,256,512] [--jobs 8]

32,768 tokens, inside a CUDA graph, microseconds, both launches. Every result is compared with the first one's. What is
found belongs into `kernels/attend_pages/sizes.py`. With --jobs so many processes first compile every choice, untimed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from typing import Any
from unittest import mock

import torch
from decode_kernel import Paged
from harness import graph_us, save

from gemkv_compile.kernels.attend_pages import kernel, sizes

SHAPES = [  # batch, query heads, K/V heads, head size
    (1, 32, 8, 64),
    (8, 32, 8, 64),
    (1, 32, 8, 128),
    (8, 32, 8, 128),
    (1, 8, 4, 256),
    (8, 8, 4, 256),
    (8, 16, 8, 256),
    (1, 8, 2, 512),
]
TOKENS = 32768 - 32
WARPS_AND_TILES = {64: [(1, 32), (1, 64), (2, 64)], 128: [(1, 32), (1, 64), (2, 64), (4, 64)]}
WIDE = [(1, 32), (2, 64), (4, 64)]
STAGES, WAVES = (2, 3), (0.5, 0.97, 2, 3)  # of as many programs as the device runs at once


def splits(rows: int, groups: int, programs: float, row: dict[str, Any]) -> int:
    """As `sizes.num_splits`, for so many programs; notes what it says."""
    row["splits"] = max(1, min(groups, sizes.MAX_SPLITS, int(programs // rows)))
    return int(row["splits"])


def measure(shape: tuple[int, int, int, int], kv_format: str, timed: bool = True) -> list[dict[str, Any]]:
    """A row for each choice, best first; not timed, every choice is compiled."""
    batch, q_heads, heads, dim = shape
    k, v = (torch.randn(batch, heads, TOKENS, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(batch, q_heads, 1, dim, dtype=torch.bfloat16, device="cuda")
    cache = Paged(batch, heads, dim, TOKENS, kv_format)
    cache.append(k, v)
    expected, rows = cache.attend(q), []
    about = {"batch": batch, "q_heads": q_heads, "kv_heads": heads, "head_dim": dim, "format": kv_format}
    for (warps, tile), stages, waves in itertools.product(WARPS_AND_TILES.get(dim, WIDE), STAGES, WAVES):
        row: dict[str, Any] = about | {"warps": warps, "tile": tile, "stages": stages, "waves": waves}
        chosen = {
            "num_warps": lambda *_, n=warps: n,
            "tile_tokens": lambda *_, n=tile: n,
            "stages": lambda *_, n=stages: n,
            "num_splits": lambda rows, groups, at_once, n=waves, row=row: splits(rows, groups, n * at_once, row),
        }
        kernel._PROGRAMS.clear()
        with mock.patch.multiple(kernel, **chosen):
            try:
                difference = (cache.attend(q).float() - expected.float()).abs().max() / expected.abs().max()
                row |= {"us": graph_us(lambda: cache.attend(q), 5) if timed else 0.0, "difference": difference.item()}
            except Exception as error:  # too much shared memory
                row["failed"] = str(error)[:100]
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default="int8,int4")
    parser.add_argument("--head-dims", default="64,128,256,512")
    parser.add_argument("--jobs", type=int, default=0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("decode_sweep needs a GPU: left out")
        return
    rows: list[dict[str, Any]] = []
    shapes = [shape for shape in SHAPES if str(shape[3]) in arguments.head_dims.split(",")]
    cases = list(itertools.product(shapes, arguments.formats.split(",")))
    if arguments.jobs:
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            pool.starmap(measure, [(*case, False) for case in cases], chunksize=1)
    for case in cases:
        rows += (found := measure(*case))
        for row in found[:3]:
            print(row, flush=True)
    save("decode_sweep", rows)


if __name__ == "__main__":
    main()
