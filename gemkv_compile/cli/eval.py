"""`gemkv eval`: how far a cache format moves a model while decoding."""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gemkv_compile.cli.eval_tables import needle_table, notes, text_table
from gemkv_compile.cli.models import named_model
from gemkv_compile.errors import GemkvError


def evaluate(console: Console, arguments: argparse.Namespace) -> int:
    """Measure, print tables, and write what was asked for; returns 0."""
    import torch

    from gemkv_compile.fidelity.formats import formats_of_run
    from gemkv_compile.fidelity.plots import pyplot, save_plots

    if arguments.plots:
        pyplot()  # not after an hour
    dtype = getattr(torch, arguments.dtype)
    formats = formats_of_run(arguments.formats, dtype, arguments.drop, arguments.keep, arguments.peers)
    with console.status(f"loading {arguments.model}"):
        model, tokenizer, title = named_model(arguments.model, dtype)
        model = model.to(_device(arguments.device))
    result = run(console, model, tokenizer, title, formats, arguments)
    console.print(text_table(result))
    if result.needles:
        console.print(needle_table(result))
    for note in notes(result):
        console.print(note, markup=False, soft_wrap=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(result.to_json() + "\n")
    for path in save_plots(result, arguments.plots) if arguments.plots else ():
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return 0


def run(console: Console, model: Any, tokenizer: Any, title: str, formats: Any, arguments: argparse.Namespace) -> Any:
    """Measure a loaded model; returns a `fidelity.result.Result`."""
    from gemkv_compile.fidelity import measure, needle, text
    from gemkv_compile.fidelity.result import Result, curves_of, rows_of

    words, begin = text.tokens_of(text.read_text(arguments.text), tokenizer)
    enough = arguments.tokens + 1 - len(begin) if arguments.tokens else None  # the first token only precedes
    windows = text.cut_windows(words[:enough], begin, arguments.windows)
    way, path = _path(model, formats, arguments)
    size = arguments.batch or (16 if way == "decode" else 1)
    batches = list(text.batches(*windows, arguments.prompts, size, arguments.every_prompt))
    lengths = arguments.lengths if arguments.needles else []
    contexts = [
        context
        for length in lengths
        for context in needle.contexts(words, begin, tokenizer, length, arguments.needles, arguments.seed)
    ]
    began = time.monotonic()
    with warnings.catch_warnings(), _progress(console) as progress:
        # Transformers will rename the argument that carries the cache; both names work in all versions used here.
        warnings.filterwarnings("ignore", message=".*past_key_values", category=FutureWarning)
        task = progress.add_task(f"{title}, {way}", total=measure.tokens_to_run(batches, contexts))
        scored = measure.measure_text(path, batches, model.device, lambda tokens: progress.advance(task, tokens))
        cells = measure.measure_needles(path, contexts, model.device, lambda tokens: progress.advance(task, tokens))
    about = _about(title, way, formats, arguments) | {"seconds": round(time.monotonic() - began, 1)}
    return Result(about, rows_of(scored, arguments.seed), curves_of(scored), cells)


def _path(model: Any, formats: Any, arguments: argparse.Namespace) -> tuple[str, Any]:
    from gemkv_compile.fidelity.decode_path import DecodePath
    from gemkv_compile.fidelity.parallel_path import ParallelPath

    way = arguments.path or ("parallel" if arguments.device == "cpu" else "decode")
    if way == "decode":
        return way, DecodePath(model, formats, arguments.inner)
    return way, ParallelPath(model, formats)


def _device(name: str) -> Any:
    import torch

    try:
        device = torch.device(name)
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise GemkvError(f"--device {name} cannot be used here; see `gemkv doctor`.") from error


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    return Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)


def _about(title: str, way: str, formats: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    device = torch.device(arguments.device)
    kept = ("tokens", "windows", "prompts", "every_prompt", "seed", "dtype", "lengths", "drop", "keep", "inner")
    return {
        "model": title,
        "path": way,
        "formats": [form.name for form in formats],
        "text": arguments.text.name if arguments.text else "pydoc_data.topics",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(arguments, name) for name in kept},
    }
