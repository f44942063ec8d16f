"""Python around a decode step: this package's, and Dynamo's guards with the model's own call, without the step's work.

    python step_overhead.py [--layers 34] [--steps 600]

A Gemma 3 with the layers of the 4B model and tiny widths. Each step is replayed as a CUDA graph, on a GPU; on a CPU the
replay does nothing, and the rest is the same. "package" is from the executable's call to its return: finding the
caches' tables, their appends, what is copied in, and new handles. "dynamo" is the rest of the model's call; "unguarded"
is that rest with `torch.compiler.set_stance(skip_guard_eval_unsafe=True)`, in half of the steps. Quiet steps
(the fastest 5 of a hundred) are given beside the median, since other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import save

import gemkv_compile
from gemkv_compile.runtime import recording
from gemkv_compile.runtime.executable import Executable


class Nothing:
    """Stands for a recorded step on a CPU: it runs once, and gives the same results from then on."""

    def __init__(self, function: Callable[[], Sequence[Any]], device: torch.device) -> None:
        self._function: Callable[[], Sequence[Any]] | None = function
        self._results: Sequence[Any] = ()

    def replay(self) -> Sequence[Any]:
        if self._function is not None:
            self._results, self._function = self._function(), None
        return self._results


def tiny_gemma3(layers: int) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**sizes, **heads, sliding_window=512, max_position_embeddings=8192)
    ).eval()


def measure(layers: int, steps: int, device: str) -> dict[str, Any]:
    """Microseconds a step."""
    torch.manual_seed(0)
    model = gemkv_compile.compile(tiny_gemma3(layers).to(device), cuda_graphs=True)
    own: list[float] = []
    call = Executable.__call__

    def timed(self: Executable, *args: Any) -> Any:
        began = time.perf_counter()
        results = call(self, *args)
        own.append(time.perf_counter() - began)
        return results

    Executable.__call__ = timed  # type: ignore[method-assign]
    token, position = torch.tensor([[5]], device=device), 20

    def run(count: int) -> list[float]:
        nonlocal position
        whole = []
        for _ in range(count):
            positions = torch.tensor([[position]], device=device)
            began = time.perf_counter()
            model(token, past_key_values=cache, position_ids=positions, use_cache=True)
            whole.append(time.perf_counter() - began)
            position += 1
        return whole

    try:
        with torch.no_grad():
            cache = model(torch.randint(1, 128, (1, position), device=device), use_cache=True).past_key_values
            run(20)
            guarded = run(steps)
            with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
                unguarded = run(steps)
    finally:
        Executable.__call__ = call  # type: ignore[method-assign]
    row: dict[str, Any] = {"layers": layers, "device": device, "steps": steps}
    rest, unchecked = (
        [all_of_it - ours for all_of_it, ours in zip(whole, part, strict=True)]
        for whole, part in ((guarded, own[-2 * steps : -steps]), (unguarded, own[-steps:]))
    )
    for name, seconds in (("package", own[-2 * steps :]), ("dynamo", rest), ("unguarded", unchecked)):
        quiet = sorted(seconds)[len(seconds) // 20]
        row |= {f"{name}_us": 1e6 * statistics.median(seconds), f"{name}_quiet_us": 1e6 * quiet}
    return row


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        recording.RECORDERS["cpu"] = Nothing
    row = measure(arguments.layers, arguments.steps, "cuda" if torch.cuda.is_available() else "cpu")
    print(row)
    print(f"saved to {save('step_overhead', [row])}")


if __name__ == "__main__":
    main()
