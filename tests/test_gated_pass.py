"""Which products of a graph are computed with a gated MLP's activation, and what the report says of the others."""

import re

import pytest
import torch
from tiers import tiers
from tiny_models import build, prompt
from torch import nn
from torch.nn import functional as F

import gemkv_compile
from gemkv_compile.kernels.ops_linear import MAX_ROWS, gated_linear
from gemkv_compile.passes import few_rows
from gemkv_compile.passes.few_rows import fuse_linears

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """On a CPU the operator runs as the reference, in graphs that the pass is told to look at."""
    monkeypatch.setattr(few_rows, "DEVICES", frozenset({"cuda", "cpu"}))


class MLP(nn.Module):
    """A gated MLP whose parts may be replaced, one by one, with something that the pass must not take."""

    def __init__(self, act=F.silu, combine=None, bias=(False, False), widths=(128, 128), between=None):
        super().__init__()
        self.gate, self.up = (nn.Linear(64, n, bias=b, dtype=BF16) for n, b in zip(widths, bias, strict=True))
        self.down = nn.Linear(128, 64, bias=False, dtype=BF16)
        self.act, self.between = act, between or (lambda x: None)
        self.combine = combine or (lambda gate, up: act(gate) * up)

    def forward(self, x):
        gate = self.gate(x)
        self.between(x)
        result = self.combine(gate, self.up(x))
        return self.down(result) if result.dtype == BF16 else result


def fused(model, rows=1, dynamic=None):
    """The report of a call's graph, and the activations of its operators; the results are eager's."""
    found = []

    def backend(module, _):
        found.append(str(fuse_linears(module)))
        module.graph.lint()
        nodes = [node for node in module.graph.nodes if node.target is gated_linear._opoverload]
        found.append([node.args[5] for node in nodes])
        assert all(node.meta["example_value"].shape[-1] == 128 for node in nodes)
        return module.forward

    torch._dynamo.reset()
    x = torch.randn(rows, 1, 64, dtype=BF16)
    with torch.no_grad():
        got = torch.compile(model, backend=backend, dynamic=dynamic)(x.clone())
        assert torch.equal(got, model(x.clone()))
    return found


def multiply(gate, up):
    return torch.mul(up, F.gelu(gate))


def in_place(gate, up):
    up *= F.silu(gate)
    return up


TAKEN = {
    "silu": (MLP(), "silu"),
    "module": (MLP(nn.SiLU()), "silu"),
    "gelu": (MLP(F.gelu), "gelu"),
    "gelu_tanh": (MLP(nn.GELU(approximate="tanh")), "gelu_tanh"),
    "biases": (MLP(bias=(True, True)), "silu"),
    "up first": (MLP(combine=multiply), "gelu"),
    "method": (MLP(combine=lambda gate, up: F.silu(gate).mul(up)), "silu"),
    "in place": (MLP(combine=in_place), "silu"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_pairs_that_are_taken(name):
    model, activation = TAKEN[name]
    report, found = fused(model)
    assert found == [activation]
    assert report == "3 products of 1 row with weights in 2 launches, 1 of them with a gated MLP's activation"


def test_several_rows():
    """A pair is taken as two products of one input are; the product alone is left."""
    left = "1 left: several rows, and no other weight of the same input"
    for rows, dynamic, said in [(3, None, "3 rows"), (MAX_ROWS, None, "16 rows"), (3, True, "a few rows")]:
        report, found = fused(MLP(), rows, dynamic)
        assert found == ["silu"] and left in report
        assert report.startswith(f"2 products of {said} with weights in 1 launches, 1 of them with")
    assert fused(MLP(), MAX_ROWS + 1) == ["None", []]


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


LEFT = {
    "another activation": (MLP(F.relu), "it is relu"),
    "written out": (MLP(quick_gelu), "it is several operations"),
    "in place": (MLP(nn.SiLU(inplace=True)), "it is silu"),
    "gate used twice": (MLP(combine=lambda gate, up: F.silu(gate) * up + gate), "something else reads it"),
    "activation used twice": (MLP(combine=lambda g, up: (a := F.silu(g)) * up + a), "something else reads it"),
    "up used twice": (MLP(combine=lambda gate, up: F.silu(gate) * up - up), "something else reads it"),
    "gate cast": (MLP(combine=lambda gate, up: F.silu(gate.float()) * up), "it is several operations"),
    "activation cast": (MLP(combine=lambda gate, up: F.silu(gate).float() * up), "it is several operations"),
    "scaled": (MLP(combine=lambda gate, up: F.silu(gate) * 2 * up), "it is several operations"),
    "one bias": (MLP(bias=(True, False)), "only one of its products has a bias"),
    "broadcast": (MLP(widths=(1, 128)), "its weights have different shapes"),
    "write in between": (MLP(between=lambda x: x.mul_(2)), "memory is written between its products"),
}


@pytest.mark.parametrize("name", LEFT)
def test_near_misses(name):
    """Products are still taken, and the report says why the activation is not."""
    model, reason = LEFT[name]
    report, found = fused(model)
    assert found == [] and f"; 1 activations left: {reason}" in report and report[0] in "23"


def test_what_is_no_gated_mlp_is_not_spoken_of():
    """No activation; the activation of the other operand; another input; the product of one weight with itself."""
    for combine in [
        lambda gate, up: gate * up,
        lambda gate, up: F.silu(gate) * F.silu(up),
        lambda gate, up: F.silu(up) * up + gate,
    ]:
        report, found = fused(MLP(combine=combine))
        assert found == [] and "activation" not in report

    class Two(MLP):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x + 1))

    report, found = fused(Two())
    assert found == [] and "activation" not in report


def test_other_products_of_the_input_share_their_own_launch():
    class Parallel(MLP):
        def __init__(self):
            super().__init__()
            self.q, self.k = (nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(2))

        def forward(self, x):
            return self.q(x) + super().forward(x) + self.k(x)

    report, found = fused(Parallel())
    assert found == ["silu"] and report.startswith("5 products of 1 row with weights in 3 launches")


FAST = [("llama", {"mlp_bias": True, "num_hidden_layers": 1}, "silu")]
SLOW = [
    ("gemma1", {}, "gelu_tanh"),
    ("gemma2", {}, "gelu_tanh"),
    ("gemma3", {}, "gelu_tanh"),
    ("qwen3", {"hidden_act": "gelu"}, "gelu"),
    ("qwen2", {"hidden_act": "swish"}, "silu"),
    ("olmo2", {}, "silu"),
    ("gemma1", {"hidden_act": "gelu_new"}, ""),  # written out
    ("phi3", {}, ""),  # one weight for both
]


@pytest.mark.parametrize("family, changes, activation", tiers(FAST, SLOW), ids=str)
def test_models(family, changes, activation):
    """Tokens are eager's; every layer's MLP is one operator in decode steps."""
    model = build(family, "eager" if family == "gemma2" else "sdpa", **changes).to(BF16)
    generate = lambda: model.generate(prompt(1, 20), max_new_tokens=3, do_sample=False)  # noqa: E731
    expected = generate()
    gemkv_compile.compile(model, kv_format="model")
    assert torch.equal(generate(), expected)
    graph = gemkv_compile.report_of(model).graphs[-1]
    layers = model.config.num_hidden_layers if activation else 0
    assert (f"{layers} of them with a gated MLP's activation" in graph.linears) == bool(activation)
    assert re.findall(r"gemkv::gated_linear.*'(\w+)', '", graph.after) == [activation] * layers
