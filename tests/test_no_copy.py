"""No copy of a cache: not in the graph, not in Inductor's code, not in memory (pytorch/pytorch#131192)."""

import json
import subprocess
import sys

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from tiers import tiers
from tiny_models import greedy, prompt, tuple_model
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import gemkv_compile

COPIES = {"clone", "cat", "copy", "copy_", "slice_scatter", "index_put", "index_copy", "as_strided_scatter"}
STATE = {"page_table", "seq_lens", "starts", "tail"}


def decode_with(inner, **options):
    """A compiled hand-written model, its past after a prompt, and what to call for one token."""
    model = gemkv_compile.compile(tuple_model(), inner=inner, strict=True, **options)
    _, _, pasts = greedy(model, prompt(1, 70), 3)
    return model, pasts


def aten_copies(graph, at_least):
    """Nodes of an ATen graph that copy a tensor of `at_least` elements."""
    for node in graph.nodes:
        name = getattr(node.target, "_opname", "")
        value = node.meta.get("val")
        if name in COPIES and isinstance(value, torch.Tensor) and value.numel() >= at_least:
            yield node


def test_rewritten_graph_has_no_cache_sized_tensor_at_aten_level():
    """B1: after AOT autograd: no cat, clone or copy of a cache, and no output but the logits and the small state."""
    graphs = []

    def record(module, example_inputs):
        def keep(aten, _):
            graphs.append(aten)
            return make_boxed_func(aten.forward)

        return aot_module_simplified(module, example_inputs, fw_compiler=keep)

    model, pasts = decode_with(record)
    assert len(graphs) >= 2
    decode, tail = graphs[-1].graph, pasts[0][0].table.tail
    operators = [str(node.target) for node in decode.nodes if "gemkv" in str(node.args) or "gemkv" in str(node.target)]
    assert sum("append_kv" in name or "auto_functionalized" in name for name in operators) == 2
    assert not list(aten_copies(decode, 10 * tail.numel()))
    assert not any(node.target is torch.ops.aten.cat.default for node in decode.nodes)
    largest = max(value.numel() for node in decode.nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    assert largest <= max(tail.numel(), 256 * 64, 1024 * 64)  # the tail and the model's own weights
    with torch.no_grad():
        model(prompt(1, 1), pasts)


@pytest.mark.slow
def test_inductor_writes_in_place():
    """Final graph and generated code: the mutated state is neither cloned before nor copied back after a write."""
    final = []
    with config.patch(post_grad_custom_post_pass=lambda graph: final.append(graph), force_disable_caches=True):
        counters.clear()
        model = gemkv_compile.compile(tuple_model(), inner="inductor", strict=True)
        with torch.no_grad():
            _, pasts = model(prompt(1, 70))
            (logits, _), codes = run_and_get_code(model, prompt(1, 1), pasts)
    tail = pasts[0][0].table.tail.numel()
    for graph in final:
        assert sum(node.target is torch.ops.gemkv.append_kv.default for node in graph.nodes) == 2
        assert not [node for node in aten_copies(graph, tail) if _touches_state(node)]
    assert counters["inductor"]["possibly_missed_reinplacing_bytes"] == 0
    code = codes[-1]
    assert code.count("torch.ops.gemkv.append_kv") >= 2
    assert "empty_strided_cpu((1, 2, 2, 64, 16)" not in code and logits.shape == (1, 1, 256)


def _touches_state(node):
    return any(any(name in str(arg) for name in STATE) for arg in node.all_input_nodes)


@pytest.mark.slow
def test_inductor_equals_the_graph_run_as_it_is():
    """Also over a group boundary and with a second cache: writes and reads of page memory keep their order."""
    expected = greedy(tuple_model(), prompt(2, 60), 80)[0]
    for inner in ("inductor", "eager", "aot_eager"):
        torch._dynamo.reset()
        model = gemkv_compile.compile(tuple_model(), inner=inner, kv_format="model", strict=True)
        assert torch.equal(greedy(model, prompt(2, 60), 80)[0], expected), inner
        assert torch.equal(greedy(model, prompt(2, 60), 80)[0], expected), inner


SCRIPT = """
import json, resource, sys, torch
import gemkv_compile
from gemkv_compile.runtime.ledger import kv_memory

inner, tokens = sys.argv[1], int(sys.argv[2])
HEADS, DIM = 8, 128

def attend(q, k, v, past):
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out, (k, v)

def prefill(q, k, v, past):
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    mask = torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, attn_mask=mask[-1:]), (k, v)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def rows(n):
    return [torch.randn(1, HEADS, n, DIM, dtype=torch.bfloat16) for _ in range(3)]

step = gemkv_compile.compile(attend, inner=inner, strict=True, kv_format="model")
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.runtime.handle import make_handle
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import pools
from gemkv_compile.kernels import ops

layout = PageLayout(HEADS, DIM, 256, 64, "model", torch.bfloat16)
pool = pools.get(layout, torch.device("cpu"), None)

def cache(n):
    table = PageTable(pool, 1)
    for length in [256] * (n // 256) + [60]:
        _, k, v = rows(length)
        table.begin(length, None)
        ops.append_kv(k, v, table.page_table, table.seq_lens, table.tail, 256, "model", "test")
        table.commit(length)
    pool.give_back(pool.allocate(2))  # the slab of the next page is there before anything is measured
    return tuple(make_handle(table, role, 0, table.length) for role in (0, 1))

def run(past, steps):
    pointers = []
    with torch.no_grad():
        for _ in range(steps):
            _, past = step(*rows(1), past)
            pointers.append((past[0].table.tail.data_ptr(), past[0].table.page_table.data_ptr()))
    return past, pointers

run(cache(512), 3)
run(cache(768), 3)
past, _ = run(cache(tokens), 1)
before = peak()
past, pointers = run(past, 8)  # commits a group to a new page
print(json.dumps({"grown": peak() - before, "pool": kv_memory(past).total, "pointers": len(set(pointers))}))
"""


@pytest.mark.parametrize("inner", tiers(["inductor"], [("auto",)]))
def test_memory_does_not_grow_by_the_cache(inner):
    """Peak memory of decode steps over a pool of 256 MiB, a commit among them: far less than one copy of it."""
    command = [sys.executable, "-c", SCRIPT, inner, "65536"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert result["pool"] >= 256 << 20
    assert result["grown"] < 32 << 20, result
    assert result["pointers"] <= 2  # the table of addresses may grow once


def test_bytes_written_per_step_do_not_depend_on_the_cache():
    """B6: what a step copies (HabanaAI/optimum-habana#1069): counted for a short and for a long past."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Written(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func._opname in ("copy_", "clone", "cat", "index_put_"):
                self.bytes += result.numel() * result.element_size()
            return result

    counts = []
    for tokens in (100, 900):
        model = gemkv_compile.compile(tuple_model(), strict=True)
        _, _, pasts = greedy(model, prompt(1, tokens), 2)
        layout = pasts[0][0].table.pool.layout
        table = pasts[0][0].table
        row = torch.ones(1, layout.num_kv_heads, 1, layout.head_dim)
        with Written() as written:
            table.begin(1, None)
            state = (table.page_table, table.seq_lens, table.tail)
            torch.ops.gemkv.append_kv(row, row, *state, layout.page_size, layout.kv_format, "test")
            table.commit(1)
        counts.append(written.bytes)
    assert counts[0] == counts[1]
