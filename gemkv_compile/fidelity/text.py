"""The text to measure on, cut into windows of tokens that start with a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.errors import GemkvError

SHORTEST = 2  # a prompt token and a decoded one


@dataclass(frozen=True)
class Batch:
    """Windows that run together.

    Args:
        ids: [batch, tokens] int64, what the model reads.
        targets: [batch, tokens] int64, the token after each.
        prompt: Tokens at the start of each window that are given in one call.
    """

    ids: Tensor
    targets: Tensor
    prompt: int

    @property
    def decoded(self) -> int:
        """Tokens that are decoded, over the whole batch."""
        return self.ids.shape[0] * (self.ids.shape[1] - self.prompt)


def read_text(path: Path | None) -> str:
    """The text of a file (UTF-8), or without one the reference pages of Python: English that every installation has.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path is not None:
        return path.read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def tokens_of(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of a text, and the ids that this tokenizer puts before any text (empty, or one begin token)."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    begin = tokenizer.bos_token_id
    return (ids[1:], [begin]) if ids and ids[0] == begin is not None else (ids, [])


def cut_windows(text: Sequence[int], begin: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Cut tokens into windows; what does not fill one is left out, unless it is all there is.

    Args:
        text: Token ids.
        begin: Ids to put before every window.
        length: Tokens of a window, `begin` included.
    Returns:
        ids and targets, [windows, length] int64. No target is in two windows.
    Raises:
        GemkvError: the text has fewer than three tokens, or windows fewer than two.
    """
    if length < SHORTEST:
        raise GemkvError(f"A window needs at least {SHORTEST} tokens, got {length}.")
    first = 1 - len(begin)  # the text's own first token is a target only if something stands before it
    length = min(length, len(text) - first)
    if length < SHORTEST:
        raise GemkvError(f"The text has {len(text)} tokens; give at least {SHORTEST + 1}.")
    starts = range(first, len(text) - length + 1, length)
    targets = torch.tensor([text[start : start + length] for start in starts])
    before = [[*begin] or [text[start - 1]] for start in starts]
    return torch.cat((torch.tensor(before), targets[:, :-1]), 1), targets


def batches(
    ids: Tensor, targets: Tensor, prompts: Sequence[int], batch: int, every_prompt: bool = False
) -> Iterator[Batch]:
    """Give each window a prompt, and put windows of one prompt together.

    Args:
        ids, targets: [windows, length] int64.
        prompts: Prompt lengths; windows take them in turn.
        batch: Most windows in a batch.
        every_prompt: Every window runs with each prompt instead.
    Raises:
        GemkvError: a prompt leaves nothing to decode.
    """
    prompts = prompts if every_prompt else prompts[: len(ids)]
    for prompt in prompts:
        if not 0 < prompt < ids.shape[1]:
            raise GemkvError(f"A prompt of {prompt} tokens does not fit windows of {ids.shape[1]} tokens.")
    for turn, prompt in enumerate(prompts):
        mine = slice(None) if every_prompt else slice(turn, None, len(prompts))
        for few, goals in zip(ids[mine].split(batch), targets[mine].split(batch), strict=True):
            if few.numel():  # split gives one empty part where there is nothing
                yield Batch(few, goals, prompt)
