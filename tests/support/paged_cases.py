"""A cache in raw memory with its own record of every token, and a dense float64 attention to compare with."""

import math
import zlib

import numpy as np
import pytest
import torch

from gemkv_compile.kernels import ops
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.memory import read_groups

VERSION = "test"


@pytest.fixture(autouse=True)
def one_thread():
    """Run a test on one thread: its tensors are so small that a second one only waits, longer on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(*what):
    """A torch generator seeded by its arguments."""
    return torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))


def normal(*shape, dtype=torch.float32, seed=0):
    """Standard normal numbers."""
    return torch.randn(*shape, generator=generator(shape, seed)).to(dtype)


def strided(x):
    """The same numbers in memory with other strides and a gap between rows."""
    wide = torch.full((*x.transpose(1, 2).shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype)
    view = wide[..., : x.shape[-1]].transpose(1, 2)
    return view.copy_(x)


BITS = {"int8": (8, 8), "k8v4": (8, 4), "k6v4": (6, 4), "int4": (4, 4)}  # of a key and of a value


def numpy_quantise(x, bits=8):
    """Codes, scale and zero of groups [..., G, D] float32: the page format, written down a second time."""
    largest = 2 ** (bits - 1) - 1
    x = np.asarray(x, dtype=np.float32)
    limit = np.float32(np.finfo(np.float16).max)
    middle = np.float32(0.5) * x.min(axis=-2) + np.float32(0.5) * x.max(axis=-2)
    zero = np.clip(middle, -limit, limit).astype(np.float16)
    reach = np.abs(x - zero.astype(np.float32)[..., None, :]).max(axis=-2)
    with np.errstate(over="ignore"):
        scale = (reach / np.float32(largest)).astype(np.float16)
        short = scale.astype(np.float64) * largest < reach
        scale = np.where(short, np.nextafter(scale, np.float16(np.inf)), scale)
    scale = np.where(reach == 0, np.float16(1), scale)
    codes = np.rint((x - zero.astype(np.float32)[..., None, :]) / scale.astype(np.float32)[..., None, :])
    return np.clip(codes, -largest, largest).astype(np.int8), scale, zero


def numpy_quantise_values(x):
    """Codes, channel scales [..., D] and norms [..., 2, G] of groups of 4-bit values, written down a second time."""
    x = np.asarray(x, dtype=np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        steps = np.rint(np.abs(x) / (np.abs(x).max(axis=-2, keepdims=True) / np.float32(1023)))
        steps = np.where(np.isfinite(steps), steps, 0).astype(np.int64)
        halves = np.stack(np.split(steps * steps, 2, axis=-1), axis=-3).sum(axis=-1)  # [..., 2, G]
        norms = (np.sqrt(np.maximum(halves, 1).astype(np.float32)) / np.float32(1023)).astype(np.float16)
        spread = np.repeat(np.swapaxes(norms, -1, -2).astype(np.float32), x.shape[-1] // 2, axis=-1)
        reach = (np.abs(x) / spread).max(axis=-2)
        scale = (reach / np.float32(7)).astype(np.float16)
        short = scale.astype(np.float64) * 7 < reach
        scale = np.where(short, np.nextafter(scale, np.float16(np.inf)), scale)
        scale = np.where(reach == 0, np.float16(1), scale)
        codes = np.rint(x / (spread * scale.astype(np.float32)[..., None, :]))
    return np.clip(np.nan_to_num(codes), -7, 7).astype(np.int8), scale, norms


def numpy_dequantise(x, bits=8, values=False):
    """What the format makes of groups [..., G, D], float64."""
    if values and bits == 4:
        codes, scale, norms = (part.astype(np.float64) for part in numpy_quantise_values(x))
        return codes * scale[..., None, :] * np.repeat(np.swapaxes(norms, -1, -2), codes.shape[-1] // 2, axis=-1)
    codes, scale, zero = (part.astype(np.float64) for part in numpy_quantise(x, bits))
    return codes * scale[..., None, :] + zero[..., None, :]


class PagedCache:
    """One layer's cache. Bytes that no append has written are 0xFF: NaN as a scale, and as a number of any dtype."""

    def __init__(
        self, batch=1, heads=1, head_dim=16, page_size=64, group_size=64, kv_format="int8", dtype=torch.float32,
        max_pages=4, shuffle=0, holes=(), device="cpu",
    ):  # fmt: skip
        self.layout = PageLayout(heads, head_dim, page_size, group_size, kv_format, dtype)
        pages = batch * max_pages + 1
        self.memory = torch.full((pages, self.layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
        order = torch.randperm(batch * max_pages, generator=generator("pages", shuffle))
        self.page_table = (self.memory.data_ptr() + order * self.layout.page_bytes).view(batch, max_pages).to(device)
        for row, column in holes:
            self.page_table[row, column] = 0
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.starts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.tail = torch.full((batch, 2, heads, self.layout.tail_rows, head_dim), math.nan, dtype=dtype, device=device)
        self.history = [torch.empty(2, heads, 0, head_dim, dtype=dtype) for _ in range(batch)]

    @property
    def state(self):
        return self.page_table, self.seq_lens, self.tail

    @property
    def format_args(self):
        return self.layout.page_size, self.layout.kv_format, VERSION

    def append(self, k, v, rows=slice(None)):
        """Append [rows, heads, q_len, head_dim] to some sequences."""
        state = (x[rows] for x in self.state)
        ops.append_kv(k, v, *state, *self.format_args)
        for row, new in zip(range(len(self.history))[rows], torch.stack((k, v), dim=1), strict=True):
            self.history[row] = torch.cat((self.history[row], new), dim=2)
        return self

    def fill(self, lengths, seed=0):
        """Give each sequence a number of random tokens, in one append each."""
        heads, head_dim, dtype = self.layout.num_kv_heads, self.layout.head_dim, self.layout.model_dtype
        for row, length in enumerate(lengths):
            if length:
                k, v = (normal(1, heads, length, head_dim, dtype=dtype, seed=(seed, row, i)) for i in range(2))
                self.append(k, v, slice(row, row + 1))
        return self

    def dense(self, row):
        """Keys and values of a sequence as the cache stands for them, [2, heads, n, head_dim] float64."""
        stored = self.coded(row)
        if self.layout.is_guarded:
            first = slice(0, self.layout.group_size)
            stored[:, :, first] = self.history[row][:, :, first].to(torch.float64)
        return stored

    def coded(self, row):
        """As `dense`, but the first group of a guarded format as its codes in the page say."""
        tokens = self.history[row].to(torch.float64)
        end = tokens.shape[2] - tokens.shape[2] % self.layout.group_size
        if not self.layout.is_quantised or not end:
            return tokens
        groups = tokens[:, :, :end].unflatten(2, (-1, self.layout.group_size)).to(torch.float32).numpy()
        k_bits, v_bits = BITS[self.layout.kv_format]
        both = numpy_dequantise(groups[0], k_bits), numpy_dequantise(groups[1], v_bits, values=True)
        stored = torch.from_numpy(np.stack(both)).flatten(2, 3)
        return torch.cat((stored, tokens[:, :, end:]), dim=2)

    def page(self, row, page):
        """The bytes of a page of a sequence, [heads, groups_per_page, group_bytes]."""
        max_pages = self.page_table.shape[1]
        number = (int(self.page_table[row, page % max_pages]) - self.memory.data_ptr()) // self.layout.page_bytes
        return self.memory[number].view(self.layout.num_kv_heads, -1, self.layout.group_bytes)

    def stored(self, row, page=0):
        """Keys and values as the page has them, [2, heads, page_size, head_dim] float32."""
        return torch.stack(read_groups(self.page(row, page), self.layout))


def dense_attention(
    cache, q, k=None, v=None, padding=None, mask=None, sinks=None, scale=1.0, softcap=None, causal=True, window=None,
    dtype=torch.float64,
):  # fmt: skip
    """Dense attention, in any dtype, of the queries of attend_chunk (k, v given) or attend_pages (not given)."""
    results = []
    for row in range(q.shape[0]):
        keys, values = cache.dense(row).to(dtype)
        q_len = q.shape[2]
        if k is not None:
            keys, values = torch.cat((keys, k[row].to(dtype)), 1), torch.cat((values, v[row].to(dtype)), 1)
        total = keys.shape[1]
        position = torch.arange(q_len)[:, None] + (total - q_len)  # the last ones
        token = torch.arange(total)[None]
        visible = ((token >= cache.starts[row]) & (token <= position if causal else token >= 0)).expand(1, q_len, total)
        if window is not None:
            visible = visible & (token > position - window)
        if padding is not None:
            visible = visible & padding[row, :total]
        groups = q.shape[1] // keys.shape[0]
        scores = q[row].to(dtype) @ keys.repeat_interleave(groups, 0).mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            part = mask[row if mask.shape[0] > 1 else 0]
            known = min(total, part.shape[-1])
            part = part[..., part.shape[-1] - known :]
            hidden = torch.zeros(*part.shape[:-1], total - known, dtype=torch.bool)
            visible = visible & torch.cat((hidden, part if part.dtype == torch.bool else part > -math.inf), -1)
            if part.dtype != torch.bool:
                finite = part.to(dtype).masked_fill(part == -math.inf, 0)
                scores = scores + torch.cat((hidden.to(dtype), finite), -1)
        scores = scores.masked_fill(~visible, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, q_len, 1)), -1)
        lse = torch.logsumexp(scores, -1)
        # A row of -inf has an lse of -inf; the difference is NaN there and must be 0.
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])[..., :total]
        results.append((weights @ values.repeat_interleave(groups, 0), lse))
    out, lse = zip(*results, strict=True)
    return torch.stack(out), torch.stack(lse)


def assert_accurate(got, reference, low_precision):
    """Compare with float64 under a budget that an independent computation in float32 sets.

    Args:
        got: Computed in float32 inside and then rounded to its dtype.
        reference: float64.
        low_precision: The same as reference, computed in float32 by other means.
    The budget is four times the largest error of that computation (another order of summation may err differently),
    a float32 rounding of the largest number, and one rounding of each number to the dtype of `got`.
    """
    assert got.shape == reference.shape
    assert torch.equal(torch.isneginf(got), torch.isneginf(reference))
    got, finite = got.masked_fill(torch.isneginf(got), 0), reference.masked_fill(torch.isneginf(reference), 0)
    low = low_precision.to(torch.float64).masked_fill(torch.isneginf(reference), 0)
    if not finite.numel():
        return
    eps = torch.finfo(torch.float32).eps
    budget = 4 * (low - finite).abs().max() + eps * finite.abs().max()
    budget = budget + finite.abs() * torch.finfo(got.dtype).eps / 2
    excess = (got.to(torch.float64) - finite).abs() - budget
    assert not torch.isnan(excess).any(), "NaN in the result"
    assert excess.max() <= 0, f"error exceeds the budget by {excess.max():.3g} (budget {budget.max():.3g})"
