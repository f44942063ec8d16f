"""`gemkv eval`: its two paths are one, its numbers are right, and a bad format looks bad."""

import json
import math

import numpy as np
import paged_cases as cases
import pytest
import torch
from tiny_models import build, prompt
from transformers import DynamicCache

from gemkv_compile.cli.main import main
from gemkv_compile.errors import GemkvError, InvalidOption
from gemkv_compile.fidelity import metrics, needle, text
from gemkv_compile.fidelity.attention import runs
from gemkv_compile.fidelity.decode_path import DecodePath, dense_cache, peer_cache
from gemkv_compile.fidelity.formats import REFERENCE_FORMAT, TESTED, Format, formats_of_run, noise_floor
from gemkv_compile.fidelity.measure import measure_needles, measure_text
from gemkv_compile.fidelity.parallel_path import ParallelPath
from gemkv_compile.fidelity.result import found_in_all, rows_of

ALL = formats_of_run(["model", "int8"], torch.float32)
THREE_LEVELS = Format("three levels", 64, lambda rows: rows.sign() * rows.abs().mean())


def logits_of(path, ids, prompt_tokens):
    """By format, all decoded logits [batch, tokens, vocabulary]; and the positions, which must be in order."""
    parts = list(path(ids, prompt_tokens))
    logits = {name: torch.cat([some[name] for _, some in parts], 1) for name in parts[0][1]}
    assert parts[0][0] == prompt_tokens and next(iter(logits.values())).shape[1] == ids.shape[1] - prompt_tokens
    return logits


PAIRS = [("gemma3", 8), ("llama", 64)]
INT8_ONLY = formats_of_run(["int8"], torch.float32)


@pytest.mark.parametrize("family, prompt_tokens", PAIRS)
def test_the_parallel_path_is_the_decode_path(family, prompt_tokens):
    """Each token under each format; 140 tokens cross windows and two groups.

    Sums differ in order, and that may put a code one step off: a fraction of what the format itself changes.
    """
    model, ids = build(family), prompt(2, 140)
    stepped, whole = (logits_of(path(model, INT8_ONLY), ids, prompt_tokens) for path in (DecodePath, ParallelPath))
    assert stepped.keys() == whole.keys() == {"reference", "bfloat16 rows", "int8"}
    for name in whole:
        moved = (whole[name] - whole["reference"]).abs().max()
        assert name == "reference" or moved > 1e-4
        assert (stepped[name] - whole[name]).abs().max() <= 0.15 * moved + 1e-6, name


def test_softcaps_and_other_floors_are_the_same_on_both_paths():
    model, ids = build("gemma2", "eager"), prompt(1, 90)
    formats = (REFERENCE_FORMAT, noise_floor(torch.float32), noise_floor(torch.bfloat16))
    for prompt_tokens in (1, 8):
        stepped, whole = (logits_of(path(model, formats), ids, prompt_tokens) for path in (DecodePath, ParallelPath))
        for name in whole:
            torch.testing.assert_close(stepped[name], whole[name], rtol=0, atol=3e-5)


def test_decoding_the_reference_is_eager_decoding_and_changes_nothing_in_the_model():
    model, ids = build("gemma3"), prompt(1, 90)
    before = model.config._attn_implementation
    parallel = logits_of(ParallelPath(model, ALL), ids, 8)["reference"]
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, 8:]
    torch.testing.assert_close(parallel, expected, rtol=0, atol=1e-5)
    assert model.config._attn_implementation == before


def test_half_precision_has_another_floor():
    model, ids = build("gemma3", dtype=torch.bfloat16), prompt(1, 40)
    formats = formats_of_run([], torch.bfloat16)
    assert [form.name for form in formats] == ["reference", "other sum order"]
    for path in (DecodePath, ParallelPath):
        logits = logits_of(path(model, formats), ids, 8)
        moved = (logits["other sum order"].float() - logits["reference"].float()).abs().max()
        assert 0 < moved < 0.1


def test_runs_by_hand():
    assert list(runs(10, 2, 4)) == [(0, 2, 0), (2, 3, 0), (3, 7, 4), (7, 10, 8)]
    assert list(runs(10, 4, 4)) == [(0, 4, 0), (4, 7, 4), (7, 10, 8)]
    assert list(runs(10, 2, 1)) == [(0, 2, 0), (2, 10, 10)]
    assert list(runs(5, 5, 1)) == list(runs(5, 5, 4)) == [(0, 5, 0)]


def test_scores_by_hand():
    """Chances (1/2, 1/4, 1/4) against (1/4, 1/2, 1/4): KL = ln(2)/2 - ln(2)/4."""
    exact, other = torch.tensor([[[2.0, 1.0, 1.0]]]).log(), torch.tensor([[[1.0, 2.0, 1.0]]]).log()
    scores = metrics.token_scores({"reference": exact, "other": other + 5}, "reference", torch.tensor([[0]]))
    assert scores["reference"].ravel() == pytest.approx([math.log(2), 0, 0, 0], abs=1e-7)
    assert scores["other"].ravel() == pytest.approx([math.log(4), math.log(2), math.log(2) / 4, 1], abs=1e-6)


def test_scores_of_near_logits_are_those_of_the_definition(monkeypatch):
    """Both ways of computing, on both sides of the border; and digits are kept where little moved."""
    monkeypatch.setattr(metrics, "AT_ONCE", (4000, 0))  # two queries at once
    exact, targets = 3 * torch.randn(2, 3, 1000), torch.randint(0, 1000, (2, 3))
    for size, rel in ((1e-4, 1e-3), (0.1, 1e-4), (3.0, 1e-4), (30.0, 1e-6)):
        other = exact + size * torch.randn(2, 3, 1000)
        scores = metrics.token_scores({"reference": exact, "other": other}, "reference", targets)["other"]
        before, after = exact.double().log_softmax(-1), other.double().log_softmax(-1)
        kl = torch.nn.functional.kl_div(after, before, log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(torch.from_numpy(scores[metrics.KL]), kl, rtol=rel, atol=0)
        nll = -after.gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(torch.from_numpy(scores[metrics.NLL]), nll, rtol=0, atol=1e-5)


def test_intervals_by_hand():
    scores = np.array([[1.0, 3.0, 5.0], [0, 0, 0], [0, 0, 0], [1, 0, 0]])
    sums, counts = metrics.blocks_of(scores, 2)
    assert sums[:, 0].tolist() == [4, 5] and counts.tolist() == [2, 1]
    perplexity = metrics.estimate(sums, counts, metrics.NLL, 0, np.exp)
    # Two blocks: both the first (mean 2), both the second (mean 5), or one of each (mean 3).
    assert [perplexity.value, perplexity.low, perplexity.high] == pytest.approx(np.exp([3, 2, 5]))
    assert metrics.estimate(sums, counts, metrics.DIFFERS, 0).value == pytest.approx(1 / 3)
    assert math.isnan(metrics.estimate(sums[:1], counts[:1], metrics.NLL, 0).low)
    half = metrics.proportion(5, 10)
    assert (half.value, half.low, half.high) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    assert metrics.proportion(0, 0).low == 0 and metrics.proportion(8, 8).high == 1


def test_intervals_cover():
    """Means of 40 blocks of noise: a 95% interval has the truth in it nearly always, and is no wider than it must."""
    rng, inside, widths = np.random.default_rng(3), 0, []
    for _ in range(100):
        sums = np.repeat(rng.normal(0, 1, (40, 1)), 4, 1)
        found = metrics.estimate(sums, np.ones(40, int), 0, 1)
        inside += found.low <= 0 <= found.high
        widths.append(found.high - found.low)
    assert 88 <= inside <= 99 and np.mean(widths) == pytest.approx(2 * 1.96 / 40**0.5, rel=0.1)


def rows_for(formats, **changes):
    model = build("llama", **changes)
    ids = prompt(4, 200)
    batches = text.batches(ids, torch.roll(ids, -1, 1), [1, 64], 2)
    done = []
    windows = measure_text(ParallelPath(model, formats), batches, "cpu", done.append)
    assert sum(done) == 2 * 199 + 2 * 136 and len(windows) == 4
    return {(row.format, row.prompt): row for row in rows_of(windows, 0)}


def test_a_bad_format_is_seen():
    rows = rows_for((REFERENCE_FORMAT, noise_floor(torch.float32), *TESTED.values(), THREE_LEVELS))
    floor, int8, bad = (rows[name, None].kl for name in ("bfloat16 rows", "int8", "three levels"))
    assert rows["reference", None].kl.high == 0 and rows["model", None].kl.high < 1e-9
    assert 0 < floor.low < floor.high < 20 * int8.value and bad.low > 50 * int8.high
    assert rows["three levels", None].differs.low > rows["int8", None].differs.high
    assert rows["int8", 64].tokens == 2 * 136 and rows["int8", None].tokens == 2 * (199 + 136)
    assert rows["int8", None].ratio.low <= 1.001 and rows["reference", None].ratio.high == 1


def test_a_format_of_infinities_is_seen():
    broken = Format("broken", 64, lambda rows: rows * float("inf"))
    row = rows_for((REFERENCE_FORMAT, broken))["broken", None]
    assert math.isnan(row.kl.value) and math.isnan(row.perplexity.high)


@pytest.mark.parametrize("name, k_bits, v_bits", [("int8", 8, 8), ("k8v4", 8, 4), ("k6v4", 6, 4), ("int4", 4, 4)])
def test_formats_are_the_product_s(name, k_bits, v_bits):
    rows = torch.randn(2, 2, 128, 16)
    groups = rows.unflatten(2, (2, 64)).numpy()
    for store, bits, values in zip(TESTED[name].stores, (k_bits, v_bits), (False, True), strict=True):
        expected = cases.numpy_dequantise(groups, bits, values).reshape(rows.shape)
        np.testing.assert_allclose(store(rows), expected, rtol=1e-6, atol=1e-6)


def test_formats_of_a_run_have_names():
    with pytest.raises(InvalidOption, match="--formats takes int8, k8v4, k6v4, int4, model, got 'int3'"):
        formats_of_run(["int3"], torch.float32)


def test_peers_of_a_run():
    forms = formats_of_run(["int8"], torch.float32, peers=["quanto4", "hqq8"])
    assert [form.name for form in forms[2:]] == ["int8", "quanto4", "hqq8"] and forms[-1].peer == ("hqq", 8)
    with pytest.raises(InvalidOption, match="--peers takes quanto4, quanto2, hqq8, hqq4, got 'quanto3'"):
        formats_of_run([], torch.float32, peers=["quanto3"])
    with pytest.raises(GemkvError, match="token by token: use --path decode"):
        ParallelPath(build("llama"), forms)


def test_a_peer_runs_over_its_own_cache(monkeypatch):
    """Transformers' QuantizedCache, for which a cache stands here that keeps rows as signs, so that it is seen."""
    made, rows = [], Format("signs", 1, torch.sign)
    peers = formats_of_run([], torch.float32, peers=["quanto4"])

    def quantized(backend, config, nbits):
        made.append((backend, nbits))
        return dense_cache(config, rows)

    monkeypatch.setattr("transformers.QuantizedCache", quantized)
    model, ids = build("llama"), prompt(1, 20)
    found = logits_of(DecodePath(model, peers), ids, 8)
    expected = logits_of(DecodePath(model, (*peers[:2], rows)), ids, 8)["signs"]
    assert made == [("quanto", 4)] and torch.equal(found["quanto4"], expected)
    assert (found["quanto4"] - found["reference"]).abs().max() > 1e-4


def test_a_peer_that_does_not_work_here_says_why():
    with pytest.raises(GemkvError, match=r"quanto cache of 4 bits cannot be measured here: .*layer"):
        peer_cache(build("gemma3").config, "quanto", 4)


def test_windows():
    ids, targets = text.cut_windows(range(10, 20), [1], 4)
    assert ids.tolist() == [[1, 10, 11, 12], [1, 14, 15, 16]] and targets.tolist() == [
        [10, 11, 12, 13],
        [14, 15, 16, 17],
    ]
    ids, targets = text.cut_windows(range(10, 19), [], 4)
    assert ids.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]] and targets.tolist()[1] == [15, 16, 17, 18]
    assert text.cut_windows(range(3), [], 100)[0].tolist() == [[0, 1]]
    with pytest.raises(GemkvError, match="has 2 tokens; give at least 3"):
        text.cut_windows(range(2), [], 100)
    with pytest.raises(GemkvError, match="at least 2 tokens, got 1"):
        text.cut_windows(range(9), [], 1)
    assert [batch.prompt for batch in text.batches(*text.cut_windows(range(21), [], 10), [1, 3, 5], 3)] == [1, 3]
    every = list(text.batches(*text.cut_windows(range(41), [], 10), [1, 3], 3, every_prompt=True))
    assert [(len(batch.ids), batch.prompt) for batch in every] == [(3, 1), (1, 1), (3, 3), (1, 3)]
    assert every[1].decoded == 9
    with pytest.raises(GemkvError, match="prompt of 10 tokens does not fit"):
        list(text.batches(*text.cut_windows(range(41), [], 10), [10], 1))


class Words:
    """A tokenizer that knows whole words, with a begin token."""

    bos_token_id = 0

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True, verbose=True):
        words = [self.ids.setdefault(word, len(self.ids) + 1) for word in text.split()]
        return {"input_ids": [0, *words] if add_special_tokens else words}


def copier(ids, prompt_tokens):
    """A path that copies what followed the same five words before; under the format "lossy" it does not."""
    seen = ids[0].tolist()
    logits = torch.zeros(1, len(seen), 1000)
    for t in range(prompt_tokens, len(seen)):
        for past in range(5, t):
            if seen[past - 5 : past] == seen[t - 4 : t + 1]:
                logits[0, t, seen[past]] = 1
    logits = logits[:, prompt_tokens:]
    yield prompt_tokens, {"reference": logits, "lossy": torch.zeros_like(logits)}


def test_needles_are_found_by_copying_and_lost_without():
    words = Words()
    hay = words("one two three four five six seven " * 60, False)["input_ids"]
    contexts = list(needle.contexts(hay, [0], words, 400, 4, seed=1))
    assert len(contexts) == 2 and {len(context.ids) for context in contexts} == {400}
    for context in contexts:
        assert len(context.questions) == 10 and context.ids[0] == 0
        planted = context.ids[: context.prompt]
        for question in context.questions:
            assert context.ids[question.position + 1] == question.value and question.position >= context.prompt
            assert planted.count(question.value) == 1
            where = planted.index(question.value) / context.prompt
            assert abs(where - question.depth) < 0.2
    cells = measure_needles(copier, contexts, "cpu", lambda tokens: None)
    assert {(cell.found, cell.asked) for cell in cells if cell.format == "reference"} == {(4, 4)}
    assert found_in_all(cells, "lossy").value == 0 and found_in_all(cells, "reference").low > 0.8
    with pytest.raises(GemkvError, match="see --lengths"):
        list(needle.contexts(hay, [0], words, 100, 4, seed=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a byte tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    build("llama", num_hidden_layers=1).save_pretrained(path)
    letters = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(path)
    return path


def evaluate(folder, tmp_path, capsys, options):
    """Run the command on a short text; returns what it printed, and its JSON with rows by format and prompt."""
    (tmp_path / "text").write_text("A cat sat on the mat. " * 30)
    files = ["--text", str(tmp_path / "text"), "--json", str(tmp_path / "out" / "r.json")]
    assert main(["eval", str(folder), "--tokens", "310", "--needles", "0", *files, *options.split()]) == 0
    result = json.loads((tmp_path / "out" / "r.json").read_text())
    rows = {(row["format"], row["prompt"]): row for row in result["rows"]}
    return " ".join(capsys.readouterr().out.split()), result, rows


def test_the_command(folder, tmp_path, capsys):
    options = f"--windows 150 --prompts 2,8 --plots {tmp_path / 'plots'}"
    out, result, rows = evaluate(folder, tmp_path, capsys, options)
    assert "its 95% interval" in out and "Noise floor: 'bfloat16 rows'" in out and "too narrow" in out
    assert rows["int8", 2]["tokens"] == 148 and rows["int8", None]["tokens"] == 148 + 142
    assert rows["int8", None]["kl"]["low"] > 0 and rows["model", None]["kl"]["high"] < 1e-8
    assert result["about"]["path"] == "parallel" and [start for start, _ in result["curves"]["int8"]] == [0, 64, 128]
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"divergence.png", "positions.png"}


def test_the_command_through_the_compiled_model(folder, tmp_path, capsys):
    options = "--windows 70 --prompts 8 --formats int8 --path decode --inner eager"
    _, result, rows = evaluate(folder, tmp_path, capsys, options)
    assert (result["about"]["path"], result["about"]["inner"]) == ("decode", "eager")
    assert rows["int8", 8]["tokens"] == 4 * 62
    assert rows["int8", 8]["kl"]["low"] > 0


def test_mistakes_of_the_command(folder, capsys):
    assert main(["eval", str(folder), "--formats", "int3"]) == 1
    assert main(["eval", str(folder), "--device", "cuda:99"]) == 1
    assert main(["eval", "no/such"]) == 1
    assert (
        main(["eval", str(folder), "--tokens", "300", "--windows", "99", "--prompts", "8"]) == 1
    )  # letters are no one-token words
    errors = " ".join(capsys.readouterr().err.split())
    for words in ("--formats takes", "cannot be used here", "smollm2-135m", "use --needles 0"):
        assert words in errors
    with pytest.raises(SystemExit):
        main(["eval", str(folder), "--tokens", "many"])
