"""Needles that a small model can find: a made-up key word with a value, planted in text and asked for at the end.

Finding one is copying: the key stands at the end again, and what followed it before must be the most likely next token.
The text up to the questions is a prompt; the questions are decoded, so the needles are read from the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemkv_compile.errors import GemkvError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PAIRS = 2  # needles at each depth of a context
VALUES = """
amber apple arrow autumn banana basket bird blue bread bridge brown candle castle cat cherry circle clock cloud coffee
copper cotton dog dragon eagle engine feather fire fish flower forest garden glass gold green hammer harbor horse island
king lake lemon lion market mirror moon mountain music ocean orange paper pearl piano pink purple queen rain red river
salt school silver snow spring square star stone storm summer table thunder tiger tower train valley water whale wheat
white window winter wolf yellow
""".split()


@dataclass(frozen=True)
class Question:
    """A needle and where it is asked for: the logits at `position` must put `value` first."""

    depth: float
    position: int
    value: int


@dataclass(frozen=True)
class Context:
    """A text with needles; token ids, of which the first `prompt` are given in one call."""

    ids: tuple[int, ...]
    prompt: int
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Pair:
    depth: float
    before: list[int]  # up to the value
    value: int
    after: list[int]


def contexts(
    text: Sequence[int], begin: Sequence[int], tokenizer: Any, length: int, needles: int, seed: int
) -> Iterator[Context]:
    """Build contexts of exactly `length` tokens, with at least `needles` needles at each depth over all of them.

    Args:
        text: Token ids to hide needles in; each context takes another part, from the end of the text on.
        begin: Ids to put before every context.
    Raises:
        GemkvError: no room for the needles, or the tokenizer has too few one-token values.
    """
    rng = random.Random(f"{seed}-{length}")
    values = [ids[0] for word in VALUES if len(ids := _encode(tokenizer, f" {word}")) == 1]
    if len(values) < PAIRS * len(DEPTHS):
        raise GemkvError("This tokenizer has too few one-token words for needles; use --needles 0.")
    for number in range(-(-needles // PAIRS)):
        pairs = _pairs(tokenizer, values, rng)
        planted = sum(len(pair.before) + 1 + len(pair.after) for pair in pairs)
        room = length - len(begin) - 2 * planted
        if room < planted or len(text) < room:
            raise GemkvError(f"{length} tokens are too few (or the text is too short) for needles; see --lengths.")
        end = len(text) - number * room % (len(text) - room + 1)
        yield _assemble(list(begin), text[end - room : end], pairs, rng)


def _pairs(tokenizer: Any, values: Sequence[int], rng: random.Random) -> list[_Pair]:
    chosen = rng.sample(list(values), PAIRS * len(DEPTHS))
    pairs = []
    for depth, value in zip(DEPTHS * PAIRS, chosen, strict=True):
        key = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)).capitalize()
        pairs.append(_Pair(depth, _encode(tokenizer, f"\nThe secret word of {key} is"), value, _encode(tokenizer, ".")))
    return pairs


def _assemble(begin: list[int], hay: Sequence[int], pairs: list[_Pair], rng: random.Random) -> Context:
    ids, done = begin, 0
    for pair in sorted(pairs, key=lambda pair: pair.depth):
        here = round(pair.depth * len(hay))
        ids = [*ids, *hay[done:here], *pair.before, pair.value, *pair.after]
        done = here
    ids += hay[done:]
    prompt, questions = len(ids), []
    for pair in rng.sample(pairs, len(pairs)):
        ids = [*ids, *pair.before]
        questions.append(Question(pair.depth, len(ids) - 1, pair.value))
        ids += [pair.value, *pair.after]
    return Context(tuple(ids), prompt, tuple(questions))


def ask(path: Any, context: Context, device: Any) -> dict[str, list[tuple[float, bool]]]:
    """Run a context through a path; by format, (depth, whether the value came first) of every question."""
    asked = {question.position: question for question in context.questions}
    found: dict[str, list[tuple[float, bool]]] = {}
    for first, logits in path(torch.tensor([context.ids], device=device), context.prompt):
        for name, some in logits.items():
            best = some[0].argmax(-1).tolist()
            hits = [(asked[first + i], token) for i, token in enumerate(best) if first + i in asked]
            found.setdefault(name, []).extend((question.depth, token == question.value) for question, token in hits)
    return found


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
