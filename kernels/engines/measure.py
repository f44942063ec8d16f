"""Timing the engines that do a class of prompts, beside this package's kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.benchmark import Timer as Clock

from gemkv_compile.compat import outside_fake_mode
from gemkv_compile.kernels.engines.calling import call, random_prompt
from gemkv_compile.kernels.engines.choice import forget_choices, usable_engines
from gemkv_compile.kernels.engines.engine import OWN, Place, Prompt
from gemkv_compile.kernels.engines.times import bucket_of, save_times

log = logging.getLogger(__name__)
KV_HEADS, MEASURED_S = 4, 0.2
Timer = Callable[[Callable[[], Any], torch.device], float]


def median_us(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call, microseconds, after one that is not counted."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        run()
        clock = Clock("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        return 1e6 * float(clock.blocked_autorange(min_run_time=MEASURED_S).median)


def measure(
    prompt: Prompt, tokens: int, device: torch.device, kv_heads: int = KV_HEADS, timer: Timer = median_us
) -> dict[str, float]:
    """Time a class of prompts at the bucket of a length, and keep the times for later choices.

    Args:
        kv_heads: K/V heads of the one random prompt that is timed.
    Returns:
        Microseconds by engine; an engine that fails is left out, with a line in the log.
    Raises:
        torch.OutOfMemoryError: the prompt does not fit.
    """
    bucket, prompt = bucket_of(tokens), prompt.at(tokens)
    us: dict[str, float] = {}
    with outside_fake_mode(), torch.inference_mode(False), torch.no_grad():
        q, k, v = random_prompt(prompt, kv_heads, bucket, device)
        scale = prompt.head_dim**-0.5
        for name in (OWN, *usable_engines(prompt, device)):
            try:
                us[name] = timer(lambda name=name: call(name, q, k, v, scale, prompt), device)  # type: ignore[misc]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                log.warning("gemkv: %s could not be timed for %s: %s", name, prompt, error)
    save_times(prompt, bucket, us, Place.of(device))
    forget_choices()
    return us
