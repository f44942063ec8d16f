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


def repeated(k, v):
    return k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


def einsum_form(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) * 0.25 + additive(causal(q, k))
    return torch.einsum("bhqk, bhkd -> bhqd", scores.softmax(-1), values), (k, v)


def einsum_letters(q, k, v, past):
    """Other letters, operands the other way round, a transposed key, a list of operands."""
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = torch.einsum("...ca,...ba->...bc", keys, q).where(causal(q, k), LOW)
    return torch.einsum("xyjd,xyij->xyid", [values, torch.special.softmax(scores, 3)]), (k, v)


def einsum_on_transposed_keys(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = torch.einsum("nhid,nhdj->nhij", q, keys.transpose(2, 3)) * 0.25
    return torch.where(~causal(q, k), LOW, scores).softmax(-1) @ values, (k, v)


def bmm_form(q, k, v, past):
    k, v = grown(k, v, past)
    (b, h, n, d), (keys, values) = q.shape, repeated(k, v)
    mask = additive(causal(q, k))
    q, keys, values = q.reshape(b * h, n, d), keys.view(b * h, -1, d), values.flatten(0, 1)
    scores = torch.bmm(q, keys.transpose(1, 2)) * 0.25 + mask
    return torch.bmm(scores.softmax(dim=-1), values).view(b, h, n, d).transpose(1, 2).reshape(b, n, h * d), (k, v)


def bmm_of_scaled_query(q, k, v, past):
    """The query is changed after it is folded, and nothing unfolds the output."""
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    keys = keys.transpose(2, 3).flatten(0, 1)
    weights = torch.bmm(q.flatten(0, 1) * 0.25, keys).masked_fill(~causal(q, k), float("-inf")).softmax(2)
    return torch.bmm(weights, values.flatten(0, 1)).transpose(0, 1), (k, v)


def bmm_with_mask_of_four_dims(q, k, v, past):
    """Scores are unfolded for the mask and folded again, as OPT and BLOOM had it."""
    k, v = grown(k, v, past)
    (b, h, n, d), (keys, values) = q.shape, repeated(k, v)
    scores = torch.bmm(q.view(b * h, n, d), keys.view(b * h, -1, d).mT).view(b, h, n, -1) / 4.0
    scores = scores + additive(causal(q, k)).expand(b, 1, -1, -1)
    weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype).view(b * h, n, -1)
    return torch.bmm(weights, values.view(b * h, -1, d)).unflatten(0, (b, h)), (k, v)


def baddbmm_form(q, k, v, past):
    k, v = grown(k, v, past)
    (b, h, n, d), (keys, values) = q.shape, repeated(k, v)
    mask = additive(causal(q, k)).expand(b, h, -1, -1).reshape(b * h, n, -1)
    q, keys, values = q.reshape(b * h, n, d), keys.reshape(b * h, -1, d), values.reshape(b * h, -1, d)
    weights = torch.baddbmm(mask, q, keys.transpose(1, 2), beta=1, alpha=0.25).softmax(-1)
    return torch.bmm(weights, values).reshape(b, h, n, d), (k, v)


def baddbmm_without_its_input(q, k, v, past):
    k, v = grown(k, v, past)
    (b, h, n, d), (keys, values) = q.shape, repeated(k, v)
    nothing = torch.empty(b * h, n, keys.shape[2])
    folded = q.reshape(b * h, n, d), keys.reshape(b * h, -1, d).mT
    scores = nothing.baddbmm(batch1=folded[0], batch2=folded[1], beta=0, alpha=0.5) / 2.0
    scores = scores.reshape(b, h, n, -1) + additive(causal(q, k))
    return scores.softmax(-1) @ values, (k, v)


def scaled_query_and_key(q, k, v, past):
    """The cache holds keys without the scale."""
    k, v = grown(k, v, past)
    keys, values = repeated(k * 0.5, v)
    scores = (q * 0.5) @ (keys / 2.0).transpose(2, 3) + additive(causal(q, k))
    return scores.softmax(-1) @ values, (k, v)


def scaled_keys_cached(q, k, v, past):
    """The cache holds the scaled keys, if the scale comes before."""
    k, v = grown(k * 0.5, v, past)
    keys, values = repeated(k, v)
    return (q @ keys.mT + additive(causal(q, k))).softmax(-1) @ values, (k, v)


def softmax_written_out(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = q @ keys.mT / torch.full([], 4.0) + additive(causal(q, k))
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(dim=-1, keepdim=True)) @ values, (k, v)


def softmax_written_out_with_max(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = torch.where(causal(q, k), q @ keys.mT / 4.0, torch.tensor(LOW))
    powers = torch.exp(scores - torch.max(scores, dim=-1, keepdim=True).values)
    return (powers / torch.sum(powers, 3, True)) @ values, (k, v)


def softmax_safe(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = (q @ keys.mT * 0.25).float().masked_fill(~causal(q, k), torch.tensor(float("-inf")))
    return torch.ops.aten._safe_softmax.default(scores, -1).type_as(q) @ values, (k, v)


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
    einsum_form,
    einsum_letters,
    einsum_on_transposed_keys,
    bmm_form,
    bmm_of_scaled_query,
    bmm_with_mask_of_four_dims,
    baddbmm_form,
    baddbmm_without_its_input,
    scaled_query_and_key,
    scaled_keys_cached,
    softmax_written_out,
    softmax_written_out_with_max,
    softmax_safe,
]


# Rewritten with the dense mask, and why it is not more.


def mask_is_an_input(q, k, v, past, mask):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)


def places(q, k):
    """Positions of queries [Q, 1] and keys [1, K]."""
    return torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2]), torch.arange(k.shape[2])[None]


def masked(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)


def mask_hides_every_third(q, k, v, past):
    k, v = grown(k, v, past)
    i, j = places(q, k)
    return masked(q, k, v, (j <= i) & ((j > i - 4) | (j < 2) | (j // 3 == i // 3)))


def mask_keeps_the_first(q, k, v, past):
    """A window, and the first keys beside it: arXiv:2309.17453."""
    k, v = grown(k, v, past)
    i, j = places(q, k)
    return masked(q, k, v, (j <= i) & ((j > i - 4) | (j < 2)))


def mask_of_documents(q, k, v, past, ids):
    k, v = grown(k, v, past)
    i, j = places(q, k)
    same = ids[:, None, -q.shape[2] :, None] == ids[:, None, None, :]
    return masked(q, k, v, same & (j <= i))


def mask_with_a_prefix(q, k, v, past, lengths):
    k, v = grown(k, v, past)
    i, j = places(q, k)
    return masked(q, k, v, (j <= i) | (j < lengths[:, None, None, None]))


def mask_looks_ahead(q, k, v, past):
    k, v = grown(k, v, past)
    i, j = places(q, k)
    return masked(q, k, v, (i - j).abs() <= 1)


def mask_by_image(q, k, v, past, ids):
    """Tokens of one image see one another; -1 is text."""
    k, v = grown(k, v, past)
    i, j = places(q, k)
    own, other = ids[:, None, -q.shape[2] :, None], ids[:, None, None, :]
    return masked(q, k, v, torch.where((j <= i) | ((own == other) & (own >= 0)), 0.0, -float("inf")))


def mask_by_unknown_op(q, k, v, past):
    k, v = grown(k, v, past)
    mask = causal(q, k).cumsum(-1).gt(0) & causal(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)


def biased(q, k, v, past, bias):
    """An additive mask of learned numbers, such as ALiBi or T5's."""
    k, v = grown(k, v, past)
    return (q @ k.repeat_interleave(2, 1).mT + bias).softmax(-1) @ v.repeat_interleave(2, 1), (k, v)


def baddbmm_with_a_bias(q, k, v, past, bias):
    """The bias has batch and heads in one dimension, as BLOOM's."""
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = torch.baddbmm(bias, q.flatten(0, 1), keys.flatten(0, 1).mT, alpha=0.25)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).unflatten(0, (2, 4)), (k, v)


def written_into_places(q, k, v, past):
    """Three rows at places 2 to 4 of five, in new tensors."""
    keys, values = (torch.slice_scatter(old, new, 2, 2, 5) for old, new in zip(past, (k, v), strict=True))
    shown = torch.arange(5)[None] <= torch.arange(3)[:, None] + 2
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=shown, enable_gqa=True), (keys, values)


DENSE = {
    "mask_over_places": (written_into_places, None),
    "mask_outside_graph": (mask_is_an_input, torch.rand(2, 1, 3, 8) > 0.3),
    "mask_outside_graph (bias)": (biased, torch.randn(4, 3, 8)),
    "mask_outside_graph (bias of baddbmm)": (baddbmm_with_a_bias, torch.randn(8, 3, 8)),
    "mask_residual": (mask_hides_every_third, None),
    "mask_kind_dense (prefix of a window)": (mask_keeps_the_first, None),
    "mask_kind_dense (documents)": (
        mask_of_documents,
        torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3], [1] * 8]),
    ),
    "mask_kind_dense (prefix)": (mask_with_a_prefix, torch.tensor([2, 8])),
    "mask_kind_dense (right window)": (mask_looks_ahead, None),
    "mask_kind_dense (spans)": (mask_by_image, torch.tensor([[-1, 0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0, 0]])),
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


def einsum_of_transposed_scores(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    weights = torch.einsum("bhqd,bhkd->bhkq", q, keys).softmax(-1)
    return torch.einsum("bhkq,bhkd->bhqd", weights, values), (k, v)


def einsum_over_all_key_heads(q, k, v, past):
    k, v = grown(k, v, past)
    return torch.einsum("bhqd,bgkd->bhqk", q, k).softmax(-1) @ v.repeat_interleave(2, 1), (k, v)


def einsum_of_transposed_values(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    weights = torch.einsum("bhqd,bhkd->bhqk", q, keys).softmax(-1)
    return torch.einsum("bhqk,bhdk->bhqd", weights, values.mT), (k, v)


def einsum_of_tokens_before_heads(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), keys.transpose(1, 2))
    return scores.softmax(-1) @ values, (k, v)


def einsum_with_a_letter_of_two_sizes(q, k, v, past):
    """The one channel of the query goes with the sum of the key's."""
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    return torch.einsum("bhqd,bhkd->bhqk", q[..., :1], keys).softmax(-1) @ values, (k, v)


def keys_permuted_to_themselves(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    return (q[..., :8] @ keys[..., :8].permute(0, 1, 2, 3)).softmax(-1) @ values, (k, v)


def keys_reshaped(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    return (q @ keys.reshape(*keys.shape[:2], 16, -1)).softmax(-1) @ values, (k, v)


def keys_reshaped_to_three_dims(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    weights = torch.bmm(q.flatten(0, 1), keys.reshape(8, 16, -1)).softmax(-1)
    return torch.bmm(weights, values.flatten(0, 1)), (k, v)


def keys_folded_heads_first(q, k, v, past):
    """Two sequences of four heads and four of two are both eight matrices."""
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    weights = torch.bmm(q.flatten(0, 1), keys.transpose(0, 1).flatten(0, 1).mT).softmax(-1)
    return torch.bmm(weights, values.flatten(0, 1)).view(2, 4, -1, 16), (k, v)


def values_folded_heads_first(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    weights = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).mT).softmax(-1)
    return torch.bmm(weights, values.transpose(0, 1).flatten(0, 1)).view(2, 4, -1, 16), (k, v)


def scores_unfolded_heads_first(q, k, v, past):
    """Right, as nothing depends on the split; but it is not proven."""
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).mT).view(4, 2, q.shape[2], -1)
    return torch.bmm(scores.softmax(-1).flatten(0, 1), values.flatten(0, 1)).view(2, 4, -1, 16), (k, v)


def values_of_three_dims(q, k, v, past):
    """Every sequence and head has the same values."""
    k, v = grown(k, v, past)
    weights = torch.bmm(q.flatten(0, 1), k.repeat_interleave(2, 1).flatten(0, 1).mT).softmax(-1)
    return torch.bmm(weights, v[0, :1].expand(8, -1, -1)).view(2, 4, -1, 16), (k, v)


def _baddbmm(q, k, v, past, scaled=1.0, mask=None, **factors):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    bias = additive(causal(q, k)).expand(8, -1, -1)
    scores = torch.baddbmm(bias, q.flatten(0, 1), keys.flatten(0, 1).mT, **factors) * scaled
    scores = scores if mask is None else scores + mask(q, k)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)), (k, v)


def baddbmm_with_half_the_mask(q, k, v, past):
    return _baddbmm(q, k, v, past, beta=0.5)


def baddbmm_scaled_afterwards(q, k, v, past):
    return _baddbmm(q, k, v, past, scaled=0.5)


def baddbmm_masked_twice(q, k, v, past):
    return _baddbmm(q, k, v, past, mask=lambda q, k: additive(causal(q, k)))


def softmax_without_the_largest(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    powers = (q @ keys.mT * 0.25).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ values, (k, v)


def softmax_summed_over_queries(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scores = q @ keys.mT * 0.25
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-2, keepdim=True)) @ values, (k, v)


def hidden_by_a_number_that_is_not_lowest(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    return torch.where(causal(q, k), q @ keys.mT, -100.0).softmax(-1) @ values, (k, v)


def scale_changed_in_place(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k, v)
    scale = torch.full([], 0.25)
    scale.mul_(2.0)
    return (q @ keys.mT * scale).softmax(-1) @ values, (k, v)


def scaled_keys_returned(q, k, v, past):
    k, v = grown(k, v, past)
    k = k * 0.5
    return (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1), (k, v)


def keys_scaled_by_a_tensor(q, k, v, past):
    k, v = grown(k, v, past)
    keys, values = repeated(k * q[0, 0, 0], v)
    return (q @ keys.mT).softmax(-1) @ values, (k, v)


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
    ("attention_not_recognised", einsum_of_transposed_scores),
    ("attention_not_recognised", einsum_over_all_key_heads),
    ("attention_not_recognised", einsum_of_transposed_values),
    ("attention_not_recognised", einsum_of_tokens_before_heads),
    ("attention_not_recognised", einsum_with_a_letter_of_two_sizes),
    ("attention_not_recognised", keys_permuted_to_themselves),
    ("attention_not_recognised", keys_reshaped),
    ("attention_not_recognised", keys_reshaped_to_three_dims),
    ("attention_not_recognised", keys_folded_heads_first),
    ("attention_not_recognised", values_folded_heads_first),
    ("attention_not_recognised", scores_unfolded_heads_first),
    ("attention_not_recognised", baddbmm_with_half_the_mask),
    ("attention_not_recognised", baddbmm_scaled_afterwards),
    ("attention_not_recognised", baddbmm_masked_twice),
    ("attention_not_recognised", softmax_without_the_largest),
    ("attention_not_recognised", softmax_summed_over_queries),
    ("attention_not_recognised", hidden_by_a_number_that_is_not_lowest),
    ("scale_not_constant", scale_changed_in_place),
    ("cache_shapes_differ", scaled_keys_returned),
    ("cache_read_changed", keys_scaled_by_a_tensor),
    ("rank_unsupported", values_of_three_dims),
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
