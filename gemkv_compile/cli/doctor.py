"""`gemkv doctor`: what is installed, what can be used, what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gemkv_compile.kernels.engines.registry import ENGINES

PACKAGES = ("torch", "triton", "transformers", "numpy", "sympy", "rich")
OLDEST_TORCH, OLDEST_TRANSFORMERS = (2, 11), (5, 17)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and what to do about it."""

    problem: str
    remedy: str


def doctor(console: Console) -> int:
    """Print what is there and what is wrong; returns 1 if something is."""
    console.print(_versions())
    console.print(_devices())
    console.print(_kernels())
    findings = list(diagnose())
    for finding in findings:
        console.print(f"[red]wrong:[/red] {finding.problem}\n  [green]mend:[/green] {finding.remedy}")
    if not findings:
        console.print("[green]nothing is wrong[/green]")
    return 1 if findings else 0


def diagnose() -> Iterator[Finding]:
    """Everything that would keep a compile from working."""
    if "gemkv" not in torch.compiler.list_backends():
        yield Finding(
            'torch.compile does not know the backend "gemkv".',
            "Install the package (pip install gemkv-compile, or pip install -e . in a checkout), then restart Python.",
        )
    if _version("torch") < OLDEST_TORCH:
        yield Finding(f"torch {torch.__version__} is too old.", "pip install 'torch>=2.11'")
    if importlib.util.find_spec("transformers") and _version("transformers") < OLDEST_TRANSFORMERS:
        yield Finding("transformers is older than what is tested.", "pip install 'transformers>=5.17'")
    kernels = importlib.util.find_spec("kernels")
    if kernels is not None and any((Path(p) / "layout.py").exists() for p in kernels.submodule_search_locations or ()):
        yield Finding(
            "`import kernels` finds this project's folder, which breaks Transformers.",
            "Run from another folder, or set PYTHONSAFEPATH=1.",
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        yield Finding("This GPU has no bfloat16 tensor cores.", "Use an sm_80 GPU or newer, or run on the CPU.")
    if shutil.which("cc") is None and shutil.which("g++") is None:
        yield Finding("No C++ compiler: inner='inductor' cannot compile for the CPU.", "apt-get install g++")


def _versions() -> Table:
    table = Table(title="versions", title_justify="left")
    table.add_column("package")
    table.add_column("version")
    table.add_row("python", platform.python_version())
    for name in ("gemkv-compile", *PACKAGES):
        table.add_row(name, torch.__version__ if name == "torch" else _version_text(name))
    return table


def _devices() -> Table:
    table = Table(title="devices", title_justify="left")
    for column in ("device", "memory", "capability"):
        table.add_column(column)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        table.add_row(properties.name, f"{properties.total_memory / 2**30:.0f} GiB", capability)
    table.add_row("cpu", "", f"{torch.get_num_threads()} threads")
    return table


def _kernels() -> Table:
    table = Table(title="engines and kernels", title_justify="left")
    for column in ("name", "usable", "what"):
        table.add_column(column)
    has_triton = importlib.util.find_spec("triton") is not None
    on_gpu = has_triton and torch.cuda.is_available()
    why = "" if on_gpu else ": no CUDA GPU" if has_triton else ": not installed (pip install triton)"
    table.add_row("reference", "yes", "all operators in plain torch, on any device")
    table.add_row("triton", "yes" if on_gpu else "no", f"append, decode and chunk attention on a GPU{why}")
    for name, engine in ENGINES.items():
        missing = engine.missing()
        on_device = missing is None and torch.cuda.is_available()
        why = f": {missing}" if missing else "" if on_device else ": no CUDA GPU"
        table.add_row(name, "yes" if on_device else "no", f"prompts by {engine.title}{why}")
    return table


def _version_text(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _version(package: str) -> tuple[int, int]:
    major, minor, *_ = _version_text(package).split(".")
    return int(major), int(minor)
