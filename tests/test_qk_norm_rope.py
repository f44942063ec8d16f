"""RMSNorm and rotary embedding of a token's heads: the kernel against float64 and against eager, and the operator."""

import pytest
import torch
from triton_devices import DEVICES

from gemkv_compile.errors import InvalidOption, ShapeMismatch, UnsupportedDtype
from gemkv_compile.kernels.ops_rope import NORMS, qk_norm_rope
from gemkv_compile.kernels.qk_norm_rope import kernel
from gemkv_compile.kernels.qk_norm_rope.kernel import qk_norm_rope_triton
from gemkv_compile.kernels.qk_norm_rope.reference import qk_norm_rope_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def heads_of(batch, heads, dim, dtype):
    """Heads as views of a projection that holds others too, [batch, heads, 1, dim]; their memory ends in NaN."""
    packed = torch.full((batch, 1, (heads + 1) * dim), float("nan"), dtype=dtype)
    packed[..., : heads * dim] = torch.randn(batch, 1, heads * dim) * torch.rand(batch, 1, 1) * 4
    return packed[..., : heads * dim].view(batch, 1, heads, dim).transpose(1, 2)


def random_case(norm, dtype=BF16, dim=64, rotary=None, batch=2, heads=(4, 2), values=False, one_row=False, weight=None):
    """Arguments of the operator but for its version, fresh random numbers each time."""
    rotary = dim if rotary is None else rotary
    q, k = (heads_of(batch, each, dim, dtype) for each in heads)
    v = heads_of(batch, heads[1], dim, dtype) if values else None
    weights = [torch.randn(dim).to(weight or dtype) for _ in range(2)] if norm != "none" and not values else [None] * 2
    angles = torch.rand(1 if one_row else batch, 1, 1, rotary // 2) * 7
    cos, sin = (f(torch.cat([angles, angles], -1)).to(dtype) for f in (torch.cos, torch.sin))
    return q, k, v, *weights, cos, sin, norm, 1e-6


def moved(case, device):
    """The case on a device, with the strides that it had."""

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    return [move(x) for x in case]


def check_close(got, case):
    """Within the roundings that the operator promises of float64, and next to eager's own results."""
    exact = qk_norm_rope_reference(*[x.double() if isinstance(x, torch.Tensor) else x for x in case])
    eager = qk_norm_rope_reference(*case)
    dtype = case[0].dtype
    assert len(got) == len(exact) == 2 + (case[2] is not None)
    for ours, reference, theirs in zip(got, exact, eager, strict=True):
        assert ours.dtype == dtype and ours.shape == reference.shape and ours.is_contiguous()
        # At most two roundings of the norm, one of each product and one of the sum; none is of more than both halves.
        size = reference.square().mean(-1, keepdim=True).sqrt() + reference.abs().amax(-1, keepdim=True)
        error, budget = ((x.cpu().double() - reference).abs() for x in (ours, theirs))
        assert (error <= torch.finfo(dtype).eps * 2 * size + 1e-6).all()
        more = 1.5 if ours.is_cuda and dtype == FP32 else 1.05  # a GPU's rsqrt is off by up to 2 units of float32
        assert error.mean() <= more * budget.mean() + 1e-9
        if case[7] == "none" and dtype != FP32:
            assert torch.equal(ours.cpu(), theirs)  # nothing is summed up: the same roundings
        elif dtype != FP32:
            assert (ours.cpu() != theirs).float().mean() < 0.02  # sums in another order


MORE = [  # "none" of 16 bits: every bit is eager's
    ("none", dict(dim=64, dtype=FP16)),
    ("none", dict(dim=256, batch=1)),
    ("none", dict(dim=96, rotary=24, heads=(5, 1))),
    ("weight", dict(dim=64, rotary=32, dtype=FP16)),
    ("one_plus_weight", dict(dim=128, dtype=FP16, heads=(3, 1), one_row=True)),
    ("one_plus_weight", dict(dim=256, batch=1)),
    ("rounded_weight", dict(dim=128)),
    ("rounded_weight", dict(dim=80, dtype=FP32, heads=(2, 2))),
    ("rounded_weight", dict(dim=96, rotary=24, dtype=FP16)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm, case", [*((norm, {}) for norm in NORMS), *MORE], ids=str)
def test_kernel(device, norm, case):
    case = random_case(norm, **case)
    check_close(qk_norm_rope_triton(*moved(case, device)), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary", [64, 16])
def test_values_and_norms_without_weights(device, rotary):
    case = random_case("weight", rotary=rotary, values=True)
    check_close(qk_norm_rope_triton(*moved(case, device)), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["weight", "one_plus_weight"])
def test_weights_of_float32(device, norm):
    case = random_case(norm, weight=FP32)
    check_close(qk_norm_rope_triton(*moved(case, device)), case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch", [1, 8, 70])
@pytest.mark.parametrize("norm, dim, heads", [("one_plus_weight", 256, (8, 4)), ("rounded_weight", 128, (32, 8))])
def test_kernel_at_the_sizes_of_models(batch, norm, dim, heads):
    case = random_case(norm, dim=dim, heads=heads, batch=batch)
    check_close(qk_norm_rope_triton(*moved(case, "cuda")), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim, rotary", [(64, 64), (80, 20)])
def test_nothing_is_written_elsewhere(device, dim, rotary, monkeypatch):
    """Results whose memory was poisoned, with poison after them."""
    case = random_case("weight", dim=dim, rotary=rotary, values=True)
    memory = torch.full((3, 4096), float("nan"), dtype=BF16, device=device)
    given = iter(memory)
    monkeypatch.setattr(kernel, "_result", lambda x: next(given)[: x.numel()].view(x.shape))
    got = qk_norm_rope_triton(*moved(case, device))
    check_close(got, case)
    for out, part in zip(got, memory, strict=True):
        assert part[out.numel() :].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_strides_are_honoured(device):
    """Channels that are not side by side, and cos and sin that are one row for all sequences."""
    case = list(random_case("one_plus_weight", batch=3, one_row=True))
    for i in (0, 1, 5, 6):
        case[i] = case[i].repeat_interleave(2, -1)[..., ::2]
    case[5], case[6] = (x.expand(3, 1, 1, -1) for x in case[5:7])
    moved_case = moved(case[:5], device) + [x.to(device).expand(3, 1, 1, -1) for x in case[5:7]] + case[7:]
    check_close(qk_norm_rope_triton(*moved_case), case)


@pytest.mark.parametrize("values", [False, True])
def test_operator(values):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    case = random_case("weight", values=values)
    check_close(qk_norm_rope(*case, "test"), case)
    torch.library.opcheck(qk_norm_rope, (*case, "test"), test_utils=checks)


def test_bad_arguments():
    q, k, v, w, _, cos, sin, _, eps = random_case("weight")
    for error, args in [
        (UnsupportedDtype, (q.double(), k.double(), v, w, w, cos.double(), sin.double(), "weight", eps)),
        (UnsupportedDtype, (q, k, v, w, w, cos.float(), sin.float(), "weight", eps)),
        (UnsupportedDtype, (q, k, v, w.float(), w.float(), cos, sin, "rounded_weight", eps)),
        (ShapeMismatch, (q, k[..., :32], v, w, w, cos, sin, "weight", eps)),
        (ShapeMismatch, (q, k[:1], v, w, w, cos, sin, "weight", eps)),
        (ShapeMismatch, (q.expand(-1, -1, 2, -1), k, v, w, w, cos, sin, "weight", eps)),
        (ShapeMismatch, (q, k, v, w[:32], w, cos, sin, "weight", eps)),
        (ShapeMismatch, (q, k, v, w, None, cos, sin, "weight", eps)),
        (ShapeMismatch, (q, k, v, None, None, cos, sin, "one_plus_weight", eps)),
        (ShapeMismatch, (q, k, k, None, None, cos, sin, "none", eps)),
        (ShapeMismatch, (q, k, v, w, w, cos[..., :31], sin[..., :31], "weight", eps)),
        (ShapeMismatch, (q, k, v, w, w, cos, sin[0], "weight", eps)),
        (InvalidOption, (q, k, v, w, w, cos, sin, "layer", eps)),
    ]:
        with pytest.raises(error):
            qk_norm_rope(*args, "test")
