"""First token of `generate` and the memory it takes, at several lengths of prompt, beside Transformers' own caches.

    python prefill_end_to_end.py [--models gemma3-4b,gemma1-7b] [--modes dynamic,static,gemkv]
                                 [--lengths 4096,32768,131072]

One sequence, models and modes of `end_to_end.py`, random bf16 weights. A mode runs in a process of its own, which makes
the model once and takes the lengths in the order given. Each length is run once untimed, which compiles what has to be,
and then three times; where that first run compiles nothing and takes longer than LONG_S, it is the only one. Peaks are
over the weights, as torch's allocator saw them. The longest prompt is not run with StaticCache. Dynamo takes the first
prompt's length as a constant and compiles once more for all later ones, as it does for every user.

The model `tiny` is for trying this out: it runs on any device, a CPU has no peaks, and nothing is saved.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from end_to_end import LIMIT_S, MODELS, outcome, prepare, random_model, start
from harness import save

MODES = ("dynamic", "static", "gemkv")
LENGTHS = (4096, 32768, 131072)
LONGEST = {"static": 32768}  # tokens
COMPILES = {"gemkv"}  # modes whose first run of a length may compile
REPEATS, LONG_S = 3, 8.0


def tiny() -> Any:
    """Two layers of a Gemma 3, one of them with a window of 32."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "query_pre_attn_scalar": 64}
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, sliding_window=32, layer_types=kinds))


BUILDERS = {**MODELS, "tiny": tiny}


def measure(name: str, mode: str, lengths: list[int], out: Path) -> None:
    """Write one row for each length to a file, which has the rows so far at any time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(BUILDERS[name], device)
    options = prepare(model, mode) | {"do_sample": False}
    weights = allocated(device)
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        try:
            row = at_length(model, mode, tokens, options, weights, device)
        except torch.OutOfMemoryError:
            row = {"failed": "out of memory"}
        free(device)
        rows.append({"tokens": tokens, **row})
        out.write_text(json.dumps({"rows": rows}))


def at_length(model: Any, mode: str, tokens: int, options: dict[str, Any], weights: int, device: str) -> dict[str, Any]:
    """A length's row: milliseconds of each timed run and GiB above the weights, with their median and largest."""
    ids = torch.randint(5, 1000, (1, tokens), device=device)
    options = options | {"attention_mask": torch.ones_like(ids)}
    runs = [first_token(model, ids, options, device)]
    row: dict[str, Any] = {"warm_up_ms": runs[0][0]}
    if mode in COMPILES or runs[0][0] < 1e3 * LONG_S:
        runs = [first_token(model, ids, options, device) for _ in range(REPEATS)]
    row["times_ms"] = [ms for ms, _ in runs]
    row["first_token_ms"] = statistics.median(row["times_ms"])
    if device == "cuda":
        row["peaks_gib"] = [(peak - weights) / 2**30 for _, peak in runs]
        row |= {"peak_gib": max(row["peaks_gib"]), "weights_gib": weights / 2**30}
    return row | ({"engines": engines_at(model, tokens)} if mode == "gemkv" else {})


def first_token(model: Any, ids: torch.Tensor, options: dict[str, Any], device: str) -> tuple[float, int]:
    """Milliseconds of `generate` of one token, and the most bytes that were allocated meanwhile."""
    free(device)
    began = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options)
    if device == "cpu":
        return 1e3 * (time.perf_counter() - began), 0
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), torch.cuda.max_memory_allocated()


def free(device: str) -> None:
    """Collect what earlier runs left behind, wait for the device, and forget its peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def engines_at(model: Any, tokens: int) -> list[str]:
    """Who attends to a prompt of so many tokens, by layers, as the report of the compile says."""
    import gemkv_compile

    choices = [choice for graph in gemkv_compile.report_of(model).graphs for choice in graph.engines]
    fits = [c for c in choices if (c.shortest or 0) <= tokens <= (c.longest or tokens)]
    return list(dict.fromkeys(f"layer {', '.join(map(str, c.layers))}: {c.engine}" for c in fits))


def rows_of(name: str, mode: str, lengths: list[int]) -> list[dict[str, Any]]:
    """The rows of a process of its own; those that it did not come to say what it failed with."""
    lengths = [tokens for tokens in lengths if tokens <= LONGEST.get(mode, tokens)]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--lengths", ",".join(map(str, lengths))]
        process, out, log = start(__file__, name, mode, folder, options)
        result = outcome(process, out, log, LIMIT_S)
        rows = json.loads(out.read_text())["rows"] if out.exists() else []
    rows += [{"tokens": tokens, "failed": result["failed"]} for tokens in lengths[len(rows) :]]
    return [{"model": name, "mode": mode, "batch": 1, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--save-as", default="prefill_end_to_end")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "MODE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    lengths = [int(tokens) for tokens in arguments.lengths.split(",")]
    if arguments.child:
        name, mode, out = arguments.child
        measure(name, mode, lengths, Path(out))
        return
    names = arguments.models.split(",")
    if not torch.cuda.is_available() and names != ["tiny"]:
        print("prefill_end_to_end needs a GPU: left out")
        return
    rows = []
    for name in names:
        for mode in arguments.modes.split(","):
            rows += (found := rows_of(name, mode, lengths))
            print(*found, sep="\n", flush=True)
            if "tiny" not in names:  # each time: a run that is cut short leaves what it had
                print(f"saved to {save(arguments.save_as, rows)}", flush=True)
    sys.exit(int(all("failed" in row for row in rows)))


if __name__ == "__main__":
    main()
