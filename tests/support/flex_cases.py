"""FlexAttention over a (keys, values) past: what is rewritten, and near misses with their reasons."""

import inspect

import torch
from attention_cases import grown
from tiny_models import TupleAttention, TupleModel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention


def past_of(q, k):
    return k.shape[2] - q.shape[2]


def causal_block_mask(q, k):
    """As users write it: made in the compiled function, for all sequences and heads."""
    offset = past_of(q, k)
    return create_block_mask(lambda b, h, i, j: i + offset >= j, None, None, q.shape[2], k.shape[2], device=q.device)


def flex(q, k, v, **options):
    return flex_attention(q, k, v, enable_gqa=True, **options)


# What is rewritten.


def flex_plain(q, k, v, past):
    k, v = grown(k, v, past)
    return flex(q, k, v), (k, v)


def flex_mask_in_score_mod(q, k, v, past):
    k, v = grown(k, v, past)
    offset = past_of(q, k)

    def score_mod(score, b, h, i, j):
        return torch.where(i + offset >= j, score, -float("inf"))

    return flex(q, k, v, score_mod=score_mod, scale=0.3), (k, v)


def flex_softcapped(q, k, v, past):
    k, v = grown(k, v, past)
    offset = past_of(q, k)

    def score_mod(score, b, h, i, j):
        score = torch.tanh(score * 2.0 / 5.0) * 5.0
        return score.masked_fill(j > i + offset, -float("inf"))

    return flex(q, k, v, score_mod=score_mod), (k, v)


def flex_block_mask(q, k, v, past):
    k, v = grown(k, v, past)
    return flex(q, k, v, block_mask=causal_block_mask(q, k)), (k, v)


def flex_sliding(q, k, v, past):
    k, v = grown(k, v, past)
    offset = past_of(q, k)
    mask_mod = and_masks(lambda b, h, i, j: j <= i + offset, lambda b, h, i, j: j > i + offset - 4)
    block_mask = create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
    return flex(q, k, v, block_mask=block_mask), (k[:, :, -3:, :], v[:, :, -3:, :])


def flex_two_masks(q, k, v, past):
    """A block mask and a condition in score_mod: a key is seen where both show it."""
    k, v = grown(k, v, past)
    offset = past_of(q, k)

    def score_mod(score, b, h, i, j):
        return torch.where(i + offset - j < 4, 2 * score, -float("inf"))

    return flex(q, k, v, score_mod=score_mod, block_mask=causal_block_mask(q, k)), (k, v)


def flex_shared_by_two(q, k, v, past):
    """Two layers, one block mask, one cache."""
    k, v = grown(k, v, past)
    block_mask = causal_block_mask(q, k)
    first = flex(q, k, v, block_mask=block_mask)
    return flex(first * 0.5, k, v, block_mask=block_mask), (k, v)


def flex_small_blocks(q, k, v, past):
    k, v = grown(k, v, past)
    offset = past_of(q, k)
    lengths = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    block_mask = create_block_mask(lambda b, h, i, j: i + offset >= j, *lengths, device=q.device, BLOCK_SIZE=(2, 4))
    return flex(q, k, v, block_mask=block_mask), (k, v)


def flex_one_kind_of_blocks(q, k, v, past):
    k, v = grown(k, v, past)
    offset, lengths = past_of(q, k), (None, None, q.shape[2], k.shape[2])
    block_mask = create_block_mask(
        lambda b, h, i, j: i + offset >= j, *lengths, device=q.device, separate_full_blocks=False
    )
    return flex(q, k, v, block_mask=block_mask), (k, v)


REWRITTEN = [
    flex_plain,
    flex_mask_in_score_mod,
    flex_softcapped,
    flex_block_mask,
    flex_sliding,
    flex_two_masks,
    flex_shared_by_two,
    flex_small_blocks,
]
if "separate_full_blocks" in inspect.signature(create_block_mask).parameters:  # not in PyTorch 2.11
    REWRITTEN.append(flex_one_kind_of_blocks)


def flex_padded(q, k, v, past, padding):
    """`padding` [batch, kv_len] is read by mask_mod."""
    k, v = grown(k, v, past)
    offset = past_of(q, k)

    def mask_mod(b, h, i, j):
        return (i + offset >= j) & (padding[b][j] != 0)

    block_mask = create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
    return flex(q, k, v, block_mask=block_mask), (k, v)


# Rewritten with a dense mask whose kind is proven; the last argument is read by mask_mod.


def flex_packed(q, k, v, past, ids):
    """`ids` [batch, kv_len]: the document of each token."""
    k, v = grown(k, v, past)
    offset = past_of(q, k)

    def mask_mod(b, h, i, j):
        return (i + offset >= j) & (ids[b, i + offset] == ids[b, j])

    block_mask = create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
    return flex(q, k, v, block_mask=block_mask), (k, v)


def flex_prefix(q, k, v, past, lengths):
    """`lengths` [batch]: how many first tokens every query sees."""
    k, v = grown(k, v, past)
    offset = past_of(q, k)

    def mask_mod(b, h, i, j):
        return (i + offset >= j) | (j < lengths[b])

    block_mask = create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
    return flex(q, k, v, block_mask=block_mask), (k, v)


def flex_both_windows(q, k, v, past, width):
    """Keys at most `width` places before and after the query, in score_mod."""
    k, v = grown(k, v, past)
    offset = past_of(q, k)

    def score_mod(score, b, h, i, j):
        return torch.where((i + offset - j).abs() <= width, score, -float("inf"))

    return flex(q, k, v, score_mod=score_mod), (k, v)


PACKED = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3], [1] * 8])
DENSE_KINDS = [
    (flex_packed, PACKED, "dense (causal, documents)"),
    (flex_prefix, torch.tensor([2, 8]), "dense (causal, prefix)"),
    (flex_both_windows, 1, "dense (window 2, right window 1)"),
]


# Rewritten with a dense mask, as the mask is more than the kinds that are proven.


def flex_by_head(q, k, v, past):
    k, v = grown(k, v, past)

    def score_mod(score, b, h, i, j):
        return torch.where((j + h) % 3 > 0, score, -float("inf"))

    return flex(q, k, v, score_mod=score_mod), (k, v)


def flex_documents(q, k, v, past):
    k, v = grown(k, v, past)
    document = torch.arange(k.shape[2], device=q.device) // 3
    offset = past_of(q, k)

    def score_mod(score, b, h, i, j):
        return torch.where(document[i + offset] == document[j], score, -float("inf"))

    return flex(q, k, v, score_mod=score_mod), (k, v)


def flex_constant_of_a_tensor(q, k, v, past):
    """A captured number is a tensor: dtypes promote as they do for two numbers."""
    k, v = grown(k, v, past)
    limit = q.amax().double() * 0 + 2.5

    def score_mod(score, b, h, i, j):
        return torch.where(j.float() > limit, score, -float("inf"))

    return flex(q, k, v, score_mod=score_mod), (k, v)


# Rewritten with a dense mask of the blocks' own tensors, as nothing proves that these are mask_mod's.


def blocks_of_another_mask(q, k, v, past):
    """The blocks are those of a causal mask, and mask_mod is another one."""
    k, v = grown(k, v, past)
    block_mask, offset = causal_block_mask(q, k), past_of(q, k)
    block_mask.mask_mod = lambda b, h, i, j: j <= i + offset + 1
    return flex(q, k, v, block_mask=block_mask), (k, v)


def blocks_by_hand(q, k, v, past):
    k, v = grown(k, v, past)
    count, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lengths = q.shape[2], k.shape[2]
    return flex(q, k, v, block_mask=BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=128, seq_lengths=lengths)), (k, v)


def blocks_edited(q, k, v, past):
    k, v = grown(k, v, past)
    block_mask = causal_block_mask(q, k)
    block_mask.kv_num_blocks.add_(0)
    return flex(q, k, v, block_mask=block_mask), (k, v)


def blocks_of_the_first_sequence(q, k, v, past):
    """create_block_mask with batch None asks mask_mod about sequence 0 only."""
    k, v = grown(k, v, past)
    block_mask = create_block_mask(lambda b, h, i, j: j >= b, None, None, q.shape[2], k.shape[2], device=q.device)
    return flex(q, k, v, block_mask=block_mask), (k, v)


DENSE = [
    ("mask_unknown_op", flex_by_head),
    ("mask_residual", flex_documents),
    ("mask_unknown_op", flex_constant_of_a_tensor),
    ("mask_unknown_op", blocks_of_another_mask),
    ("mask_unknown_op", blocks_by_hand),
    ("mask_unknown_op", blocks_edited),
    ("mask_unknown_op", blocks_of_the_first_sequence),
]


class FlexAttentionLayer(TupleAttention):
    """The hand-written attention of tiny_models, with FlexAttention: a block mask, or a condition in score_mod."""

    def __init__(self, dim, blocks, softcap):
        super().__init__(dim)
        self.blocks, self.softcap = blocks, softcap

    def forward(self, x, past=None):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, heads, self.head_dim).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        k, v = (k, v) if past is None else grown(k, v, past)
        y = flex(q, k, v, **self.options(q, k))
        return self.o(y.transpose(1, 2).reshape(batch, length, -1)), (k, v)

    def options(self, q, k):
        if self.blocks:
            return {"block_mask": causal_block_mask(q, k)}
        offset, softcap = past_of(q, k), self.softcap

        def score_mod(score, b, h, i, j):
            return torch.where(i + offset >= j, softcap * torch.tanh(score / softcap), -float("inf"))

        return {"score_mod": score_mod}


def flex_model(blocks, softcap=5.0, seed=0):
    """A decoder of two such layers, in eval mode."""
    torch.manual_seed(seed)
    model = TupleModel(layers=0)
    model.layers.extend(FlexAttentionLayer(64, blocks, softcap) for _ in range(2))
    model.norms.extend(torch.nn.LayerNorm(64) for _ in range(2))
    return model.eval()


# What is kept.


def bias(q, k, v, past):
    k, v = grown(k, v, past)
    return flex(q, k, v, score_mod=lambda score, b, h, i, j: score + (j - i)), (k, v)


def lowered(q, k, v, past):
    """-1e4 hides a key only from scores that are much higher."""
    k, v = grown(k, v, past)
    return flex(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -1e4)), (k, v)


def capped_after_the_mask(q, k, v, past):
    """tanh(-inf) is -1: the cap shows the key again."""
    k, v = grown(k, v, past)

    def score_mod(score, b, h, i, j):
        return torch.tanh(torch.where(i >= j, score, -float("inf")) / 5.0) * 5.0

    return flex(q, k, v, score_mod=score_mod), (k, v)


def capped_by_two_numbers(q, k, v, past):
    k, v = grown(k, v, past)
    return flex(q, k, v, score_mod=lambda score, b, h, i, j: torch.tanh(score / 5.0) * 4.0), (k, v)


def scaled_by_a_tensor(q, k, v, past):
    k, v = grown(k, v, past)
    return flex(q, k, v, score_mod=lambda score, b, h, i, j: score * (h + 1)), (k, v)


def hidden_by_score(q, k, v, past):
    k, v = grown(k, v, past)
    return flex(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(score > 0, score, -float("inf"))), (k, v)


def mask_through_a_sine(q, k, v, past):
    k, v = grown(k, v, past)
    return flex(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(torch.sin(j) > 0, s, -float("inf"))), (k, v)


def uses_the_log_sum(q, k, v, past):
    k, v = grown(k, v, past)
    out, aux = flex(q, k, v, return_aux=AuxRequest(lse=True))
    return out * aux.lse[..., None], (k, v)


def counts_its_calls(q, k, v, past):
    k, v = grown(k, v, past)
    count = torch.zeros(())

    def score_mod(score, b, h, i, j):
        count.add_(0)
        return score

    return flex(q, k, v, score_mod=score_mod), (k, v)


def blocks_too_few(q, k, v, past):
    """The lists have one block of 4 keys, and there are 8 keys."""
    k, v = grown(k, v, past)
    count, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lengths = q.shape[2], k.shape[2]
    block_mask = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=(128, 4), seq_lengths=lengths)
    return flex(q, k, v, block_mask=block_mask), (k, v)


KEPT = [
    ("score_mod_not_recognised", bias),
    ("score_mod_not_recognised", lowered),
    ("score_mod_not_recognised", capped_after_the_mask),
    ("score_mod_not_recognised", capped_by_two_numbers),
    ("score_mod_not_recognised", scaled_by_a_tensor),
    ("mask_unknown_op", hidden_by_score),
    ("mask_unknown_op", mask_through_a_sine),
    ("aux_outputs_used", uses_the_log_sum),
    ("written_in_place", counts_its_calls),
    ("block_mask_not_proven", blocks_too_few),
]
