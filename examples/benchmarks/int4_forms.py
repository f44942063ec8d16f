"""Ways to scale 4-bit keys and values, by what they cost in text: the table behind "k8v4" and "int4".

    python int4_forms.py [--models gemma3-270m,smollm2-135m] [--tokens 1024] [--window 1024] [--device cpu]

As `int8_forms.py`. Where only keys or only values are named, the others are int8.
"""

from __future__ import annotations

import torch
from int8_forms import GROUP, Store, main
from torch import Tensor

from gemkv_compile.fidelity.formats import TESTED, Format
from gemkv_compile.kernels.formats import dequantise_groups, quantise_groups

EXACT = TESTED["int8"].stores
CLIPS = [1 - step / 20 for step in range(9)]


def channels(tokens: int) -> Store:
    """A scale and zero-point per channel of some tokens."""
    return lambda rows: dequantise_groups(*quantise_groups(rows.unflatten(-2, (-1, tokens)), 4)).flatten(-3, -2)


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


def keys(name: str, store: Store) -> Format:
    return Format(f"keys {name}", GROUP, store, EXACT[1])


def values(name: str, store: Store) -> Format:
    return Format(f"values {name}", GROUP, EXACT[0], store)


FORMS = [
    TESTED["int8"],
    TESTED["k8v4"],
    TESTED["int4"],
    values("per (group, channel)", channels(GROUP)),
    values("per (32 tokens, channel)", channels(32)),
    values("per (token, 64 channels)", tokens_of(64)),
    values("rotated, per (token, 64 channels)", rotated(tokens_of(64))),
    keys("per (group, channel)", channels(GROUP)),
    keys("per (32 tokens, channel)", channels(32)),
    keys("per (group, channel), clipped", clipped),
    keys("rotated, per (group, channel)", rotated(channels(GROUP))),
    keys("per (token, 64 channels)", tokens_of(64)),
]

if __name__ == "__main__":
    main(FORMS, "int4_forms", __doc__, 1024, 1024)
