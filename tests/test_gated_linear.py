"""A gated MLP's products with its activation in one launch: the kernels against float64, the operator."""

import pytest
import torch
from torch.nn import functional as F
from triton_devices import DEVICES

from gemkv_compile.errors import InvalidOption, ShapeMismatch, UnsupportedDtype
from gemkv_compile.kernels.linears import kernel
from gemkv_compile.kernels.linears.kernel import gated_linear_triton
from gemkv_compile.kernels.linears.reference import ACTIVATIONS, gated_linear_reference
from gemkv_compile.kernels.linears.sizes import gated_sizes
from gemkv_compile.kernels.ops_linear import ACTIVATIONS as NAMES
from gemkv_compile.kernels.ops_linear import MAX_ROWS, gated_linear

BF16, FP16 = torch.bfloat16, torch.float16


def random_case(rows, features, width, dtype=BF16, has_bias=False, device="cpu"):
    """Rows [rows, 1, features], both weights, and biases or None; fresh random numbers, gates of a few units."""
    x = torch.randn(rows, 1, features, dtype=dtype, device=device)
    gate, up = (torch.randn(width, features, dtype=dtype, device=device).div_(features**0.5) for _ in range(2))
    biases = [torch.randn(width, dtype=dtype, device=device) if has_bias else None for _ in range(2)]
    return [x, gate.mul_(2), up, *biases]


def check_close(got, case, activation):
    """Within what roundings of gate, up, activation and product, and sums in float32, may make of the exact result."""
    x, *others = case
    tensors = [None if each is None else each.double() for each in (x, *others)]
    gate = F.linear(tensors[0], tensors[1], tensors[3]).requires_grad_()
    up = F.linear(tensors[0], tensors[2], tensors[4])
    activated = ACTIVATIONS[activation](gate)
    (slope,) = torch.autograd.grad(activated.sum(), gate)
    half, sums = torch.finfo(x.dtype).eps * 0.51, 1e-5 + 1e-8 * x.shape[-1]
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps  # below it float16 has no numbers
    gate_error, up_error = half * gate.abs() + sums, half * up.abs() + sums
    # The second derivatives are below 1.2; 1 + erf loses digits of float32 where erf is near -1.
    error = slope.abs() * gate_error + gate_error**2 + 2e-7 * gate.abs() + half * activated.abs() + smallest
    error = (activated.abs() + error) * up_error + up.abs() * error
    exact = activated * up
    assert got.dtype == x.dtype and got.shape == exact.shape
    assert ((got.double() - exact).abs() <= error + half * (exact.abs() + error) + smallest).all()


CASES = [(64, 37), (640, 20), (1536, 5), (576, 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation, has_bias", [("gelu_tanh", False), ("gelu", True), ("silu", False)])
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize("features, width", CASES, ids=str)
def test_kernel(device, features, width, rows, activation, has_bias):
    case = random_case(rows, features, width, [BF16, FP16][has_bias], has_bias, device)
    check_close(gated_linear_triton(*case, activation), case, activation)


def test_the_check_tells_activations_apart():
    """Even the two forms of GELU, which differ by 5e-4 at most."""
    case = random_case(1, 64, 4000, FP16)
    for activation in NAMES:
        got = gated_linear_reference(*case, activation)
        check_close(got, case, activation)
        for other in set(NAMES) - {activation}:
            with pytest.raises(AssertionError):
                check_close(got, case, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("rows", [1, 2, 8, MAX_ROWS])
def test_kernel_at_the_sizes_of_models(rows, activation):
    """MLPs of Gemma 3 4B, Gemma 1 7B and a Llama."""
    for features, width in [(2560, 10240), (3072, 24576), (4096, 14336)]:
        case = random_case(rows, features, width, device="cuda")
        check_close(gated_linear_triton(*case, activation), case, activation)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 8])
def test_kernel_beyond_32_bits(rows):
    """Weights whose last element is beyond 2^31."""
    case = random_case(rows, 8192, 270_000, device="cuda")
    check_close(gated_linear_triton(*case, "silu"), case, "silu")


def picked(dtype, rows=1, device="cpu"):
    """A case whose gates and ups are sums of two elements of the weights: only the four roundings are inexact."""
    x = torch.zeros(rows, 1, 64, dtype=dtype)
    for row in range(rows):
        x[row, 0, 3 * row : 3 * row + 2] = 1
    gate, up = torch.randn(400, 64), torch.randn(400, 64)
    return [x.to(device), gate.to(dtype).to(device), up.to(dtype).to(device), None, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("rows", [1, 2])
def test_rounds_where_the_unfused_operations_round(device, rows, activation):
    """Nearly all numbers are those of float64 with these roundings, and many are not those of a single rounding."""
    case = picked(BF16, rows, device)
    x, gate, up, *_ = [None if each is None else each.cpu().double() for each in case]
    act, gates, ups = ACTIVATIONS[activation], F.linear(x, gate), F.linear(x, up)
    got = gated_linear_triton(*case, activation).cpu()
    gates_rounded, ups_rounded = gates.to(BF16), ups.to(BF16)
    assert (got != act(gates_rounded.double()).to(BF16) * ups_rounded).float().mean() < 0.02
    for other in (act(gates).to(BF16) * ups_rounded, act(gates_rounded.double()).to(BF16) * ups, act(gates) * ups):
        assert (got != other.to(BF16)).float().mean() > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", NAMES)
def test_large_gates(device, activation):
    """What overflows inside an activation has the results that eager has; infinities and NaN too."""
    gate = torch.tensor([3e38, -3e38, 1e13, -1e13, 200, -200, 0, float("inf"), -float("inf"), float("nan")])
    weight = torch.zeros(len(gate), 64, dtype=BF16)
    case = torch.zeros(1, 1, 64, dtype=BF16), weight, weight, gate.to(BF16), torch.full((len(gate),), 0.5, dtype=BF16)
    got = gated_linear_triton(*(each.to(device) for each in case), activation).cpu()
    torch.testing.assert_close(got, gated_linear_reference(*case, activation), equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2])
def test_nothing_is_written_elsewhere(device, rows, monkeypatch):
    case = random_case(rows, 128, 37, device=device)
    memory = torch.full((4096,), float("nan"), dtype=BF16, device=device)
    monkeypatch.setattr(kernel, "_results", lambda *_: [memory[: rows * 37].view(rows, 1, 37)])
    check_close(gated_linear_triton(*case, "silu"), case, "silu")
    assert memory[rows * 37 :].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_views_that_are_not_aligned_and_more_rows_than_the_kernel_has(device):
    case = random_case(1, 64, 9, device=device)
    case[2] = torch.empty(9 * 64 + 1, dtype=BF16, device=device)[1:].view(9, 64).copy_(case[2])
    check_close(gated_linear_triton(*case, "gelu"), case, "gelu")
    case = random_case(MAX_ROWS + 1, 64, 9, device=device)
    check_close(gated_linear_triton(*case, "gelu"), case, "gelu")


def test_sizes_divide():
    """Loads have no masks; tensor cores take 16 output features or more."""
    for features in range(64, 4096, 64):
        for rows in (1, 16):
            assert features % gated_sizes(rows, features).block_in == 0
        assert gated_sizes(2, features).block_out >= 16


@pytest.mark.parametrize("has_bias", [False, True])
def test_operator(has_bias):
    args = *random_case(2, 64, 8, has_bias=has_bias), "silu", "test"
    assert torch.equal(gated_linear(*args), gated_linear_reference(*args[:-1]))
    torch.library.opcheck(gated_linear, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))


def test_bad_arguments():
    x, gate, up, gate_bias, up_bias = random_case(1, 64, 8, has_bias=True)
    for error, said, args in [
        (UnsupportedDtype, "tensors of gated_linear must be all bfloat16", (x.float(), gate, up, None, None)),
        (UnsupportedDtype, "torch.float32, torch.float32", (x.float(), gate.float(), up.float(), None, None)),
        (ShapeMismatch, "a multiple of 64", (x[..., :32].contiguous(), gate, up, None, None)),
        (ShapeMismatch, "two weights of one shape", (x, gate, up[:4], None, None)),
        (ShapeMismatch, "contiguous weights", (x, gate, up.T.contiguous().T, None, None)),
        (ShapeMismatch, "for each of its two weights or none", (x, gate, up, gate_bias, None)),
        (ShapeMismatch, "bias of a weight", (x, gate, up, gate_bias, up_bias[:4])),
    ]:
        with pytest.raises(error, match=said):
            gated_linear(*args, "silu", "test")
    with pytest.raises(InvalidOption, match="gelu_tanh, gelu, silu, got 'relu'"):
        gated_linear(x, gate, up, None, None, "relu", "test")
