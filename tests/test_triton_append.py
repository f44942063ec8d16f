"""The Triton append against its reference: the same bytes, whatever the lengths."""

import interpreted
import pytest
import torch
import triton
import triton.language as tl
from interleaved import interleave
from paged_cases import PagedCache, normal, strided
from triton_devices import DEVICES

from gemkv_compile.kernels.append_kv import kernel_token
from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.append_kv.kernel_quantise import _quotient
from gemkv_compile.kernels.append_kv.reference import append_kv_reference
from gemkv_compile.kernels.layout import CODE_BITS, KV_FORMATS, MAX_TOKENS

SHAPES = [(1, 64, 64, 4), (2, 80, 128, 2), (3, 16, 64, 2), (1, 256, 256, 1)]  # heads, head_dim, page_size, max_pages
# The first completes a group of either sequence by a single token.
CHUNKS = [[1, 1, 24, 1, 1, 1, 34, 1, 1, 1, 26, 1], [3, 60, 1, 1, 1, 70], [64, 64], [200, 1], [63, 2, 500]]


def run(append, device, case, chunks, kv_format, dtype):
    """The bytes of all pages, the tail and the lengths after appends of `chunks` tokens to sequences of 0 and 37."""
    heads, dim, page_size, max_pages = case
    cache = PagedCache(
        2, heads, dim, page_size, 64, kv_format, dtype, max_pages, holes=[(1, 0)] * (max_pages > 0), device=device
    )
    old = [normal(1, heads, 37, dim, dtype=dtype, seed=i).to(device) for i in range(2)]
    append(*old, cache.page_table[1:], cache.seq_lens[1:], cache.tail[1:], cache.layout)
    for number, tokens in enumerate(chunks):
        k, v = (strided(normal(2, heads, tokens, dim, dtype=dtype, seed=(number, i))).to(device) for i in range(2))
        append(k, v, *cache.state, cache.layout)
    return cache


def check_same(device, case, chunks, kv_format, dtype):
    ours = run(append_kv_triton, device, case, chunks, kv_format, dtype)
    theirs = run(append_kv_reference, "cpu", case, chunks, kv_format, dtype)
    assert torch.equal(ours.seq_lens.cpu(), theirs.seq_lens)
    for row in range(2):
        at = theirs.layout.tail_row(int(theirs.seq_lens[row]))
        filled = at + int(theirs.seq_lens[row]) % 64
        assert torch.equal(ours.tail[row, :, :, :filled].cpu(), theirs.tail[row, :, :, :filled])
        assert torch.equal(ours.tail[row, :, :, filled:].cpu().isnan(), theirs.tail[row, :, :, filled:].isnan())
        for column in range(case[3]):
            if theirs.page_table[row, column]:
                assert torch.equal(ours.page(row, column).cpu(), theirs.page(row, column))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("case, chunks", zip(SHAPES + SHAPES[:1], CHUNKS, strict=True), ids=str)
def test_same_bytes(device, case, chunks, kv_format):
    check_same(device, case, chunks, kv_format, torch.float32)


@pytest.mark.skipif(not interpreted.ON, reason="needs the interpreter")
@pytest.mark.parametrize("kv_format", ["int8", "k6v4", "model"])
@pytest.mark.parametrize("heads, dim, programs", [(3, 80, 256), (5, 96, 8), (3, 128, 1)])
def test_programs_take_turns(monkeypatch, heads, dim, programs, kv_format):
    """Whatever the order of their loads, stores and atomics: the same bytes, and lengths that advance by one.

    The step from 63 tokens completes a first group, that from 127 a second one; fewer programs have several tiles each.
    """
    monkeypatch.setattr(kernel_token, "PROGRAMS", programs)
    turns = interleave(monkeypatch, kv_format)
    check_same("cpu", (heads, dim, 64, 4), [62, 1, 1, 26, 1], kv_format, torch.float32)
    assert turns.switches > 100


@pytest.mark.parametrize("batch", [1, 2, 7, 128, 1000])
@pytest.mark.parametrize("heads", [1, 4, 12, 128])
def test_every_row_of_a_step_has_a_program(batch, heads):
    """And the programs of a sequence can be counted in the bits that a length leaves free."""
    for head_dim in (16, 80, 256, 512):
        parts, sizes = kernel_token.launch_sizes(batch, heads, head_dim)
        assert 2 * parts * MAX_TOKENS <= 1 << 32 and parts * sizes["ROWS"] >= heads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [[63, 1, 1], [30, 80]], ids=str)
def test_table_without_columns(device, chunks):
    """Completed groups are dropped, the lengths and the tail go on."""
    check_same(device, (2, 64, 64, 0), chunks, "int8", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("case, chunks", [((16, 512, 128, 8), CHUNKS[1]), ((4, 96, 64, 8), CHUNKS[4])], ids=str)
def test_same_bytes_in_every_dtype(case, chunks, kv_format, dtype):
    check_same("cuda", case, chunks, kv_format, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", list(CODE_BITS))
def test_extreme_values(device, kv_format):
    """Constant channels, tiny and huge ranges: the same bytes. NaN and inf: never a finite number again."""
    x = normal(1, 1, 64, 16)
    x[..., 0] = 3.25
    x[..., 1] = 0.0
    x[..., 2] *= 1e-9
    x[..., 3] = (5e6 if kv_format == "int8" else 3e5) * x[..., 3].sign()  # what a float16 scale still reaches
    x[..., 4] = 7e4 + x[..., 4]
    results = []
    for append in (append_kv_triton, append_kv_reference):
        cache = PagedCache(kv_format=kv_format, device=device if append is append_kv_triton else "cpu")
        append(x.to(cache.tail.device), -x.to(cache.tail.device), *cache.state, cache.layout)
        results.append(cache.page(0, 0).cpu())
    assert torch.equal(*results)
    x[0, 0, 7, 5], x[0, 0, 9, 6], x[0, 0, 9, 7] = float("nan"), float("inf"), float("-inf")
    cache = PagedCache(kv_format=kv_format, device=device)
    append_kv_triton(x.to(device), x.to(device), *cache.state, cache.layout)
    broken = ~torch.isfinite(cache.stored(0)).all(1).all(1)  # of K and V, by channel
    assert broken[:, 5:8].all() and not broken[:, 8:].any() and not broken[:, :5].any()


@triton.jit
def quotients(x, divisor, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    by = tl.load(divisor + at)
    tl.store(out + at, _quotient(tl.load(x + at), by, tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by)))


@pytest.mark.parametrize("device", DEVICES)
def test_quotients_are_those_of_a_division(device):
    """By every float16 mantissa; numbers at random, halves between two codes, and the float32 numbers next to these."""
    generator = torch.Generator().manual_seed(3)
    divisor = torch.arange(0x2C00, 0x3000, dtype=torch.int16).view(torch.float16).float().repeat(64)  # 1/16 .. 1/8
    x = torch.rand(divisor.shape, generator=generator) * 127 * divisor
    half = (torch.randint(0, 127, divisor.shape, generator=generator) + 0.5) * divisor
    x = torch.stack([x, half, half.nextafter(torch.tensor(0.0)), half.nextafter(torch.tensor(1e9))]).flatten()
    x, divisor = x.to(device), divisor.repeat(4).to(device)
    out = torch.full_like(x, float("nan"))
    quotients[(len(x) // 8192,)](x, divisor, out, 8192)
    assert torch.equal(out, x / divisor)
