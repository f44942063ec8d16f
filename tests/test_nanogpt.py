"""A decoder written by hand in nanoGPT's way, with a cache: one projection, a triangle of ones as a buffer, softmax."""

import math

import pytest
import torch
from tiny_models import VOCAB, greedy, prompt
from torch import nn
from torch.nn import functional as F

import gemkv_compile
from gemkv_compile import PagedKVTensor


class CausalSelfAttention(nn.Module):
    def __init__(self, width=64, heads=4, places=128, fused=False):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.width, self.fused = heads, width, fused
        self.register_buffer("bias", torch.tril(torch.ones(places, places)).view(1, 1, places, places))

    def forward(self, x, past):
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        total = k.size(2)
        if self.fused:
            shown = self.bias[:, :, total - length : total, :total] == 1
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, dropout_p=0.0)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, total - length : total, :total] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width)), (k, v)


class NanoGPT(nn.Module):
    def __init__(self, layers=2, width=64, fused=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(128, width)
        self.h = nn.ModuleList(CausalSelfAttention(width, fused=fused) for _ in range(layers))
        self.ln = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, ids, pasts=None):
        first = 0 if pasts is None else pasts[0][0].size(2)
        x = self.wte(ids) + self.wpe(torch.arange(first, first + ids.size(1), device=ids.device))
        presents = []
        for i, (attention, mlp) in enumerate(zip(self.h, self.mlp, strict=True)):
            y, present = attention(self.ln[2 * i](x), None if pasts is None else pasts[i])
            x = x + y
            x = x + mlp(self.ln[2 * i + 1](x))
            presents.append(present)
        return F.linear(self.ln[-1](x), self.wte.weight), presents


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_rewritten_whole(fused):
    torch.manual_seed(0)
    plain = NanoGPT(fused=fused).eval()
    tokens, logits, pasts = greedy(plain, prompt(2, 10), 24)
    model = gemkv_compile.compile(plain, kv_format="model", strict=True)
    ours = greedy(model, prompt(2, 10), 24)
    assert torch.equal(ours[0], tokens)
    torch.testing.assert_close(ours[1], logits, rtol=1e-4, atol=1e-4)
    assert all(isinstance(part, PagedKVTensor) for pair in ours[2] for part in pair)
    torch.testing.assert_close(ours[2][1][0].materialise(), pasts[1][0], rtol=1e-4, atol=1e-5)
    sites = [site for graph in gemkv_compile.report_of(model).graphs for site in graph.sites]
    assert {(site.status, site.reason) for site in sites} == {("rewritten", "mask_outside_graph")}
