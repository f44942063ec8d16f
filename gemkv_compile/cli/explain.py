"""`gemkv explain`: what the backend does to a model's prefill and decode graphs."""

from __future__ import annotations

from rich.console import Console

from gemkv_compile.cli.models import load_model
from gemkv_compile.options import Options


def explain_model(console: Console, path: str, kv_format: str, attention: str, as_json: bool) -> int:
    """Load a model, generate three tokens through a recording backend and print the report."""
    import torch

    from gemkv_compile.backend import Backend
    from gemkv_compile.frontend import break_texts
    from gemkv_compile.report import Report

    options = Options(kv_format=kv_format)
    with console.status(f"loading {path}"):
        model = load_model(path, attention)
    backend = Backend(options)
    model.compile(backend=backend)
    ids = torch.arange(5, 21)[None]
    with console.status("compiling"), torch.no_grad():
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    report = Report(tuple(backend.graphs), break_texts(backend))
    if as_json:
        print(report.to_json(indent=2))
        return 0
    report.print(console)
    console.print(f"bytes of the cache, for B sequences of S tokens: {report.memory}", markup=False, soft_wrap=True)
    return 0
