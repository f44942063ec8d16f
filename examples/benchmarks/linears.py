"""Products of a decode step's rows with the weights of a layer, beside cuBLAS: one launch for those of one input.

    python linears.py [--rows 1,8]

Times inside a CUDA graph that goes through copies of the weights larger than the L2 cache together, so that each
weight comes from memory, as in a model. "peer" is one `F.linear` a weight. Microseconds, medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import save, stream_gb_per_s
from torch.nn.functional import linear

from gemkv_compile.kernels.linears.kernel import linears_triton
from gemkv_compile.kernels.linears.reference import linears_reference

# Model, what is multiplied, input features, output features of each weight.
CASES = [
    ("gemma3-4b", "q, k, v", 2560, (2048, 1024, 1024)),
    ("gemma3-4b", "o", 2048, (2560,)),
    ("gemma3-4b", "gate, up", 2560, (10240, 10240)),
    ("gemma3-4b", "down", 10240, (2560,)),
    ("gemma3-4b", "LM head", 2560, (262208,)),
    ("gemma1-7b", "q, k, v", 3072, (4096, 4096, 4096)),
    ("gemma1-7b", "o", 4096, (3072,)),
    ("gemma1-7b", "gate, up", 3072, (24576, 24576)),
    ("gemma1-7b", "down", 24576, (3072,)),
    ("gemma1-7b", "LM head", 3072, (256000,)),
]
COPIES_BYTES = 600 << 20
CALLS, REPEATS = 60, 7


def graph_us(calls: list[Callable[[], Any]]) -> float:
    """Median time of one of the calls, which are captured one after another, CALLS of them or a few more."""
    calls[0]()
    torch.cuda.synchronize()
    rounds = -(-CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(REPEATS + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(1e3 * first.elapsed_time(last) / (rounds * len(calls)))
    return statistics.median(times[1:])


def measure(model: str, part: str, features: int, widths: tuple[int, ...], rows: int) -> dict[str, Any]:
    """A row: microseconds, and the error against float64 as a share of the bound that the tests have."""
    num_bytes = 2 * features * sum(widths)
    copies = max(2, COPIES_BYTES // num_bytes)
    x = torch.randn(rows, 1, features, dtype=torch.bfloat16, device="cuda")
    weights = [
        [torch.randn(width, features, dtype=torch.bfloat16, device="cuda") / features**0.5 for width in widths]
        for _ in range(copies)
    ]
    exact = linears_reference(x.double(), [weight.double() for weight in weights[0]], []) if num_bytes < 1e9 else []
    errors = [
        ((ours.double() - reference).abs() / (2**-8 * reference.abs() + 1e-5 + 1e-8 * features)).max().item()
        for ours, reference in zip(linears_triton(x, weights[0], []), exact, strict=False)
    ]
    ours = graph_us([partial(linears_triton, x, each, []) for each in weights])
    peer = graph_us([lambda each=each: [linear(x, weight) for weight in each] for each in weights])
    row: dict[str, Any] = {"model": model, "part": part, "rows": rows, "features": features, "widths": list(widths)}
    return row | {"gemkv_us": ours, "peer_us": peer, "bytes": num_bytes, "error": max(errors, default=None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("linears needs a GPU: left out")
        return
    found = []
    stream = stream_gb_per_s(1 << 30)
    for rows in map(int, arguments.rows.split(",")):
        for case in CASES:
            found.append(measure(*case, rows) | {"stream_gb_per_s": stream})
            print({key: round(x, 2) if isinstance(x, float) else x for key, x in found[-1].items()}, flush=True)
            save("linears", found)


if __name__ == "__main__":
    main()
