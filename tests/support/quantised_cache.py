"""An independent model of a quantised cache: a dense Transformers cache with committed groups quantised and back."""

import paged_cases
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

GROUP = 64


class QuantisedLayer(DynamicLayer):
    """Keeps all rows as they are; attention gets full groups of the past through NumPy's version of the format."""

    def __init__(self, window=None, kv_format="int8"):
        super().__init__()
        self.window = window
        self.bits = paged_cases.BITS[kv_format]
        self.guard = GROUP if min(self.bits) < 8 else 0

    def update(self, key_states, value_states, *args, **kwargs):
        past = self.get_seq_length()
        keys, values = super().update(key_states, value_states)
        total, new = keys.shape[2], key_states.shape[2]
        # A chunk attends to its own rows as they are; one new row is appended first, and may complete a group.
        committed = (total if new == 1 else past) // GROUP * GROUP
        first = 0 if self.window is None else max(0, total - new - self.window + 1)
        return tuple(self._seen(rows, committed, i)[:, :, first:] for i, rows in enumerate((keys, values)))

    def _seen(self, rows, committed, is_value):
        groups = rows[:, :, :committed].unflatten(2, (-1, GROUP)).float()
        if not committed:
            return rows
        stored = paged_cases.numpy_dequantise(groups.numpy(), self.bits[is_value], is_value)
        stored = torch.from_numpy(stored).to(rows.dtype)
        stored = stored.flatten(2, 3)[:, :, self.guard :]
        return torch.cat([rows[:, :, : self.guard], stored, rows[:, :, committed:]], 2)

    def get_mask_sizes(self, query_length):
        total = self.get_seq_length() + query_length
        first = 0 if self.window is None else max(0, total - query_length - self.window + 1)
        return total - first, first

    @property
    def is_sliding(self):
        return self.window is not None


def quantised_cache(config, kv_format="int8"):
    """A DynamicCache for a configuration, with quantised groups."""
    cache = DynamicCache(config=config)
    cache.layers = [QuantisedLayer(getattr(layer, "sliding_window", None), kv_format) for layer in cache.layers]
    return cache
