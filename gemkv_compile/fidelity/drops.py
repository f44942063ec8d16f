"""Early drop in a fidelity run: policies by name, all after the prompt only, and what they do to an emulated window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gemkv_compile.drop import AttentionMass, Pages, Policy, SinkAndRecent, SnapKV, lowest_pages
from gemkv_compile.errors import InvalidOption

PAGE = 64  # what the product takes with a policy, where no option says


@dataclass(frozen=True)
class Random:
    """Keep a share of the pages of a sequence, drawn anew for each layer and length: what a policy has to beat.

    Args:
        share: In (0, 1].
        seed: Of the draws; equal seeds draw the same pages for each sequence of a batch.
        recent: The newest tokens, which are never dropped.
        sinks: The first tokens, whose pages are dropped last.
    """

    share: float
    seed: int = 0
    recent: int = 64
    sinks: int = 0
    decodes: bool = False
    windowed: bool = False
    observes: ClassVar[int] = 0

    def choose(self, pages: Pages) -> Tensor:
        """The pages that are not drawn, bool [batch, pages]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + pages.layer * 1009 + pages.tokens)
        scores = torch.rand(pages.exists.shape[1], generator=generator)
        scores[: -(-self.sinks // pages.page_size)] = 1.0
        return lowest_pages(scores.expand(pages.exists.shape), pages, self.recent, self.share, None)


POLICIES: dict[str, Callable[[float], Policy]] = {
    "sink_and_recent": lambda share: SinkAndRecent(share=share, decodes=False),
    "attention_mass": lambda share: AttentionMass(share=share, decodes=False),
    "snapkv": lambda share: SnapKV(share=share),
    "random": lambda share: Random(share),
}


def policy_named(name: str, share: float) -> Policy:
    """A policy that keeps a share of a prompt's complete pages.

    Raises:
        InvalidOption: no such policy, or the share is not in (0, 1].
    """
    if name not in POLICIES:
        raise InvalidOption(f"--drop takes {', '.join(POLICIES)}, got {name!r}.")
    if not 0 < share <= 1:
        raise InvalidOption(f"--keep takes a share of the pages in (0, 1], got {share}.")
    return POLICIES[name](share)


class Holes:
    """The tokens that a policy has dropped of one layer while a window is emulated.

    Args:
        policy: Whom to ask, or None.
        layer, is_windowed: Of the attention.
        query: [batch, Hq, T, D] of the whole window.
        mask: bool [batch, 1, T, T], which tokens a query sees without a policy.
        scale, softcap: Of the scores.
        guard: Tokens at the start that the format keeps as they are, and that are therefore never dropped.
    """

    def __init__(
        self,
        policy: Policy | None,
        layer: int,
        is_windowed: bool,
        query: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None,
        guard: int = 0,
    ) -> None:
        self._guard = guard
        self._policy = None if is_windowed and policy is not None and not policy.windowed else policy
        self._layer, self._query, self._mask = layer, query, mask
        self._scale, self._softcap = scale, softcap
        self._asked = 0  # tokens that were there then
        self._lost = torch.zeros(len(query), query.shape[2], dtype=torch.bool, device=query.device)

    def split(self, runs: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        """Runs of queries, cut where a page becomes complete: the query that completes it still sees all pages."""
        for first, end, stored in runs:
            cut = self._policy is not None and self._policy.decodes and (first + 1) % PAGE == 0
            if cut and first + 1 < end:
                yield first, first + 1, stored
                first += 1
            yield first, end, stored

    def seen(self, first: int, end: int) -> Tensor:
        """What the queries first .. end - 1 see of the tokens before end, bool [batch, 1, queries, end]."""
        return self._mask[:, :, first:end, :end] & ~self._lost[:, None, None, :end]

    def ask(self, tokens: int, prompt: int, keys: Tensor) -> None:
        """Ask the policy, if it is its turn when `tokens` tokens are there, after a prompt of `prompt` ones.

        Args:
            keys: [batch, Hkv, at least tokens, D], complete groups as they are stored.
        """
        policy = self._policy
        is_turn = tokens == prompt > 1 or (policy is not None and policy.decodes and tokens > max(prompt, 1))
        if policy is None or not is_turn or (tokens != prompt and tokens % PAGE) or tokens < PAGE:
            return
        if tokens == self._asked:
            return
        self._asked = tokens
        complete, new_tokens = tokens // PAGE * PAGE, prompt if tokens == prompt else 1
        exists = ~self._lost[:, :complete].unflatten(1, (-1, PAGE)).all(2)
        exists[:, : self._guard // PAGE] = False
        attention = self._attention(tokens, keys)[:, :, :complete].unflatten(2, (-1, PAGE))
        about = Pages(self._layer, tokens, new_tokens, PAGE, None, exists.cpu(), attention)
        chosen = policy.choose(about).to(self._lost.device) & exists
        self._lost[:, :complete] |= chosen.repeat_interleave(PAGE, 1)

    def _attention(self, tokens: int, keys: Tensor) -> Tensor:
        """Mean weights of the observed queries, float32 [batch, Hq, tokens]."""
        assert self._policy is not None
        first = max(0, tokens - max(1, self._policy.observes))
        query = self._query[:, :, first:tokens].float()
        scores = (
            query @ keys[:, :, :tokens].float().repeat_interleave(query.shape[1] // keys.shape[1], 1).mT * self._scale
        )
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        return scores.masked_fill(~self.seen(first, tokens), float("-inf")).softmax(-1).mean(2)


def holes_of(
    policy: Policy | None, module: Any, query: Tensor, mask: Tensor, options: dict[str, Any], guard: int
) -> Holes:
    """The holes of an attention module of Transformers that is called with these options."""
    window = window_of(module, options)
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    layer = getattr(module, "layer_idx", 0)
    return Holes(policy, layer, window is not None, query, mask, scale, options.get("softcap"), guard)


def window_of(module: Any, options: dict[str, Any]) -> int | None:
    """The window of an attention module of Transformers that is called with these options, or None."""
    window: int | None = options.get("sliding_window") or getattr(module, "sliding_window", None)
    return window
