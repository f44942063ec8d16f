"""Scores of single tokens, and means of them with 95% intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

RESAMPLES = 2000
BLOCK = 128
"""Tokens in a block of the bootstrap. Neighbouring tokens have correlated scores; blocks of a paragraph hardly do."""
AT_ONCE = (2**20, 2**27)  # logits in one step, on a CPU (temporaries stay in its caches: 3 times faster) and a GPU
NEAR = 20.0  # logits that moved less than this cannot overflow an exponential
NLL, EXCESS, KL, DIFFERS = range(4)  # rows of a score array
Floats = np.ndarray


def token_scores(logits: dict[str, Tensor], reference: str, targets: Tensor) -> dict[str, Floats]:
    """Score every query under every format.

    Args:
        logits: By format, [batch, queries, vocabulary], any float dtype.
        reference: The format that the others are compared with.
        targets: [batch, queries] int64, the tokens that come.
    Returns:
        By format, [4, batch, queries] float64: negative log-likelihood of the target in nats; the same minus the
        reference's; KL(reference || format) in nats; 1 where the most likely token is another than the reference's.
    """
    batch, queries, words = logits[reference].shape
    step = max(1, AT_ONCE[targets.is_cuda] // (batch * words))
    parts = []
    for first in range(0, queries, step):
        some = slice(first, first + step)
        parts.append(_scores({name: one[:, some] for name, one in logits.items()}, reference, targets[:, some]))
    return {name: np.concatenate([part[name] for part in parts], 2) for name in logits}


def _scores(logits: dict[str, Tensor], reference: str, targets: Tensor) -> dict[str, Floats]:
    exact = logits[reference].float()
    chance, best = exact.softmax(-1), exact.argmax(-1)
    nll = (exact.logsumexp(-1) - _at(exact, targets)).double()
    scores = {}
    for name, other in logits.items():
        moved = other.float() - exact
        near = bool(moved.abs().amax() < NEAR)  # not so for NaN
        kl, excess = _near(chance, moved, targets) if near else _far(exact, other, targets)
        differs = (other.argmax(-1) != best).double()
        scores[name] = torch.stack((nll + excess, excess, kl, differs)).cpu().numpy()
    return scores


def _near(chance: Tensor, moved: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """KL and excess of logits that moved little, [batch, queries] float64 both; changes `moved`.

    With d = moved - mean(moved) under the reference's chances, KL = log(mean(exp(d))) = log1p(mean(exp(d) - 1 - d)):
    a sum of terms that are never negative, so float32 keeps its digits where a difference of logarithms loses them.
    """
    moved -= torch.linalg.vecdot(chance, moved).unsqueeze(-1)
    kl = torch.linalg.vecdot(chance, torch.expm1(moved).sub_(moved)).double().log1p()
    return kl, kl - _at(moved, targets).double()


def _far(exact: Tensor, other: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same for any logits, by the definition in float64."""
    before, after = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (before.exp() * (before - after)).sum(-1), _at(before, targets) - _at(after, targets)


def _at(values: Tensor, targets: Tensor) -> Tensor:
    return values.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def blocks_of(scores: Floats, block: int = BLOCK) -> tuple[Floats, Floats]:
    """Sum the scores of one window by blocks.

    Args:
        scores: [4, tokens] float64 of consecutive tokens.
        block: Tokens in a block; the last may have fewer.
    Returns:
        Sums [blocks, 4] float64 and token counts [blocks] int64.
    """
    starts = np.arange(0, scores.shape[1], block)
    sums = np.add.reduceat(scores, starts, axis=1).T
    return sums, np.diff(np.append(starts, scores.shape[1]))


def resampled_means(sums: Floats, counts: Floats, seed: int) -> Floats:
    """Means of bootstrap samples that draw whole blocks, [RESAMPLES, 4] float64.

    The same seed and number of blocks draw the same samples, so formats are compared on the same tokens.
    Source: the bootstrap for ratios of sums, Efron and Tibshirani, An Introduction to the Bootstrap, 1993.
    """
    blocks = len(counts)
    drawn = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=RESAMPLES)
    return (drawn @ sums) / (drawn @ counts)[:, None]


def estimate(sums: Floats, counts: Floats, row: int, seed: int, of: Callable[[Any], Any] = float) -> Estimate:
    """A function of a mean score, with its percentile interval.

    Args:
        sums, counts: Of blocks, as `blocks_of` gives them.
        row: Which score.
        of: What to report of the mean, for instance np.exp of a mean log-likelihood; monotonic.
    """
    means = resampled_means(sums, counts, seed)[:, row]
    known = len(counts) > 1 and np.isfinite(means).all()  # one block says nothing of others
    low, high = np.quantile(means, (0.025, 0.975)) if known else (np.nan, np.nan)
    with np.errstate(over="ignore"):  # a format may be so bad that its perplexity is infinite
        return Estimate(*(float(of(np.float64(x))) for x in (sums[:, row].sum() / counts.sum(), low, high)))


def proportion(hits: int, tries: int) -> Estimate:
    """A share of independent tries, with Wilson's 95% interval.

    Source: Wilson, Probable inference, the law of succession, and statistical inference, JASA 22, 1927.
    """
    if not tries:
        return Estimate(float("nan"), 0.0, 1.0)
    z, share = 1.959964, hits / tries
    middle = (share + z * z / (2 * tries)) / (1 + z * z / tries)
    reach = z / (1 + z * z / tries) * (share * (1 - share) / tries + z * z / (4 * tries * tries)) ** 0.5
    return Estimate(share, max(0.0, middle - reach), min(1.0, middle + reach))
