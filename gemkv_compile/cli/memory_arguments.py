"""Arguments of `gemkv memory`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemkv_compile.cli.gpus import GPUS
from gemkv_compile.cli.models import MODEL_NAMES


def add_memory(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command to argparse's sub-parsers; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "memory", help="what a model's cache takes in each format, and what fits on a GPU; no weights are loaded"
    )
    parser.add_argument("model", help=f"{', '.join(MODEL_NAMES)}, a folder with config.json, or a .gguf file")
    parser.add_argument("--tokens", type=_positive, default=8192, help="of each sequence (default 8192)")
    parser.add_argument("--batch", type=_positive, default=1, help="sequences (default 1)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help=f"24GiB, 80GB, or a GPU: {', '.join(GPUS)}")
    parser.add_argument("--reserve", metavar="SIZE", default="0", help="of it for activations and CUDA (default 0)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights, keys and values (default: the config's, bfloat16 if it names none)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bytes by tokens (extra `report`)")
    return parser


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)
