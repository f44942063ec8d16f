"""Arguments of `gemkv eval`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemkv_compile.cli.models import MODEL_NAMES
from gemkv_compile.options import INNER_COMPILERS


def add_eval(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command to argparse's sub-parsers; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "eval", help="how far a cache format moves a model while decoding: perplexity, divergence, needles"
    )
    parser.add_argument("model", help=f"{', '.join(MODEL_NAMES)}, a folder, or a .gguf file")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to measure on (default: Python's own manual)")
    parser.add_argument(
        "--formats",
        type=_names,
        default=["model", "int8"],
        help="of int8, k8v4, k6v4, int4, model (model,int8)",
    )
    parser.add_argument(
        "--drop",
        type=_names,
        default=[],
        metavar="POLICIES",
        help="run each format with these policies too: sink_and_recent, attention_mass, snapkv, random; all drop once, "
        "after the prompt",
    )
    parser.add_argument(
        "--keep", type=float, default=0.7, metavar="SHARE", help="share of a prompt's pages that policies keep (0.7)"
    )
    parser.add_argument(
        "--peers",
        type=_names,
        default=[],
        help="Transformers' quantised caches beside them: quanto4, quanto2, hqq8, hqq4; --path decode",
    )
    _add_amounts(parser)
    parser.add_argument("--needles", type=int, default=8, help="needles at each depth and length (default 8; 0: none)")
    parser.add_argument("--lengths", type=_counts, default=[512, 1024, 2048], help="contexts of needles, in tokens")
    _add_ways(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots there (extra `report`)")
    return parser


def _add_amounts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=_count, default=8192, help="tokens of the text (default 8192; 0: all)")
    parser.add_argument("--windows", type=_count, default=2048, metavar="TOKENS", help="tokens of a window (2048)")
    parser.add_argument(
        "--prompts", type=_counts, default=[1, 8, 64, 1024], help="prompt lengths, taken in turn (1,8,64,1024)"
    )
    parser.add_argument("--every-prompt", action="store_true", help="run every window with each prompt length")


def _add_ways(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        choices=("decode", "parallel"),
        help="decode: the compiled model, token by token (default on a GPU); "
        "parallel: the same reads in one forward a window (default on a CPU)",
    )
    parser.add_argument(
        "--inner",
        choices=INNER_COMPILERS,
        default="auto",
        help="compiler of the rewritten graphs of --path decode (auto); eager: nothing to wait for, slower steps",
    )
    parser.add_argument("--batch", type=_count, help="windows that run together (decode 16, parallel 1)")
    parser.add_argument("--seed", type=int, default=0, help="of intervals and needles (default 0)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of tokens, got {text!r}")
    return int(text)
