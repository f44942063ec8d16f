"""Engines for prompts on a GPU: each that is there, against float64 and in generate."""

import pytest
import torch
from tiny_models import build, prompt

import gemkv_compile
from gemkv_compile.kernels.engines.calling import call, random_prompt, trial
from gemkv_compile.kernels.engines.choice import choose, forget_choices, reason_against
from gemkv_compile.kernels.engines.engine import OWN, Place, Prompt
from gemkv_compile.kernels.engines.measure import measure
from gemkv_compile.kernels.engines.registry import ENGINES
from gemkv_compile.kernels.engines.times import known_times

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RULES = [dict(), dict(causal=False), dict(window=100), dict(softcap=20.0)]


def of(dtype=torch.bfloat16, head_dim=128, groups=2, causal=True, window=None, softcap=None):
    return Prompt(dtype, head_dim, groups, causal, window, softcap)


def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_gives_our_kernels_results(name, dtype, head_dim, rules):
    """Over odd lengths; an engine that does not do it says why."""
    which = of(dtype, head_dim, **rules)
    why = reason_against(ENGINES[name], which, device())
    if why is not None:
        pytest.skip(why)
    for tokens in (33, 517):
        q, k, v = random_prompt(which, 2, tokens, device())
        outs = [call(each, q, k, v, head_dim**-0.5, which.at(tokens)) for each in (name, OWN)]
        rough = ENGINES[name].error * outs[1].abs().max().item()
        torch.testing.assert_close(*outs, rtol=2e-2, atol=max(2e-2, rough))
        assert outs[0].transpose(1, 2).is_contiguous()


def test_cudnn_is_there():
    """PyTorch brings it: heads of 128 channels on any GPU that we support, of 256 on Hopper."""
    assert trial(ENGINES["cudnn"], of(), device()) is None
    if torch.cuda.get_device_capability() == (9, 0):
        assert reason_against(ENGINES["cudnn"], of(head_dim=256), device()) is None


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", ENGINES)
def test_generate_with_an_engine(name, inner):
    """Tokens that a random model has no reason to choose differently, in bfloat16; logits of the prompt within it."""
    if ENGINES[name].missing() or reason_against(ENGINES[name], of(head_dim=64), device()):
        pytest.skip(str(ENGINES[name].missing() or reason_against(ENGINES[name], of(head_dim=64), device())))
    plain = build("llama", head_dim=64, dtype=torch.bfloat16).cuda()
    model = build("llama", head_dim=64, dtype=torch.bfloat16).cuda()
    gemkv_compile.compile(model, kv_format="model", inner=inner, strict=True, prefill=name)
    for tokens in (40, 75, 140):
        ids = prompt(2, tokens).cuda()
        with torch.no_grad():
            allowed = 5e-2 + ENGINES[name].error
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=5e-2, atol=allowed)
    (choice,) = gemkv_compile.report_of(model).graphs[0].engines
    assert choice.engine == name


def test_auto_measures_once_and_takes_the_fastest(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path))
    forget_choices()
    us = measure(of(head_dim=64), 2048, device())
    assert set(us) >= {OWN} and all(time > 0 for time in us.values())
    assert known_times(of(head_dim=64), 2048, Place.of(device())).us == us
    assert choose("auto", of(head_dim=64), 2048, device()).engine == min(us, key=us.get)
    forget_choices()


def test_choosing_waits_for_nothing_once_it_is_known():
    """After the trial a prompt's operator reads nothing from the device."""
    which, (q, k, v) = of(), random_prompt(of(), 2, 512, device())
    choose("cudnn", which, 512, device())
    call("cudnn", q, k, v, 0.1, which)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        name = choose("cudnn", which, 512, device()).engine
        call(name, q, k, v, 0.1, which)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert name == "cudnn"
