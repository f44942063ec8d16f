"""What a cache gives back for the rows put into it, by format: what a fidelity run compares.

Three kinds stand in every run. The reference keeps keys and values as the model computed them. The noise floor is
what nobody calls a loss: in a float32 model, rows rounded to bfloat16 when they are cached, which is what every dense
bfloat16 cache does; in a half-precision model, where those rows are the reference, the same attention written out,
whose sums are rounded in another order. The formats under test are the product's. Beside them may stand peers:
Transformers' own quantised caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gemkv_compile.drop import Policy
from gemkv_compile.errors import InvalidOption
from gemkv_compile.fidelity.drops import policy_named
from gemkv_compile.kernels.layout import CODE_BITS, GUARDED, KV_FORMATS, PageLayout
from gemkv_compile.kernels.memory import pack_groups, read_groups
from gemkv_compile.options import Options

REFERENCE = "reference"
GROUP = Options().group_size


@dataclass(frozen=True)
class Format:
    """A way to keep keys and values.

    Args:
        name: Its name in tables.
        group: Tokens that are stored together, once the last of them is there; until then they are read exactly.
        store: Maps keys [..., n * group, head_dim] to what reading them back gives, same shape and dtype.
        store_values: The same for values; None: as keys.
        guard: Tokens at the start of a sequence that stay as they are.
        guards_windows: Whether that is so in layers with a window too; the parallel path alone can leave them out.
        written_out: Attention is matmul, softmax, matmul instead of the fused operator.
        kv_format: The product's format that this is, or "" for one that the product does not have.
        drop: A policy that drops pages of the cache, or None.
        peer: Backend and bits of Transformers' QuantizedCache that this is, or None; it does its own storing.
    """

    name: str
    group: int
    store: Callable[[Tensor], Tensor]
    store_values: Callable[[Tensor], Tensor] | None = None
    guard: int = 0
    guards_windows: bool = True
    written_out: bool = False
    kv_format: str = ""
    drop: Policy | None = None
    peer: tuple[str, int] | None = None

    @property
    def stores(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """What keeps keys, and what keeps values."""
        return self.store, self.store_values or self.store


def as_is(rows: Tensor) -> Tensor:
    """Rows of any shape and dtype, unchanged."""
    return rows


def as_bfloat16(rows: Tensor) -> Tensor:
    """Rows of any shape and dtype, rounded to bfloat16 and back to their dtype."""
    return rows.to(torch.bfloat16).to(rows.dtype)


def paged(name: str) -> Format:
    """A format of pages, through the product's own quantiser and bytes."""

    def store(rows: Tensor, which: int) -> Tensor:
        layout = PageLayout(1, rows.shape[-1], GROUP, GROUP, name, rows.dtype)
        groups = rows.unflatten(-2, (-1, GROUP))
        return read_groups(pack_groups(groups, groups, layout), layout)[which].to(rows.dtype)

    guard = GROUP if name in GUARDED else 0
    return Format(name, GROUP, lambda keys: store(keys, 0), lambda values: store(values, 1), guard, kv_format=name)


# "model" keeps the others' groups, so that in the parallel path it runs through the same steps and must change nothing.
TESTED = {"model": Format("model", GROUP, as_is, kv_format="model")} | {name: paged(name) for name in CODE_BITS}
PEERS = {
    f"{backend}{bits}": Format(f"{backend}{bits}", 1, as_is, peer=(backend, bits))
    for backend, bits in (("quanto", 4), ("quanto", 2), ("hqq", 8), ("hqq", 4))
}
"""Transformers' quantised caches by the name of their backend and their bits, with Transformers' own settings."""
REFERENCE_FORMAT = Format(REFERENCE, 1, as_is)


def noise_floor(dtype: torch.dtype) -> Format:
    """The floor of a model of this dtype; see the head of this file."""
    if dtype == torch.float32:
        return Format("bfloat16 rows", 1, as_bfloat16)
    return Format("other sum order", 1, as_is, written_out=True)


def formats_of_run(
    tested: Sequence[str],
    dtype: torch.dtype,
    drops: Sequence[str] = (),
    keep: float = 1.0,
    peers: Sequence[str] = (),
) -> tuple[Format, ...]:
    """Reference, noise floor, the named formats and the named peers, in this order.

    Args:
        drops: Names of policies; each format is followed by what it is with each of them.
        keep: The share of a prompt's complete pages that they keep.
    Raises:
        InvalidOption: a name is no format, policy or peer of this version, or the share is out of range.
    """
    for name in peers:
        if name not in PEERS:
            raise InvalidOption(f"--peers takes {', '.join(PEERS)}, got {name!r}.")
    for name in tested:
        if name not in TESTED:
            raise InvalidOption(f"--formats takes {', '.join(KV_FORMATS)}, got {name!r}.")
    policies = [(name, policy_named(name, keep)) for name in dict.fromkeys(drops)]
    forms: list[Format] = []
    for form in (TESTED[name] for name in dict.fromkeys(tested)):
        forms += [form, *(replace(form, name=f"{form.name}, {name}", drop=policy) for name, policy in policies)]
    return REFERENCE_FORMAT, noise_floor(dtype), *forms, *(PEERS[name] for name in dict.fromkeys(peers))
