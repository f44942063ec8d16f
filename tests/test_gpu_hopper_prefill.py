"""The Hopper prefill kernel on a Hopper GPU, against float64 and beside PyTorch's own attention in the same dtype.

A fault in the protocol of its barriers would hang, and a kernel cannot be stopped but with its process. So these tests
run in processes of their own, and one that takes two minutes ends its process; GEMKV_HOPPER_TESTS=1 runs them in this.
"""

import importlib.util
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import paged_cases as cases
import pytest
import torch
import torch.nn.functional as F
from triton_devices import close_enough, is_hopper, to_device

from gemkv_compile.kernels.attend_chunk.kernel import attend_chunk_triton

APART = os.environ.get("GEMKV_HOPPER_TESTS") == "1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]
if is_hopper():
    from gemkv_compile.kernels.attend_chunk import kernel_hopper as hopper

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def impatient(request):
    """End the process when a test takes more than two minutes."""
    if request.function is test_in_a_process_of_their_own:
        yield
        return
    if not APART:
        pytest.skip("runs in a process of its own")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.mark.skipif(APART, reason="this is the process of their own")
def test_in_a_process_of_their_own():
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", str(Path(__file__).resolve())]
    command += ["-n", "4"] if importlib.util.find_spec("xdist") else []
    environment = os.environ | {"GEMKV_HOPPER_TESTS": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def rows(batch, heads, tokens, head_dim, dtype, seed):
    """[B, H, S, D] views of [B, S, H, D] memory."""
    return cases.normal(batch, tokens, heads, head_dim, dtype=dtype, seed=seed).cuda().transpose(1, 2)


def visible(q_len, new_len, causal, window, device):
    token, key = torch.arange(new_len - q_len, new_len, device=device)[:, None], torch.arange(new_len, device=device)
    seen = key <= token if causal else key >= 0
    return seen if window is None else seen & (key > token - window)


def exact(q, k, v, scale, softcap, causal, window):
    """Attention and lse in float64, a few queries at a time."""
    groups, found = q.shape[1] // k.shape[1], []
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device)
    for part, mask in zip(q.split(256, 2), seen.expand(q.shape[2], -1).split(256), strict=True):
        scores = part.double() @ keys.mT * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -math.inf)
        found.append((torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)))
    return tuple(torch.cat(parts, 2) for parts in zip(*found, strict=True))


def check(q, k, v, softcap=None, causal=True, window=None, **options):
    scale = q.shape[-1] ** -0.5
    assert hopper.eligible(q, k, v, scale, (9, 0)) == ""
    lengths = torch.zeros(q.shape[0], dtype=torch.int32, device="cuda")
    for _ in range(2):  # the second launch finds other results in the memory of the first
        out, lse = hopper.attend_chunk_hopper(q, k, v, lengths, lengths, scale, softcap, causal, window, **options)
    right, right_lse = exact(q, k, v, scale, softcap, causal, window)
    torch.testing.assert_close(lse.double(), right_lse, rtol=2e-5, atol=2e-5)
    error = (out.double() - right).abs()
    assert not torch.isnan(out).any()
    if softcap is not None:  # PyTorch's kernels have none
        assert error.max() <= 2 * torch.finfo(q.dtype).eps * right.abs().max()
        return
    mask = visible(q.shape[2], k.shape[2], causal, window, q.device).expand(q.shape[2], -1)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=scale)
    budget = (theirs.double() - right).abs()
    assert error.max() <= 1.2 * budget.max() + 1e-5, f"{error.max()} of {budget.max()}"
    assert error.square().mean().sqrt() <= 1.2 * budget.square().mean().sqrt() + 1e-6


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [64, 127, 1000, 2048])
def test_causal(head_dim, tokens, dtype):
    check(*(rows(2, n, tokens, head_dim, dtype, i) for i, n in enumerate((4, 2, 2))))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 100, 1024])
def test_windows(head_dim, causal, window):
    check(*(rows(1, n, 2000, head_dim, HALF, i) for i, n in enumerate((4, 2, 2))), causal=causal, window=window)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal, window", [(True, None), (False, 300)])
def test_softcap(head_dim, causal, window):
    new = (rows(1, n, 700, head_dim, HALF, i) for i, n in enumerate((2, 2, 2)))
    check(*new, softcap=1.5, causal=causal, window=window)


@pytest.mark.parametrize("heads, kv_heads", [(32, 2), (8, 1), (6, 2), (5, 5)])
def test_groups(heads, kv_heads):
    check(*(rows(1, n, 500, 128, HALF, i) for i, n in enumerate((heads, kv_heads, kv_heads))))


@pytest.mark.parametrize("queries, tokens", [(64, 1500), (333, 1024)])
def test_queries_of_the_last_tokens(queries, tokens):
    q, k, v = (rows(1, 4, tokens, 128, HALF, i) for i in range(3))
    check(q[:, :, -queries:], k, v)
    check(q[:, :, -queries:], k, v, causal=False)


@pytest.mark.parametrize("layout", ["tokens apart", "heads apart", "a part of wider rows"])
def test_strides(layout):
    made = []
    for seed in range(3):
        x = rows(2, 4, 600, 128, HALF, seed)
        if layout == "heads apart":
            x = x.contiguous()
        elif layout == "a part of wider rows":
            wide = torch.full((2, 600, 4, 136), math.nan, dtype=HALF, device="cuda").transpose(1, 2)[..., :128]
            x = wide.copy_(x)
        made.append(x)
    check(*made)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("place", range(5))
def test_every_candidate(head_dim, place):
    new = [rows(1, n, 1111, head_dim, HALF, i) for i, n in enumerate((4, 2, 2))]
    for tiles in hopper.CANDIDATES[head_dim][place : place + 1]:
        check(*new, tiles=tiles)
        check(*new, tiles=tiles, window=200, programs=7)


@pytest.mark.parametrize("rules", [{}, {"window": 60}, {"softcap": 2.0, "causal": False}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("kv_format", ["int8", "model"])
def test_with_a_past(rules, kv_format):
    cache = cases.PagedCache(4, 1, 128, 64, 64, kv_format, HALF, max_pages=8).fill([0, 71, 130, 400])
    cache.starts.copy_(torch.tensor([5, 3, 140, 0]))
    q, k, v = (cases.normal(4, n, 300, 128, dtype=HALF, seed=i) for i, n in enumerate((2, 1, 1)))
    rules = {"scale": 0.09, "causal": True, "window": None, "softcap": None, "sinks": None} | rules
    rules["sinks"] = torch.tensor([0.5, -1.0]) if rules["sinks"] else None
    sinks = None if rules["sinks"] is None else rules["sinks"].cuda()
    arguments = None, None, sinks, rules["scale"], rules["softcap"], rules["causal"], rules["window"]
    state = to_device(cache, "cuda")
    got = attend_chunk_triton(q.cuda(), k.cuda(), v.cuda(), *state, *arguments, cache.layout, variant="hopper")
    references = (cases.dense_attention(cache, q, k, v, **rules, dtype=dtype) for dtype in (torch.float64, HALF))
    close_enough(got, *references)


def test_repeats_bit_by_bit():
    """No result depends on which partition was faster."""
    q, k, v = (rows(1, 8, 3000, 128, HALF, i) for i in range(3))
    lengths = torch.zeros(1, dtype=torch.int32, device="cuda")
    results = [hopper.attend_chunk_hopper(q, k, v, lengths, lengths, 0.09, None, True, None) for _ in range(20)]
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)
