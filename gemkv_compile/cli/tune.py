"""`gemkv tune`: time the engines of the option `prefill` on this GPU, for the shapes of a model or for one shape."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gemkv_compile.errors import GemkvError
from gemkv_compile.kernels.engines.choice import choose, reason_against
from gemkv_compile.kernels.engines.engine import OWN, Prompt
from gemkv_compile.kernels.engines.measure import measure
from gemkv_compile.kernels.engines.registry import AUTO, ENGINES, exact_engines
from gemkv_compile.kernels.engines.times import bucket_of, cache_folder

DTYPES = ("bfloat16", "float16", "float32")


def add_tune(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command to argparse's sub-parsers; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune", help="time who attends to prompts fastest on this GPU, for prefill='auto'"
    )
    parser.add_argument("model", nargs="?", help="a folder with config.json, a .gguf file or gemma3-270m: its shapes")
    parser.add_argument("--heads", type=int, help="query heads, for a shape without a model")
    parser.add_argument("--kv-heads", type=int, help="key/value heads")
    parser.add_argument("--head-dim", type=int, help="channels of a head")
    parser.add_argument("--window", type=int, help="tokens that a query sees (default: all before it)")
    parser.add_argument("--softcap", type=float, help="cap of the scores (default: none)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of keys and values (default bfloat16)")
    parser.add_argument("--tokens", default="1024,4096,8192,32768", help="lengths (default 1024,4096,8192,32768)")
    parser.add_argument("--device", default="cuda", help="default cuda")
    return parser


def tune(console: Console, arguments: argparse.Namespace) -> int:
    """Time all shapes at all lengths, keep the times, and print them; returns 0.

    Raises:
        GemkvError: there is no such device, or neither a model nor a whole shape is given.
    """
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise GemkvError("gemkv tune times kernels on a CUDA GPU, and there is none.")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
    lengths = sorted({bucket_of(_number(text)) for text in arguments.tokens.split(",")})
    table = Table(title=f"microseconds of a prompt's attention, {device}", title_justify="left")
    for column in ("K/V heads", "class", "tokens", OWN, *exact_engines(), "taken"):
        table.add_column(column)
    left_out: dict[str, None] = {}
    for kv_heads, prompt in shapes(arguments):
        for tokens in lengths:
            with console.status(f"timing {tokens} tokens"):
                us = measure(prompt, tokens, device, kv_heads)
            taken = choose(AUTO, prompt, tokens, device).engine
            cells = [f"{us[name]:.0f}" if name in us else "-" for name in (OWN, *exact_engines())]
            table.add_row(str(kv_heads), _words(prompt.at(tokens)), str(tokens), *cells, taken)
        for name in exact_engines():
            why = reason_against(ENGINES[name], prompt, device)
            left_out |= {} if why is None else {f"{name}, {_words(prompt)}: {why}": None}
    console.print(table)
    for line in left_out:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"kept in {cache_folder()}", markup=False, highlight=False, soft_wrap=True)
    return 0


def shapes(arguments: argparse.Namespace) -> Iterator[tuple[int, Prompt]]:
    """K/V heads and class of each kind of layer; of a model, as its config says."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.model is None:
        heads, kv_heads, dim = arguments.heads, arguments.kv_heads, arguments.head_dim
        if not (heads and kv_heads and dim) or heads % kv_heads:
            raise GemkvError("gemkv tune needs a model, or --heads (a multiple of --kv-heads), --kv-heads, --head-dim.")
        yield kv_heads, Prompt(dtype, dim, heads // kv_heads, True, arguments.window, arguments.softcap)
        return
    from gemkv_compile.cli.models import named_config

    text = named_config(arguments.model)[0].get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    sliding = getattr(text, "sliding_window", None)
    for kind in sorted(kinds & {"full_attention", "sliding_attention"}):
        is_sliding = kind == "sliding_attention" or (not getattr(text, "layer_types", None) and sliding)
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        if not is_sliding:
            dim = getattr(text, "global_head_dim", None) or dim
            heads = getattr(text, "num_global_key_value_heads", None) or heads
        softcap = getattr(text, "attn_logit_softcapping", None) if text.model_type == "gemma2" else None
        groups = text.num_attention_heads // heads
        yield heads, Prompt(dtype, dim, groups, True, sliding if is_sliding else None, softcap)


def _words(prompt: Prompt) -> str:
    parts = [f"{prompt.groups} x {prompt.head_dim}", str(prompt.dtype).removeprefix("torch.")]
    parts += [f"window {prompt.window}"] * (prompt.window is not None)
    return ", ".join(parts + [f"softcap {prompt.softcap}"] * (prompt.softcap is not None))


def _number(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise GemkvError(f"--tokens takes numbers of at least 1 with commas between them, got {text!r}.")
    return int(text)
