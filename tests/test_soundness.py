"""Graphs that look like a cached attention and mean something else: whatever the verdict, results equal eager's."""

import attention_cases as cases
import pytest
import torch
import torch.nn.functional as F
from attention_cases import additive, causal, grown
from torch.utils._pytree import tree_map

import gemkv_compile
from gemkv_compile import Options, PagedKVTensor
from gemkv_compile.errors import RewriteFailed

INF = float("inf")
sdpa = F.scaled_dot_product_attention


def compare(function, *arguments, **tolerance):
    """Compiled against eager, on inputs of their own: results, and what is done to the inputs in place."""
    copies = [tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, arguments) for _ in range(2)]
    with torch.no_grad():
        ours = gemkv_compile.compile(function, kv_format="model")(*copies[0])
        theirs = function(*copies[1])
    cases.tree_close((ours, copies[0]), (theirs, copies[1]), **({"rtol": 1e-5, "atol": 1e-5} | tolerance))


def reasons(function, *arguments):
    with torch.no_grad():
        report = gemkv_compile.explain(function, *arguments, gemkv_options=Options(kv_format="model"))
    return {site.reason for site in report.sites if site.status == "kept"}


# In place: each is kept, with the line that writes.


def scores_masked_in_place_after_a_view(q, k, v, past):
    k, v = k * 1.0, v * 1.0
    scores = q @ k.mT * 0.25
    scores.masked_fill_(~causal(q, k), -INF)
    return scores.softmax(-1) @ v, (k, v)


def scores_scaled_in_place(q, k, v, past):
    k, v = k * 1.0, v * 1.0
    scores = q @ k.mT
    scores.mul_(0.25)
    return scores.softmax(-1) @ v, (k, v)


def scores_set_in_place(q, k, v, past):
    k, v = k * 1.0, v * 1.0
    scores = q @ k.mT
    scores[..., 0] = -100.0
    return scores.softmax(-1) @ v, (k, v)


def keys_scaled_in_place(q, k, v, past):
    k, v = k * 1.0, v * 1.0
    keys = k.clone()
    keys.mul_(0.5)
    return sdpa(q, keys, v), (k, v)


def cache_scaled_afterwards(q, k, v, past):
    k, v = k * 1.0, v * 1.0
    out = sdpa(q, k, v)
    k.mul_(2)
    return out, (k, v)


def new_keys_zeroed_after_the_cat(q, k, v, past):
    k = k * 1.0
    keys, values = grown(k, v, past)
    k.zero_()
    return sdpa(q, keys, values, causal(q, keys)), (keys, values)


def base_of_the_new_rows_zeroed(q, k, v, past):
    both = torch.cat([k, v], -1)
    keys, values = grown(both[..., :16], both[..., 16:], past)
    both.zero_()
    return sdpa(q, keys, values, causal(q, keys)), (keys, values)


def query_zeroed_after_the_scores(q, k, v, past):
    q = q * 1.0
    keys, values = grown(k, v, past)
    scores = q @ keys.mT
    q.zero_()
    return scores.softmax(-1) @ values, (keys, values)


def mask_zeroed_after_the_add(q, k, v, past):
    keys, values = grown(k, v, past)
    mask = additive(causal(q, keys))
    scores = q @ keys.mT + mask
    mask.zero_()
    return scores.softmax(-1) @ values, (keys, values)


def new_keys_zeroed_between_two_readers(q, k, v, past):
    k = k * 1.0
    keys, values = grown(k, v, past)
    first = sdpa(q, keys, values, causal(q, keys))
    k.zero_()
    return sdpa(first, keys, values, causal(q, keys)), (keys, values)


IN_PLACE = [
    scores_masked_in_place_after_a_view,
    scores_scaled_in_place,
    scores_set_in_place,
    keys_scaled_in_place,
    cache_scaled_afterwards,
    new_keys_zeroed_after_the_cat,
    base_of_the_new_rows_zeroed,
    query_zeroed_after_the_scores,
    mask_zeroed_after_the_add,
    new_keys_zeroed_between_two_readers,
]


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_written_in_place(function):
    arguments = cases.inputs(kv_heads=4)
    compare(function, *arguments)
    assert reasons(function, *arguments) == {"written_in_place"}


def test_steps_in_place_are_steps():
    """Scores that nothing else uses may be masked in place."""

    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        scores = q @ keys.mT
        scores *= 0.25
        scores += additive(causal(q, keys))
        return scores.softmax(-1) @ values, (keys, values)

    arguments = cases.inputs(kv_heads=4)
    compare(function, *arguments)
    assert reasons(function, *arguments) == set()


def relu_in_place(x):
    F.relu(x, True)


def iadd_of_a_view(x):
    x.view(-1).__iadd__(1)


def batch_norm_statistics(x):
    F.batch_norm(torch.ones(2, 3) * x.sum(), x[0, :3], x[1, :3].abs(), training=True)


@pytest.mark.parametrize(
    "write",
    [relu_in_place, iadd_of_a_view, batch_norm_statistics, lambda x: F.leaky_relu(x, 0.1, True)],
    ids=["relu", "iadd", "batch_norm", "leaky_relu"],
)
def test_writes_without_a_name_are_not_dead_code(write):
    def function(q, k, v, past, extra):
        write(extra)
        return cases.sdpa(q, k, v, past)

    compare(function, *cases.inputs(), torch.randn(4, 4))


def test_mask_changed_by_an_in_place_flag_is_not_proven():
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        mask = additive(causal(q, keys))
        F.relu(mask, True)
        return sdpa(q, keys, values, mask, enable_gqa=True), (keys, values)

    compare(function, *cases.inputs())


# Two readers of one cache see different rows.


@pytest.mark.parametrize("rows", [(None, 4), (4, 7)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_readers_of_different_rows(rows, tokens):
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        parts = [(keys, values) if n is None else (keys[:, :, -n:], values[:, :, -n:]) for n in rows]
        outs = [sdpa(q, *part, enable_gqa=True) for part in parts]
        return outs, (keys, values)

    compare(function, *cases.inputs(tokens=tokens, past=9))


@pytest.mark.parametrize("columns", [slice(0, 6), slice(-6, None)], ids=str)
def test_padding_of_the_last_rows(columns):
    def function(q, k, v, past, pad):
        keys, values = grown(k, v, past)
        mask = pad[:, None, None, columns].bool()
        return sdpa(q, keys[:, :, -6:], values[:, :, -6:], mask, enable_gqa=True), (keys, values)

    pad = (torch.rand(2, 30) > 0.4).long()
    pad[:, 5] = pad[:, -1] = 1
    compare(function, *cases.inputs(tokens=1, past=9), pad)


@pytest.mark.parametrize("second", ["dense", "window"])
def test_readers_with_and_without_a_mask_over_a_past_that_is_too_long(second):
    def function(q, k, v, past, mask):
        keys, values = grown(k, v, past)
        column = torch.arange(keys.shape[2])
        masks = {"dense": mask, "window": (column > keys.shape[2] - 21)[None, None, None]}
        outs = [sdpa(q, keys, values, m, enable_gqa=True) for m in (None, masks[second])]
        return outs, (keys[:, :, -3:], values[:, :, -3:])

    compare(function, *cases.inputs(tokens=1, past=9), torch.rand(2, 1, 1, 10) > 0.2)


# Masks.

BROADCAST = {
    "one key": (3, torch.rand(1, 1, 3, 1)),
    "a number": (1, torch.rand(1, 1)),
    "one query": (3, torch.rand(1, 4, 1, 8)),
    "by sequence": (3, torch.rand(2, 1, 1, 8)),
    "by key": (3, torch.rand(1, 8)),
    "by head": (3, torch.rand(4, 1, 1)),
    "no dimension": (3, torch.rand(())),
    "bool by key": (3, torch.rand(8) > 0.3),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_dense_masks_are_broadcast(name):
    tokens, mask = BROADCAST[name]

    def function(q, k, v, past, mask):
        keys, values = grown(k, v, past)
        scores = q @ keys.repeat_interleave(2, 1).mT
        scores = scores.masked_fill(~mask, -INF) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1) @ values.repeat_interleave(2, 1), (keys, values)

    arguments = (*cases.inputs(tokens=tokens), mask)
    compare(function, *arguments)
    assert reasons(function, *arguments) == set()


def test_adding_a_bool_is_no_mask():
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        return ((q @ keys.mT) * 0.25 + causal(q, keys)).softmax(-1) @ values, (keys, values)

    compare(function, *cases.inputs(kv_heads=4))


@pytest.mark.parametrize("place", ["keys", "scores", "weights"])
def test_casts_that_change_values(place):
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        cut = {place: lambda x: (x * 3).to(torch.int32).float()}
        scores = cut.get("scores", lambda x: x)(q @ cut.get("keys", lambda x: x)(keys).mT)
        return cut.get("weights", lambda x: x)(scores.softmax(-1)) @ values, (keys, values)

    compare(function, *cases.inputs(kv_heads=4))


@pytest.mark.parametrize("how", ["values", "both"])
def test_one_query_head_over_many_key_heads(how):
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        keys = keys.expand(-1, 4, -1, -1) if how == "both" else keys
        return (q @ keys.mT).softmax(-1) @ values.expand(-1, 4, -1, -1), (keys[:, :1], values)

    compare(function, *cases.inputs(heads=1, kv_heads=1))


def test_padding_input_written_through_an_alias():
    def function(q, k, v, past, pad, alias):
        alias.zero_()
        alias[:, 3:] = 1
        keys, values = grown(k, v, past)
        return sdpa(q, keys, values, pad[:, None, None].bool(), enable_gqa=True), (keys, values)

    arguments, results = cases.inputs(), []
    for call in (function, gemkv_compile.compile(function, kv_format="model")):
        pad = torch.ones(2, 8, dtype=torch.int64)
        with torch.no_grad():
            results.append(call(*arguments, pad, pad[:]))
    cases.tree_close(results[1], results[0], rtol=1e-5, atol=1e-5)


# Layout, aliasing, names.


@pytest.mark.parametrize(
    "after",
    [
        lambda o: F.relu(o).view(-1),
        lambda o: (o * 2).view(-1),
        lambda o: o.to(torch.float64).view(-1),
        lambda o: o.view_as(torch.empty(8, 3, 16)),
        lambda o: o.as_strided((5, 7), (3, 2)),
    ],
    ids=["relu", "mul", "to", "view_as", "as_strided"],
)
def test_layout_of_the_output(after):
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        out = (q @ keys.mT).softmax(-1) @ values
        return after(out), (keys, values)

    compare(function, *cases.inputs(kv_heads=4))


def test_copy_asked_for_by_position():
    def function(q, k, v, past, extra):
        copy = extra.to(torch.float32, False, True)
        copy.add_(1.0)
        return cases.sdpa(q, k, v, past), copy

    compare(function, *cases.inputs(), torch.zeros(3))


def test_functions_of_one_name_are_not_shared():
    def made(factor):
        return torch.compiler.allow_in_graph(lambda x: x * factor)

    results = []
    for op in (made(2.0), made(3.0)):

        def function(q, k, v, past, op=op):
            out, cache = cases.sdpa(q, k, v, past)
            return op(out), cache

        with torch.no_grad():
            results.append(gemkv_compile.compile(function, kv_format="model")(*cases.inputs())[0])
        torch._dynamo.reset()
    torch.testing.assert_close(results[0] * 1.5, results[1])


def test_handle_written_in_a_graph():
    past = gemkv_compile.compile(cases.sdpa, kv_format="model")
    with torch.no_grad():
        _, cache = past(*cases.inputs())
    assert isinstance(cache[0], PagedKVTensor)

    def edit(keys):
        keys[:, :, :2] = 0.0
        return keys.sum()

    dense = cache[0].materialise()
    with torch.no_grad():
        total = gemkv_compile.compile(edit, kv_format="model")(cache[0])
    torch.testing.assert_close(total, edit(dense))
    torch.testing.assert_close(cache[0].materialise(), dense)


# Calls by keyword, and forms that once raised.

KEYWORDS = {
    "matmul": lambda q, k, v: torch.matmul(
        input=F.softmax(input=torch.matmul(input=q, other=torch.transpose(input=k, dim0=2, dim1=3)), dim=-1), other=v
    ),
    "permute": lambda q, k, v: torch.softmax(input=q @ torch.permute(k, dims=(0, 1, 3, 2)), dim=3) @ v,
    "swapaxes": lambda q, k, v: (q @ torch.swapaxes(k, axis0=2, axis1=3)).softmax(dim=-1) @ v,
    "method": lambda q, k, v: (q @ k.permute(dims=(0, 1, 3, 2))).softmax(dim=-1) @ v,
    "tanh": lambda q, k, v: (torch.tanh(input=q @ k.mT / 5.0) * 5.0).softmax(-1) @ v,
    "dropout": lambda q, k, v: F.dropout(input=(q @ k.mT).softmax(-1), p=0.0) @ v,
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_calls_by_keyword(name):
    def function(q, k, v, past):
        keys, values = torch.cat(tensors=[past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        return KEYWORDS[name](q, keys, values), (keys, values)

    arguments = cases.inputs(kv_heads=4)
    compare(function, *arguments)
    assert reasons(function, *arguments) == set()


def test_scores_divided_by_zero():
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        return (q @ keys.mT / 0).softmax(-1).nan_to_num() @ values, (keys, values)

    compare(function, *cases.inputs(kv_heads=4))


def test_keys_of_three_dimensions():
    def function(q, k, v):
        return (q @ k.mT).softmax(-1) @ v, (k, v)

    compare(function, torch.randn(2, 4, 3, 16), torch.randn(4, 5, 16), torch.randn(4, 5, 16))


def test_graph_without_inputs():
    def function():
        k = torch.ones(1, 2, 3, 16)
        return sdpa(k, k, k, is_causal=True), (k, k)

    compare(function)


def test_number_from_data():
    def function(q, k, v, past, x):
        return *cases.sdpa(q, k, v, past), x.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compare(function, *cases.inputs(), torch.tensor(5))


def test_contiguous_cache():
    def function(q, k, v, past):
        keys, values = (x.contiguous() for x in grown(k, v, past))
        return sdpa(q, keys, values, causal(q, keys), enable_gqa=True), (keys, values)

    arguments = cases.inputs()
    compare(function, *arguments)
    assert reasons(function, *arguments) == set()


# What is said.


def test_dropout_of_written_out_attention_is_seen():
    def function(q, k, v, past):
        return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v, (k, v)

    assert reasons(function, *cases.inputs(kv_heads=4)) == {"dropout_active"}


def test_attention_inside_checkpoint_is_seen():
    def function(q, k, v, past):
        out = torch.utils.checkpoint.checkpoint(lambda q: sdpa(q, k, v), q, use_reentrant=False)
        return out, (k, v)

    arguments = cases.inputs(kv_heads=4)
    assert reasons(function, *arguments) == {"inside_higher_order_op"}
    with pytest.raises(Exception, match="StrictError: strict=True"):
        gemkv_compile.compile(function, strict=True)(*arguments)


def test_a_router_is_no_attention():
    def function(q, k, v, past, weight):
        out, cache = cases.sdpa(q, k, v, past)
        return F.linear(out, weight).softmax(-1) @ out.mT, cache

    assert reasons(function, *cases.inputs(), torch.randn(16, 16)) == set()


def test_the_user_that_is_named_is_the_one_that_is_no_attention():
    with torch.no_grad():
        report = gemkv_compile.explain(cases.cache_used_elsewhere, *cases.inputs())
    assert "k.mean()" in report.sites[0].source


def test_learned_temperature_is_named():
    def function(q, k, v, past, temperature):
        keys, values = grown(k, v, past)
        return (q @ keys.mT * temperature).softmax(-1) @ values, (keys, values)

    assert reasons(function, *cases.inputs(kv_heads=4), torch.tensor(2.0)) == {"scale_not_constant"}


def test_an_error_of_the_passes_keeps_the_graph_and_says_so(monkeypatch):
    import gemkv_compile.backend

    def broken(*_):
        raise KeyError("nothing")

    monkeypatch.setattr(gemkv_compile.backend, "decide", broken)
    with pytest.warns(RewriteFailed, match="KeyError.*report it"):
        compare(cases.sdpa, *cases.inputs())
    with pytest.raises(Exception, match="nothing"):
        gemkv_compile.compile(cases.sdpa, strict=True)(*cases.inputs())


def test_a_softcap_written_with_two_minus_signs():
    """-c * tanh(x / -c) is c * tanh(x / c): the operators take a positive cap."""
    arguments = cases.inputs()

    def function(q, k, v, past):
        keys, values = cases.grown(k, v, past)
        scores = -5.0 * torch.tanh(q @ keys.repeat_interleave(2, 1).mT * 0.25 / -5.0)
        return scores.softmax(-1) @ values.repeat_interleave(2, 1), (keys, values)

    with torch.no_grad():
        (site,) = gemkv_compile.explain(function, *arguments).sites
        ours = gemkv_compile.compile(function, kv_format="model")(*arguments)
    assert (site.status, site.softcap) == ("rewritten", 5.0)
    cases.tree_close(ours, function(*arguments), rtol=1e-5, atol=1e-5)
