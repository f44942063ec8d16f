"""Early drop in `gemkv eval`: an emulated window drops what the compiled model drops, and the command names them."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_models import build, prompt

from gemkv_compile.cli.main import main
from gemkv_compile.drop import AttentionMass, Pages, SnapKV
from gemkv_compile.errors import InvalidOption
from gemkv_compile.fidelity.decode_path import DecodePath
from gemkv_compile.fidelity.drops import POLICIES, Random
from gemkv_compile.fidelity.formats import REFERENCE_FORMAT, TESTED, formats_of_run
from gemkv_compile.fidelity.parallel_path import ParallelPath


def logits_of(path, ids, prompt_tokens):
    parts = list(path(ids, prompt_tokens))
    return {name: torch.cat([some[name] for _, some in parts], 1) for name in parts[0][1]}


@pytest.mark.slow
def test_the_parallel_path_drops_what_the_decode_path_drops():
    """Two implementations of the order of things: after a prompt, and while decoding over a page's end."""
    model, ids = build("gemma3"), prompt(2, 261)
    while_decoding = replace(TESTED["model"], name="mass", drop=AttentionMass(share=0.5, recent=0, observes=8))
    after_the_prompt = replace(TESTED["int8"], name="snapkv", drop=SnapKV(share=0.4))
    forms = (REFERENCE_FORMAT, while_decoding, after_the_prompt)
    stepped, whole = (logits_of(path(model, forms), ids, 251) for path in (DecodePath, ParallelPath))
    for name in whole:
        torch.testing.assert_close(stepped[name], whole[name], rtol=0, atol=2e-3 if name == "snapkv" else 1e-5)
        assert name == "reference" or (whole[name] - whole["reference"]).abs().max() > 0.02


def test_every_named_policy_keeps_the_same_number_of_pages():
    attention = torch.rand(3, 2, 20, 64)
    about = Pages(1, 20 * 64 + 5, 1285, 64, None, torch.ones(3, 20, dtype=torch.bool), attention)
    forms = formats_of_run(["model", "int8"], torch.float32, ["random", *POLICIES], 0.7)
    names = ["random", *(name for name in POLICIES if name != "random")]
    assert [form.name for form in forms[2:]] == [
        f"{base}{name}" for base in ("model", "int8") for name in ["", *(f", {n}" for n in names)]
    ]
    for form in forms[3:7]:
        assert form.drop.choose(about).sum(1).tolist() == [6, 6, 6] and not form.drop.decodes
    draws = [Random(0.7, seed).choose(replace(about, layer=layer)) for seed in (0, 1) for layer in (0, 1)]
    assert all(not torch.equal(one, other) for i, one in enumerate(draws) for other in draws[:i])
    assert torch.equal(Random(0.7).choose(about), Random(0.7).choose(about))
    assert not any(Random(0.7, seed, sinks=65).choose(about)[:, [0, 1, 19]].any() for seed in range(9))
    assert any(Random(0.7, seed).choose(about)[:, 0].any() for seed in range(9))
    with pytest.raises(InvalidOption, match="--drop takes sink_and_recent, .* got 'h2o'"):
        formats_of_run(["int8"], torch.float32, ["h2o"], 0.7)
    with pytest.raises(InvalidOption, match="--keep takes a share .* got 0"):
        formats_of_run(["int8"], torch.float32, ["random"], 0)


def test_the_command_names_policies(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    letters = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("A cat sat on the mat. " * 20)
    files = ["--text", str(tmp_path / "text"), "--json", str(tmp_path / "r.json")]
    options = "--tokens 301 --windows 300 --prompts 260 --needles 0 --formats model --drop snapkv,random --keep 0.5"
    assert main(["eval", str(tmp_path / "model"), *files, *options.split()]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    kl = {row["format"]: row["kl"]["value"] for row in result["rows"]}
    assert kl["model"] < 1e-8 and min(kl["model, snapkv"], kl["model, random"]) > 1e-8
    assert result["about"]["drop"] == ["snapkv", "random"] and result["about"]["keep"] == 0.5
    assert "model, random" in capsys.readouterr().out
