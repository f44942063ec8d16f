"""Which engine attends to a prompt: asked for by name, or the fastest of those that do its class exactly."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from gemkv_compile.kernels.engines.calling import trial
from gemkv_compile.kernels.engines.engine import OWN, Engine, Place, Prompt
from gemkv_compile.kernels.engines.registry import AUTO, ENGINES, exact_engines
from gemkv_compile.kernels.engines.times import Known, bucket_of, known_times


@dataclass(frozen=True)
class Choice:
    """An engine's name, and why it is taken."""

    engine: str
    why: str


def choose(option: str, prompt: Prompt, tokens: int, device: torch.device) -> Choice:
    """The engine for a prompt of `tokens` tokens; nothing is timed here, and a class's engines are tried out once.

    Args:
        option: The option `prefill`: "auto", "triton", or an engine that is there.
    """
    return _choose(option, prompt.at(tokens), bucket_of(tokens), device)


@functools.cache
def _choose(option: str, prompt: Prompt, bucket: int, device: torch.device) -> Choice:
    if option == OWN:
        return Choice(OWN, "asked for")
    if option != AUTO:
        why = reason_against(ENGINES[option], prompt, device)
        return Choice(option, "asked for") if why is None else Choice(OWN, f"{option} was asked for: {why}")
    usable = usable_engines(prompt, device)
    if not usable:
        return Choice(OWN, "no other engine that is there does this exactly")
    known = known_times(prompt, bucket, Place.of(device))
    times = {} if known is None else {name: us for name, us in known.us.items() if name in (*usable, OWN)}
    if known is None or OWN not in times:
        return Choice(OWN, "no times are known for this length; gemkv tune measures them")
    best = min(times, key=lambda name: times[name])
    return Choice(best, _compared(known, times, best))


def reason_against(engine: Engine, prompt: Prompt, device: torch.device) -> str | None:
    """Why an engine does not do a class of prompts on a device as exactly as it claims; None if it does."""
    if device.type not in engine.kinds:
        return f"it does not run on a {device.type} device"
    return engine.missing() or engine.refuses(prompt, Place.of(device)) or trial(engine, prompt, device)


def usable_engines(prompt: Prompt, device: torch.device) -> tuple[str, ...]:
    """Names of the engines that do a class exactly on a device."""
    return tuple(name for name in exact_engines() if reason_against(ENGINES[name], prompt, device) is None)


def forget_choices() -> None:
    """Choose anew: times or engines have changed."""
    _choose.cache_clear()
    trial.cache_clear()


def _compared(known: Known, times: dict[str, float], best: str) -> str:
    """The times in words, the best first."""
    order = sorted(times, key=lambda name: times[name])
    texts = ", ".join(f"{name} {times[name]:.0f}" for name in order)
    heads = f"{known.prompt.groups} query heads a K/V head"
    window = "" if known.prompt.window is None else f", window {known.prompt.window}"
    return f"{texts} us at {known.tokens} tokens, {heads}{window}; {known.source}"
