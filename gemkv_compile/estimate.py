"""What a model's cache takes and what fits, without its weights: the passes judge a trace on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemkv_compile.backend import compile_graph, raise_recompile_limit
from gemkv_compile.errors import GemkvError
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.memory_formula import PARTS, CacheMemory, paged_parts
from gemkv_compile.options import KV_FORMATS, Options
from gemkv_compile.passes.decide import page_size_of
from gemkv_compile.report import GraphReport

TRACE_TOKENS = 16
MOST = 1 << 50  # tokens or sequences: beyond any memory, so what still fits there has no limit
STATES = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class DenseLayer:
    """Keys and values of one layer in Transformers' DynamicCache.

    Args:
        row_bytes: Bytes of one token's keys and values.
        keep: Rows that a sliding layer keeps, None for all.
        shape: (heads, head size of the keys, head size of the values).
    """

    row_bytes: int
    keep: int | None
    shape: tuple[int, int, int]

    def size(self, tokens: int, windowed: bool = True) -> int:
        """Bytes of one sequence of `tokens` tokens, with or without use of the window."""
        rows = tokens if self.keep is None or not windowed else min(tokens, self.keep)
        return rows * self.row_bytes


@dataclass(frozen=True)
class FormatMemory:
    """A model's caches in one format: the paged ones, and the layers whose attention is kept."""

    kv_format: str
    caches: tuple[CacheMemory, ...]
    kept: tuple[DenseLayer, ...]
    reasons: tuple[str, ...]  # why attentions are kept, each once
    state_bytes: int = 0  # of one sequence, other than keys and values

    def parts(self, batch: int, tokens: int) -> dict[str, int]:
        """Bytes of codes, scales, padding, tail, tables, and "dense" of what is not paged."""
        total = dict.fromkeys(PARTS, 0)
        for (layout, keep), count in Counter((cache.layout, cache.keep) for cache in self.caches).items():
            for name, size in paged_parts(layout, keep, tokens).items():
                total[name] += batch * count * size
        dense = self.state_bytes + sum(layer.size(tokens) for layer in self.kept)
        return total | {"dense": batch * dense}

    def total(self, batch: int, tokens: int) -> int:
        """Bytes of all caches."""
        return sum(self.parts(batch, tokens).values())

    def peak(self, batch: int, tokens: int) -> int:
        """The most bytes on the way to `tokens` tokens: a windowed cache has a page more now and then."""
        page = max((cache.page_size for cache in self.caches if cache.keep is not None), default=0)
        return batch * max(self.total(1, step) for step in range(max(1, tokens - page), tokens + 1))


@dataclass(frozen=True)
class ModelMemory:
    """Memory of a model, format by format.

    Args:
        weights: Bytes of parameters and buffers in the model's dtype.
        source: Where layers come from: "trace", or "config" and why.
        positions: Most tokens that the config names, or None.
    """

    title: str
    dtype: torch.dtype
    weights: int
    layers: tuple[DenseLayer, ...]
    formats: tuple[FormatMemory, ...]
    source: str
    positions: int | None
    state_bytes: int = 0

    def dense(self, batch: int, tokens: int, windowed: bool) -> int:
        """Bytes of Transformers' DynamicCache, with sliding layers or with every layer holding all tokens."""
        return batch * (self.state_bytes + sum(layer.size(tokens, windowed) for layer in self.layers))


def most_that_fits(size: Callable[[int], int], room: int) -> int | None:
    """The largest n >= 0 with size(n) <= room, for a `size` that never shrinks; None if there is no limit."""
    if size(MOST) <= room:
        return None
    low, high = 0, 1  # low fits (nothing takes no room)
    while high < MOST and size(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    return low


def estimate(config: Any, title: str, dtype: torch.dtype) -> ModelMemory:
    """What caches of a model take, from its config alone: no weight is read or made.

    The model is built on the meta device and one prompt is traced; the passes decide which caches are paged, with
    which windows, heads and head sizes. Where the trace fails, layers are read from the config, and `source` says so.

    Args:
        config: A Transformers config of a causal language model.
        title: What to call the model.
        dtype: Of weights, keys and values.
    Raises:
        GemkvError: Transformers has no causal language model of this config, or its cache has no keys and values.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except ValueError as error:
        raise GemkvError(f"{title} cannot be built from its config: {error}") from error
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    cache = DynamicCache(config=model.config)
    reports, failure = _trace(model, cache, dtype)
    layers = _layers_of(cache)
    source = "trace"
    if failure is not None or not layers or not any(graph.caches for graph in reports[KV_FORMATS[0]]):
        source = f"config: {failure or 'no cache was found in the trace'}"
        layers = layers or _layers_of_config(cache, model.config, dtype)
    if not layers:
        raise GemkvError(f"{title} has no cache of keys and values that this command knows.")
    state = _state_bytes(cache)
    formats = tuple(_format(name, reports[name], layers, state, source, dtype) for name in KV_FORMATS)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return ModelMemory(title, dtype, weights, tuple(layers), formats, source, positions, state)


def _trace(model: Any, cache: Any, dtype: torch.dtype) -> tuple[dict[str, list[GraphReport]], str | None]:
    """Reports of a prompt's graphs by format, and why the call failed, or None; `cache` holds the rows afterwards."""
    from transformers.cache_utils import DynamicLayer

    reports: dict[str, list[GraphReport]] = {name: [] for name in KV_FORMATS}
    no_rows = torch.empty(0, dtype=dtype, device="meta")
    for layer in cache.layers:
        # Traced, this would make torch.tensor([]) on the meta device, which PyTorch (2.13) leaves without a fake.
        if isinstance(layer, DynamicLayer):
            layer.lazy_initialization(no_rows, no_rows)

    def judge(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for name in KV_FORMATS:
            reports[name].append(compile_graph(graph, inputs, Options(kv_format=name))[1])
        return graph.forward

    raise_recompile_limit()
    ids = torch.zeros(1, TRACE_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            torch.compile(model.forward, backend=judge)(ids, past_key_values=cache, use_cache=True)
    except Exception as raised:  # by the model's code, on tensors without values, or by a pass
        error = getattr(raised, "inner_exception", raised)
        return reports, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return reports, None


def _layers_of(cache: Any) -> list[DenseLayer]:
    """The layers of a cache that holds rows; none if one of them has no rows, as after a call that failed."""
    layers = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        if keys.dim() != 4 or not keys.numel():
            return []
        shape = (keys.shape[1], keys.shape[3], values.shape[3])
        row = keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
        layers.append(DenseLayer(row, _keep(layer), shape))
    return layers


def _keep(layer: Any) -> int | None:
    return layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else None


def _layers_of_config(cache: Any, config: Any, dtype: torch.dtype) -> list[DenseLayer]:
    """The fallback: all layers with the config's one number of heads and head size."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    dim = getattr(text, "head_dim", None) or (text.hidden_size // text.num_attention_heads if heads else None)
    if not heads or not dim:
        return []
    row = 2 * heads * dim * dtype.itemsize
    return [DenseLayer(row, _keep(layer), (heads, dim, dim)) for layer in cache.layers if hasattr(layer, "keys")]


def _state_bytes(cache: Any) -> int:
    """Bytes of one sequence's other states, such as those of a convolution."""
    states = [getattr(layer, name, None) for layer in cache.layers for name in STATES]
    tensors: list[torch.Tensor] = []
    for state in states:
        found = state.values() if isinstance(state, Mapping) else [state]
        tensors += [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _format(
    name: str, graphs: Sequence[GraphReport], layers: Sequence[DenseLayer], state: int, source: str, dtype: torch.dtype
) -> FormatMemory:
    caches = tuple(cache for graph in graphs for cache in graph.caches)
    reasons = tuple(dict.fromkeys(f"{site.reason}: {site.sentence}" for graph in graphs for site in graph.kept))
    if source != "trace":
        caches, reasons = _caches_of_config(name, layers, dtype)
    paged = Counter((c.layout.num_kv_heads, c.layout.head_dim, c.layout.head_dim, c.keep) for c in caches)
    kept = []
    for layer in layers:
        key = (*layer.shape, layer.keep)
        if paged[key]:
            paged[key] -= 1
        else:
            kept.append(layer)
    return FormatMemory(name, caches, tuple(kept), reasons, state)


def _caches_of_config(
    name: str, layers: Sequence[DenseLayer], dtype: torch.dtype
) -> tuple[tuple[CacheMemory, ...], tuple[str, ...]]:
    """The fallback's caches: every layer that a page layout exists for."""
    options, caches, reasons = Options(kv_format=name), [], []
    for number, layer in enumerate(layers):
        page_size = page_size_of(layer.keep is not None, options.group_size)
        heads, dim, value_dim = layer.shape
        try:
            layout = PageLayout(heads, dim, page_size, options.group_size, name, dtype)
        except GemkvError as error:
            reasons.append(f"layout_unsupported: {error}")
            continue
        if dim == value_dim:
            caches.append(CacheMemory.of(number, layout, layer.keep))
    return tuple(caches), tuple(dict.fromkeys(reasons))
