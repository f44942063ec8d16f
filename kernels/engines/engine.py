"""What an engine is: which prompts it attends to exactly, where, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OWN = "triton"  # this package's kernel, which does every prompt


@dataclass(frozen=True)
class Prompt:
    """A class of prompts: as many queries as keys, no padding, nothing stored before them.

    Args:
        dtype: Of queries, keys and values.
        head_dim: Channels of a head.
        groups: Query heads that share a K/V head.
        causal: A query attends to no token after its own.
        window: A query attends to no token `window` or more before its own; None for no such bound.
        softcap: Scores become softcap * tanh(score / softcap); None for scores as they are.
    """

    dtype: torch.dtype
    head_dim: int
    groups: int
    causal: bool
    window: int | None
    softcap: float | None

    def at(self, tokens: int) -> Prompt:
        """The class of a prompt of so many tokens: a window that reaches over all of them is none."""
        whole = self.window is not None and self.window >= tokens
        return Prompt(self.dtype, self.head_dim, self.groups, self.causal, None, self.softcap) if whole else self


@dataclass(frozen=True)
class Place:
    """A device: its type, its name, and its compute capability, (0, 0) for what has none."""

    kind: str
    name: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> Place:
        """The place of a torch device."""
        if device.type != "cuda":
            return cls(device.type, device.type, (0, 0))
        properties: Any = torch.cuda.get_device_properties(device)
        return cls("cuda", properties.name, (properties.major, properties.minor))


@dataclass(frozen=True)
class Engine:
    """A library's attention.

    Args:
        name: As in the option `prefill`.
        title: For people.
        kinds: Types of devices that it runs on.
        missing: Why it is not there in this process, and what to do; None if it is.
        refuses: Why it does not do a class of prompts exactly on a place; None if it does. A pure function.
        attend: (q [B, Hq, N, D], k, v [B, Hkv, N, D], scale, prompt) -> out [B, Hq, N, D], any strides.
        version: Of the library.
        error: Of an approximation, the largest error that its trial allows, of the largest number. It is only taken by
            name, never by "auto". 0: the engine is exact but for rounding.
        takes_padding: Whether `attend` has one more argument: bool [B, >= N] or None, True for tokens to attend to.
    """

    name: str
    title: str
    kinds: tuple[str, ...]
    missing: Callable[[], str | None]
    refuses: Callable[[Prompt, Place], str | None]
    attend: Callable[..., Tensor]
    version: Callable[[], str]
    error: float = 0.0
    takes_padding: bool = False


def half_precision(prompt: Prompt) -> str | None:
    """Why a library that knows float16 and bfloat16 does not take a class; None if it does."""
    if prompt.dtype in (torch.float16, torch.bfloat16):
        return None
    return f"it takes float16 and bfloat16, this model is in {str(prompt.dtype).removeprefix('torch.')}"


def sides(prompt: Prompt) -> tuple[int, int]:
    """The window as flash-attn counts it: tokens before and after a query's own that it sees, -1 for all."""
    return (-1, -1) if prompt.window is None else (prompt.window - 1, 0 if prompt.causal else -1)


def token_rows(x: Tensor) -> Tensor:
    """Heads first [B, H, N, D] as tokens first [B, N, H, D], copied if rows are not contiguous or not at 16 bytes."""
    rows, unit = x.transpose(1, 2), 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in rows.stride()[:-1])
    return rows if rows.stride(-1) == 1 and aligned else rows.contiguous()
