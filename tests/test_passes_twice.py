"""The passes on what they have made: nothing is found once more, and the graph stays as it is."""

import attention_cases
import flex_cases
import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from gemkv_compile.passes.canonicalise import canonicalise
from gemkv_compile.passes.decide import Facts, decide
from gemkv_compile.passes.find_attention import find_attention
from gemkv_compile.passes.find_updates import find_updates
from gemkv_compile.passes.printing import format_graph
from gemkv_compile.passes.rewrite import rewrite_graph


def once(module):
    """All passes; the graph that they make, and how many caches they rewrote."""
    module, canonical = canonicalise(module)
    attentions = find_attention(module.graph)
    updates = find_updates(module.graph, attentions.found, [node for node, _ in attentions.refused])
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    verdicts = decide(updates.caches, placeholders, Facts("int8", 64, None, canonical.handle_inputs))
    rewrite_graph(module, verdicts.rewrites, None)
    return module, len(verdicts.rewrites)


REWRITTEN = [
    attention_cases.sdpa,
    attention_cases.matmul_form,
    attention_cases.shared_by_two,
    attention_cases.sliding,
    attention_cases.reads_the_length,
    attention_cases.einsum_form,
    attention_cases.baddbmm_form,
    attention_cases.softmax_written_out,
    attention_cases.mask_hides_every_third,
    flex_cases.flex_block_mask,
    flex_cases.flex_softcapped,
]
KEPT = [
    attention_cases.no_cache,
    attention_cases.cache_used_elsewhere,
    attention_cases.keys_scaled,
    attention_cases.weights_returned,
]


@pytest.mark.parametrize("function", REWRITTEN + KEPT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", [1, 3])
def test_second_time(function, tokens, monkeypatch):
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    counts, texts = [], []

    def backend(module, example_inputs):
        made = module
        for _ in range(3):
            made, count = once(made)
            counts.append(count)
            texts.append(format_graph(made.graph))
        return module.forward

    arguments = attention_cases.inputs(tokens=tokens)
    with torch.no_grad():
        torch.compile(function, backend=backend)(*arguments)
    assert counts == [int(function in REWRITTEN), 0, 0]
    assert texts[0] == texts[1] == texts[2]
    assert ("gemkv::append_kv" in texts[0]) == (function in REWRITTEN)
