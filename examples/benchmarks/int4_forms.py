"""Ways to scale 4-bit keys and values, by what they cost in text: the table behind "k8v4", "k6v4" and "int4".

    python int4_forms.py [--models gemma3-270m,smollm2-135m] [--tokens 2048] [--window 1024] [--skip 50000]

As `int8_forms.py`, on a part of the text that `fidelity.py` leaves out when it confirms the formats on 3,072 tokens.
Where only keys or only values are named, the others are int8. "bounded" forms keep the groups in int8 whose error is
more than a part of their variance, and say how many these are; "guarded" ones keep the first group as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from int8_forms import GROUP, Store, main
from torch import Tensor

from gemkv_compile.fidelity.formats import TESTED, Format
from gemkv_compile.kernels.formats import dequantise_groups, dequantise_values, quantise_groups, quantise_values

EXACT = TESTED["int8"].stores
SMALL = ("k6v4", "int4")
CLIPS = [1 - step / 20 for step in range(9)]


def channels(tokens: int, bits: int = 4) -> Store:
    """A scale and zero-point per channel of some tokens."""
    return lambda rows: dequantise_groups(*quantise_groups(rows.unflatten(-2, (-1, tokens)), bits)).flatten(-3, -2)


def by_token(rows: Tensor) -> Tensor:
    """The values of "k8v4"."""
    return dequantise_values(*quantise_values(rows.unflatten(-2, (-1, GROUP)))).flatten(-3, -2)


def widest(share: float) -> Store:
    """Per (group, channel), 8 bits for the share of a group's channels that have the largest scales, 4 for others."""

    def store(rows: Tensor) -> Tensor:
        x = rows.unflatten(-2, (-1, GROUP))
        scale = quantise_groups(x, 4)[1].float()
        wide = scale >= scale.quantile(1 - share, dim=-1, keepdim=True)
        few, many = (dequantise_groups(*quantise_groups(x, bits)) for bits in (4, 8))
        return torch.where(wide.unsqueeze(-2), many, few).flatten(-3, -2)

    return store


class Bounded:
    """Groups whose squared error is more than `bound` of their variance in int8; counts them."""

    def __init__(self, store: Store, exact: Store, bound: float) -> None:
        self.store, self.exact, self.bound = store, exact, bound
        self.groups, self.beyond = 0, 0

    def __call__(self, rows: Tensor) -> Tensor:
        x, coarse, fine = (part.unflatten(-2, (-1, GROUP)) for part in (rows, self.store(rows), self.exact(rows)))
        variance = (x - x.mean(-2, keepdim=True)).square().sum((-2, -1))
        beyond = (coarse - x).square().sum((-2, -1)) > self.bound * variance
        self.groups, self.beyond = self.groups + beyond.numel(), self.beyond + int(beyond.sum())
        return torch.where(beyond[..., None, None], fine, coarse).flatten(-3, -2)


def tokens_of(width: int) -> Store:
    """A scale and zero-point per token and `width` channels."""

    def store(rows: Tensor) -> Tensor:
        x = rows.unflatten(-1, (-1, width)).mT  # "channels" of quantise_groups are the blocks
        return dequantise_groups(*quantise_groups(x, 4)).mT.flatten(-2)

    return store


def clipped(rows: Tensor) -> Tensor:
    """Per (group, channel), the range among nine that has the smallest squared error."""
    x = rows.unflatten(-2, (-1, GROUP))
    middle = (x.amax(-2, keepdim=True) + x.amin(-2, keepdim=True)) / 2
    reach = (x - middle).abs().amax(-2, keepdim=True)
    tries = []
    for share in CLIPS:
        scale = (reach * share / 7).clamp(min=1e-12)
        tries.append(((x - middle) / scale).round().clamp(-7, 7) * scale + middle)
    errors = torch.stack([(one - x).square().sum(-2, keepdim=True) for one in tries])
    best = errors.argmin(0, keepdim=True).expand(1, *x.shape)
    return torch.stack(tries).gather(0, best)[0].flatten(-3, -2)


def rotated(store: Store) -> Store:
    """Rows times an orthonormal Hadamard matrix on the way in, and back on the way out."""

    def both(rows: Tensor) -> Tensor:
        matrix = torch.ones(1, 1)
        while len(matrix) < rows.shape[-1]:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        matrix = matrix.to(rows) / len(matrix) ** 0.5
        return store(rows @ matrix) @ matrix

    return both


def keys(name: str, store: Store, guard: int = 0) -> Format:
    return Format(f"keys {name}", GROUP, store, EXACT[1], guard)


def values(name: str, store: Store, guard: int = 0) -> Format:
    return Format(f"values {name}", GROUP, EXACT[0], store, guard)


BOUNDED = {
    "keys": Bounded(channels(GROUP), EXACT[0], 0.0085),
    "values": Bounded(by_token, EXACT[1], 0.014),
}
FORMS = [
    TESTED["int8"],
    TESTED["k8v4"],
    TESTED["k6v4"],
    TESTED["int4"],
    *(replace(TESTED[name], name=f"{name}, no guard where there is a window", guards_windows=False) for name in SMALL),
    Format("keys of 6 bits, values by token, no guard", GROUP, channels(GROUP, 6), by_token),
    values("by token", by_token),
    values("by token, guarded", by_token, GROUP),
    values("by token, bounded", BOUNDED["values"]),
    values("per (group, channel)", channels(GROUP)),
    values("per (32 tokens, channel)", channels(32)),
    values("per (token, 64 channels)", tokens_of(64)),
    values("rotated, per (token, 64 channels)", rotated(tokens_of(64))),
    keys("per (group, channel)", channels(GROUP)),
    keys("per (32 tokens, channel)", channels(32)),
    keys("per (group, channel), guarded", channels(GROUP), GROUP),
    keys("per (group, channel), bounded", BOUNDED["keys"]),
    keys("per (group, channel), a quarter of the channels in 8 bits", widest(0.25)),
    keys("per (group, channel), 6 bits", channels(GROUP, 6)),
    keys("per (group, channel), clipped", clipped),
    keys("rotated, per (group, channel)", rotated(channels(GROUP))),
    keys("per (token, 64 channels)", tokens_of(64)),
]

if __name__ == "__main__":
    main(FORMS, "int4_forms", __doc__, 2048, 1024, 50_000)
    for name, one in BOUNDED.items():
        print(f"{name} beyond the bound: {one.beyond} of {one.groups} groups")
