"""The `gemkv` command on small models; and the report that it prints."""

import json
import sys

import pytest
import sympy
import torch
from tiny_models import build, prompt

import gemkv_compile
from gemkv_compile.cli.main import main
from gemkv_compile.report import BATCH, TOKENS, count_by_status


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build("gemma3").save_pretrained(path)
    return path


def test_doctor_says_what_is_there(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and "nothing is wrong" in out and "reference" in out
    usable = next(line for line in out.splitlines() if " triton " in line and ("yes" in line or "no " in line))
    assert ("yes" in usable) == torch.cuda.is_available()


def test_doctor_says_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(torch.compiler, "list_backends", lambda: ["inductor"])
    assert main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert 'does not know the backend "gemkv"' in out and "pip install" in out


def test_explain_a_folder(folder, capsys):
    assert main(["explain", str(folder)]) == 0
    out = capsys.readouterr().out
    for word in ("attend_chunk", "attend_pages", "causal, window 16", "for B sequences of S tokens"):
        assert word in out


@pytest.mark.slow
def test_explain_as_json(folder, capsys):
    assert main(["explain", str(folder), "--json", "--attention", "eager", "--kv-format", "model"]) == 0
    report = json.loads(capsys.readouterr().out)
    sites = report["graphs"][0]["sites"]
    assert len(sites) == 2 and all(site["status"] == "rewritten" for site in sites)
    assert "attention_matmul" in sites[0]["rule"] and "gemkv::attend_chunk" in report["graphs"][0]["after"]
    symbols = {"B": BATCH, "S": TOKENS}
    assert sympy.sympify(report["memory"], locals=symbols).subs({BATCH: 1, TOKENS: 100}) > 0


def test_mistakes_are_one_line(capsys):
    assert main(["explain", "no/such/model"]) == 1
    assert main(["explain", ".", "--kv-format", "int3"]) == 1
    errors = " ".join(capsys.readouterr().err.split())  # wrapped at the width of the terminal
    assert (
        "no/such/model does not exist; give a folder" in errors
        and "kv_format must be one of 'int8', 'k8v4', 'k6v4', 'int4', 'model', got 'int3'" in errors
    )
    with pytest.raises(SystemExit) as usage:
        main(["nonsense"])
    assert usage.value.code == 2


def test_demo_without_a_model_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert "gemkv-compile[demo]" in capsys.readouterr().err


def test_report_of_one_call():
    model = build("gemma3")
    with torch.no_grad():
        report = gemkv_compile.explain(model, prompt(1, 20))
    assert count_by_status(report.sites) == {"rewritten": 2}
    first, second = report.sites
    assert (first.layer, first.module, first.window) == (0, "model.layers.0.self_attn", 16)
    assert (second.layer, second.num_q_heads, second.num_kv_heads, second.head_dim) == (1, 4, 2, 16)
    assert "sdpa_attention.py:" in first.source and "scaled_dot_product_attention" in first.source
    assert {"canonicalise", "rewrite", "inner compile"} <= report.graphs[0].stages.keys()
    text = str(report)
    assert "model.layers.1.self_attn" in text and "1 x 32768" in text
    assert report.memory.free_symbols == {BATCH, TOKENS} and report.memory_bytes(2, 500) == 2 * report.memory_bytes(
        1, 500
    )


def test_report_of_a_model_without_attention():
    report = gemkv_compile.explain(torch.nn.Linear(3, 3), torch.ones(1, 3))
    assert report.sites == () and report.memory == 0 and "no attention in this graph" in str(report)


def test_explain_leaves_the_compiled_model_alone():
    from torch._dynamo.utils import counters

    model = gemkv_compile.compile(build("llama"))
    with torch.no_grad():
        model(prompt(1, 8))
        before = counters["stats"]["unique_graphs"]
        gemkv_compile.explain(model, prompt(1, 8))
        explained = counters["stats"]["unique_graphs"]
        model(prompt(1, 8))
    assert explained == before + 1 == counters["stats"]["unique_graphs"]


def test_progress_line(capsys):
    import time

    from gemkv_compile.progress import progress_line

    with progress_line("compiling", quiet=0.05):
        time.sleep(0.3)
    with progress_line("nothing", quiet=5.0):
        pass
    assert capsys.readouterr().err.splitlines() == ["gemkv: compiling ...", "gemkv: compiling: 0 s"]
    assert "torch" in sys.modules
