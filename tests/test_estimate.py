"""`gemkv memory` and the estimate behind it: exact bytes without weights, and what fits."""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_tables import layout_of
from tiers import tiers
from tiny_models import FAMILIES, LATER_FAMILIES, MORE_FAMILIES, WINDOW, build, prompt

import gemkv_compile
from gemkv_compile import estimate as estimating
from gemkv_compile.cli.gpus import GPUS, memory_size
from gemkv_compile.cli.main import main
from gemkv_compile.errors import GemkvError
from gemkv_compile.estimate import estimate, most_that_fits
from gemkv_compile.memory_formula import BATCH, PARTS, TOKENS, paged_bytes, paged_parts
from gemkv_compile.options import KV_FORMATS
from gemkv_compile.runtime.ledger import kv_memory

ALL = FAMILIES | MORE_FAMILIES | LATER_FAMILIES


def estimated(family, dtype=torch.float32, **changes):
    return estimate(ALL[family](**changes)[1], family, dtype)


def of_format(model, kv_format):
    return next(each for each in model.formats if each.kv_format == kv_format)


@given(
    tokens=st.integers(1, 10**9),
    keep=st.none() | st.integers(1, 5000),
    kv_format=st.sampled_from(KV_FORMATS),
    sizes=st.sampled_from([(64, 64), (256, 64), (96, 48), (16, 16)]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_integers_and_formula_are_the_same(tokens, keep, kv_format, sizes):
    layout = layout_of(kv_format, page_size=sizes[0], group_size=sizes[1])
    parts = paged_parts(layout, keep, tokens)
    assert tuple(parts) == PARTS and all(isinstance(size, int) for size in parts.values())
    assert 3 * sum(parts.values()) == int(paged_bytes(layout, keep).subs({BATCH: 3, TOKENS: tokens}))


@pytest.mark.parametrize("kv_format", tiers(["k6v4"], [("int8",), ("model",), ("k8v4",), ("int4",)]))
def test_parts_are_those_of_the_ledger_after_decoding(kv_format):
    """Exactly, past the window and past a page."""
    expected, model = of_format(estimated("gemma3"), kv_format), build("gemma3")
    gemkv_compile.compile(model, kv_format=kv_format, strict=True)
    with torch.no_grad():
        out = model.generate(prompt(2, 10), max_new_tokens=91, do_sample=False, return_dict_in_generate=True)
    ledger, tokens = kv_memory(out.past_key_values), 100
    counted = {part: sum(getattr(layer, part) for layer in ledger.layers) for part in PARTS}
    assert expected.parts(2, tokens) == counted | {"dense": 0}
    assert expected.total(2, tokens) == ledger.total


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "gpt_oss"])
def test_dense_caches_and_weights_are_those_of_the_real_model(family):
    model, real = estimated(family), build(family, "eager")
    with torch.no_grad():
        cache = real(prompt(1, 40)).past_key_values
    assert model.source == "trace" and all(not each.kept for each in model.formats)
    assert model.dense(1, 40, windowed=True) == kv_memory(cache).dense
    assert model.dense(3, 40, windowed=False) == 3 * 40 * sum(layer.row_bytes for layer in model.layers)
    tensors = {id(t): t for t in (*real.parameters(), *real.buffers())}.values()
    assert model.weights == sum(t.nbytes for t in tensors)


def test_windows_heads_and_sizes_come_from_the_trace():
    caches = of_format(estimated("gemma4"), "int8").caches
    found = [(c.keep, c.layout.num_kv_heads, c.layout.head_dim, c.page_size) for c in caches]
    assert found == [(WINDOW - 1, 2, 16, 64), (None, 2, 32, 256)] * 2


def test_what_is_kept_is_counted_as_dense_and_said():
    model = estimated("llama", head_dim=24)
    for each in model.formats:
        assert len(each.kept) == 2 and not each.caches and "head" in each.reasons[0]
        assert each.total(2, 100) == model.dense(2, 100, True) == each.parts(2, 100)["dense"] > 0


def test_a_trace_that_fails_falls_back_to_the_config_and_says_so(monkeypatch):
    traced = estimated("gemma3")

    def fail(*_):
        raise RuntimeError("no such trace\nand more")

    monkeypatch.setattr(estimating, "compile_graph", fail)
    guessed = estimated("gemma3")
    assert guessed.source.startswith("config: ") and guessed.source.endswith("no such trace")
    assert guessed.layers == traced.layers
    for ours, theirs in zip(guessed.formats, traced.formats, strict=True):
        assert ours.parts(2, 1000) == theirs.parts(2, 1000)


def test_peak_is_the_most_on_the_way():
    each = of_format(estimated("gemma3", sliding_window=100), "int8")
    most = 0
    for tokens in range(1, 700):
        most = max(most, each.total(2, tokens))
        assert each.peak(2, tokens) == most, tokens
    assert any(each.total(2, tokens) < each.peak(2, tokens) for tokens in range(400, 700))


@given(st.integers(0, 10**12), st.integers(1, 10**6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_most_that_fits(room, slope, offset):
    most = most_that_fits(lambda n: offset + slope * n if n else 0, room)
    assert most == max(0, (room - offset) // slope)


def test_no_limit_where_everything_is_windowed():
    mistral = of_format(estimated("mistral"), "int8")
    assert most_that_fits(lambda tokens: mistral.peak(1, tokens), 10**9) is None
    assert most_that_fits(lambda tokens: mistral.peak(1, tokens), 10) == 0


def test_memory_sizes():
    assert memory_size("24GiB") == 24 * 2**30 and memory_size("1.5 gb") == 1.5e9 and memory_size("80G") == 80 * 10**9
    assert memory_size("rtx4090") == memory_size("GeForce RTX 4090") == 24 * 10**9
    assert memory_size("A100-80GB") == memory_size("a100-80") == 80 * 10**9
    assert all(memory_size(name) == size * 10**9 for name, (size, _) in GPUS.items())
    for wrong in ("V9000", "-3GiB", "0", "24 apples", ""):
        with pytest.raises(GemkvError, match=r"no memory size; write 24GiB, 80GB or one of H200"):
            memory_size(wrong)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config and no weights."""
    path = tmp_path_factory.mktemp("model")
    ALL["gemma3"]()[1].save_pretrained(path)
    return path


def test_the_command_needs_no_weights(folder, capsys):
    command = ["memory", str(folder), "--tokens", "1000", "--batch", "4", "--dtype", "bfloat16"]
    assert main([*command, "--gpu-memory", "1MiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["format"]: row for row in result["formats"]}
    assert list(rows) == ["dense, windowed", "dense, no window", *KV_FORMATS] and result["source"] == "trace"
    model = estimated("gemma3", torch.bfloat16)
    room = 2**20 - model.weights
    for name in KV_FORMATS:
        each, row = of_format(model, name), rows[name]
        assert row["bytes"] == each.total(4, 1000) == sum(row["parts"].values())
        assert each.peak(4, row["most_tokens"]) <= room < each.peak(4, row["most_tokens"] + 1)
        assert each.peak(row["most_batch"], 1000) <= room < each.peak(row["most_batch"] + 1, 1000)
    assert main([*command, "--gpu-memory", "H200", "--reserve", "140GB"]) == 0
    out = capsys.readouterr().out
    for word in ("windows 16", "from a trace", "most tokens, batch 4", "padding", "dense, no window", "--reserve"):
        assert word in out
    assert main([*command, "--gpu-memory", "1KiB", "--json"]) == 0
    assert all(row["most_tokens"] == 0 for row in json.loads(capsys.readouterr().out)["formats"])


def test_the_plot_and_what_to_install_for_it(folder, capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    command = ["memory", str(folder), "--tokens", "100", "--plot", str(tmp_path / "out" / "cache.png")]
    assert main(command) == 0 and (tmp_path / "out" / "cache.png").stat().st_size > 1000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(command) == 1
    assert "pip install 'gemkv-compile[report]'" in capsys.readouterr().err


def test_mistakes_of_the_command_are_one_line(folder, capsys, tmp_path):
    assert main(["memory", "no/such/model"]) == 1
    assert main(["memory", str(tmp_path)]) == 1
    assert main(["memory", str(folder), "--gpu-memory", "V9000"]) == 1
    errors = " ".join(capsys.readouterr().err.split())
    assert "does not exist; give a folder" in errors and "has no config.json" in errors and "no memory size" in errors
    with pytest.raises(SystemExit):
        main(["memory", str(folder), "--tokens", "0"])
