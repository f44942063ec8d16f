"""What is counted of rounding: the numbers in pages against the rows that were put there."""

import pytest
import torch
from paged_tables import CPU, dense_rows, layout_of
from tiny_models import build, prompt
from transformers import DynamicCache

import gemkv_compile
from gemkv_compile.errors import ReleasedHandle
from gemkv_compile.kernels.layout import CODE_BITS
from gemkv_compile.runtime.group_errors import GroupErrors, group_errors
from gemkv_compile.runtime.handle import KEYS, VALUES, make_handle
from gemkv_compile.runtime.importing import import_dense
from gemkv_compile.runtime.pool import PagePool


def cache_of(kv_format, keys, values):
    table = import_dense(PagePool(layout_of(kv_format), CPU), keys, values)
    return [make_handle(table, role, 0, table.length) for role in (KEYS, VALUES)]


@pytest.mark.parametrize("kv_format", CODE_BITS)
def test_expected_errors_are_near_those_of_the_rows(kv_format):
    keys, values = dense_rows(2, 400)
    cache = cache_of(kv_format, keys, values)
    (found,) = group_errors(cache, bound=0.0)
    first = 1 if kv_format in ("k8v4", "k6v4", "int4") else 0
    assert (found.groups, found.guarded) == (6 * 4, first * 4)
    assert found.beyond_keys == found.beyond_values == (6 - first) * 4
    for rows, handle, worst in zip((keys, values), cache, (found.worst_keys, found.worst_values), strict=True):
        x, stored = (part[:, :, first * 64 : 384].unflatten(2, (-1, 64)) for part in (rows, handle.materialise()))
        spread = (x - x.mean(-2, keepdim=True)).abs().mean(-2).square().sum(-1)
        real = ((stored - x).square().mean(-2).sum(-1) / spread).max()
        assert 0.7 * real < worst < 1.4 * real
    assert group_errors(cache, bound=1.0)[0].beyond_keys == 0


def test_an_outlier_is_counted_and_the_first_group_is_not():
    keys, values = dense_rows(2, 300)
    keys[0, 1, 70] *= 100
    keys[1, 0, 5] *= 100  # in the guarded group
    (found,) = group_errors(cache_of("int4", keys, values))
    assert found.beyond_keys == 1 and found.worst_keys > 0.05


def test_pages_of_the_model_s_dtype_round_nothing():
    assert group_errors(cache_of("model", *dense_rows(2, 130))) == (GroupErrors(groups=2 * 4),)


def test_groups_of_equal_tokens_have_no_error():
    rows = torch.ones(2, 2, 130, 16)
    (found,) = group_errors(cache_of("int4", rows, rows), bound=0.0)
    assert (found.beyond_keys, found.worst_keys) == (0, 0.0)


def test_a_released_cache():
    cache = cache_of("int4", *dense_rows(2, 130))
    cache[0].table.release()
    with pytest.raises(ReleasedHandle):
        group_errors(cache)


def test_the_report_names_the_guard():
    model = gemkv_compile.compile(build("gemma3"), kv_format="k6v4", strict=True)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(1, 150), past_key_values=cache)
    assert "guard: the first 64 tokens of each sequence" in str(gemkv_compile.report_of(model))
    found = gemkv_compile.group_errors(cache)
    assert len(found) == len(cache.layers) and all(layer.groups >= layer.guarded for layer in found)
    assert any(layer.guarded for layer in found)
    exact = gemkv_compile.compile(build("gemma3"), strict=True)
    with torch.no_grad():
        exact(prompt(1, 150))
    assert "guard:" not in str(gemkv_compile.report_of(exact))
