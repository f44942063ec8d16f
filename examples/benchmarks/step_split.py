"""Where the time of a decode step goes: kernels by kind, gaps between them, and Python by whose it is.

    python step_split.py [--models gemma3-4b,gemma1-7b] [--batches 1,8] [--tokens 32768] [--steps 24]

The shapes of end_to_end.py, each model in a process of its own. The cache is made of random rows, so no prompt is
run: two traces and one inner compile a batch size. Then, over one cache that goes on growing:

* "generate": from one call of the model to the next, with nothing in between but `generate` itself; and once more with
  a wait for the device after each call, which tells its loop from that wait.
* "call": the model called with what `generate` gave it, and a wait for the device.

Of a call, "package" is from the executable's call to its return, the launch of the recorded step included, and "dynamo"
the rest: its guards, what it writes back, and what Transformers does around `forward`. "graph" is the recorded step on
the device, by events around it; "kernels" are sums of a profile of steps. All are medians in milliseconds. Without a
GPU there are no kernels, the widths are tiny, and the replay does nothing: only Python is measured then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from device_work import kernels_by_kind, kernels_of, replays_timed
from end_to_end import MODELS
from harness import save

import gemkv_compile
from gemkv_compile.runtime import recording
from gemkv_compile.runtime.executable import Executable

PROFILED_STEPS = 5
WARM_UP = 6  # steps: traces, the inner compile, the recording
LIMIT_S = 560  # of one process


class Clock:
    """Times the calls of a compiled model, and in each what the package takes; keeps what the last call was given."""

    def __init__(self, model: Any) -> None:
        self.began: list[float] = []
        self.model: list[float] = []
        self.package: list[float] = []
        self.given: dict[str, Any] = {}
        compiled, call = model._compiled_call_impl, Executable.__call__

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.given = kwargs
            self.package.append(0.0)
            self.began.append(time.perf_counter())
            result = compiled(*args, **kwargs)
            self.model.append(time.perf_counter() - self.began[-1])
            return result

        def timed_executable(executable: Executable, *args: Any) -> Any:
            began = time.perf_counter()
            results = call(executable, *args)
            self.package[-1] += time.perf_counter() - began
            return results

        model._compiled_call_impl = timed
        Executable.__call__ = timed_executable  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget what was timed."""
        for times in (self.began, self.model, self.package):
            times.clear()

    def split(self, first: int) -> dict[str, float]:
        """Medians of the calls from `first` on, milliseconds."""
        package = self.package[first:]
        dynamo = [whole - own for whole, own in zip(self.model[first:], package, strict=True)]
        return {"package_ms": median_ms(package), "dynamo_ms": median_ms(dynamo)}


class Waits:
    """A logits processor that waits for the device, and notes how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seconds.append(wait())
        return scores


def wait() -> float:
    """Wait for the device; returns how long that took."""
    began = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def random_cache(model: Any, batch: int, tokens: int, device: str) -> Any:
    """A DynamicCache of that many tokens, of which a sliding layer keeps what its window needs.

    All layers and sequences show the same random rows, so that they take little memory before they are in pages.
    """
    from transformers import DynamicCache

    config = model.config
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    rows = [torch.randn(shape, device=device) for _ in range(2)]
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        kept = min(tokens, layer.sliding_window - 1) if layer.is_sliding else tokens
        keys, values = (part[:, :, :kept].expand(batch, -1, -1, -1) for part in rows)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = tokens
    return cache


class Subject:
    """A compiled model with a cache, and what is done with it.

    Args:
        name: Of the model.
        model, clock: Compiled by `gemkv_compile.compile`, and its clock.
        steps: How many are measured each time.
    """

    def __init__(self, name: str, model: Any, clock: Clock, batch: int, tokens: int, steps: int, device: str) -> None:
        self.clock = clock
        self._model, self._steps, self._batch, self._device = model, steps, batch, device
        self._about = {"model": name, "batch": batch, "tokens": tokens, "steps": steps, "device": device}
        self._cache = random_cache(model, batch, tokens, device)

    def measure(self) -> Iterator[dict[str, Any]]:
        """The rows of "generate" and "call"."""
        began = time.perf_counter()
        self.generate(WARM_UP)
        warm_up = {"warm_up_s": round(time.perf_counter() - began, 1)}
        self.generate(self._steps + 2)
        periods = [after - before for before, after in itertools.pairwise(self.clock.began[1:])]
        waits = Waits()
        self.generate(self._steps + 2, logits_processor=[waits])
        steps = zip(itertools.pairwise(self.clock.began[1:]), self.clock.model[1:], waits.seconds[1:], strict=False)
        around = [after - before - call - waited for (before, after), call, waited in steps]
        row = self._about | warm_up | {"call": "generate", "step_ms": median_ms(periods)}
        yield row | self.clock.split(1) | {"wait_ms": median_ms(waits.seconds[1:]), "loop_ms": median_ms(around)}
        yield self._about | {"call": "call"} | self._bare_calls() | self._device_work()

    def generate(self, new: int, **options: Any) -> None:
        """`generate` over the cache; its first call takes one token, as all later ones do."""
        length = self._cache.get_seq_length() + 1
        ids = torch.randint(5, 100, (self._batch, length), device=self._device)
        wait()
        self.clock.clear()
        with torch.no_grad():
            self._model.generate(
                ids,
                past_key_values=self._cache,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                **options,
            )
        wait()

    def calls(self, count: int, do: Callable[[Callable[[], Any]], Any]) -> None:
        """Calls of the model with what `generate` gives it; `do` makes each of them."""
        given = dict(self.clock.given)
        for _ in range(count):
            if (mask := given.get("attention_mask")) is not None:
                given["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            for name in ("position_ids", "cache_position"):
                if given.get(name) is not None:
                    given[name] = given[name] + 1
            with torch.no_grad():
                do(lambda: self._model(**given))
        self.clock.given = given

    def _bare_calls(self) -> dict[str, float]:
        waits: list[float] = []
        periods: list[float] = []

        def timed(call: Callable[[], Any]) -> None:
            began = time.perf_counter()
            call()
            waits.append(wait())
            periods.append(time.perf_counter() - began)

        wait()
        self.clock.clear()
        self.calls(self._steps + 1, timed)
        row = {"step_ms": median_ms(periods[1:]), "wait_ms": median_ms(waits[1:]), "loop_ms": None}
        return row | self.clock.split(1)

    def _device_work(self) -> dict[str, Any]:
        """What a step does on a GPU: milliseconds of the recorded step, and of its kernels by kind."""
        if not torch.cuda.is_available():
            return {}
        from torch.profiler import ProfilerActivity, profile

        with replays_timed() as pairs:
            self.calls(self._steps, lambda call: (call(), wait()))
        row: dict[str, Any] = {"graph_ms": statistics.median(first.elapsed_time(last) for first, last in pairs)}
        profiles: list[list[tuple[str, float]]] = []

        def profiled(call: Callable[[], Any]) -> None:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                call()
                wait()
            profiles.append(kernels_of(seen))

        self.calls(PROFILED_STEPS, profiled)
        return row | kernels_by_kind(profiles[1:])


def tiny(name: str) -> Any:
    """The layers of a model with tiny widths."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GemmaConfig, GemmaForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 131072}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    if name == "gemma3-4b":
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, num_hidden_layers=34, sliding_window=1024))
    return GemmaForCausalLM(GemmaConfig(**sizes, **heads, num_hidden_layers=28))


def child(name: str, batches: list[int], tokens: int, steps: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one model, compiled with these options."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if device == "cuda":
        torch.set_default_dtype(torch.bfloat16)
    else:
        from step_overhead import Nothing

        recording.RECORDERS["cpu"] = Nothing
    with torch.device(device):
        model = (MODELS[name]() if device == "cuda" else tiny(name)).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    gemkv_compile.compile(model, strict=True, cuda_graphs=True, **options)
    rows: list[dict[str, Any]] = []
    clock = Clock(model)
    for batch in batches:
        torch._dynamo.reset()  # a second batch size would be dynamic
        rows += [options | row for row in Subject(name, model, clock, batch, tokens, steps, device).measure()]
        print(rows[-2:], flush=True)
    said = [line for graph in gemkv_compile.report_of(model).graphs for line in graph.cuda_graphs]
    assert all(f"captured for {batch} sequences" in said for batch in batches), said
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--options", default="{}", help='of gemkv_compile.compile, as JSON: {"split_layers": true}')
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, out = arguments.child
        batches, options = [int(each) for each in arguments.batches.split(",")], json.loads(arguments.options)
        rows = child(name, batches, arguments.tokens, arguments.steps, options)
        Path(out).write_text(json.dumps(rows))
        return
    rows = []
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            shape = [f"--{key}={getattr(arguments, key)}" for key in ("batches", "tokens", "steps", "options")]
            command = [sys.executable, __file__, "--child", name, str(out), *shape]
            subprocess.run(command, check=True, timeout=LIMIT_S)
            rows += json.loads(out.read_text())
    print(f"saved to {save('step_split', rows)}")


if __name__ == "__main__":
    main()
