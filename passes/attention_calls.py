"""The operator call that an attention becomes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from gemkv_compile.compat import fake_mode_of
from gemkv_compile.kernels.results import empty_results
from gemkv_compile.passes.decide import Read, Rewrite
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.prompts import Prefill, takes_engine
from gemkv_compile.passes.version import pass_version
from gemkv_compile.plan import StateField


def format_arguments(rewrite: Rewrite) -> tuple[int, str, str]:
    """The last arguments of every operator."""
    return rewrite.layout.page_size, rewrite.layout.kv_format, pass_version()


def attention_call(
    graph: Graph,
    rewrite: Rewrite,
    read: Read,
    prefill: Prefill,
    rows: tuple[Node, Node, Node],
    state: Mapping[StateField, Node],
    masks: tuple[Node | None, Node | None, Node | None],
) -> Node:
    """Put the call where the graph inserts now; the node of its output [batch, Hq, q_len, head_dim].

    Args:
        rows: Queries, and this call's keys and values, heads first.
        state: The state of its cache, with "stored" where the call is an `attend_prompt`.
        masks: Padding, dense mask and sinks.
    """
    attention, asked = read.attention, rows[0]
    device = tuple(state[field] for field in ("page_table", "seq_lens", "starts", "tail"))
    scores, format_args = (attention.scale, attention.softcap), format_arguments(rewrite)
    arguments: tuple[Any, ...]
    if rewrite.is_decode:
        target: Any = torch.ops.gemkv.attend_pages.default
        arguments = (asked, *device, *masks, *scores, read.window, *format_args)
    elif takes_engine(rewrite, read, prefill):
        target = torch.ops.gemkv.attend_prompt.default
        rules = read.causal, read.window, prefill.option
        arguments = (*rows, state["stored"], *device, masks[0], *scores, *rules, *format_args)
    else:
        target = torch.ops.gemkv.attend_chunk.default
        arguments = (*rows, *device, *masks, *scores, read.causal, read.window, *format_args)
    called = graph.call_function(target, arguments)
    query = value_of(attention.query)
    with fake_mode_of([query]):
        out, lse = empty_results(query)
    called.meta["stack_trace"] = attention.node.meta.get("stack_trace")
    if target is torch.ops.gemkv.attend_prompt.default:
        called.meta["example_value"] = out
        return called
    called.meta["example_value"] = out, lse
    result = graph.call_function(operator.getitem, (called, 0))
    result.meta.update(example_value=out, stack_trace=called.meta["stack_trace"])
    return result
