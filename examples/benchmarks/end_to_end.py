"""First token, decode step and peak memory of `generate` on a GPU, beside Transformers' own caches in the same run.

    python end_to_end.py [--models gemma3-4b,gemma1-7b] [--modes dynamic,inductor,static,quantized,gemkv,...]
                         [--batch 1] [--tokens 32768] [--parallel-warm-up]

Random bf16 weights of real shapes. Every mode runs in a process of its own: nothing that one leaves in memory or in
Dynamo's caches reaches the next. First token: `generate` of one token, prompt included. Step: what one more token adds.
Peaks are over the weights, as torch's allocator saw them; "decoding" is the peak after the first token was chosen.
"gemkv-launches" is gemkv without CUDA graphs, "gemkv-unguarded" without Dynamo's guards on modules. A quantised cache
takes its steps so slowly that it is measured over fewer of them, once.
With --parallel-warm-up all compiling modes first fill the compile caches side by side, untimed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import save

OURS = ("gemkv", "gemkv-launches", "gemkv-unguarded")
MODES = ("dynamic", "inductor", "static", "quantized", *OURS)
COMPILING = ("inductor", "static", *OURS)
STEPS, REPEATS = 33, 3
SLOW = {"quantized": (3, 1)}  # steps and repeats where a step takes as long as a prompt
LIMIT_S = 560  # of one process


def gemma3_4b() -> Any:
    """The text part of Gemma 3 4B: 34 layers, one in six attends to everything, window 1024."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    config = Gemma3TextConfig(**sizes, **heads, sliding_window=1024, max_position_embeddings=131072)
    return Gemma3ForCausalLM(config)


def gemma1_7b() -> Any:
    """Gemma 1 7B: 28 layers of full attention, a K/V head for each query head."""
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(max_position_embeddings=131072))


MODELS = {"gemma3-4b": gemma3_4b, "gemma1-7b": gemma1_7b}


class AfterFirstToken:
    """A logits processor that forgets the peak of the prompt."""

    def __init__(self) -> None:
        self.prompt_peak: int | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.prompt_peak is None:
            torch.cuda.synchronize()
            self.prompt_peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return scores


def prepare(model: Any, mode: str) -> dict[str, Any]:
    """Compile a model as a mode asks for it; returns the arguments of generate."""
    if mode == "inductor":
        model.compile()
    if mode in OURS:
        import gemkv_compile

        guards = torch.compiler.skip_guard_on_all_nn_modules_unsafe if mode == "gemkv-unguarded" else None
        gemkv_compile.compile(model, strict=True, cuda_graphs=mode != "gemkv-launches", guard_filter_fn=guards)
    if mode == "static":
        return {"cache_implementation": "static"}
    if mode == "quantized":
        return {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}}
    return {}


def random_model(build: Callable[[], Any], device: str) -> Any:
    """A model in bf16 with random weights, whose `generate` stops at no token."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = build().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def measure(name: str, mode: str, batch: int, tokens: int, only_compile: bool) -> dict[str, Any]:
    """One row: milliseconds, and GiB above the weights."""
    model = random_model(MODELS[name], "cuda")
    weights = torch.cuda.memory_allocated()
    ids = torch.randint(5, 1000, (batch, tokens), device="cuda")
    options = prepare(model, mode) | {"attention_mask": torch.ones_like(ids), "do_sample": False}

    def generate(new: int, **more: Any) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options, **more)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    steps, repeats = SLOW.get(mode, (STEPS, REPEATS))
    began = time.perf_counter()
    if mode not in SLOW:
        generate(4)
    generate(steps)  # the static cache is as long as this asks for
    row: dict[str, Any] = {"warm_up_s": round(time.perf_counter() - began, 1)}
    if only_compile:
        return row
    first, all_steps = (median_of(lambda n=n: generate(n), repeats) for n in (1, steps))
    row |= {"first_token_ms": first, "step_ms": (all_steps - first) / (steps - 1), "steps": steps, "repeats": repeats}
    torch.cuda.reset_peak_memory_stats()
    watch = AfterFirstToken()
    generate(steps, logits_processor=[watch])
    peaks = {"peak_gib": watch.prompt_peak, "decoding_gib": torch.cuda.max_memory_allocated()}
    return row | {key: (peak - weights) / 2**30 for key, peak in peaks.items()} | {"weights_gib": weights / 2**30}


def median_of(run: Callable[[], float], times: int) -> float:
    return statistics.median(run() for _ in range(times))


def child(arguments: argparse.Namespace, name: str, mode: str, only_compile: bool, folder: str) -> Any:
    """Start a process for one mode; it writes its row into a file."""
    shape = ["--batch", str(arguments.batch), "--tokens", str(arguments.tokens)]
    return start(__file__, name, mode, folder, [*shape, *["--only-compile"] * only_compile])


def start(script: str, name: str, mode: str, folder: str, options: list[str]) -> Any:
    """Start a benchmark's process for one mode; returns it, the file for its results, and that of what it prints."""
    out = str(Path(folder) / f"{name}-{mode}.json")
    command = [sys.executable, script, "--child", name, mode, out, *options]
    log = (Path(folder) / f"{name}-{mode}.log").open("w")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), Path(out), Path(log.name)


def outcome(process: Any, out: Path, log: Path, limit: float) -> dict[str, Any]:
    """The row of a process, or what it failed with."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return {"failed": f"not finished within {limit} s"}
    if process.returncode:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        print("\n".join(lines[-12:]), flush=True)
        return {"failed": lines[-1][:200] if lines else f"exit status {process.returncode}"}
    row: dict[str, Any] = json.loads(out.read_text())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--parallel-warm-up", action="store_true")
    parser.add_argument("--save-as", default="end_to_end")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "MODE", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("end_to_end needs a GPU: left out")
        return
    if arguments.child:
        name, mode, out = arguments.child
        row = measure(name, mode, arguments.batch, arguments.tokens, arguments.only_compile)
        Path(out).write_text(json.dumps(row))
        return
    rows, modes = [], arguments.modes.split(",")
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if arguments.parallel_warm_up:
                started = [child(arguments, name, mode, True, folder) for mode in modes if mode in COMPILING]
                print([outcome(*one, LIMIT_S) for one in started], flush=True)
            for mode in modes:
                one = child(arguments, name, mode, False, folder)
                row = {"model": name, "mode": mode, "batch": arguments.batch, "tokens": arguments.tokens}
                row["compile_caches"] = "warm" if arguments.parallel_warm_up else "as found"
                rows.append(row | outcome(*one, LIMIT_S))
                print(rows[-1], flush=True)
                path = save(arguments.save_as, rows)  # each time: a run that is cut short leaves what it had
    print(f"saved to {path}")


if __name__ == "__main__":
    main()
