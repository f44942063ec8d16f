"""An engine that runs on a CPU: attention in the dtype's own math, by torch, with what was asked of it."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

from gemkv_compile.kernels.engines import registry
from gemkv_compile.kernels.engines.choice import forget_choices
from gemkv_compile.kernels.engines.engine import Engine


class Fake:
    """What the engine does and was asked; `wrong` is added to its results."""

    def __init__(self, refused=None, wrong=0.0):
        self.calls, self.refused, self.wrong, self.broken = [], refused, wrong, False

    def attend(self, q, k, v, scale, prompt):
        self.calls.append((q.shape[2], prompt))
        if self.broken:
            raise RuntimeError("out of order")
        assert prompt.softcap is None
        query, key = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None]
        seen = (key <= query) if prompt.causal else torch.ones_like(key <= query)
        if prompt.window is not None:
            seen = seen & (key > query - prompt.window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        return out + self.wrong

    def refuses(self, prompt, place):
        if prompt.softcap is not None:
            return "it has no softcap"
        return self.refused

    def engine(self, name="fake"):
        return Engine(name, "a fake", ("cpu",), lambda: None, self.refuses, self.attend, lambda: "1")

    @property
    def prompts(self):
        """Lengths of the prompts that it attended to, without those of its trial."""
        return [tokens for tokens, _ in self.calls if tokens != 192]


@contextmanager
def fake_engine(monkeypatch, tmp_path, name="fake", **changes):
    """Register a fake; times go to a folder of the test."""
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path))
    fake = Fake(**changes)
    monkeypatch.setitem(registry.ENGINES, name, fake.engine(name))
    forget_choices()
    yield fake
    forget_choices()
