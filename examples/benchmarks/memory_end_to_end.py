"""Memory of the cache and of a whole call on a GPU: each format of this package beside Transformers' DynamicCache.

    python memory_end_to_end.py [--models gemma3-4b,gemma1-7b,gemma2-9b] [--modes dynamic,int8,k8v4,k6v4,int4,model]
                                [--tokens 32768] [--steps 66] [--jobs 12] [--device cuda]

A prompt of one sequence, then decode steps, each a call of the model that asks for the last logits only. Shapes are
real, weights random and bf16, and all layers have the same ones: every figure is above the weights, and so many
processes fit on one GPU. Each mode runs in a process of its own. Memory is what is measured, not time: the rewritten
graph runs as it is (`inner="eager"`), without CUDA graphs and other engines; so the peak of a prompt is higher
than with Inductor, which fuses what a layer computes between two products.

Figures are those of PyTorch's allocator, which counts each process apart:

* held: what is allocated after a step, less what is left when the cache is dead and empty slabs are given back. So it
  has slabs' unused pages and the allocator's rounding in it. `held_by_step` has it for each step.
* after_prompt: the same after the prompt. DynamicCache's sliding layers still hold a whole prompt's rows there.
* peak_prompt, peak_decoding: the most that was allocated, less the weights; decoding starts after the first token.

Beside them stands what `gemkv_compile.kv_memory` counted at the step with the largest ratio to the windowed cache's
size, and what the report's formula says for it. Only `unwindowed`, a bf16 cache of all tokens in all layers, is
computed from shapes. Gemma 2's attention is written out for this package, softcap and all; for DynamicCache it is
PyTorch's fused one, which leaves the softcap out, since scores of 32,768 x 32,768 would not fit. On a CPU ("held"
counts living tensors there) it can only be tried out, with `--models tiny`.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from end_to_end import LIMIT_S, MODELS, outcome
from harness import save

import gemkv_compile
from gemkv_compile.kernels.layout import KV_FORMATS

DYNAMIC = "dynamic"
MODES = (DYNAMIC, *KV_FORMATS)
GIB = 2**30
SPARE_GIB = 6  # of the GPU that is given to no process: what others and the driver have


def gemma2_9b() -> Any:
    """Gemma 2 9B: 42 layers, every second one with a window of 4096, softcaps."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256}
    softcaps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = Gemma2Config(**sizes, **heads, **softcaps, sliding_window=4096, max_position_embeddings=131072)
    return Gemma2ForCausalLM(config)


def tiny() -> Any:
    """A Gemma 2 for trying this script out."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, sliding_window=96, max_position_embeddings=4096))


SHAPES: dict[str, Callable[[], Any]] = {**MODELS, "gemma2-9b": gemma2_9b, "tiny": tiny}
REAL = [name for name in SHAPES if name != "tiny"]
SOFTCAPPED = ("gemma2-9b", "tiny")
# GiB that a process takes with 32K tokens, roughly, for packing: DynamicCache, "model", other formats.
NEED_GIB = {"gemma3-4b": (13, 9, 8), "gemma1-7b": (26, 26, 20), "gemma2-9b": (24, 18, 15), "tiny": (1, 1, 1)}
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Memory:
    """What is allocated: on a GPU by PyTorch's allocator, on a CPU the bytes of living tensors, without peaks."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def allocated(self) -> int:
        """Bytes at this moment."""
        if self.is_cuda:
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in PLAIN and not each.is_meta]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def peak(self) -> int:
        """The most since the last call of this; 0 on a CPU."""
        if not self.is_cuda:
            return 0
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most


def with_shared_layers(make: Callable[[], Any], device: torch.device) -> Any:
    """A model of `make`'s shapes with random weights on a device, those of a layer for all layers; in eval mode."""
    with torch.device("meta"):
        model = make()
    few: dict[str, Any] = {"num_hidden_layers": 1}
    if kinds := sorted(set(getattr(model.config, "layer_types", None) or ())):
        few = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    with torch.device(device):
        small = type(model)(type(model.config).from_dict(model.config.to_dict() | few))
    weights = small.model.layers[0].state_dict(keep_vars=True)
    for layer in model.model.layers:
        layer.load_state_dict(weights, assign=True)
    for name, module in small.model.named_children():
        if name != "layers":
            setattr(model.model, name, module)
    model.lm_head = small.lm_head
    empty = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta]
    assert not empty, f"no values for {empty}"
    return model.eval()


def measure(name: str, mode: str, tokens: int, steps: int, device: torch.device) -> dict[str, Any]:
    """One row, all of it bytes but `at`, the number of tokens where the cache was largest beside a windowed one."""
    from transformers import DynamicCache

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    memory, model = Memory(device), with_shared_layers(SHAPES[name], device)
    ids = torch.randint(5, 100, (1, tokens + steps), device=device)
    if mode != DYNAMIC:
        if name in SOFTCAPPED:
            model.set_attn_implementation("eager")
        options = {"inner": "eager", "cuda_graphs": False, "prefill": "triton", "strict": True}
        gemkv_compile.compile(model, kv_format=mode, **options)
    gc.collect()
    cache, weights, _ = DynamicCache(config=model.config), memory.allocated(), memory.peak()
    allocated, counted, peaks = [], [], []
    with torch.no_grad():
        for step in range(steps + 1):
            new = ids[:, :tokens] if step == 0 else ids[:, tokens + step - 1 : tokens + step]
            model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            peaks.append(memory.peak() - weights)
            allocated.append(memory.allocated())
            ledger = gemkv_compile.kv_memory(cache)
            counted.append((ledger.total, ledger.reserve))
    del cache, ledger
    gc.collect()
    gemkv_compile.trim()
    left = memory.allocated()
    held = [each - left for each in allocated]
    worst = max(range(1, steps + 1), key=lambda step: held[step] / dense_bytes(model.config, tokens + step, True))
    row = {"at": tokens + worst, "held": held[worst], "after_prompt": held[0], "held_by_step": held[1:]}
    row |= {"unwindowed": dense_bytes(model.config, tokens + worst, False), "left_over_weights": left - weights}
    if memory.is_cuda:
        row |= {"peak_prompt": peaks[0], "peak_decoding": max(peaks[1:])}
    if mode != DYNAMIC:
        formula = gemkv_compile.report_of(model).memory_bytes(1, tokens + worst)
        row |= {"ledger": counted[worst][0], "reserve": counted[worst][1], "formula": formula}
    return row


def dense_bytes(config: Any, tokens: int, windowed: bool) -> int:
    """Bytes of a bf16 cache of one sequence, from shapes alone, with or without use of windows."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    keep = [config.sliding_window - 1 if windowed and kind == "sliding_attention" else tokens for kind in kinds]
    return sum(min(tokens, rows) for rows in keep) * 2 * config.num_key_value_heads * config.head_dim * 2


def run_all(arguments: argparse.Namespace, tasks: list[tuple[str, str]], folder: str) -> dict[Any, dict[str, Any]]:
    """Rows by (model, mode), of processes that run side by side as far as the GPU has room for them."""
    waiting = sorted(tasks, key=lambda task: -need_gib(*task))
    room = torch.cuda.mem_get_info()[0] / GIB - SPARE_GIB if arguments.device == "cuda" else float("inf")
    rows, running = {}, dict[tuple[str, str], Any]()
    while waiting or running:
        for task in list(waiting):
            taken = sum(need_gib(*each) for each in running)
            if not running or (len(running) < arguments.jobs and taken + need_gib(*task) <= room):
                running[task] = child(arguments, *task, folder)
                waiting.remove(task)
        time.sleep(0.2)
        for task, (began, process, out, log) in list(running.items()):
            seconds = time.monotonic() - began
            if process.poll() is not None or seconds > LIMIT_S:
                process.kill()  # of no effect on one that has ended
                rows[task] = outcome(process, out, log, LIMIT_S)
                print(task, f"{seconds:.0f} s", rows[task].get("failed", "done"), flush=True)
                del running[task]
    return rows


def need_gib(name: str, mode: str) -> int:
    """Of a process, roughly."""
    return NEED_GIB[name][{DYNAMIC: 0, "model": 1}.get(mode, 2)]


def child(arguments: argparse.Namespace, name: str, mode: str, folder: str) -> tuple[float, Any, Path, Path]:
    """Start a process for one mode; it writes its row into a file. When it began, the process, that file, its log."""
    out, log = (Path(folder) / f"{name}-{mode}.{kind}" for kind in ("json", "log"))
    command = [sys.executable, __file__, "--child", name, mode, str(out), "--tokens", str(arguments.tokens)]
    command += ["--steps", str(arguments.steps), "--device", arguments.device]
    with log.open("w") as text:
        return time.monotonic(), subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT), out, log


def main() -> None:
    """Parse the arguments, measure everything and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(REAL))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--steps", type=int, default=66, help="decode steps; 64 cross the end of a group")
    parser.add_argument("--jobs", type=int, default=12, help="processes side by side, where the GPU has room for them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save-as", default="memory_end_to_end")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "MODE", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("memory_end_to_end needs a GPU: left out")
        return
    if given.child:
        name, mode, out = given.child
        Path(out).write_text(json.dumps(measure(name, mode, given.tokens, given.steps, torch.device(given.device))))
        return
    tasks = [(name, mode) for name in given.models.split(",") for mode in given.modes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(given, tasks, folder)
        for task in tasks:  # what others left no room for gets the GPU for itself
            if "memory" in rows[task].get("failed", ""):
                rows |= run_all(given, [task], folder)
    about = {"batch": 1, "tokens": given.tokens}
    print(f"saved to {save(given.save_as, [{'model': t[0], 'mode': t[1], **about, **rows[t]} for t in tasks])}")


if __name__ == "__main__":
    main()
