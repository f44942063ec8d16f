"""Early drop: policies that choose pages of a cache to give back before anything else would.

A dropped page is a hole: no later attention sees its tokens, and nothing can read them. Positions stay what they were,
since keys carry them, and so do lengths. The unit is a page, of all K/V heads of a layer: one group of 64 tokens by
default where a policy is set.

A policy is any object with the attributes and the method of `Policy`; a frozen dataclass is best, as options are
compared by value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gemkv_compile.errors import InvalidOption

MOST_OBSERVED = 256  # queries


@dataclass(frozen=True)
class Pages:
    """What a policy is told of one layer's cache when a call has completed a page: its complete pages.

    Args:
        layer: The number of the cache in its graph, from 0 on.
        tokens: Rows of each sequence after the call, padding and dropped ones included.
        new_tokens: Rows that the call has added; 1 is a decode step.
        page_size: Page p holds the tokens p * page_size .. (p + 1) * page_size - 1.
        window: Tokens that a query attends to at most, or None.
        exists: bool [batch, pages], on the CPU: which pages are there, and not dropped yet.
        attention: float32 [batch, num_q_heads, pages, page_size] on the cache's device: the share of each token in the
            attention of the newest `observes` queries (fewer if there are no more), their mean. Rows of a head sum to 1
            with those that are in no complete page; dropped pages have 0. None if the policy observes nothing.
    """

    layer: int
    tokens: int
    new_tokens: int
    page_size: int
    window: int | None
    exists: Tensor
    attention: Tensor | None


class Policy(Protocol):
    """What the option `drop` takes.

    Attributes:
        observes: How many of the newest queries it wants the attention of; 0: none, and then pages of a prompt that it
            drops are never allocated.
        decodes: Whether it is asked in decode steps too, each time a page is complete; otherwise after prompts only.
        windowed: Whether it is asked about layers with a window too. They give back pages themselves.
    """

    @property
    def observes(self) -> int: ...

    @property
    def decodes(self) -> bool: ...

    @property
    def windowed(self) -> bool: ...

    def choose(self, pages: Pages) -> Tensor:
        """The pages to give back: bool [batch, pages], on any device; pages that are not there are ignored.

        A result on a GPU is waited for: once a call, for all layers together.
        """
        ...


@dataclass(frozen=True)
class SinkAndRecent:
    """Keep the first and the newest tokens, whole pages of them.

    Unlike in the paper, tokens keep their positions, so this does not take a model beyond the length that it knows.
    Source: StreamingLLM, arXiv:2309.17453.

    Args:
        sinks: The first tokens, which are kept.
        recent: The newest tokens, which are kept; or
        share: so many of these that this share of a sequence's complete pages is kept, in (0, 1].
        decodes, windowed: See `Policy`.
    Raises:
        InvalidOption: not exactly one of recent and share is given, or a number is out of range.
    """

    sinks: int = 4
    recent: int | None = None
    share: float | None = None
    decodes: bool = True
    windowed: bool = False
    observes: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _at_least(self, "sinks", 0)
        _check_amount(self, "recent", "share")

    def choose(self, pages: Pages) -> Tensor:
        """Pages between the sinks and the newest tokens, bool [batch, pages]."""
        first = torch.arange(pages.exists.shape[1]) * pages.page_size
        if self.share is not None:
            order = torch.where(first < self.sinks, math.inf, first)
            return lowest_pages(order.expand(pages.exists.shape), pages, 0, self.share, None)
        assert self.recent is not None
        between = (first >= self.sinks) & (first + pages.page_size <= pages.tokens - self.recent)
        return between.expand_as(pages.exists)


@dataclass(frozen=True)
class AttentionMass:
    """Drop the pages that the newest queries attend to least, by the share of attention that all their tokens get.

    Source: heavy hitters, H2O, arXiv:2306.14048. There the weights of all queries are summed token by token and head by
    head; here those of the newest queries, page by page, over all heads.

    Args:
        threshold: Drop pages with a smaller share of the attention than this, a mean over heads.
        share: Keep this share of a sequence's complete pages, in (0, 1].
        budget: Keep this many tokens, rounded down to pages; up to a page more until it is asked again.
        recent: The newest tokens, which are never dropped.
        observes, decodes, windowed: See `Policy`.
    Raises:
        InvalidOption: not exactly one of threshold, share and budget is given, or a number is out of range.
    """

    threshold: float | None = None
    share: float | None = None
    budget: int | None = None
    recent: int = 64
    observes: int = 32
    decodes: bool = True
    windowed: bool = False

    def __post_init__(self) -> None:
        _check_amount(self, "threshold", "share", "budget")

    def choose(self, pages: Pages) -> Tensor:
        """The pages with the smallest shares, bool [batch, pages]."""
        assert pages.attention is not None
        mass = pages.attention.sum(3).mean(1)
        if self.threshold is not None:
            return (mass < self.threshold) & ~newest_pages(pages, self.recent).to(mass.device)
        return lowest_pages(mass, pages, self.recent, self.share, self.budget)


@dataclass(frozen=True)
class SnapKV:
    """After a prompt, keep the pages that hold what its last queries look at.

    A token's importance is the attention of the last queries of the prompt, pooled over its neighbours; a page counts
    as much as its most important token, as a mean over heads. In the paper each head keeps tokens of its own; here all
    heads of a layer keep the same pages.
    Source: SnapKV, arXiv:2404.14469.

    Args:
        share: Keep this share of a sequence's complete pages, in (0, 1].
        budget: Keep this many tokens, rounded down to pages; up to a page more until it is asked again.
        pool: Neighbouring tokens that are pooled, an odd number.
        recent: The newest tokens, which are never dropped.
        observes, decodes, windowed: See `Policy`.
    Raises:
        InvalidOption: not exactly one of share and budget is given, or a number is out of range.
    """

    share: float | None = None
    budget: int | None = None
    pool: int = 7
    recent: int = 64
    observes: int = 32
    decodes: bool = False
    windowed: bool = False

    def __post_init__(self) -> None:
        _check_amount(self, "share", "budget")
        _at_least(self, "pool", 1)
        if self.pool % 2 == 0:
            raise InvalidOption(f"SnapKV: pool must be odd, got {self.pool}.")

    def choose(self, pages: Pages) -> Tensor:
        """The pages without an important token, bool [batch, pages]."""
        assert pages.attention is not None
        tokens = pages.attention.flatten(2)
        pooled = torch.nn.functional.avg_pool1d(tokens, self.pool, 1, self.pool // 2)
        best = pooled.unflatten(2, pages.attention.shape[2:]).amax(3).mean(1)
        return lowest_pages(best, pages, self.recent, self.share, self.budget)


def newest_pages(pages: Pages, recent: int) -> Tensor:
    """Which pages hold one of the newest `recent` tokens, bool [pages] on the CPU."""
    end = (torch.arange(pages.exists.shape[1]) + 1) * pages.page_size
    return end > pages.tokens - recent


def lowest_pages(scores: Tensor, pages: Pages, recent: int, share: float | None, budget: int | None) -> Tensor:
    """The pages of each sequence with the lowest scores, so many that a share or a budget of tokens stays.

    Args:
        scores: [batch, pages], float.
        recent: The newest tokens, whose pages stay.
        share: Of the complete pages, dropped ones included, the share that stays; or
        budget: the tokens that stay, with those that are in no complete page.
    Returns:
        bool [batch, pages], on the device of the scores.
    """
    count = scores.shape[1]
    if share is not None:
        keep = count - math.floor((1 - share) * count + 0.5)
    else:
        assert budget is not None
        keep = max(0, budget - pages.tokens % pages.page_size) // pages.page_size
    exists = pages.exists.to(scores.device)
    free = exists & ~newest_pages(pages, recent).to(scores.device)
    rank = scores.masked_fill(~free, math.inf).argsort(dim=1, stable=True).argsort(dim=1)
    surplus = exists.sum(1, keepdim=True) - keep
    return free & (rank < surplus)


def check_policy(policy: Any) -> None:
    """Check that an object is a policy.

    Raises:
        InvalidOption: it lacks a part of one, and the message says which.
    """
    hint = f"Give SinkAndRecent, AttentionMass or SnapKV of {__name__}, or an object like its Policy."
    if isinstance(policy, type) or not callable(getattr(policy, "choose", None)):
        raise InvalidOption(f"drop must be None or a policy with a method choose, got {policy!r}. {hint}")
    observes = getattr(policy, "observes", None)
    if not isinstance(observes, int) or isinstance(observes, bool) or not 0 <= observes <= MOST_OBSERVED:
        raise InvalidOption(
            f"drop: observes of {policy!r} must be a number of queries, 0 to {MOST_OBSERVED}, got {observes!r}. {hint}"
        )
    for name in ("decodes", "windowed"):
        if not isinstance(getattr(policy, name, None), bool):
            value = getattr(policy, name, None)
            raise InvalidOption(f"drop: {name} of {policy!r} must be True or False, got {value!r}. {hint}")


def _at_least(policy: Any, name: str, least: int) -> None:
    value = getattr(policy, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidOption(f"{type(policy).__name__}: {name} must be an int of at least {least}, got {value!r}.")


def _check_amount(policy: Any, *names: str) -> None:
    """Check what says how much is dropped, and the fields that such policies share."""
    kind = type(policy).__name__
    given = {name: getattr(policy, name) for name in names if getattr(policy, name) is not None}
    if len(given) != 1:
        raise InvalidOption(f"{kind} takes exactly one of {', '.join(names)}, got {given or 'none'}.")
    ((name, value),) = given.items()
    if name in ("budget", "recent"):
        _at_least(policy, name, int(name == "budget"))
    elif not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise InvalidOption(f"{kind}: {name} must be in (0, 1], got {value!r}.")
    if "recent" not in names:
        _at_least(policy, "recent", 0)
        _at_least(policy, "observes", 1)
