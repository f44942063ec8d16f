"""Small random models of real families, and modules written by hand."""

import functools

import torch
from torch import nn

VOCAB = 256
WINDOW = 16
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
)


def gemma3(**changes):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
    return Gemma3ForCausalLM, Gemma3TextConfig(**COMMON | layers | changes)


def gemma2(**changes):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM, Gemma2Config(**COMMON | dict(num_hidden_layers=2, sliding_window=WINDOW) | changes)


def gemma1(**changes):
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM, GemmaConfig(**COMMON | dict(num_hidden_layers=2) | changes)


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig(**COMMON | dict(num_hidden_layers=2) | changes)


def qwen3(**changes):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM, Qwen3Config(**COMMON | dict(num_hidden_layers=2) | changes)


def mistral(**changes):
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM, MistralConfig(**COMMON | dict(num_hidden_layers=2, sliding_window=WINDOW) | changes)


SHARED = dict(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "full_attention"] * 3,
    sliding_window=WINDOW,
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=16,
)


def gemma3n(**changes):
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    own = dict(laurel_rank=8, activation_sparsity_pattern=[0.0] * 6, intermediate_size=[128] * 6)
    return Gemma3nForCausalLM, Gemma3nTextConfig(**COMMON | SHARED | own | changes)


def gemma4(**changes):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    own = dict(global_head_dim=32, num_global_key_value_heads=1)
    return Gemma4ForCausalLM, Gemma4TextConfig(**COMMON | SHARED | own | changes)


def gpt_oss(**changes):
    from transformers import GptOssConfig, GptOssForCausalLM

    own = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    return GptOssForCausalLM, GptOssConfig(**COMMON | own | experts | changes)


def llama3(**changes):
    """Llama 3: rotary frequencies scaled by "llama3"."""
    scaling = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    return llama(rope_parameters=scaling | {"original_max_position_embeddings": 128}, **changes)


def qwen2(**changes):
    """Qwen 2.5: biases on queries, keys and values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM, Qwen2Config(**COMMON | dict(num_hidden_layers=2) | changes)


def phi3(**changes):
    """Phi 3: one projection for queries, keys and values; a window; rotary on half of a head."""
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    own = dict(num_hidden_layers=2, sliding_window=WINDOW, rope_parameters=rope)
    return Phi3ForCausalLM, Phi3Config(**COMMON | NO_TOKENS | own | changes)


def olmo2(**changes):
    """OLMo 2: norms of queries and keys, and after attention and MLP."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM, Olmo2Config(**COMMON | NO_TOKENS | dict(num_hidden_layers=2) | changes)


def glm4(**changes):
    """GLM 4: interleaved rotary on half of a head, biases, norms after."""
    from transformers import Glm4Config, Glm4ForCausalLM

    return Glm4ForCausalLM, Glm4Config(**COMMON | NO_TOKENS | dict(num_hidden_layers=2) | changes)


def stablelm(**changes):
    """StableLM: rotary on a quarter of a head, LayerNorm."""
    from transformers import StableLmConfig, StableLmForCausalLM

    return StableLmForCausalLM, StableLmConfig(**COMMON | NO_TOKENS | dict(num_hidden_layers=2) | changes)


NO_TOKENS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
MORE_FAMILIES = {f.__name__: f for f in (llama3, qwen2, phi3, olmo2, glm4, stablelm)}
LATER_FAMILIES = {f.__name__: f for f in (gemma3n, gemma4, gpt_oss)}
LATER_CELLS = [("gemma3n", "sdpa"), ("gemma4", "sdpa"), ("gemma4", "eager"), ("gpt_oss", "eager")]
FAMILIES = {f.__name__: f for f in (gemma1, gemma2, gemma3, llama, qwen3, mistral)}


def build(family, attention="sdpa", seed=0, dtype=torch.float32, **changes):
    """A small random model of a family, in eval mode, that never stops early."""
    model_class, config = (FAMILIES | MORE_FAMILIES | LATER_FAMILIES)[family](**changes)
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation=attention).to(dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(batch, tokens, seed=0):
    """Random token ids [batch, tokens]."""
    return torch.randint(5, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


class TupleAttention(nn.Module):
    """Attention over a (keys, values) tuple, as people write it."""

    def __init__(self, dim=64, heads=4, kv_heads=2, head_dim=16, rows_first=False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.rows_first = heads, kv_heads, head_dim, rows_first
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x, past=None):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.head_dim)
        v = self.v(x).view(batch, length, self.kv_heads, self.head_dim)
        seq_dim = 1 if self.rows_first else 2
        if not self.rows_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=seq_dim), torch.cat([past[1], v], dim=seq_dim)
        present = (k, v)
        if self.rows_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        total = k.shape[2]
        visible = torch.arange(total, device=x.device)[None, :] <= torch.arange(length, device=x.device)[:, None] + (
            total - length
        )
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1)), present


class TupleModel(nn.Module):
    """A decoder written by hand: returns (logits, [(keys, values), ...]); imports nothing but torch."""

    def __init__(self, layers=2, dim=64, rows_first=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Embedding(1024, dim)
        self.layers = nn.ModuleList(TupleAttention(dim, rows_first=rows_first) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.rows_first = rows_first

    def forward(self, ids, pasts=None):
        seen = 0 if pasts is None else pasts[0][0].shape[1 if self.rows_first else 2]
        x = self.embed(ids) + self.position(torch.arange(seen, seen + ids.shape[1], device=ids.device))
        presents = []
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            y, present = layer(norm(x), None if pasts is None else pasts[i])
            x = x + y
            presents.append(present)
        return self.head(x), presents


def tuple_model(seed=0, **changes):
    """A TupleModel in eval mode."""
    torch.manual_seed(seed)
    return TupleModel(**changes).eval()


def greedy(model, ids, steps, pasts=None):
    """Greedy decoding with a tuple cache; returns all new tokens [batch, steps], the logits and the cache."""
    tokens, kept = [], []
    with torch.no_grad():
        for _ in range(steps):
            logits, pasts = model(ids, pasts)
            ids = logits[:, -1:].argmax(-1)
            tokens.append(ids)
            kept.append(logits[:, -1])
    return torch.cat(tokens, 1), torch.stack(kept, 1), pasts


@functools.cache
def generated(family, batch, tokens, steps, attention="sdpa", **kwargs):
    """Eager greedy generation of a family's tiny model (computed once)."""
    model = build(family, attention)
    with torch.no_grad():
        return model.generate(prompt(batch, tokens), max_new_tokens=steps, do_sample=False, **kwargs)
