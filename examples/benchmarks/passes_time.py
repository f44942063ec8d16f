"""What the passes add to compile time, by stage: every graph of a generation with the layers of Gemma 3 4B.

34 layers, every sixth with full attention, 8 query and 4 key/value heads; widths are small, as no pass looks at a
number of channels. Seconds of the compile that a user waits for, by stage; and CPU seconds of one more on the same
graph, the median of five. Dynamo's own time and the inner compiler's stand apart.

    python passes_time.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from harness import save
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from gemkv_compile import Options
from gemkv_compile.backend import Backend, compile_graph
from gemkv_compile.report import GraphReport

LAYERS, REPEATS = 34, 5
INNER = "inner compile"


def main() -> None:
    """Compile the graphs of a prompt and of decode steps; print the rows and save them."""
    torch.set_num_threads(1)
    timed = Timed()
    model = shaped_like_4b().eval()
    model.compile(backend=timed)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    whole = torch._dynamo.utils.compile_times("csv", aggregate=False)
    by_name = dict(zip(*whole, strict=True))
    traced = [float(seconds) for seconds in by_name["_compile.compile_inner"].split(",")]
    assert len(traced) == len(timed.rows), "a graph break"
    for row, seconds in zip(timed.rows, traced, strict=True):
        row["dynamo_s"] = seconds - row.pop("backend_s")
        print(row)
    print(f"saved to {save('passes_time', timed.rows)}")


def shaped_like_4b() -> Gemma3ForCausalLM:
    """A random Gemma 3 with the layers and heads of the 4B model."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(LAYERS)]
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        layer_types=kinds,
        sliding_window=1024,
    )
    return Gemma3ForCausalLM(config)


class Timed:
    """The backend, with a row for each graph."""

    def __init__(self) -> None:
        self.backend = Backend(Options(strict=True))
        self.rows: list[dict[str, Any]] = []

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        """Compile for the call, then five times more."""
        begin = time.perf_counter()
        compiled = self.backend(module, example_inputs)
        mine = self.backend.graphs[-1]
        row = {"graph": kind(mine), "layers": LAYERS, "nodes": len(module.graph.nodes)}
        row |= {"stages_s": without_inner(mine), "inner_s": mine.stages[INNER]}
        row["passes_s"] = sum(row["stages_s"].values())
        row["cpu_s"] = statistics.median(self.cpu_seconds(module, example_inputs) for _ in range(REPEATS))
        self.rows.append(row | {"backend_s": time.perf_counter() - begin})
        return compiled

    def cpu_seconds(self, module: torch.fx.GraphModule, example_inputs: Any) -> float:
        """Of one more compile, whatever else the machine does: all stages, with no inner compiler."""
        begin = time.process_time()
        compile_graph(module, example_inputs, self.backend.options)
        return time.process_time() - begin


def kind(graph: GraphReport) -> str:
    """What a graph is for."""
    if graph.sites[0].operator == "attend_chunk":
        return "prompt"
    return "decode, any length" if graph.length_free else "decode, first step"


def without_inner(graph: GraphReport) -> dict[str, float]:
    """Seconds by stage, the inner compiler's left out."""
    return {stage: seconds for stage, seconds in graph.stages.items() if stage != INNER}


if __name__ == "__main__":
    main()
