"""Operators over paged keys and values, in the `gemkv::` namespace: schemas, shape functions and dispatch.

Passes insert these operators into graphs; nothing here imports an implementation until an operator runs. Page memory is
reached through the addresses in `page_table` and is declared by no schema: `append_kv` declares `seq_lens` and `tail`
as mutated, every read takes both, and that orders reads after writes in any functionalising compiler.

Shapes used below: batch B, q_len Q, num_q_heads Hq, num_kv_heads Hkv (Hq = groups * Hkv), head_dim D, group_size G.

    page_table  [B, max_pages]     int64   address of the page of tokens p*page_size .. at column p % max_pages; 0: none
    seq_lens    [B]                int32   tokens stored for each sequence, fewer than `layout.MAX_TOKENS` (2^25)
    starts      [B]                int32   first token that may be attended to
    tail        [B, 2, Hkv, G, D]  model   keys (0) and values (1) of the newest, unfilled group, in model precision;
                                   2 G rows in a guarded format: tokens 0 .. G - 1, then the newest group if later
    padding     [B, n]             bool    padding[b, t]: token t of sequence b may be attended to; n >= its tokens
    mask        [B|1, Hq|1, Q, K]  bool or float (added to the scores); column j is token n - K + j, where n counts the
                                   tokens up to the last query's; tokens before column 0 are not attended to
    sinks       [Hq]               float   a logit per head that takes part in the softmax and has no value

Token t of a sequence with n stored tokens is in the tail if t >= (n // G) * G, or if t < G in a guarded format, else in
its page. A token in no page
(its entry is 0, or a later page has taken its column) is not attended to.
Query head h reads K/V head h // groups. Scores are scale * q . k, then softcap * tanh(score / softcap), then the mask.
A query that may attend to nothing gets a row of zeros, and the sink or -inf as lse.
`version` names the pass and format version that built the graph; it is there to be part of every compile cache's key.

Every operator raises ShapeMismatch, UnsupportedDtype, UnsupportedGroups, UnsupportedHeadDim or InvalidOption, as
`gemkv_compile.kernels.validate` says, when it runs; shape functions check nothing. Implementations run with autocast
off: what they compute in float32 stays float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gemkv_compile.compat import autocast_off
from gemkv_compile.kernels.dispatch import implementation
from gemkv_compile.kernels.results import empty_results
from gemkv_compile.kernels.validate import check_keys, check_masks, check_queries, check_scores, check_state

Function = TypeVar("Function", bound=Callable[..., Any])


def _without_autocast(function: Function) -> Function:
    """The function with autocast off: an operator is called above autocast, and runs inside it."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with autocast_off():
            return function(*args)

    return run  # type: ignore[return-value]


@torch.library.custom_op("gemkv::append_kv", mutates_args=("seq_lens", "tail"))
@_without_autocast
def append_kv(
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tail: Tensor,
    page_size: int,
    kv_format: str,
    version: str,
) -> None:
    """Store the keys and values of Q new tokens, quantising every group that they complete. It has no gradient.

    Args:
        k, v: New keys and values, [B, Hkv, Q, D], model dtype, any strides.
        page_size, kv_format: Layout of the pages, see `PageLayout`.
    A completed group is dropped when its page_table entry is 0, or when a later page that this call writes has its
    column: nothing will attend to it. A page_table of 0 columns keeps no completed group at all, only the tail.
    While this runs the upper bits of seq_lens may count programs: nothing else on the device may read them meanwhile.
    """
    layout = check_state(page_table, seq_lens, tail, page_size, kv_format)
    check_keys(k, v, tail)
    implementation("append_kv", k.device)(k, v, page_table, seq_lens, tail, layout)


@append_kv.register_fake
def _(k, v, page_table, seq_lens, tail, page_size, kv_format, version):
    return None


@torch.library.custom_op("gemkv::attend_pages", mutates_args=())
@_without_autocast
def attend_pages(
    q: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    page_size: int,
    kv_format: str,
    version: str,
) -> tuple[Tensor, Tensor]:
    """Attend one query per sequence to its cache, after `append_kv` of the query's own token.

    Args:
        q: Queries of token seq_len - 1, [B, Hq, 1, D], model dtype, any strides.
        window: Only the newest `window` tokens are attended to.
    Returns:
        out [B, Hq, 1, D] in q's dtype; lse [B, Hq, 1] float32, the natural logarithm of the sum of exponentials.
    Raises:
        NotImplementedError: a gradient is asked for.
    Source: paged attention, arXiv:2309.06180.
    """
    layout = check_state(page_table, seq_lens, tail, page_size, kv_format)
    check_queries(q, 1, tail, starts, sinks)
    check_masks(q, padding, mask)
    check_scores(softcap, window)
    return implementation("attend_pages", q.device)(
        q, page_table, seq_lens, starts, tail, padding, mask, sinks, scale, softcap, window, layout
    )


@attend_pages.register_fake
def _(q, *args):
    return empty_results(q)


@torch.library.custom_op("gemkv::attend_chunk", mutates_args=())
@_without_autocast
def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    page_size: int,
    kv_format: str,
    version: str,
) -> tuple[Tensor, Tensor]:
    """Attend new queries to the cache and to the keys of their chunk, before `append_kv` of these keys.

    Args:
        q: Queries of the last Q tokens of the chunk, [B, Hq, Q, D], model dtype, any strides.
        k, v: Keys and values of the chunk's tokens seq_len .. seq_len + N - 1, [B, Hkv, N, D], N >= Q, in model
            precision.
        causal: A query attends to no token after its own.
        window: A query attends to no token `window` or more before its own.
    Returns:
        out [B, Hq, Q, D] in q's dtype, the heads of a token side by side in memory; lse [B, Hq, Q] float32, the
        natural logarithm of the sum of exponentials.
    Differentiable in q, k and v; the past is constant, and its pages must still be there in the backward pass.
    """
    layout = check_state(page_table, seq_lens, tail, page_size, kv_format)
    check_keys(k, v, tail)
    check_queries(q, min(q.shape[2:3] + k.shape[2:3]), tail, starts, sinks)
    check_masks(q, padding, mask)
    check_scores(softcap, window)
    return implementation("attend_chunk", q.device)(
        q, k, v, page_table, seq_lens, starts, tail, padding, mask, sinks, scale, softcap, causal, window, layout
    )


@attend_chunk.register_fake
def _(q, *args):
    return empty_results(q)


@torch.library.custom_op("gemkv::attend_chunk_backward", mutates_args=())
@_without_autocast
def attend_chunk_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    page_size: int,
    kv_format: str,
    version: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from those of the results of `attend_chunk`, given its arguments and results."""
    from gemkv_compile.kernels.attend_chunk.backward import attend_chunk_backward_reference

    layout = check_state(page_table, seq_lens, tail, page_size, kv_format)
    return attend_chunk_backward_reference(
        grad_out, grad_lse, q, k, v, page_table, seq_lens, starts, tail, padding, mask, out, lse,
        scale, softcap, causal, window, layout,
    )  # fmt: skip


@attend_chunk_backward.register_fake
def _(grad_out, grad_lse, q, k, v, *args):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


@torch.library.custom_op("gemkv::copy_state", mutates_args=())
def copy_state(
    page_table: Tensor, seq_lens: Tensor, starts: Tensor, tail: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies for the backward pass: `append_kv` and the cache go on changing the originals.

    An operator of its own, because Inductor takes `clone` for a no-op here and hands the changed input to the backward.
    """
    return page_table.clone(), seq_lens.clone(), starts.clone(), tail.clone()


@copy_state.register_fake
def _(*state):
    return tuple(torch.empty_like(x) for x in state)


@torch.library.custom_op("gemkv::newest_queries", mutates_args=())
def newest_queries(q: Tensor, count: int, version: str) -> Tensor:
    """The last `count` queries of q [B, Hq, Q, D], contiguous [B, Hq, count, D]; zeros before them if Q is less.

    An operator of its own, so that the size of its result depends on no length: a slice would add a guard. It has no
    gradient.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], count, q.shape[3])
    rows = min(count, q.shape[2])
    out[:, :, count - rows :] = q[:, :, q.shape[2] - rows :]
    return out


@newest_queries.register_fake
def _(q, count, version):
    return q.new_empty(q.shape[0], q.shape[1], count, q.shape[3])


def _refuse_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    raise NotImplementedError(
        "gemkv::attend_pages has no gradient, and an input requires one. "
        "Run generation under torch.no_grad() or torch.inference_mode(), or use gemkv::attend_chunk."
    )


def _save_chunk(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, page_table, seq_lens, starts, tail, padding, mask, _, *ctx.options = inputs
    state = copy_state(page_table, seq_lens, starts, tail)
    ctx.save_for_backward(q, k, v, *state, padding, mask, *output)


def _chunk_gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    for name, index in (("tail", 6), ("mask", 8), ("sinks", 9)):
        if ctx.needs_input_grad[index]:
            raise NotImplementedError(
                f"gemkv::attend_chunk has no gradient for {name}. Freeze it with {name}.requires_grad_(False)."
            )
    grads = attend_chunk_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.options)
    return (*grads, *(None for _ in range(14)))


attend_pages.register_autograd(lambda ctx, *grads: None, setup_context=_refuse_gradient)
attend_chunk.register_autograd(_chunk_gradients, setup_context=_save_chunk)
