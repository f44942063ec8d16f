"""What becomes of each model family, in a few lines: the golden reports that two releases of Transformers must give.

python family_reports.py [FIRST STOP STEP]   # prints a JSON object of all families' reports, or these, and the version
"""

import json
import sys
from unittest import mock

import torch
import transformers
from tiny_models import FAMILIES, LATER_CELLS, MORE_FAMILIES, build, prompt

import gemkv_compile
from gemkv_compile.passes import rope

CELLS = [(family, "eager" if family == "gemma2" else "sdpa") for family in FAMILIES | MORE_FAMILIES]
CELLS += LATER_CELLS


def family_report(family, attention):
    """Sites of a padded prompt and of a decode step, by layer; how many caches there are; what is done on a GPU."""
    model, lines = build(family, attention, dtype=torch.bfloat16), []
    padding = torch.ones(2, 21, dtype=torch.long)
    padding[0, :3] = 0
    with torch.no_grad():
        # The cache is the model's own and dense here: reports do not depend on what runs.
        cache = model(prompt(2, 20), use_cache=True).past_key_values
        calls = {
            "padded prompt": ((prompt(2, 21),), {"attention_mask": padding, "use_cache": True}),
            "step": ((prompt(2, 1),), {"past_key_values": cache}),
        }
        for name, (arguments, keywords) in calls.items():
            torch._dynamo.reset()
            with mock.patch.object(rope, "DEVICES", {"cpu"}):
                report = gemkv_compile.explain(model, *arguments, **keywords)
            lines += [name, *map(_line, report.sites), f"  caches: {sum(len(g.caches) for g in report.graphs)}"]
            lines += [f"  rope: {graph.rope}" for graph in report.graphs if graph.rope]
    return "\n".join(lines) + "\n"


def _line(site):
    what = f"{site.operator}, {site.mask}" if site.status == "rewritten" else site.reason
    heads = f"{site.num_q_heads}/{site.num_kv_heads} x {site.head_dim}"
    return f"  {site.layer}: {site.status}: {what}; {heads}; {site.rule}"


if __name__ == "__main__":
    reports = {
        f"{family}-{attention}": family_report(family, attention)
        for family, attention in CELLS[slice(*map(int, sys.argv[1:]))]
    }
    print(json.dumps({"transformers": transformers.__version__, "reports": reports}))
