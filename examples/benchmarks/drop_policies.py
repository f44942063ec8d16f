"""What early drop costs in text: each policy against random pages, of layers without a window, at the same budget.

    python drop_policies.py [--model gemma3-270m] [--tokens 4096] [--window 2048] [--prompt 1280] [--keep 0.7]
                            [--needles 4] [--device cpu]

Keys and values are exact, so all that differs is what was dropped: after each prompt, `--keep` of its complete pages of
64 tokens stay, and everything after it. Every token after the prompt is scored as while decoding (`gemkv eval --path
parallel`) against the same model with nothing dropped. Needles are in the prompt, and asked for after it: a policy that
looks at the last queries of the prompt has not seen the questions. Each seed draws other random pages.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
from harness import save

from gemkv_compile.cli.models import named_model
from gemkv_compile.fidelity import measure, needle, text
from gemkv_compile.fidelity.drops import POLICIES, Random
from gemkv_compile.fidelity.formats import REFERENCE, REFERENCE_FORMAT, TESTED, Format
from gemkv_compile.fidelity.parallel_path import ParallelPath
from gemkv_compile.fidelity.result import rows_of


def forms(keep: float, seeds: int) -> list[Format]:
    """The policies, all after the prompt only. The first page draws much attention: some random draws keep it."""
    policies = {name: make(keep) for name, make in POLICIES.items() if name != "random"}
    policies |= {f"random, seed {seed}": Random(keep, seed) for seed in range(seeds)}
    policies |= {f"random, first page kept, seed {seed}": Random(keep, seed, sinks=4) for seed in range(seeds)}
    return [replace(TESTED["model"], name=name, drop=policy) for name, policy in policies.items()]


def measured(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each policy."""
    model, tokenizer, title = named_model(given.model, torch.float32)
    words, begin = text.tokens_of(text.read_text(None), tokenizer)
    windows = text.cut_windows(words[: given.tokens + 1 - len(begin)], begin, given.window)
    batches = list(text.batches(*windows, [given.prompt], 1))
    path = ParallelPath(model.to(given.device), (REFERENCE_FORMAT, *forms(given.keep, given.seeds)))
    contexts = list(needle.contexts(words, begin, tokenizer, given.prompt, given.needles, 0)) if given.needles else []
    began = time.monotonic()

    def tell(tokens: int) -> None:
        print(f"{time.monotonic() - began:.0f} s: {tokens} more tokens", flush=True)

    scored = measure.measure_text(path, batches, model.device, tell)
    cells = measure.measure_needles(path, contexts, model.device, tell)
    rows = []
    for row in rows_of(scored, 0):
        values = {key: getattr(row, key) for key in ("ratio", "kl", "differs")}
        numbers = {key: [one.value, one.low, one.high] for key, one in values.items()}
        mine = [cell for cell in cells if cell.format == row.format]
        found = {"found": sum(cell.found for cell in mine), "asked": sum(cell.asked for cell in mine)}
        name = "nothing dropped" if row.format == REFERENCE else row.format
        rows.append({"model": title, "policy": name, "keep": given.keep, "prompt": given.prompt, "tokens": row.tokens})
        rows[-1] |= numbers | found
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Parse the arguments, measure and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--prompt", type=int, default=1280, help="tokens of its prompt, and about those of needles")
    parser.add_argument("--keep", type=float, default=0.7, help="share of complete pages that stay")
    parser.add_argument("--seeds", type=int, default=2, help="draws of random pages")
    parser.add_argument("--needles", type=int, default=4, help="at each depth; 0: none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save-as", default="drop_policies")
    given = parser.parse_args()
    print(f"saved to {save(given.save_as, measured(given))}")


if __name__ == "__main__":
    main()
