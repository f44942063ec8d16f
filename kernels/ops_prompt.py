"""The operator for the attention of a prompt, which other engines may compute when nothing is stored before it.

Shapes and names as in `gemkv_compile.kernels.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemkv_compile.compat import autocast_off
from gemkv_compile.errors import ShapeMismatch
from gemkv_compile.kernels.dispatch import implementation
from gemkv_compile.kernels.results import empty_results
from gemkv_compile.kernels.validate import check_keys, check_masks, check_queries, check_scores, check_state


@torch.library.custom_op("gemkv::attend_prompt", mutates_args=())
def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    engine: str,
    page_size: int,
    kv_format: str,
    version: str,
) -> Tensor:
    """Attend the queries of a prompt to its own keys and to what is stored, before `append_kv` of its keys.

    Args:
        q: Queries, [B, Hq, N, D], model dtype, any strides.
        k, v: Keys and values of the same N tokens, [B, Hkv, N, D], in model precision.
        stored: The most tokens that are stored for a sequence, int64 [] on the host: nothing waits for the device.
        padding, causal, window: As in `attend_chunk`.
        engine: The option `prefill`; which engine it means is chosen by the prompt's class and length. Where tokens
            are stored, or padding hides some and the engine takes none, it is this package's kernel. What a mask hides
            is asked of the device, once for each mask, where an engine or a kernel that knows no masks would be taken.
    Returns:
        out [B, Hq, N, D] in q's dtype, the heads of a token side by side in memory.
    Raises:
        NotImplementedError: a gradient is asked for.
        GemkvError: the engine failed.
        ShapeMismatch: `stored` is not on the host.
        The errors of `attend_chunk`.
    """
    from gemkv_compile.kernels.attend_chunk.variants import takes_hopper
    from gemkv_compile.kernels.engines.calling import call_engine
    from gemkv_compile.kernels.engines.choice import choose
    from gemkv_compile.kernels.engines.engine import OWN, Prompt
    from gemkv_compile.kernels.engines.padding import hides_nothing
    from gemkv_compile.kernels.engines.registry import ENGINES

    if stored.device.type != "cpu":
        raise ShapeMismatch(f"stored must be on the host, got a tensor on {stored.device}. Pass the table's length.")
    layout = check_state(page_table, seq_lens, tail, page_size, kv_format)
    check_keys(k, v, tail)
    check_queries(q, k.shape[2], tail, starts, None)
    check_masks(q, padding, None)
    check_scores(softcap, window)
    tokens = q.shape[2]
    prompt = Prompt(q.dtype, q.shape[3], q.shape[1] // k.shape[1], causal, window, softcap)
    with autocast_off():
        before = int(stored.item())
        name = choose(engine, prompt, tokens, q.device).engine if q.numel() and not before else OWN
        if padding is not None and (name != OWN or takes_hopper("auto", q, k, v, None, None, scale)):
            padding = None if hides_nothing(padding, before + tokens) else padding
        if name != OWN and (padding is None or ENGINES[name].takes_padding):
            return call_engine(name, q, k, v, scale, prompt.at(tokens), padding)
        rules = padding, None, None, scale, softcap, causal, window
        own = implementation("attend_chunk", q.device)
        out: Tensor = own(q, k, v, page_table, seq_lens, starts, tail, *rules, layout)[0]
        return out


@attend_prompt.register_fake
def _(q, *args):
    return empty_results(q)[0]


def _refuse_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    raise NotImplementedError(
        "gemkv::attend_prompt has no gradient, and an input requires one. "
        "Run generation under torch.no_grad() or torch.inference_mode(), or use gemkv::attend_chunk."
    )


attend_prompt.register_autograd(lambda ctx, *grads: None, setup_context=_refuse_gradient)
