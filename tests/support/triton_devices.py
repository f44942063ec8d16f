"""Where Triton kernels are tested: interpreted on a CPU, compiled on a GPU; and how their results are compared."""

import os

import interpreted  # noqa: F401  (repairs the interpreter where it is on)
import pytest
import torch
from paged_cases import assert_accurate

from gemkv_compile.kernels.layout import KV_FORMATS

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="not interpreted")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def is_hopper():
    """Whether there is a GPU for the Hopper prefill kernel."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def to_device(cache, device):
    """page_table, seq_lens, starts and tail of a cache, and its pages, on a device."""
    if device == "cpu":
        return cache.page_table, cache.seq_lens, cache.starts, cache.tail
    memory = cache.memory.to(device)
    moved = cache.page_table - cache.memory.data_ptr() + memory.data_ptr()
    cache.on_device = memory  # keeps the pages alive
    table = torch.where(cache.page_table == 0, 0, moved)
    return table.to(device), cache.seq_lens.to(device), cache.starts.to(device), cache.tail.to(device)


def close_enough(got, exact, low):
    """Compare (out, lse) with float64 and with the same computed in the model's own dtype by other means."""
    for ours, reference, single in zip(got, exact, low, strict=True):
        ours = ours.cpu()
        assert not torch.isnan(ours).any(), "NaN in the result"
        if single.dtype == torch.float32:
            assert_accurate(ours, reference, single)
            continue
        assert torch.equal(torch.isneginf(ours), torch.isneginf(reference))
        finite = ~torch.isneginf(reference)
        error = (ours.double() - reference)[finite].abs()
        budget = (single.double() - reference)[finite].abs()
        assert error.numel() == 0 or error.max() <= 2 * budget.max() + 1e-3, f"{error.max()} of {budget.max()}"


# Interpreted, "k8v4" runs in one test of each kernel: it has the keys of "int8" and the values of "int4".
FORMATS = [name for name in KV_FORMATS if name != "k8v4" or torch.cuda.is_available()]
