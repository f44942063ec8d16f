"""The decode path's numbers without its steps: one forward over a whole window, by format.

Meant for float32, where it equals `DecodePath` but for the order of sums (tests hold them together). In half precision
the paged operators keep read rows in float32, which this path rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.errors import GemkvError
from gemkv_compile.fidelity.attention import emulated
from gemkv_compile.fidelity.decode_path import Logits
from gemkv_compile.fidelity.formats import Format

QUERIES_AT_ONCE = 128  # the output embedding is read once for them


class ParallelPath:
    """Logits of a model under several formats; what it yields is as `DecodePath`'s, many queries at a time.

    Args:
        model: A causal language model of Transformers, in eval mode.
        formats: What to run.
    Raises:
        GemkvError: the model's logits are not those of its output embedding, a format is a peer, or (when called) an
            attention cannot be emulated.
    """

    def __init__(self, model: Any, formats: Sequence[Format]) -> None:
        self.model = model
        self.formats = tuple(formats)
        if any(form.peer is not None for form in self.formats):
            raise GemkvError("Peers store rows in their own way, token by token: use --path decode.")
        self._check_head()

    @torch.no_grad()
    def __call__(self, ids: Tensor, prompt: int) -> Iterator[tuple[int, Logits]]:
        """Yield (position of the first query, logits of some queries) over the decoded positions of ids."""
        hidden = {form.name: self._hidden(ids, form, prompt) for form in self.formats}
        for first in range(prompt, ids.shape[1], QUERIES_AT_ONCE):
            some = slice(first, first + QUERIES_AT_ONCE)
            yield first, {name: self._head(states[:, some]) for name, states in hidden.items()}

    def _hidden(self, ids: Tensor, form: Format, prompt: int) -> Tensor:
        """Last hidden states, [batch, tokens, width]."""
        with emulated(self.model, form, prompt):
            states: Tensor = self.model.base_model(ids, use_cache=False).last_hidden_state
        return states

    def _head(self, states: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(states)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(4, 8, device=self.model.device)[None]
        states = self.model.base_model(ids, use_cache=False).last_hidden_state
        expected = self.model(ids, use_cache=False).logits
        if not torch.allclose(self._head(states).float(), expected.float(), rtol=1e-2, atol=1e-2):
            raise GemkvError("This model does more after its last layer than --path parallel knows; use --path decode.")
