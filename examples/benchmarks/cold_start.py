"""Time to the first token in a fresh process with empty compile caches, beside Inductor and StaticCache.

    python cold_start.py [--models gemma3-4b] [--modes inductor,static,gemkv,gemkv-whole] [--tokens 4096]

The clock starts when the model stands on the GPU and stops when `generate` has returned one token, and again when a
second call has returned 35: by then decode steps are compiled too. "gemkv-whole" is gemkv without `split_layers`. Every
mode has its own process and cache folders.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from end_to_end import MODELS, prepare
from harness import save

MODES = ("inductor", "static", "gemkv", "gemkv-whole")
MORE = 34
LIMIT_S = 420


def measure(name: str, mode: str, tokens: int) -> dict[str, float]:
    """Seconds of one mode."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = MODELS[name]().eval()
        ids = torch.randint(5, 1000, (1, tokens))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    torch.cuda.synchronize()
    began = time.perf_counter()
    if mode == "gemkv-whole":
        import gemkv_compile

        gemkv_compile.compile(model, strict=True, split_layers=False)
        options: dict[str, Any] = {}
    else:
        options = prepare(model, mode)
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False}
    seconds = {}
    for new, key in ((1, "first_token_s"), (1 + MORE, "warm_s")):
        with torch.no_grad():
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
        torch.cuda.synchronize()
        seconds[key] = time.perf_counter() - began
    return seconds


def run_apart(name: str, mode: str, tokens: int) -> dict[str, Any]:
    """A row, measured in a process that finds nothing compiled."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--child", name, mode, str(out), "--tokens", str(tokens)]
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT_S}
        try:
            run = subprocess.run(command, env=os.environ | caches, **how, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished within {LIMIT_S} s"}
        if run.returncode:
            print(run.stderr[-2000:], flush=True)
            return {"failed": (run.stderr.strip().splitlines() or ["no message"])[-1][:200]}
        row: dict[str, Any] = json.loads(out.read_text())
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gemma3-4b")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "MODE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("cold_start needs a GPU: left out")
        return
    if arguments.child:
        name, mode, out = arguments.child
        Path(out).write_text(json.dumps(measure(name, mode, arguments.tokens)))
        return
    rows = []
    for name in arguments.models.split(","):
        for mode in arguments.modes.split(","):
            row = {"model": name, "mode": mode, "tokens": arguments.tokens}
            rows.append(row | run_apart(name, mode, arguments.tokens))
            print(rows[-1], flush=True)
            save("cold_start", rows)  # each time: a run that is cut short leaves what it had


if __name__ == "__main__":
    main()
