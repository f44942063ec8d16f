"""What operators ask of their arguments; each failure says what was expected, what was given and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.errors import InvalidOption, ShapeMismatch, UnsupportedDtype, UnsupportedGroups
from gemkv_compile.kernels.layout import GUARDED, MODEL_DTYPES, PageLayout

MAX_GROUPS = 16


def check_state(page_table: Tensor, seq_lens: Tensor, tail: Tensor, page_size: int, kv_format: str) -> PageLayout:
    """The layout of the pages of a cache, after checking that its tensors belong together.

    Raises:
        UnsupportedHeadDim, UnsupportedDtype, InvalidOption: see `PageLayout`.
        ShapeMismatch: shapes, dtypes or devices differ, or a sequence's tail is not contiguous.
    """
    groups = 2 if kv_format in GUARDED else 1
    if tail.dim() != 5 or tail.shape[1] != 2 or tail.shape[3] % groups:
        rows = "2 * group_size" if groups == 2 else "group_size"
        raise ShapeMismatch(f"tail must be [batch, 2, num_kv_heads, {rows}, head_dim], got {list(tail.shape)}.")
    batch, _, num_kv_heads, rows_of_tail, head_dim = tail.shape
    group_size = rows_of_tail // groups
    layout = PageLayout(num_kv_heads, head_dim, page_size, group_size, kv_format, tail.dtype)
    _expect("page_table", page_table, (batch, None), torch.int64, tail.device)
    _expect("seq_lens", seq_lens, (batch,), torch.int32, tail.device)
    if not tail.is_contiguous() and batch and not tail[0].is_contiguous():
        raise ShapeMismatch(f"each sequence's tail must be contiguous, got strides {tail.stride()}. Use .contiguous().")
    return layout


def check_keys(k: Tensor, v: Tensor, tail: Tensor) -> None:
    """Raise ShapeMismatch or UnsupportedDtype unless k and v [batch, Hkv, Q, D] are alike and fit the tail."""
    batch, _, num_kv_heads, _, head_dim = tail.shape
    for name, x in (("keys", k), ("values", v)):
        if x.dtype not in MODEL_DTYPES:
            raise UnsupportedDtype(x.dtype)
        _expect(name, x, (batch, num_kv_heads, None, head_dim), tail.dtype, tail.device)
    _expect("values", v, tuple(k.shape), k.dtype, k.device)


def check_queries(q: Tensor, q_len: int, tail: Tensor, starts: Tensor, sinks: Tensor | None) -> None:
    """Check the queries of an attention, and what goes by their heads, against the tail.

    Raises:
        UnsupportedDtype, UnsupportedGroups, ShapeMismatch.
    """
    batch, _, num_kv_heads, _, head_dim = tail.shape
    if q.dtype not in MODEL_DTYPES:
        raise UnsupportedDtype(q.dtype, "queries")
    _expect("queries", q, (batch, None, q_len, head_dim), tail.dtype, tail.device)
    num_q_heads = q.shape[1]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads or not 1 <= num_q_heads // num_kv_heads <= MAX_GROUPS:
        raise UnsupportedGroups(num_q_heads, num_kv_heads)
    _expect("starts", starts, (batch,), torch.int32, tail.device)
    if sinks is not None:
        _expect("sinks", sinks, (num_q_heads,), _float_dtype(sinks), tail.device)


def check_masks(q: Tensor, padding: Tensor | None, mask: Tensor | None) -> None:
    """Raise ShapeMismatch unless padding [batch, n] and mask [batch|1, Hq|1, Q, K] fit queries [batch, Hq, Q, D]."""
    batch, num_q_heads, q_len, _ = q.shape
    if padding is not None:
        _expect("padding", padding, (batch, None), torch.bool, q.device)
    if mask is None:
        return
    rows, heads = (
        1 if mask.dim() == 4 and mask.shape[axis] == 1 else size for axis, size in enumerate((batch, num_q_heads))
    )
    dtype = torch.bool if mask.dtype == torch.bool else _float_dtype(mask)
    columns = None if mask.shape[-1:] != (0,) else 1
    _expect("mask", mask, (rows, heads, q_len, columns), dtype, q.device)


def check_scores(softcap: float | None, window: int | None) -> None:
    """Raise InvalidOption unless softcap and window are positive or None."""
    if softcap is not None and not softcap > 0:
        raise InvalidOption(f"softcap must be positive, got {softcap}. Use None for scores without a cap.")
    if window is not None and window < 1:
        raise InvalidOption(f"window must be at least 1 token, got {window}. Use None for attention without a window.")


def _float_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype.is_floating_point else torch.float32


def _expect(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device) -> None:
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if fits and tensor.dtype == dtype and tensor.device == device:
        return
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    raise ShapeMismatch(
        f"{name} must be {dtype} [{wanted}] on {device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}. "
        "Pass tensors of one call and one cache."
    )
