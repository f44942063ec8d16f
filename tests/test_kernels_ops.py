"""The operators as PyTorch sees them: schemas, shape functions, autograd, the order of their effects when compiled."""

import subprocess
import sys

import paged_cases as cases
import pytest
import torch
from tiers import tiers
from torch.fx.experimental.proxy_tensor import make_fx

from gemkv_compile.kernels import ops

# What switching off every cache says about itself.
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")

one_thread = cases.one_thread

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SCHEMAS = {
    "append_kv": "(Tensor k, Tensor v, Tensor page_table, Tensor(a3!) seq_lens, Tensor(a4!) tail, SymInt page_size, "
    "str kv_format, str version) -> ()",
    "attend_pages": "(Tensor q, Tensor page_table, Tensor seq_lens, Tensor starts, Tensor tail, Tensor? padding, "
    "Tensor? mask, Tensor? sinks, float scale, float? softcap, SymInt? window, SymInt page_size, str kv_format, "
    "str version) -> (Tensor, Tensor)",
    "attend_chunk": "(Tensor q, Tensor k, Tensor v, Tensor page_table, Tensor seq_lens, Tensor starts, Tensor tail, "
    "Tensor? padding, Tensor? mask, Tensor? sinks, float scale, float? softcap, bool causal, SymInt? window, "
    "SymInt page_size, str kv_format, str version) -> (Tensor, Tensor)",
    "attend_chunk_backward": "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor page_table, "
    "Tensor seq_lens, Tensor starts, Tensor tail, Tensor? padding, Tensor? mask, Tensor out, Tensor lse, float scale, "
    "float? softcap, bool causal, SymInt? window, SymInt page_size, str kv_format, str version) "
    "-> (Tensor, Tensor, Tensor)",
}


def cache_of(kv_format="int8", dtype=torch.float32, lengths=(70, 20)):
    return cases.PagedCache(len(lengths), 2, 16, 64, 32, kv_format, dtype).fill(lengths)


def chunk(q_len, dtype=torch.float32, seed=0):
    return [cases.normal(2, heads, q_len, 16, dtype=dtype, seed=(seed, i)) for i, heads in enumerate((4, 2, 2))]


def optional(q_len):
    """Padding, a mask and sinks for a cache of up to 120 tokens."""
    return torch.ones(2, 120, dtype=torch.bool), cases.normal(1, 4, q_len, 50), cases.normal(4)


def pages_args(cache, q, padding=None, mask=None, sinks=None, softcap=None, window=None):
    state = cache.page_table, cache.seq_lens, cache.starts, cache.tail
    return (q, *state, padding, mask, sinks, 0.25, softcap, window, *cache.format_args)


def chunk_args(cache, q, k, v, padding=None, mask=None, sinks=None, softcap=None, window=None):
    state = cache.page_table, cache.seq_lens, cache.starts, cache.tail
    return (q, k, v, *state, padding, mask, sinks, 0.25, softcap, True, window, *cache.format_args)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name):
    assert str(getattr(torch.ops.gemkv, name).default._schema) == f"gemkv::{name}{SCHEMAS[name]}"


@pytest.mark.parametrize(
    "kv_format, dtype",
    [("int8", torch.bfloat16), ("k8v4", torch.bfloat16), ("int4", torch.float32), ("model", torch.float32)],
)
@pytest.mark.parametrize("q_len", [1, 50])
def test_opcheck_append(kv_format, dtype, q_len):
    """B5, as the next four."""
    cache = cache_of(kv_format, dtype)
    cache.tail.nan_to_num_(0.0)
    _, k, v = chunk(q_len, dtype)
    torch.library.opcheck(ops.append_kv, (cases.strided(k), v, *cache.state, *cache.format_args), test_utils=CHECKS)


@pytest.mark.parametrize("every", [False, True])
def test_opcheck_attend(every):
    cache = cache_of()
    q, k, v = chunk(9)
    rules = (2.0, 40) if every else ()
    for args, op in (
        (pages_args(cache, q[:, :, :1], *(optional(1) if every else (None,) * 3), *rules), ops.attend_pages),
        (chunk_args(cache, q, k, v, *(optional(9) if every else (None,) * 3), *rules), ops.attend_chunk),
    ):
        torch.library.opcheck(op, args, test_utils=CHECKS)


def test_opcheck_attend_chunk_with_gradients():
    cache, inputs = cache_of(), [x.requires_grad_() for x in chunk(9)]
    torch.library.opcheck(ops.attend_chunk, chunk_args(cache, *inputs), test_utils=CHECKS)


def test_opcheck_copy_state():
    cache = cache_of()
    cache.tail.nan_to_num_(0.0)
    args = cache.page_table, cache.seq_lens, cache.starts, cache.tail
    torch.library.opcheck(ops.copy_state, args, test_utils=CHECKS)


def test_opcheck_backward():
    cache, (q, k, v), (padding, mask, _) = cache_of(), chunk(9), optional(9)
    args = chunk_args(cache, q, k, v, padding, mask)
    out, lse = ops.attend_chunk(*args)
    args = (cases.normal(*out.shape), cases.normal(*lse.shape), *args[:9], out, lse, *args[10:])
    torch.library.opcheck(ops.attend_chunk_backward, args, test_utils=CHECKS)


def test_opcheck_sees_a_mutation_that_no_schema_declares():
    @torch.library.custom_op("gemkv_test::forgetful", mutates_args=("tail",))
    def forgetful(k: torch.Tensor, seq_lens: torch.Tensor, tail: torch.Tensor) -> None:
        tail.add_(1)
        seq_lens.add_(k.shape[2])

    cache = cache_of()
    cache.tail.nan_to_num_(0.0)
    with pytest.raises(Exception, match="seq_lens"):
        torch.library.opcheck(forgetful, (chunk(1)[1], cache.seq_lens, cache.tail), test_utils=("test_schema",))


def test_shapes_are_symbolic():
    # Every size is different: equal ones would share a symbol.
    q, k, v = (torch.empty(3, heads, 9, 16) for heads in (10, 5, 5))
    page_table, tail = torch.empty(3, 7, dtype=torch.int64), torch.empty(3, 2, 5, 32, 16)
    seq_lens, starts = (torch.empty(3, dtype=torch.int32) for _ in range(2))
    options, layout = (None, None, None, 0.25, None), (64, "int8", cases.VERSION)

    def call(q, k, v, page_table, seq_lens, starts, tail):
        out, lse = ops.attend_chunk(q, k, v, page_table, seq_lens, starts, tail, *options, True, None, *layout)
        ops.append_kv(k, v, page_table, seq_lens, tail, *layout)
        one = ops.attend_pages(q[:, :, -1:], page_table, seq_lens, starts, tail, *options, None, *layout)
        return out, lse, *one

    traced = make_fx(call, tracing_mode="symbolic")(q, k, v, page_table, seq_lens, starts, tail)
    inputs = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    out, lse, one, one_lse = (node.meta["val"] for node in next(iter(reversed(traced.graph.nodes))).args[0])
    assert str(out.shape) == str(inputs[0].shape) and "s" in str(out.shape[0]) and "s" in str(out.shape[2])
    assert str(lse.shape) == str(out.shape[:-1]) and str(one_lse.shape) == str(one.shape[:-1])
    assert out.transpose(1, 2).is_contiguous() and lse.dtype == one_lse.dtype == torch.float32
    assert not traced.shape_env.guards


def test_attend_pages_refuses_gradients():
    cache, q = cache_of(), chunk(1)[0].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"attend_pages has no gradient, .* torch.no_grad"):
        ops.attend_pages(*pages_args(cache, q))
    with torch.no_grad():
        assert not ops.attend_pages(*pages_args(cache, q))[0].requires_grad


@pytest.mark.parametrize("name", ["mask", "sinks", "tail"])
def test_attend_chunk_refuses_gradients_of_what_is_constant(name):
    cache, new, (_, mask, sinks) = cache_of(), chunk(9), optional(9)
    wanted = {"mask": mask, "sinks": sinks, "tail": cache.tail}[name].requires_grad_()
    out, _ = ops.attend_chunk(*chunk_args(cache, *new, None, mask, sinks))
    assert out.requires_grad
    with pytest.raises(NotImplementedError, match=f"no gradient for {name}. Freeze it with {name}.requires_grad_"):
        torch.autograd.grad(out.sum(), wanted)


def test_attend_chunk_refuses_second_derivatives():
    cache, inputs = cache_of(), [x.requires_grad_() for x in chunk(9)]
    out, _ = ops.attend_chunk(*chunk_args(cache, *inputs))
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(grads[0].sum(), inputs)


def test_append_leaves_the_cache_out_of_autograd():
    cache = cache_of()
    _, k, v = chunk(40)
    ops.append_kv(k.requires_grad_(), v.requires_grad_(), *cache.state, *cache.format_args)
    assert not cache.tail.requires_grad
    assert cache.seq_lens.tolist() == [110, 60]


def everything(cache, q, k, v):
    """All results of a chunk with its gradients, the bytes that append_kv writes, and a step after it."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = ops.attend_chunk(*chunk_args(cache, *inputs))
    grads = torch.autograd.grad(out.square().sum(), inputs)
    with torch.no_grad():
        ops.append_kv(k, v, *cache.state, *cache.format_args)
        return [out, lse, *grads, *snapshot(cache), *ops.attend_pages(*pages_args(cache, q[:, :, -1:]))]


def assert_equal_bits(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_format", ["int8", "int4", "model"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing_inside_an_operator(kv_format, dtype):
    expected = everything(cache_of(kv_format), *chunk(70))
    with torch.autocast("cpu", dtype):
        assert_equal_bits(everything(cache_of(kv_format), *chunk(70)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing_inside_an_operator(dtype):
    caches, new, before = [cache_of() for _ in range(2)], chunk(70), torch.get_default_dtype()
    expected = everything(caches[0], *new)
    torch.set_default_dtype(dtype)
    try:
        assert_equal_bits(everything(caches[1], *new), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def uncached():
    """Compile anew: a cached graph may come from an earlier state of the operators under the same version string."""
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def step(q, k, v, page_table, seq_lens, starts, tail, format_args):
    """A decoding step as the passes write it: store the token, then read everything."""
    ops.append_kv(k * 2.0, v + 1.0, page_table, seq_lens, tail, *format_args)
    return ops.attend_pages(
        q - 1.0, page_table, seq_lens, starts, tail, None, None, None, 0.25, None, None, *format_args
    )[0] * 3.0  # fmt: skip


def prefill(q, k, v, page_table, seq_lens, starts, tail, format_args):
    """A chunk as the passes write it: read the past, then store."""
    state = page_table, seq_lens, starts, tail
    out, _ = ops.attend_chunk(q - 1.0, k * 2.0, v, *state, None, None, None, 0.25, None, True, None, *format_args)
    ops.append_kv(k * 2.0, v, page_table, seq_lens, tail, *format_args)
    return out * 3.0


def snapshot(cache):
    rows, columns = cache.page_table.shape
    pages = [cache.page(row, column).clone() for row in range(rows) for column in range(columns)]
    return [*pages, cache.tail.view(torch.uint8).clone(), cache.seq_lens.clone()]


@pytest.mark.parametrize(
    "backend, kv_format",
    tiers([("aot_eager", "int8"), ("aot_eager", "model"), ("inductor", "int8")], [("inductor", "k8v4")]),
)
def test_compiled_effects_keep_their_order(backend, kv_format, uncached):
    caches = [cache_of(kv_format, lengths=(62, 30)) for _ in range(2)]
    runs = {
        function: (function, torch.compile(function, backend=backend, fullgraph=True, dynamic=True))
        for function in (step, prefill)
    }
    for number, (function, q_len) in enumerate([(prefill, 3), *[(step, 1)] * 4, (prefill, 40), *[(step, 1)] * 2]):
        new = chunk(q_len, seed=number)
        outs = []
        for cache, run in zip(caches, runs[function], strict=True):
            with torch.no_grad():
                state = cache.page_table, cache.seq_lens, cache.starts, cache.tail
                outs.append(run(*new, *state, cache.format_args))
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
        assert not torch.isnan(outs[0]).any()
        assert all(torch.equal(a, b) for a, b in zip(*map(snapshot, caches), strict=True))
    assert caches[0].seq_lens.tolist() == [111, 79]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients(backend, uncached):
    caches = [cache_of() for _ in range(2)]
    results = []
    for cache, run in zip(caches, (prefill, torch.compile(prefill, backend=backend, fullgraph=True)), strict=True):
        inputs = [x.requires_grad_() for x in chunk(50)]
        out = run(*inputs, cache.page_table, cache.seq_lens, cache.starts, cache.tail, cache.format_args)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*map(snapshot, caches), strict=True))


def test_an_implementation_is_imported_when_it_runs():
    code = (
        "import sys, gemkv_compile.kernels.ops\n"
        "print([name for name in sys.modules if 'reference' in name and 'gemkv' in name or name == 'triton'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
