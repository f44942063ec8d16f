"""The decode path itself: a prompt in one call, then every token in a call of its own, through the compiled model.

The reference and the noise floor run eagerly over dense caches, peers eagerly over Transformers' quantised caches; the
formats under test run through torch.compile(backend="gemkv") over pages. All go in step, so that no logits have to be
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.errors import GemkvError
from gemkv_compile.fidelity.attention import attention_named
from gemkv_compile.fidelity.formats import Format

Logits = dict[str, Tensor]
"""By format: logits of successive queries, [batch, queries, vocabulary], in the model's dtype."""


class DecodePath:
    """Logits of a model under several formats, token by token.

    Args:
        model: A causal language model of Transformers, in eval mode.
        formats: What to run; formats of the product run compiled.
        inner: Compiler of the rewritten graphs, as in `Options`.
    Raises (when called):
        StrictError: the backend keeps an attention of this model.
        GemkvError: a peer's cache does not work with this model, or its library is not installed.
    """

    def __init__(self, model: Any, formats: Sequence[Format], inner: str = "auto") -> None:
        self.model = model
        self.formats = tuple(formats)
        self._inner = inner
        self._calls = {form.name: self._call(form) for form in self.formats}

    @torch.no_grad()
    def __call__(self, ids: Tensor, prompt: int) -> Iterator[tuple[int, Logits]]:
        """Yield (position, logits of the query there) for every decoded position of ids [batch, tokens]."""
        caches = {form.name: _cache_of(self.model.config, form) for form in self.formats}
        self._step(ids[:, :prompt], caches)
        for position in range(prompt, ids.shape[1]):
            yield position, self._step(ids[:, position : position + 1], caches)

    def _step(self, ids: Tensor, caches: dict[str, Any]) -> Logits:
        return {
            name: call(ids, past_key_values=caches[name], use_cache=True, logits_to_keep=1).logits
            for name, call in self._calls.items()
        }

    def _call(self, form: Format) -> Callable[..., Any]:
        if form.kv_format:
            options: dict[str, Any] = {"kv_format": form.kv_format, "drop": form.drop, "strict": True}
            options["inner"] = self._inner
            return torch.compile(self.model, backend="gemkv", options=options)
        return _written_out(self.model) if form.written_out else self.model


def _written_out(model: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with attention_named(model, "eager"):
            return model(*args, **kwargs)

    return call


def _cache_of(config: Any, form: Format) -> Any:
    return dense_cache(config, form) if form.peer is None else peer_cache(config, *form.peer)


def peer_cache(config: Any, backend: str, bits: int) -> Any:
    """Transformers' QuantizedCache for a model's configuration, as its own defaults make it.

    Raises:
        GemkvError: it does not work with this model, or its library is not installed.
    """
    from transformers import QuantizedCache

    try:
        return QuantizedCache(backend, config, nbits=bits)
    except (ImportError, ValueError) as error:
        raise GemkvError(f"Transformers' {backend} cache of {bits} bits cannot be measured here: {error}") from error


def dense_cache(config: Any, form: Format) -> Any:
    """A dense cache for a model's configuration whose rows pass through a format as they are cached.

    A chunk attends to its own rows as the model computed them, and later queries to the stored ones; a single row is
    stored first. That is the order of the paged operators.
    """
    from transformers import DynamicCache

    class StoredCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            keep_keys, keep_values = form.stores
            if key_states.shape[-2] == 1:
                rows = keep_keys(key_states), keep_values(value_states)
                return super().update(*rows, layer_idx, *args, **kwargs)
            seen = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            held: Any = self.layers[layer_idx]
            held.keys, held.values = keep_keys(held.keys), keep_values(held.values)
            return seen

    return StoredCache(config=config) if form.group == 1 else DynamicCache(config=config)
