"""Which queries and keys of a decode step's graph one launch makes, which are left and why, and models with both."""

import copy

import pytest
import torch
from golden import check_golden, graph_text
from tiny_models import build, prompt
from torch import nn

import gemkv_compile
from gemkv_compile import Options
from gemkv_compile.backend import Backend
from gemkv_compile.drop import AttentionMass
from gemkv_compile.errors import InvalidOption
from gemkv_compile.inner import InnerCompiler, by_layers
from gemkv_compile.passes import rope

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
TAKEN = "queries and keys of 1 layers normalised and rotated in a launch each"


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """On a CPU the operator runs as the reference, in graphs that the pass is told to look at."""
    monkeypatch.setattr(rope, "DEVICES", frozenset({"cuda", "cpu"}))


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rms(x, eps=1e-6):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class Layer(nn.Module):
    """A layer's attention over a dense past, as Llama has it; the methods are what others have otherwise."""

    def __init__(self, dtype=BF16, width=DIM):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, n * DIM, bias=False, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.q_weight, self.k_weight = (nn.Parameter(torch.randn(width).to(dtype)) for _ in range(2))

    def forward(self, x, past, cos, sin):
        q, k, v = (part(x).view(*x.shape[:2], -1, DIM) for part in (self.q, self.k, self.v))
        q, k, v = self.heads(q, k, v, cos, sin)
        keys, values = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=False, enable_gqa=True)
        return y, (keys, values), self.more(q, k)

    def heads(self, q, k, v, cos, sin):
        """Rotated queries and keys, and values, [batch, heads, tokens, dim] of [batch, tokens, heads, dim]."""
        q, k = self.norm(q.transpose(1, 2), self.q_weight), self.norm(k.transpose(1, 2), self.k_weight)
        return *self.rotated(q, k, cos.unsqueeze(1), sin.unsqueeze(1)), v.transpose(1, 2)

    def norm(self, x, weight):
        return x

    def rotated(self, q, k, cos, sin):
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    def rotate(self, x, cos, sin):
        return (x * cos) + (rotate_half(x) * sin)

    def more(self, q, k):
        return None


class Gemma(Layer):
    def norm(self, x, weight):
        return (rms(x) * (1.0 + weight.float())).type_as(x)


class Qwen(Layer):
    """The norm stands before the transpose."""

    def heads(self, q, k, v, cos, sin):
        q, k = self.norm(q, self.q_weight).transpose(1, 2), self.norm(k, self.k_weight).transpose(1, 2)
        return *self.rotated(q, k, cos.unsqueeze(1), sin.unsqueeze(1)), v.transpose(1, 2)

    def norm(self, x, weight):
        return weight * rms(x).to(x.dtype)


class Gemma4(Layer):
    """The transpose stands last, and values have a norm without a weight."""

    def heads(self, q, k, v, cos, sin):
        tables = [(cos.unsqueeze(2), sin.unsqueeze(2)) for _ in range(2)]
        q, k = self.norm(q, self.q_weight), self.norm(k, self.k_weight)
        q, k = self.rotate(q, *tables[0]), self.rotate(k, *tables[1])
        return q.transpose(1, 2), k.transpose(1, 2), self.norm(v, None).transpose(1, 2)

    def norm(self, x, weight):
        wide = x.float()
        y = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
        return (y if weight is None else y * weight.float()).type_as(x)


class Unscaled(Layer):
    def norm(self, x, weight):
        return rms(x).type_as(x)


class Partial(Layer):
    """Half of the channels are rotated, as in Phi 3 and StableLM."""

    def rotated(self, q, k, cos, sin):
        cos, sin = cos[..., : DIM // 2], sin[..., : DIM // 2]
        return tuple(
            torch.cat([Layer.rotate(self, x[..., : DIM // 2], cos, sin), x[..., DIM // 2 :]], dim=-1) for x in (q, k)
        )


class Commuted(Gemma):
    """Sums and products the other way round, and keywords."""

    def norm(self, x, weight):
        wide = x.to(dtype=torch.float32)
        root = torch.rsqrt(1e-6 + wide.pow(2).mean(dim=-1, keepdim=True))
        return ((weight.float() + 1.0) * (root * wide)).to(x.dtype)

    def rotate(self, x, cos, sin):
        return sin * rotate_half(x) + cos * x


class Shifted(Gemma):
    """A weight that is computed in the graph."""

    def norm(self, x, weight):
        return (rms(x) * (2.0 + weight.float())).type_as(x)


def arguments(dtype=BF16, tokens=1, one_row=False, tables=None):
    """Fresh random hidden states, past, cos and sin."""
    past = [torch.randn(BATCH, KV_HEADS, 5, DIM).to(dtype) for _ in range(2)]
    angles = torch.rand(1 if one_row else BATCH, tokens, DIM // 2).repeat(1, 1, 2) * 7
    cos, sin = (f(angles).to(tables or dtype) for f in (torch.cos, torch.sin))
    return torch.randn(BATCH, tokens, 32).to(dtype), past, cos, sin


def report(model, *args, **options):
    """The report of a call's one graph; results are eager's, keys and values to the bit."""
    torch._dynamo.reset()
    backend = Backend(Options(kv_format="model", strict=True, **options))
    expected = model(*args)
    got = torch.compile(model, backend=backend)(*args)
    torch.testing.assert_close(got[0], expected[0], rtol=0.02, atol=0.02)
    for ours, theirs in zip(got[1], expected[1], strict=True):
        assert torch.equal(ours[:], theirs)
    (graph,) = backend.graphs
    assert ("gemkv::qk_norm_rope" in graph.after) == (graph.rope == TAKEN)
    return graph


def operations(graph):
    return {line.split(" = ")[-1].split("(")[0].strip(".") for line in graph.after.splitlines()}


TAKES = [Layer, Gemma, Qwen, Gemma4, Unscaled, Partial, Commuted, Shifted]


@pytest.mark.parametrize("model", TAKES, ids=lambda x: x.__name__)
@torch.no_grad()
def test_taken(model):
    args = arguments(one_row=model in (Gemma, Qwen))
    graph = report(model(), *args)
    assert graph.rope == TAKEN and "rope: " + TAKEN in str(gemkv_compile.Report((graph,)))
    assert not {"rsqrt", "pow", "neg", "mean", "cos", "type_as"} & operations(graph)
    check_golden(f"rope_{model.__name__.lower()}", graph_text(gemkv_compile.Report((graph,))))


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("model", [Gemma, Qwen], ids=lambda x: x.__name__)
@torch.no_grad()
def test_taken_in_other_dtypes(model, dtype):
    assert report(model(dtype), *arguments(dtype)).rope == TAKEN


@torch.no_grad()
def test_any_number_of_sequences():
    x, past, cos, sin = arguments()
    for tensor in (x, *past, cos, sin):
        torch._dynamo.mark_dynamic(tensor, 0)
    assert report(Gemma(), x, past, cos, sin).rope == TAKEN


@torch.no_grad()
def test_queries_that_a_policy_observes():
    """They are read a second time, after the launch."""
    graph = report(Gemma(), *arguments(), drop=AttentionMass(budget=64))
    assert graph.rope == TAKEN and "newest_queries" in graph.after


class Returned(Gemma):
    def more(self, q, k):
        return k


class Between(Gemma):
    """The normalised keys are used before they are rotated."""

    def rotated(self, q, k, cos, sin):
        self.mean = k.float().sum()
        return super().rotated(q, k, cos, sin)

    def more(self, q, k):
        return self.mean


class OtherCos(Gemma):
    def rotated(self, q, k, cos, sin):
        return self.rotate(q, cos, sin), self.rotate(k, cos * 0.5, sin)


class CosForSin(Gemma):
    def rotated(self, q, k, cos, sin):
        return self.rotate(q, cos, sin), self.rotate(k, sin, cos)


class OneNorm(Gemma):
    def norm(self, x, weight):
        return super().norm(x, weight) if x.shape[1] == HEADS else x


class OtherEps(Gemma):
    def norm(self, x, weight):
        return (rms(x, 1e-6 * x.shape[1]) * (1.0 + weight.float())).type_as(x)


class LowNorm(Gemma):
    """Computed in the model's own dtype."""

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight)


class MeanNorm(Gemma):
    """The mean is of all heads."""

    def norm(self, x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-6) * (1.0 + weight.float())).type_as(x)


class Added(Layer):
    def norm(self, x, weight):
        return x + weight


class Interleaved(Gemma):
    def rotate(self, x, cos, sin):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin


class Back(Gemma):
    def rotate(self, x, cos, sin):
        return x * cos - rotate_half(x) * sin


class OtherHalves(Gemma):
    def rotate(self, x, cos, sin):
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., :half], x[..., half:]), -1) * sin


class Quarter(Gemma):
    def rotate(self, x, cos, sin):
        cut = x.shape[-1] // 4
        return x * cos + torch.cat((-x[..., cut:], x[..., :cut]), -1) * sin


class FirstHalfTwice(Partial):
    """What is put behind the rotated channels is not what follows them."""

    def rotated(self, q, k, cos, sin):
        cos, sin = cos[..., : DIM // 2], sin[..., : DIM // 2]
        parts = [x[..., : DIM // 2] for x in (q, k)]
        return [torch.cat([self.rotate(x, cos, sin), x], dim=-1) for x in parts]


class Wide(Gemma):
    """Rotated in float32."""

    def rotate(self, x, cos, sin):
        return super().rotate(x, cos.float(), sin.float()).to(x.dtype)


class NoHeads(Gemma):
    """Tables that broadcast over sequences and heads by themselves."""

    def rotated(self, q, k, cos, sin):
        cos, sin = cos[0, 0], sin[0, 0]
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


class Written(Gemma):
    """What the projection gave is written into before the keys are stored."""

    def rotated(self, q, k, cos, sin):
        q_rotated, k_rotated = super().rotated(q, k, cos, sin)
        self.raw.mul_(2)
        return q_rotated, k_rotated

    def norm(self, x, weight):
        self.raw = x
        return super().norm(x, weight)


USED = "something else uses queries or keys on their way"
FORM = "its queries or keys are not rotated in a form that is known"
NORMS = "its queries and keys have different norms"
SOURCE = "its queries or keys are no view of what a projection gives"
TABLES = "its queries and keys have different cos and sin"


@pytest.mark.parametrize(
    "model, reason",
    [
        (Returned, USED),
        (Between, USED),
        (OtherCos, TABLES),
        (CosForSin, TABLES),
        (OneNorm, NORMS),
        (OtherEps, NORMS),
        (LowNorm, SOURCE),
        (MeanNorm, SOURCE),
        (Added, SOURCE),
        (Interleaved, FORM),
        (Back, FORM),
        (OtherHalves, FORM),
        (Quarter, FORM),
        (FirstHalfTwice, FORM),
        (Wide, FORM),
        (NoHeads, "its cos and sin are not one row a sequence"),
        (Written, "what they are computed from is written in place"),
        (lambda: Qwen(width=1), "its norm has a weight that is not one number a channel"),
        (lambda: Gemma(width=1), "its norm has a weight that is not one number a channel"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@torch.no_grad()
def test_near_misses(model, reason):
    assert report(model(), *arguments()).rope == f"{TAKEN.replace('1', '0')}; 1 left: {reason}"


@torch.no_grad()
def test_tables_of_another_dtype():
    model, args = Layer(FP16), arguments(FP16, tables=BF16)
    args = (args[0], [rows.float() for rows in args[1]], *args[2:])
    model.v.float()
    model.v.forward = lambda x: nn.functional.linear(x.float(), model.v.weight)
    assert "change their dtype on the way" in report(model, *args).rope


@torch.no_grad()
def test_not_for_two_tokens():
    graph = report(Gemma(), *arguments(tokens=2))
    assert graph.rope == "" and "gemkv::attend_chunk" in graph.after


def test_not_where_gradients_are_asked_for():
    model = Gemma().requires_grad_(False)
    assert report(model, *arguments()).rope.endswith("1 left: gradients may be asked for")


@torch.no_grad()
def test_not_on_other_devices(monkeypatch):
    monkeypatch.setattr(rope, "DEVICES", frozenset({"cuda"}))
    assert report(Gemma(), *arguments()).rope == ""


@torch.no_grad()
def test_option():
    assert report(Gemma(), *arguments(), fuse_rope=False).rope == ""
    with pytest.raises(InvalidOption, match="fuse_rope must be True or False, got 1"):
        Options(fuse_rope=1)


def next_tokens(model, ids, cache, steps=4):
    """Greedy tokens [batch, steps] of single-token steps over a cache."""
    found = []
    for _ in range(steps):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        found.append(ids)
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "llama"])
@torch.no_grad()
def test_a_model_s_decode_steps(family, monkeypatch):
    """Tokens of models of Transformers are eager's; one model has its layers compiled one by one."""
    layers = {"num_hidden_layers": 1}
    if family == "gemma3":
        layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
        inner = by_layers(InnerCompiler("recorded", lambda module, _: module.forward, True, "recorded"))
        monkeypatch.setattr("gemkv_compile.backend.choose_inner", lambda *_: inner)
    model = build(family, dtype=BF16, **layers)
    cache = model(prompt(2, 40), use_cache=True).past_key_values
    expected = next_tokens(model, prompt(2, 1), copy.deepcopy(cache))
    torch._dynamo.reset()
    gemkv_compile.compile(model, kv_format="model", strict=True)
    assert torch.equal(next_tokens(model, prompt(2, 1), cache), expected)
    said = [graph.rope for graph in gemkv_compile.report_of(model).graphs]
    assert {*said} == {TAKEN.replace("1", str(layers["num_hidden_layers"]))}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3", "llama", "gemma4", "phi3"])
@torch.no_grad()
def test_a_model_s_decode_steps_on_a_gpu(family, inner):
    """Logits of a step with the operator and without; without norms and Inductor they are the same bits."""
    model = build(family, dtype=BF16).cuda()
    cache = model(prompt(2, 40).cuda(), use_cache=True).past_key_values
    found = []
    for fuse in (True, False):
        torch._dynamo.reset()
        backend = Backend(Options(kv_format="model", strict=True, inner=inner, fuse_rope=fuse))
        step = torch.compile(model, backend=backend)
        own = copy.deepcopy(cache)
        found.append([step(ids.cuda(), past_key_values=own).logits for ids in (prompt(2, 1), prompt(2, 1, seed=1))])
        assert all(graph.rope.startswith("queries and keys of ") == fuse for graph in backend.graphs)
        assert not any("of 0 layers" in graph.rope for graph in backend.graphs)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
        assert inner != "eager" or family not in ("llama", "phi3") or torch.equal(ours, theirs)
