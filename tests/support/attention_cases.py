"""Functions with an attention over a (keys, values) past: what is rewritten, and near misses with their reasons."""

import torch
import torch.nn.functional as F
from torch import Tensor

LOW = torch.finfo(torch.float32).min


def inputs(batch=2, tokens=3, past=5, heads=4, kv_heads=2, dim=16, dtype=torch.float32, seed=0):
    """(q, k, v, (past keys, past values)), all [batch, heads, tokens, dim]."""
    generator = torch.Generator().manual_seed(seed)

    def rows(h, n):
        return torch.randn(batch, h, n, dim, generator=generator).to(dtype)

    new, old = [rows(kv_heads, tokens) for _ in range(2)], tuple(rows(kv_heads, past) for _ in range(2))
    return rows(heads, tokens), *new, old


def grown(k, v, past):
    return torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)


def causal(q, k):
    return torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])


def additive(visible):
    return torch.where(visible, 0.0, LOW)


# What is rewritten.


def sdpa(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k), enable_gqa=True), (k, v)


def sdpa_keywords(q, k, v, past):
    k, v = grown(k, v, past)
    mask = causal(q, k)
    out = F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=0.3, enable_gqa=True
    )
    return out, (k, v)


def repeat_by_expand(q, k, v, past):
    k, v = grown(k, v, past)

    def repeat(x):
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)

    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), causal(q, k)), (k, v)


def repeat_by_interleave(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = k.repeat_interleave(2, 1), torch.repeat_interleave(v, 2, dim=1)
    return F.scaled_dot_product_attention(q, keys, values, causal(q, k)), (k, v)


def matmul_form(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25 + additive(causal(q, k))
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), p=0.0)
    return torch.matmul(weights, values), (k, v)


def matmul_operators(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = (q / 2.0) @ keys.permute(0, 1, 3, 2) / 2.0
    return scores.masked_fill(~causal(q, k), float("-inf")).softmax(-1) @ values, (k, v)


def where_form(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.where(causal(q, k), (q @ keys.mT) * 0.25, LOW)
    return torch.softmax(scores, 3) @ values, (k, v)


def softcapped(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.tanh(q @ keys.transpose(-1, -2) * 0.25 / 5.0) * 5.0 + additive(causal(q, k))
    return scores.softmax(-1) @ values, (k, v)


def shared_by_two(q, k, v, past):
    """One cache, two attentions, as layers that share keys and values do."""
    k, v = grown(k, v, past)
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k), enable_gqa=True)
    return F.scaled_dot_product_attention(first, k, v, attn_mask=causal(q, k), enable_gqa=True), (k, v)


def sliding(q, k, v, past):
    k, v = grown(k, v, past)
    i, j = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2]), torch.arange(k.shape[2])[None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (j > i - 4), enable_gqa=True)
    return out, (k[:, :, -3:, :], v[:, :, -3:, :])


def no_mask(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (k, v)


def strided_view_after(q, k, v, past):
    """`view` on the output: right only with the memory layout that eager gives."""
    k, v = grown(k, v, past)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    out = (q @ keys.mT * 0.25 + additive(causal(q, k))).softmax(-1) @ values
    return out.view(q.shape[0] * q.shape[1], q.shape[2], -1), (k, v)


def reads_the_length(q, k, v, past):
    k, v = grown(k, v, past)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k), enable_gqa=True)
    return out * k.size(2) + k.numel() + past[0].shape[-2], (k, v)


def one_query_for_many_rows(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True), (k, v)


REWRITTEN = [
    sdpa,
    sdpa_keywords,
    repeat_by_expand,
    repeat_by_interleave,
    matmul_form,
    matmul_operators,
    where_form,
    softcapped,
    shared_by_two,
    sliding,
    no_mask,
    strided_view_after,
    reads_the_length,
    one_query_for_many_rows,
]


# Rewritten with the dense mask, and why it is not more.


def mask_is_an_input(q, k, v, past, mask):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)


def mask_is_two_windows(q, k, v, past):
    k, v = grown(k, v, past)
    i, j = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2]), torch.arange(k.shape[2])[None]
    mask = (j <= i) & ((j > i - 4) | (j < 2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)


def mask_by_unknown_op(q, k, v, past):
    k, v = grown(k, v, past)
    mask = causal(q, k).cumsum(-1).gt(0) & causal(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)


def biased(q, k, v, past, bias):
    """An additive mask of learned numbers, such as ALiBi or T5's."""
    k, v = grown(k, v, past)
    return (q @ k.repeat_interleave(2, 1).mT + bias).softmax(-1) @ v.repeat_interleave(2, 1), (k, v)


DENSE = {
    "mask_outside_graph": (mask_is_an_input, torch.rand(2, 1, 3, 8) > 0.3),
    "mask_outside_graph (bias)": (biased, torch.randn(4, 3, 8)),
    "mask_residual": (mask_is_two_windows, None),
    "mask_unknown_op": (mask_by_unknown_op, None),
}


# What is kept, and the reason.


def no_cache(q, k, v, past):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), past


def past_not_an_input(q, k, v, past):
    k, v = torch.cat([past[0] * 1.0, k], 2), torch.cat([past[1] * 1.0, v], 2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (k, v)


def cache_not_returned(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), past


def only_keys_returned(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (k, past[1])


def cache_used_elsewhere(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True) + k.mean(), (k, v)


def query_from_the_cache(q, k, v, past):
    """The cached rows reach the same attention by another way, too."""
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q * k.amax(), k, v, enable_gqa=True), (k, v)


def keys_scaled(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k * 0.5, v, enable_gqa=True), (k, v)


def heads_tiled(q, k, v, past):
    """Query head h takes kv head h % kv_heads, not h // groups."""
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), (k, v)


def keys_not_transposed(q, k, v, past):
    """As many rows as channels, so that the product fits without the transpose; it is no attention."""
    k, v = torch.cat([past[0], past[0], k, past[0][:, :, :3]], 2)[:, :, :16], torch.cat([past[1], v], 2)
    k, v = grown(k[:, :, :11], torch.zeros(2, 2, 11, 16), past)
    return (q @ k.repeat_interleave(2, 1)).softmax(-1) @ v.repeat_interleave(2, 1), (k, v)


def softmax_over_queries(q, k, v, past):
    k, v = grown(k, v, past)
    return (q @ k.repeat_interleave(2, 1).mT).softmax(2) @ v.repeat_interleave(2, 1), (k, v)


def mask_before_softcap(q, k, v, past):
    k, v = grown(k, v, past)
    scores = torch.tanh((q @ k.repeat_interleave(2, 1).mT + additive(causal(q, k))) / 5.0) * 5.0
    return scores.softmax(-1) @ v.repeat_interleave(2, 1), (k, v)


def softcap_of_two_sizes(q, k, v, past):
    k, v = grown(k, v, past)
    scores = torch.tanh(q @ k.repeat_interleave(2, 1).mT / 5.0) * 6.0
    return scores.softmax(-1) @ v.repeat_interleave(2, 1), (k, v)


def weights_returned(q, k, v, past):
    k, v = grown(k, v, past)
    weights = (q @ k.repeat_interleave(2, 1).mT).softmax(-1)
    return weights @ v.repeat_interleave(2, 1), (k, v), weights


def dropout(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True), (k, v)


def three_dims(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = k.repeat_interleave(2, 1).flatten(0, 1), v.repeat_interleave(2, 1).flatten(0, 1)
    return F.scaled_dot_product_attention(q.flatten(0, 1), keys, values), (k, v)


def causal_from_the_top_left(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (k, v)


def last_rows_without_a_mask(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k[:, :, -6:], v[:, :, -6:], enable_gqa=True), (k, v)


def more_queries_than_rows(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(torch.cat([q, q], 2), k, v, enable_gqa=True), (k, v)


def past_of_other_heads(q, k, v, past):
    k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    return F.scaled_dot_product_attention(q, k, v), (k, v)


def different_keeps(q, k, v, past):
    k, v = grown(k, v, past)
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out, (k[:, :, -4:], v[:, :, -5:])


def unknown_attention(q, k, v, past):
    k, v = grown(k, v, past)
    return torch.nn.functional.cosine_similarity(q.mean(1), k.mean((1, 2), keepdim=True)[:, 0], -1) + v.sum(), (k, v)


KEPT = [
    ("no_cache", no_cache),
    ("past_not_an_input", past_not_an_input),
    ("cache_not_returned", cache_not_returned),
    ("cache_not_returned", only_keys_returned),
    ("cache_not_returned", different_keeps),
    ("cache_used_elsewhere", cache_used_elsewhere),
    ("cache_used_elsewhere", query_from_the_cache),
    ("cache_read_changed", keys_scaled),
    ("cache_read_changed", heads_tiled),
    ("softmax_dim", softmax_over_queries),
    ("attention_not_recognised", mask_before_softcap),
    ("attention_not_recognised", softcap_of_two_sizes),
    ("attention_not_recognised", unknown_attention),
    ("attention_not_recognised", keys_not_transposed),
    ("attention_weights_used", weights_returned),
    ("dropout_active", dropout),
    ("rank_unsupported", three_dims),
    ("mask_residual", causal_from_the_top_left),
    ("rows_hidden", last_rows_without_a_mask),
    ("query_rows_differ", more_queries_than_rows),
]


def tree_close(left, right, **tolerance):
    """Whether two nestings of tensors (handles among them) hold the same values."""
    if isinstance(left, (tuple, list)):
        return all(tree_close(a, b, **tolerance) for a, b in zip(left, right, strict=True))
    torch.testing.assert_close(left.detach() if isinstance(left, Tensor) else left, right, **tolerance)
    return True
