"""The prompt kernel with int8 scores: like its reference, and its error against float64 beside the plain kernel's."""

import paged_cases as cases
import pytest
import torch
from tiers import tiers
from triton_devices import DEVICES

from gemkv_compile.kernels.attend_chunk.kernel import attend_chunk_triton
from gemkv_compile.kernels.attend_chunk.kernel_int8 import attend_int8_triton
from gemkv_compile.kernels.attend_chunk.kernel_int8_keys import quantise_keys
from gemkv_compile.kernels.attend_chunk.reference_int8 import attend_int8_reference, quantised_keys
from gemkv_compile.kernels.layout import PageLayout

# Of root mean squares: this kernel's error over that of the plain one, which has rounded weights alone.
MOST_TIMES, MOST_TIMES_WIDE = 6, 27
RULES = [dict(), dict(causal=False), dict(window=37), dict(softcap=3.0), dict(window=64, softcap=8.0)]
SHAPES = [(2, 2, 64, 150), (1, 3, 128, 130)]  # K/V heads, query heads of each, head size, tokens
OTHERS = [(1, 1, 256, 129), (1, 8, 64, 64), (2, 1, 128, 1), (1, 2, 64, 700)]
FAST = [(SHAPES[0], rules, True) for rules in RULES] + [(SHAPES[1], RULES[0], False)]
EVERY = [(shape, rules, padded) for shape in SHAPES + OTHERS for rules in RULES for padded in (False, True)]


def drawn(heads, groups, dim, tokens, dtype, seed, channels="even"):
    """q, k and v of two sequences; some channels of the keys lie far from 0 ("far"), or spread widely ("wide")."""
    counts = heads * groups, heads, heads
    q, k, v = (cases.normal(2, n, tokens, dim, seed=(seed, i)) for i, n in enumerate(counts))
    if channels == "far":
        k[..., 3] += 20
        k[..., dim // 2 :: 9] -= 6
    elif channels == "wide":
        k[..., 3] *= 8
    return [cases.strided(x.to(dtype)) for x in (q, k, v)]


def hidden_first(tokens, padded, poisoned=()):
    """Padding that hides the first tokens of sequence 0, whose rows become NaN; or None."""
    if not padded:
        return None
    padding = torch.ones(2, tokens + 9, dtype=torch.bool)
    padding[0, : min(tokens // 3 + 1, tokens)] = False
    for x in poisoned:
        x[0, :, : tokens // 3 + 1] = float("nan")
    return padding


def exact(q, k, v, padding, scale, softcap=None, causal=True, window=None):
    """out and lse in float64, written out."""
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    counts = torch.ones(2, tokens, dtype=torch.bool) if padding is None else padding[:, :tokens]
    k, v = (x.double().masked_fill(~counts[:, None, :, None], 0).repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    seen = counts[:, None, None] & ((key <= query) | (not causal))
    if window is not None:
        seen = seen & (key > query - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def plain(q, k, v, padding, scale, softcap=None, causal=True, window=None):
    """The same by the plain kernel, over an empty cache."""
    heads, dim = k.shape[1], k.shape[3]
    layout = PageLayout(heads, dim, 64, 64, "model", k.dtype)
    table, lengths = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    tail = torch.zeros(2, 2, heads, 64, dim, dtype=k.dtype)
    state = (x.to(q.device) for x in (table, lengths, lengths, tail))
    return attend_chunk_triton(q, k, v, *state, padding, None, None, scale, softcap, causal, window, layout)


def options(rules):
    return rules.get("softcap"), rules.get("causal", True), rules.get("window")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape, rules, padded", tiers(FAST, [case for case in EVERY if case not in FAST]), ids=str)
def test_like_its_reference(device, shape, rules, padded):
    """Codes, steps and results; hidden keys and values may be NaN, and queries that see nothing get zeros."""
    q, k, v = drawn(*shape, torch.bfloat16, 11, "far")
    padding = hidden_first(shape[3], padded, (k, v))
    expected, expected_lse = attend_int8_reference(q, k, v, padding, 0.1, *options(rules))
    q, k, v = (x.to(device) for x in (q, k, v))
    padding = None if padding is None else padding.to(device)
    out, lse = (x.cpu() for x in attend_int8_triton(q, k, v, padding, 0.1, *options(rules)))
    most = expected.float().abs().max()
    torch.testing.assert_close(out, expected, rtol=0, atol=torch.finfo(torch.bfloat16).eps * most.item())
    near = 1e-4 if device == "cpu" else 2e-2  # a GPU rounds what lies between two codes either way; 7e-3 was seen
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=near)
    assert out.dtype == torch.bfloat16 and not out.isnan().any()
    if padded and rules.get("causal", True):
        assert not out[0, :, : shape[3] // 3 + 1].any() and lse[0, :, : shape[3] // 3 + 1].isneginf().all()


@pytest.mark.parametrize("device", DEVICES)
def test_keys_are_as_near_as_their_step_allows(device):
    _, k, _ = drawn(2, 1, 64, 150, torch.float16, 12, "far")
    padding = hidden_first(150, True, (k,))
    codes, steps, means = (x.cpu() for x in quantise_keys(k.to(device), padding.view(torch.uint8).to(device)))
    counts = padding[:, None, :150, None]
    expected, expected_means = quantised_keys(k, padding[:, :150])
    torch.testing.assert_close(means, expected_means.squeeze(2), rtol=1e-5, atol=1e-5)
    read = (codes * steps[..., None, None]).flatten(2, 3)
    assert codes.shape == (2, 2, 3, 64, 64) and not read[:, :, 150:].any()
    error = (read[:, :, :150] + means[:, :, None] - k.float()).masked_fill(~counts, 0).abs()
    assert (error <= 0.5001 * steps.repeat_interleave(64, 2)[:, :, :150, None]).all()
    assert not read[:, :, :150].masked_fill(counts, 0).any()
    assert (read[:, :, :150] - expected).abs().max() <= 1.01 * steps.max()  # a tie may go the other way


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", ["even", "far", "wide"])
@pytest.mark.parametrize(
    "shape, rules",
    tiers([(SHAPES[0], RULES[0])], [(shape, rules) for shape in SHAPES for rules in RULES][1:]),
    ids=str,
)
def test_its_error_beside_the_plain_kernels(device, shape, rules, channels):
    """Channels far from 0 cost nothing: the mean is taken off. One with 8 times the others' spread takes their bits."""
    inputs = drawn(*shape, torch.bfloat16, 13, channels)
    scale = shape[2] ** -0.5
    expected, expected_lse = exact(*inputs, None, scale, **rules)
    inputs = [x.to(device) for x in inputs]
    out, lse = (x.cpu() for x in attend_int8_triton(*inputs, None, scale, *options(rules)))
    results = out, plain(*inputs, None, scale, **rules)[0]
    off = [(each.cpu().double() - expected).square().mean().sqrt() for each in results]
    assert off[0] <= (MOST_TIMES_WIDE if channels == "wide" else MOST_TIMES) * off[1]
    assert (lse - expected_lse).abs().max() <= (0.2 if channels == "wide" else 0.05)
