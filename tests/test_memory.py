"""Bytes of Gemma 3 270M's cache, counted exactly while decoding, against a dense bfloat16 cache."""

import pytest
import torch
from paged_tables import CPU, layout_of, table_of
from tiers import tiers
from tiny_models import VOCAB, prompt
from transformers import DynamicCache, EncoderDecoderCache, Gemma3ForCausalLM, Gemma3TextConfig

import gemkv_compile
from gemkv_compile.kernels import ops
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.results import empty_results
from gemkv_compile.runtime.handle import KEYS, VALUES, make_handle
from gemkv_compile.runtime.ledger import kv_memory, trim
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool

LAYERS = ["sliding_attention"] * 5 + ["full_attention"]


def gemma3_270m_shaped(periods=3):
    """Keys and values exactly as in Gemma 3 270M (18 layers, every sixth full, window 512, one head of 256), in a
    model that is otherwise as small as can be; of fewer layers, `periods` times five windows and a full one."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=6 * periods,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        layer_types=LAYERS * periods,
        max_position_embeddings=65536,
    )
    torch.manual_seed(0)
    return Gemma3ForCausalLM._from_config(config, attn_implementation="sdpa").to(torch.bfloat16).eval()


def filled(config, tokens):
    """A dense cache of `tokens` random tokens, as eager decoding would leave it."""
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        rows = min(tokens, 511) if layer.is_sliding else tokens
        both = [torch.randn(1, 1, rows, 256, dtype=torch.bfloat16) for _ in range(2)]
        layer.lazy_initialization(*both)
        layer.keys, layer.values = both
        if layer.is_sliding:
            layer.cumulative_length = tokens
    return cache


def dense_bytes(tokens):
    """Of one period."""
    return (tokens + 5 * min(tokens, 511)) * 2 * 256 * 2


@pytest.fixture
def attends_to_nothing(monkeypatch):
    """Decode steps give zeros: bytes do not depend on what attention computes, and most of the time goes there."""
    real = ops.implementation

    def implementation(operator, device):
        zeros = lambda q, *_: tuple(part.zero_() for part in empty_results(q))  # noqa: E731
        return zeros if operator == "attend_pages" else real(operator, device)

    monkeypatch.setattr(ops, "implementation", implementation)


@pytest.mark.parametrize("tokens, most", tiers([(8192, 0.60)], [(32768, 0.56)]))
def test_worst_of_256_consecutive_positions(tokens, most, attends_to_nothing):
    model = gemkv_compile.compile(gemma3_270m_shaped(periods=1), kv_format="int8", strict=True)
    cache = filled(model.config, tokens - 1)
    assert kv_memory(cache).total == dense_bytes(tokens - 1)
    ratios = []
    with torch.no_grad():
        for length in range(tokens, tokens + 256):
            model(prompt(1, 1), past_key_values=cache)
            ledger = kv_memory(cache)
            assert ledger.dense == 0 and len(ledger.layers) == 6
            ratios.append(ledger.total / dense_bytes(length))
    assert max(ratios) <= most, max(ratios)
    assert sum(layer.codes + layer.scales for layer in ledger.layers) == sum(layer.pages for layer in ledger.layers)


def test_memory_returns_when_the_cache_dies():
    """1 cache, 4 beams, 2 continuations: after all of them no page is in use, and slabs can be given back."""
    import copy

    model = gemkv_compile.compile(gemma3_270m_shaped(periods=1), kv_format="int8", strict=True)
    before = sum(pool.in_use for pool in kv_memory(()).pools)
    with torch.no_grad():
        out = model.generate(
            prompt(1, 700), max_new_tokens=12, num_beams=4, do_sample=False, return_dict_in_generate=True
        )
        cache = out.past_key_values
        forks = [copy.deepcopy(cache) for _ in range(2)]
        for fork in forks:
            model(prompt(4, 1), past_key_values=fork)
    assert sum(pool.in_use for pool in kv_memory(()).pools) > before
    del out, cache, fork, forks
    pools = kv_memory(()).pools
    assert sum(pool.in_use for pool in pools) == before
    trim()
    assert sum(pool.reserved for pool in kv_memory(()).pools) <= sum(pool.reserved for pool in pools)


def test_growth_is_counted_per_sequence_and_shared_pages_once():
    model = gemkv_compile.compile(gemma3_270m_shaped(periods=1), kv_format="int8", strict=True)
    with torch.no_grad():
        cache = model(prompt(1, 700)).past_key_values
        one = kv_memory(cache)
        cache.batch_repeat_interleave(4)
        four = kv_memory(cache)
    assert [layer.pages for layer in four.layers] == [layer.pages for layer in one.layers]
    assert all(f.tail == 4 * o.tail for f, o in zip(four.layers, one.layers, strict=True))


def rows(tokens=10):
    return torch.ones(1, 2, tokens, 16)


def dense_cache():
    cache = DynamicCache()
    cache.update(rows(), rows(), 0)
    return cache


def hybrid_cache():
    """Layers with keys, layers with another state, and layers with none."""
    names = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    config.layer_types = names
    cache = DynamicCache(config=config)
    cache.update(rows(), rows(), 0)
    cache.layers[1].update_recurrent_state(rows())
    return cache


BYTES = rows().numel() * 4
CACHES = {
    "cache": (dense_cache, 2),
    "cache in a list": (lambda: [dense_cache()], 2),
    "cache in a dict": (lambda: {"past": (dense_cache(), None)}, 2),
    "encoder and decoder": (lambda: EncoderDecoderCache(dense_cache(), dense_cache()), 4),
    "before the first call": (DynamicCache, 0),
    "hybrid": (hybrid_cache, 3),
    "one tensor twice": (lambda: [rows()] * 2, 1),
    "two views of one tensor": (lambda: rows(20).split(10, 2), 2),
    "overlapping views": (lambda: (lambda x: [x, x[:, :, 2:], x[:, :, 4:]])(rows()), 1),
    "nothing": (lambda: None, 0),
}


@pytest.mark.parametrize("name", CACHES)
def test_dense_bytes_of_all_kinds_of_caches(name):
    make, count = CACHES[name]
    assert kv_memory(make()).total == count * BYTES


@pytest.mark.parametrize("wrong", ["abc", 3, [rows(), object()]])
def test_what_is_no_cache_is_named(wrong):
    with pytest.raises(TypeError, match=r"it met a (str|int|object)\. Pass the cache itself"):
        kv_memory(wrong)


def test_handles_in_a_nested_cache_are_counted():
    model = gemkv_compile.compile(gemma3_270m_shaped(periods=1), kv_format="int8", strict=True)
    with torch.no_grad():
        cache = model(prompt(1, 100)).past_key_values
    assert kv_memory({"past": [cache]}).total == kv_memory(cache).total > 0


def test_what_an_append_under_way_holds_is_temporary():
    """A copy of the tail, and shared pages that new ones stand for until it ends; groups without rows are known."""
    table = table_of(2, 100)
    fork = table.fork(0, 100)
    pair = [make_handle(fork, role, 0, 100) for role in (KEYS, VALUES)]
    (before,) = kv_memory(pair).layers
    assert (before.temporary, before.padding) == (0, 0) and before.unwritten == before.pages // 2  # 1 of 2 groups
    fork.begin(60, None)
    (under_way,) = kv_memory(pair).layers
    assert under_way.temporary == before.pages + before.tail and under_way.total == before.total + under_way.temporary
    fork.commit(60)
    (after,) = kv_memory(pair).layers
    assert (after.temporary, after.unwritten) == (0, 0) and after.pages == before.pages


def test_padding_of_pages_is_counted(monkeypatch):
    """No layout pads today; a later one may."""
    monkeypatch.setattr(PageLayout, "page_bytes", property(lambda layout: 24 + layout.page_code_bytes))
    table = PageTable(PagePool(layout_of(), CPU), 1)
    table.begin(300, None)
    table.commit(300)
    (layer,) = kv_memory([make_handle(table, KEYS, 0, 300)]).layers
    assert layer.padding == 24 * len(table.pages) > 0 and layer.pages == layer.codes + layer.scales + layer.padding
