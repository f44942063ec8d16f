"""Modules written by hand that write into caches of a fixed number of places; nothing but torch."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 256


class StaticAttention(nn.Module):
    """gpt-fast's attention: registered buffers, `cache[:, :, input_pos] = rows`, a mask over all places."""

    def __init__(self, write, batch=2, places=48, dim=64, heads=4, kv_heads=2, head_dim=16):
        super().__init__()
        self.write, self.heads, self.kv_heads, self.head_dim = write, heads, kv_heads, head_dim
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(batch, kv_heads, places, head_dim), persistent=False)

    def forward(self, x, mask, input_pos):
        batch, length, _ = x.shape
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.wqkv(x).split(sizes, -1)
        )
        self.write(self.k_cache, input_pos, k)
        self.write(self.v_cache, input_pos, v)
        out = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class StaticModel(nn.Module):
    """forward(ids [batch, n], input_pos) -> logits [batch, n, vocabulary]."""

    def __init__(self, write, layers=2, dim=64, places=48, batch=2):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(places, dim)
        self.layers = nn.ModuleList(StaticAttention(write, batch, places, dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.register_buffer("causal_mask", torch.ones(places, places, dtype=torch.bool).tril(), persistent=False)

    def forward(self, ids, input_pos):
        places = input_pos
        if isinstance(input_pos, int):
            places = torch.arange(ids.shape[1], device=ids.device) + input_pos
        mask = self.causal_mask[None, None, places]
        x = self.embed(ids) + self.position(places)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), mask, input_pos)
        return self.head(x)


def setitem(cache, input_pos, rows):
    """By an index tensor, as gpt-fast does."""
    cache[:, :, input_pos] = rows


def index_copy(cache, input_pos, rows):
    """By index_copy_, as Transformers does."""
    cache.index_copy_(2, input_pos, rows)


def narrow(cache, start, rows):
    """By a view and copy_; start is an int."""
    cache.narrow(2, start, rows.shape[2]).copy_(rows)


def assign_slice(cache, start, rows):
    """By a slice; start is an int."""
    cache[:, :, start : start + rows.shape[2]] = rows


def copy_slice(cache, start, rows):
    """By copy_ into a slice; start is an int."""
    cache[:, :, start : start + rows.shape[2]].copy_(rows)


BY_TENSOR, BY_INT = (setitem, index_copy), (narrow, assign_slice, copy_slice)


def static_model(write, seed=0, **changes):
    """A StaticModel in eval mode."""
    torch.manual_seed(seed)
    return StaticModel(write, **changes).eval()


@torch.no_grad()
def static_greedy(model, ids, steps, start=0, by_int=False):
    """Greedy decoding from place `start` on; tokens [batch, steps]."""
    tokens = []
    for _ in range(steps):
        places = start if by_int else torch.arange(start, start + ids.shape[1], device=ids.device)
        start += ids.shape[1]
        ids = model(ids, places)[:, -1:].argmax(-1)
        tokens.append(ids)
    return torch.cat(tokens, 1)
