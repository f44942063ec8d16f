"""Products of few rows with several weights: the kernel against float64, and which products of a graph are taken."""

import pytest
import torch
from tiny_models import build, prompt
from torch import nn
from triton_devices import DEVICES

import gemkv_compile
from gemkv_compile.errors import ShapeMismatch, UnsupportedDtype
from gemkv_compile.kernels.linears import kernel
from gemkv_compile.kernels.linears.kernel import linears_triton
from gemkv_compile.kernels.linears.reference import linears_reference
from gemkv_compile.kernels.linears.sizes import sizes
from gemkv_compile.kernels.ops_linear import MAX_ROWS, linears
from gemkv_compile.passes import few_rows
from gemkv_compile.passes.few_rows import fuse_linears

BF16, FP16 = torch.bfloat16, torch.float16


def random_case(rows, features, widths, dtype=BF16, has_bias=False, device="cpu"):
    """Rows [rows, 1, features], weights and biases, fresh random numbers each time."""
    x = torch.randn(rows, 1, features, dtype=dtype)
    weights = [(torch.randn(width, features) / features**0.5).to(dtype) for width in widths]
    biases = [torch.randn(width, dtype=dtype) for width in widths] if has_bias else []
    return x.to(device), [weight.to(device) for weight in weights], [bias.to(device) for bias in biases]


def check_close(got, x, weights, biases):
    exact = linears_reference(x.double(), [w.double() for w in weights], [b.double() for b in biases])
    assert len(got) == len(exact)
    for ours, reference in zip(got, exact, strict=True):
        assert ours.dtype == x.dtype and ours.shape == reference.shape
        # One rounding of the result, and sums in float32; tensor cores cut off what they add.
        bound = torch.finfo(x.dtype).eps * 0.51 * reference.abs() + 1e-5 + 1e-8 * x.shape[-1]
        assert ((ours.double() - reference).abs() <= bound).all()


CASES = [(64, (7,)), (640, (100, 33, 1)), (2560, (64, 32, 8, 40)), (576, (1, 2))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize("features, widths", CASES, ids=str)
def test_kernel(device, features, widths, rows, has_bias):
    case = random_case(rows, features, widths, [BF16, FP16][has_bias], has_bias, device)
    check_close(linears_triton(*case), *case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 8])
def test_kernel_at_the_sizes_of_models(rows):
    """The projections of Gemma 3 4B, and an LM head whose last element is beyond 2^31."""
    for features, widths in [(2560, (2048, 1024, 1024)), (10240, (2560,)), (8192, (270_000,))]:
        case = random_case(rows, features, widths, device="cuda")
        check_close(linears_triton(*case), *case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2])
def test_nothing_is_written_elsewhere(device, rows, monkeypatch):
    """Results whose memory was poisoned, with poison after them."""
    case = random_case(rows, 128, (37, 5), device=device)
    memory = torch.full((2, 4096), float("nan"), dtype=BF16, device=device)
    given = iter(memory)
    monkeypatch.setattr(kernel, "_results", lambda x, ws: [next(given)[: rows * len(w)].view(rows, 1, -1) for w in ws])
    got = linears_triton(*case)
    check_close(got, *case)
    for out, part in zip(got, memory, strict=True):
        assert part[out.numel() :].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_views_that_are_not_aligned(device):
    x, (weight,), _ = random_case(1, 128, (9,), device=device)
    moved = torch.empty(weight.numel() + 1, dtype=BF16, device=device)[1:].view(9, 128).copy_(weight)
    check_close(linears_triton(x, [moved], []), x, [moved], [])


def test_sizes_divide():
    """Loads have no masks: a block of features divides every number of features that the operator takes."""
    for rows in (1, 16):
        for features in range(64, 4096, 64):
            assert features % sizes(rows, features).block_in == 0


@pytest.mark.parametrize("has_bias", [False, True])
def test_operator(has_bias):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    args = *random_case(2, 64, (8, 3), has_bias=has_bias), "test"
    check_close(linears(*args), *args[:3])
    torch.library.opcheck(linears, args, test_utils=checks)


def test_bad_arguments():
    x, weights, biases = random_case(1, 64, (8, 3), has_bias=True)
    for error, args in [
        (UnsupportedDtype, (x.float(), weights, biases)),
        (UnsupportedDtype, (x.float(), [w.float() for w in weights], [])),
        (ShapeMismatch, (x[:, :0], weights, biases)),
        (ShapeMismatch, (x[..., :32].contiguous(), [w[:, :32].contiguous() for w in weights], [])),
        (ShapeMismatch, (x, weights, biases[:1])),
        (ShapeMismatch, (x, [], [])),
        (ShapeMismatch, (x, weights * 3, [])),
        (ShapeMismatch, (x, [weights[0].T.contiguous().T], [])),
        (ShapeMismatch, (x, weights, [biases[1], biases[0]])),
    ]:
        with pytest.raises(error):
            linears(*args, "test")


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """On a CPU the operator runs as the reference, in graphs that the pass is told to look at."""
    monkeypatch.setattr(few_rows, "DEVICES", frozenset({"cuda", "cpu"}))


class Layer(nn.Module):
    """Two products of one input, one of their result, and one more of the input; `between` may do something."""

    def __init__(self, dtype=BF16, bias=False, features=64):
        super().__init__()
        self.q, self.k = (nn.Linear(features, width, bias=bias, dtype=dtype) for width in (128, 64))
        self.o, self.v = nn.Linear(128, 64, bias=bias, dtype=dtype), nn.Linear(features, 32, dtype=dtype)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        o = self.o(q)
        self.between(x)
        return o, k, self.v(x)

    def between(self, x):
        pass


def fused(model, *args, dynamic=False, grad=False):
    """The report of the one graph of a call, the widths of its operators, and the results beside eager's."""
    found = []

    def backend(module, _):
        with torch.no_grad() if not grad else torch.enable_grad():
            report = fuse_linears(module)
        nodes = [node for node in module.graph.nodes if node.target is linears._opoverload]
        widths = [[each.meta["example_value"].shape[0] for each in node.args[1]] for node in nodes]
        found.append((report, widths))
        return module.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        got = torch.compile(model, backend=backend, dynamic=dynamic)(*args)
        expected = model(*args)
    (result,) = found
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)
    return result


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_input_share_a_launch(bias):
    report, widths = fused(Layer(bias=bias), torch.randn(1, 1, 64, dtype=BF16))
    # `v` has a bias: without one, q and k are in another launch.
    assert widths == ([[128, 64, 32], [64]] if bias else [[128, 64], [64], [32]])
    assert str(report) == f"4 products of 1 row with weights in {len(widths)} launches"


def test_several_rows_need_another_weight_or_a_wide_one(monkeypatch):
    report, widths = fused(Layer(bias=True), torch.randn(5, 1, 64, dtype=BF16))
    assert widths == [[128, 64, 32]]
    assert "3 products of 5 rows" in str(report) and "1 left: several rows, and no other weight" in str(report)
    monkeypatch.setattr(few_rows, "WIDE", 64)
    assert fused(Layer(bias=True), torch.randn(5, 1, 64, dtype=BF16))[1] == [[128, 64, 32], [64]]


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.ModuleList([nn.Linear(64, 8, bias=False, dtype=BF16) for _ in range(6)])

    def forward(self, x):
        return [each(x) for each in self.all]


def test_as_many_as_the_operator_takes():
    assert [len(each) for each in fused(Many(), torch.randn(1, 64, dtype=BF16))[1]] == [4, 2]


class Written(Layer):
    """Near miss: the input is another one by the time of the last product."""

    def between(self, x):
        x.mul_(2)


def test_a_write_in_between_ends_a_launch():
    model = Written(bias=True)
    start = torch.randn(1, 1, 64, dtype=BF16)
    found = []

    def backend(module, _):
        with torch.no_grad():
            found.append(str(fuse_linears(module)))
        found.append(sum(node.target is linears._opoverload for node in module.graph.nodes))
        return module.forward

    with torch.no_grad():
        got, expected = torch.compile(model, backend=backend)(start.clone()), model(start.clone())
    assert all(map(torch.equal, got, expected))
    assert found == ["4 products of 1 row with weights in 3 launches", 3]


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 64, dtype=BF16))

    def forward(self, x):
        return [nn.functional.linear(x, self.weight * 2)]


@pytest.mark.parametrize(
    "model, x, reason",
    [
        (lambda: Layer(torch.float32), torch.randn(1, 1, 64), "its dtype is float32"),
        (lambda: Layer(features=32), torch.randn(1, 1, 32, dtype=BF16), "32 input features are no multiple of 64"),
        (Computed, torch.randn(1, 64, dtype=BF16), "its weight is computed in the graph"),
    ],
    ids=["float32", "features", "computed"],
)
def test_what_is_left_is_said(model, x, reason):
    report, _ = fused(model(), x)
    assert reason in str(report)


def test_a_transposed_weight_is_left():
    model = Layer()
    model.q.weight = nn.Parameter(model.q.weight.detach().T.contiguous().T)
    report, widths = fused(model, torch.randn(1, 1, 64, dtype=BF16))
    assert "1 left: its weight is not contiguous" in str(report) and widths == [[64], [64], [32]]


def test_not_for_many_rows_nor_for_tokens_that_may_be_many():
    assert fused(Layer(), torch.randn(1, MAX_ROWS + 1, 64, dtype=BF16)) == (None, [])
    assert fused(Layer(), torch.randn(2, 3, 64, dtype=BF16), dynamic=True) == (None, [])


def test_any_number_of_sequences():
    """Once Dynamo has seen two batch sizes, the number of sequences is a symbol."""
    report, widths = fused(Layer(bias=True), torch.randn(3, 1, 64, dtype=BF16), dynamic=True)
    assert widths == [[128, 64, 32]] and "3 products of a few rows" in str(report)


@pytest.mark.parametrize("device", DEVICES)
def test_more_rows_than_the_kernel_has(device):
    case = random_case(MAX_ROWS + 1, 64, (8, 3), device=device)
    check_close(linears_triton(*case), *case)


def test_not_where_gradients_are_asked_for():
    report, widths = fused(Layer(), torch.randn(1, 1, 64, dtype=BF16), grad=True)
    assert not widths and "gradients may be asked for" in str(report)


def test_not_under_autocast():
    """Near miss: switching it off, as Transformers does around its rotary embeddings, changes no product."""

    class Switched(Layer):
        def __init__(self, enabled):
            super().__init__()
            self.enabled = enabled

        def between(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
                x + 1

    x = torch.randn(1, 1, 64, dtype=BF16)
    assert "autocast is on" in str(fused(Switched(True), x)[0])
    assert len(fused(Switched(False), x)[1]) == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on" in str(fused(Layer(), x)[0])


def greedy(model, tokens, steps):
    with torch.no_grad():
        return model.generate(prompt(1, tokens), max_new_tokens=steps, do_sample=False)


@pytest.mark.parametrize("split_layers", [False, True])
def test_a_model_s_decode_steps(split_layers, monkeypatch):
    """Tokens are eager's, the report counts products, and those of a prompt are none of them."""
    model = build("gemma3", num_hidden_layers=3, layer_types=["full_attention"] * 3, intermediate_size=128).to(BF16)
    expected = greedy(model, 40, 12)
    if split_layers:
        from gemkv_compile.inner import InnerCompiler, by_layers

        inner = by_layers(InnerCompiler("recorded", lambda module, _: module.forward, True, "recorded"))
        monkeypatch.setattr("gemkv_compile.backend.choose_inner", lambda *_: inner)
    gemkv_compile.compile(model, kv_format="model", strict=True)
    assert torch.equal(greedy(model, 40, 12), expected)
    report = gemkv_compile.report_of(model)
    # q, k, v; o; gate, up; down, of 3 layers; and the LM head.
    said = [graph.linears for graph in report.graphs]
    assert said[0].startswith("1 products of 1 row") and all("22 products of 1 row" in each for each in said[1:])
    assert "in 13 launches" in str(report)


def test_option():
    model = build("gemma3").to(BF16)
    gemkv_compile.compile(model, fuse_linears=False)
    greedy(model, 40, 3)
    assert not any(graph.linears for graph in gemkv_compile.report_of(model).graphs)
