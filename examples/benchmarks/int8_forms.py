"""Ways to scale int8 keys and values, by what they cost in text: the table behind the choice of the "int8" format.

    python int8_forms.py [--models gemma3-270m,smollm2-135m] [--tokens 8192] [--device cpu]

Every form is read as while decoding (`gemkv eval --path parallel`): complete groups as stored, the newest tokens
exactly. "page" forms wait for 256 tokens, four groups, before they store, which flatters them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import save
from torch import Tensor

from gemkv_compile.cli.models import named_model
from gemkv_compile.fidelity import measure, text
from gemkv_compile.fidelity.formats import TESTED, Format, formats_of_run
from gemkv_compile.fidelity.parallel_path import ParallelPath
from gemkv_compile.fidelity.result import rows_of

GROUP, PAGE, WINDOW, PROMPTS = 64, 256, 2048, (1, 8, 64, 1024)
Store = Callable[[Tensor], Tensor]


def codes_of(x: Tensor, scale: Tensor) -> Tensor:
    """x through codes -127 .. 127 of a float16 scale that broadcasts; where that is 0, codes are x rounded."""
    scale = scale.to(torch.float16).float()
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).round().clamp(-127, 127) * scale


def symmetric(axes: tuple[int, ...], tokens: int) -> Store:
    """One scale for what `axes` of [..., groups, tokens, head_dim] span."""

    def store(rows: Tensor) -> Tensor:
        x = rows.unflatten(-2, (-1, tokens))
        return codes_of(x, x.abs().amax(axes, keepdim=True) / 127).flatten(-3, -2)

    return store


def page_scales(first_group_only: bool) -> Store:
    """A scale per channel of a page, refitted on the page or taken from its first group, times one per group."""

    def store(rows: Tensor) -> Tensor:
        x = rows.unflatten(-2, (-1, PAGE // GROUP, GROUP))
        seen = x[..., :1, :, :] if first_group_only else x
        sigma = seen.abs().amax((-3, -2), keepdim=True).clamp(min=1e-6)
        tau = (x / sigma).abs().amax((-2, -1), keepdim=True)
        return codes_of(x, sigma * tau / 127).flatten(-4, -2)

    return store


def per_token(rows: Tensor) -> Tensor:
    return codes_of(rows, rows.abs().amax(-1, keepdim=True) / 127)


CHANNELS = symmetric((-2,), GROUP)
FORMS = [
    TESTED["int8"],
    Format("per (group, channel), symmetric", GROUP, CHANNELS),
    Format("keys with zero-point, values symmetric", GROUP, TESTED["int8"].store, CHANNELS),
    Format("per (group, channel) for keys, per token for values", GROUP, CHANNELS, per_token),
    Format("per (page, channel) times per group", PAGE, page_scales(False)),
    Format("the same, channels from the page's first group", PAGE, page_scales(True)),
    Format("per token", 1, per_token),
    Format("per (group, head)", GROUP, symmetric((-2, -1), GROUP)),
]


def measure_model(
    name: str, forms: list[Format], tokens: int, device: str, window: int = WINDOW, skip: int = 0
) -> list[dict[str, Any]]:
    """A row for each form: perplexity ratio, KL and disagreement with 95% intervals, over all prompts.

    `skip` tokens of the text are left out, so that what is chosen here can be confirmed on them.
    """
    model, tokenizer, title = named_model(name, torch.float32)
    words, begin = text.tokens_of(text.read_text(None), tokenizer)
    words = words[skip:]
    windows = text.cut_windows(words[: tokens + 1 - len(begin)] if tokens else words, begin, window)
    batches = list(text.batches(*windows, [p for p in PROMPTS if p < window], 1, False))
    reference, floor, *_ = formats_of_run([], torch.float32)
    path = ParallelPath(model.to(device), (reference, floor, *forms))
    scored = measure.measure_text(path, batches, model.device, lambda done: None)
    rows = []
    for row in rows_of(scored, 0)[: len(path.formats)]:  # over all prompts
        if row.format != reference.name:
            values = {key: getattr(row, key) for key in ("ratio", "kl", "differs")}
            numbers = {key: [one.value, one.low, one.high] for key, one in values.items()}
            rows.append({"model": title, "form": row.format, "tokens": row.tokens, "worst_kl": row.worst_kl} | numbers)
            print(rows[-1], flush=True)
    return rows


def main(forms: list[Format], name: str, doc: str, tokens: int, window: int, skip: int = 0) -> None:
    """Parse the arguments, measure every model and save."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--models", default="gemma3-270m,smollm2-135m")
    parser.add_argument("--tokens", type=int, default=tokens, help="of the text; 0: all")
    parser.add_argument("--window", type=int, default=window, help="tokens of a window")
    parser.add_argument("--skip", type=int, default=skip, help="tokens at the start of the text that are left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save-as", default=name)
    given = parser.parse_args()
    models = given.models.split(",")
    sizes = given.tokens, given.device, given.window, given.skip
    rows = [row for model in models for row in measure_model(model, forms, *sizes)]
    print(f"saved to {save(given.save_as, rows)}")


if __name__ == "__main__":
    main(FORMS, "int8_forms", __doc__, 8192, WINDOW)
