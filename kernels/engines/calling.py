"""Attention of a whole prompt by an engine or by this package's kernel, with results alike; and an engine's trial."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gemkv_compile.compat import outside_fake_mode
from gemkv_compile.errors import GemkvError
from gemkv_compile.kernels.dispatch import implementation
from gemkv_compile.kernels.engines.engine import OWN, Engine, Prompt
from gemkv_compile.kernels.engines.registry import ENGINES
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.softmax import NEVER

TRIED_TOKENS, TRIED_WINDOW, TRIED_HEADS = 192, 100, 2


def call_engine(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt, padding: Tensor | None = None
) -> Tensor:
    """Attention by an engine: [B, Hq, N, D] in q's dtype, the heads of a token side by side in memory.

    Args:
        padding: As in `attend_chunk`, for an engine that takes it.
    Raises:
        GemkvError: the engine failed, with what it said and what to do.
    """
    try:
        out = ENGINES[name].attend(q, k, v, scale, prompt, *(() if padding is None else (padding,)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise GemkvError(
            f"The engine {name} failed on queries {list(q.shape)} {q.dtype} though it had done a small prompt: "
            f"{type(error).__name__}: {error}. Compile with prefill='triton' instead."
        ) from error
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def call_own(q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt) -> Tensor:
    """The same by this package's kernel, over an empty cache."""
    batch, heads, _, dim = k.shape
    layout = PageLayout(heads, dim, 64, 64, "model", k.dtype)
    table = torch.zeros(batch, 0, dtype=torch.int64, device=q.device)
    lengths = torch.zeros(batch, dtype=torch.int32, device=q.device)
    tail = torch.zeros(batch, 2, heads, 64, dim, dtype=k.dtype, device=q.device)
    rules = None, None, None, scale, prompt.softcap, prompt.causal, prompt.window
    out: Tensor = implementation("attend_chunk", q.device)(q, k, v, table, lengths, lengths, tail, *rules, layout)[0]
    return out


def call(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt) -> Tensor:
    """Attention by whatever `name` says."""
    if name == OWN:
        return call_own(q, k, v, scale, prompt)
    return call_engine(name, q, k, v, scale, prompt)


def random_prompt(prompt: Prompt, kv_heads: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [1, Hq, tokens, D] and k, v [1, Hkv, tokens, D], as projections leave them; no draw of torch's own."""
    generator = torch.Generator(device).manual_seed(tokens)
    sizes = [(1, tokens, heads, prompt.head_dim) for heads in (kv_heads * prompt.groups, kv_heads, kv_heads)]
    q, k, v = (torch.randn(size, generator=generator, dtype=prompt.dtype, device=device) for size in sizes)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@functools.cache
def trial(engine: Engine, prompt: Prompt, device: torch.device) -> str | None:
    """What is wrong with an engine's answer for a small prompt of a class on a device; None if nothing is.

    Libraries are built with and without windows, caps and head sizes; only a call tells. The answer is compared with
    float64.
    """
    small = prompt if prompt.window is None else _with_window(prompt, min(prompt.window, TRIED_WINDOW))
    with outside_fake_mode(), torch.inference_mode(False), torch.no_grad():
        q, k, v = random_prompt(small, TRIED_HEADS, TRIED_TOKENS, device)
        scale = 1.5 * prompt.head_dim**-0.5
        try:
            out = ENGINES[engine.name].attend(q, k, v, scale, small)
        except Exception as error:
            return f"a trial failed: {type(error).__name__}: {str(error).strip()[:160]}"
        if out.shape != q.shape or out.dtype != q.dtype:
            return f"a trial gave {out.dtype} {list(out.shape)} instead of {q.dtype} {list(q.shape)}"
        exact = _exact(q, k, v, scale, small)
        off, most = (out.double() - exact).abs().max().item(), exact.abs().max().item()
    if off <= max(4 * torch.finfo(prompt.dtype).eps, 1e-5, engine.error) * most:
        return None
    return f"a trial was wrong by {off:.1e}, where the largest number is {most:.1e}"


def _with_window(prompt: Prompt, window: int) -> Prompt:
    return Prompt(prompt.dtype, prompt.head_dim, prompt.groups, prompt.causal, window, prompt.softcap)


def _exact(q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: Prompt) -> Tensor:
    """Attention in float64, written out."""
    keys, values = (x.double().repeat_interleave(prompt.groups, 1) for x in (k, v))
    scores = q.double() @ keys.mT * scale
    if prompt.softcap is not None:
        scores = prompt.softcap * torch.tanh(scores / prompt.softcap)
    query, key = (torch.arange(q.shape[2], device=q.device).unsqueeze(dim) for dim in (1, 0))
    hidden = (key > query) if prompt.causal else torch.zeros_like(key > query)
    if prompt.window is not None:
        hidden = hidden | (key <= query - prompt.window)
    return scores.masked_fill(hidden, NEVER).softmax(-1) @ values
