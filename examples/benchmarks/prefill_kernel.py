"""Attention of a prompt on a GPU, TFLOPS, beside FlashAttention-2, cuDNN, FlexAttention and FlashAttention-3 in bf16.

    python prefill_kernel.py [--quick] [--jobs 8] [--sweep | --append | --int8]

Causal; ours is `attend_chunk` over an empty cache, by the plain kernel and, on a Hopper GPU, by the Hopper kernel
(gemkv_hopper, with the launch of the plain one that finds no past). Operations are counted once for each pair of a
query and a key that it sees: 4 * head_dim. The error is the largest of the last 256 queries against float64, over the
largest number there. Medians; FlashAttention-3 if `fa3_fwd_interface` is installed.

--sweep times the Hopper kernel alone, with every candidate of tiles, heads packed and not, and as many programs as
there are multiprocessors or tiles, beside FlashAttention-3; best first, to results/prefill_sweep.json. With --jobs so
many processes first compile what is timed.

--append times instead what another engine's prompt pays for the cache: `append_kv` of all its tokens, quantised and
written to pages, both launches inside a CUDA graph with the caches flushed before, beside FlashAttention-3's time (or
cuDNN's) for the same prompt; to results/prefill_append.json. Its bytes are those of keys, values and what is stored.

--int8 times the kernel with int8 scores (the launches that quantise keys included) beside the plain kernel and
FlashAttention-3, with their errors; to results/prefill_int8.json.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import graph_us, median_us, save
from torch.nn.attention import SDPBackend, sdpa_kernel

from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.attend_chunk.kernel import attend_chunk_triton
from gemkv_compile.kernels.attend_chunk.kernel_int8 import attend_int8_triton
from gemkv_compile.kernels.engines import int8
from gemkv_compile.kernels.layout import PageLayout

SHAPES = [  # batch, query heads, K/V heads, head size, tokens, window
    (1, 32, 8, 128, 8192, None),
    (1, 32, 8, 128, 32768, None),
    (1, 16, 8, 256, 8192, None),
    (1, 8, 4, 256, 32768, None),
    (4, 4, 1, 256, 8192, None),
    (1, 8, 4, 256, 32768, 1024),
    (1, 8, 4, 512, 8192, None),
]
APPENDED = [  # the same, of prompts that are appended
    (1, 32, 8, 128, 4096, None),
    (1, 32, 8, 128, 32768, None),
    (1, 8, 4, 256, 4096, None),
    (1, 8, 4, 256, 32768, None),
]
APPENDED_FORMATS = ("int8", "int4")
INT8 = [shape for shape in SHAPES if shape[3] in int8.HEAD_DIMS and shape[0] == 1]
CHECKED = 256  # queries


def visible_pairs(tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    window = min(window or tokens, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window


def measure(shape: tuple[int, int, int, int, int, int | None], scores_in_int8: bool = False) -> dict[str, Any]:
    """One row: TFLOPS by kernel, and errors; of few kernels, the one with int8 scores among them, if asked for."""
    batch, q_heads, heads, dim, tokens, window = shape
    q, k, v = inputs(shape)
    flops = 4 * dim * batch * q_heads * visible_pairs(tokens, window)
    row: dict[str, Any] = {"batch": batch, "q_heads": q_heads, "kv_heads": heads, "head_dim": dim, "tokens": tokens}
    row["window"], exact = window, exact_tail(q, k, v, window)
    runs = {**peers(q, k, v, window, not scores_in_int8), "gemkv": ours(q, k, v, window, "plain")}
    if torch.cuda.get_device_capability() == (9, 0):
        runs["gemkv_hopper"] = ours(q, k, v, window, "hopper")
    if scores_in_int8:
        runs = {name: run for name, run in runs.items() if name in ("fa3", "gemkv")}
        runs["gemkv_int8"] = lambda: attend_int8_triton(q, k, v, None, dim**-0.5, None, True, window)[0]
    for name, run in runs.items():
        time_one(row, name, run, exact, flops)
    return row


def time_one(row: dict[str, Any], name: str, run: Any, exact: torch.Tensor, flops: int) -> None:
    """Add a kernel's microseconds, TFLOPS and error to a row, or why it failed."""
    try:
        error = (run()[:, :, -CHECKED:].double() - exact).abs().max() / exact.abs().max()
        row[f"{name}_us"] = median_us(run)
    except Exception as failure:
        row[f"{name}_failed"] = f"{type(failure).__name__}: {failure}"[:120]
        return
    row[f"{name}_tflops"], row[f"{name}_error"] = flops / row[f"{name}_us"] / 1e6, error.item()


def compile_one(shape: tuple[int, int, int, int, int, int | None], tiles: Any, pack: int | None) -> None:
    """Run the Hopper kernel once, so that Triton's cache has it; what fails here fails again where it is timed."""
    from gemkv_compile.kernels.attend_chunk import kernel_hopper as hopper

    q, k, v = inputs(shape)
    lengths = torch.zeros(shape[0], dtype=torch.int32, device="cuda")
    with contextlib.suppress(Exception):
        hopper.attend_chunk_hopper(q, k, v, lengths, lengths, shape[3] ** -0.5, None, True, shape[5], tiles, pack, None)


def compile_all(shapes: list[tuple[int, int, int, int, int, int | None]], jobs: int, candidates: bool) -> None:
    """Compile the Hopper kernel for every shape, as it is used or every candidate, side by side."""
    from gemkv_compile.kernels.attend_chunk import kernel_hopper as hopper

    cases: list[tuple[Any, Any, int | None]] = [(shape, None, None) for shape in shapes]
    if candidates:
        cases = [
            (shape, tiles, pack)
            for shape in shapes
            for tiles in hopper.CANDIDATES.get(shape[3], ())
            for pack in sorted({1, hopper.packed_heads(*shape[1:3])})
        ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pool.starmap(compile_one, cases, chunksize=1)


def sweep(shape: tuple[int, int, int, int, int, int | None]) -> list[dict[str, Any]]:
    """A row for each way to run the Hopper kernel on a shape, the fastest first, with FlashAttention-3's figures."""
    from gemkv_compile.kernels.attend_chunk import kernel_hopper as hopper

    batch, q_heads, heads, dim, tokens, window = shape
    q, k, v = inputs(shape)
    flops = 4 * dim * batch * q_heads * visible_pairs(tokens, window)
    exact, theirs, rows = exact_tail(q, k, v, window), {}, []
    if (fa3 := peers(q, k, v, window).get("fa3")) is not None:
        time_one(theirs, "fa3", fa3, exact, flops)
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    rules = lengths, lengths, dim**-0.5, None, True, window
    for tiles in hopper.CANDIDATES.get(dim, ()):
        for pack in sorted({1, hopper.packed_heads(q_heads, heads)}):
            for programs in (None, 1 << 30):
                row = {"shape": shape, "tiles": tiles, "pack": pack, "persistent": programs is None, **theirs}
                options = tiles, pack, programs
                run = lambda options=options: hopper.attend_chunk_hopper(q, k, v, *rules, *options)[0]  # noqa: E731
                time_one(row, "hopper", run, exact, flops)
                rows.append(row)
    return sorted(rows, key=lambda row: row.get("hopper_us", float("inf")))


def append(shape: tuple[int, int, int, int, int, int | None]) -> dict[str, Any]:
    """A row: microseconds of another engine's attention and of the append, by format, and the ratio of the two."""
    batch, q_heads, heads, dim, tokens, window = shape
    q, k, v = inputs(shape)
    row: dict[str, Any] = {"batch": batch, "q_heads": q_heads, "kv_heads": heads, "head_dim": dim, "tokens": tokens}
    engines = peers(q, k, v, window, compiled=False)
    row["attention"] = "fa3" if "fa3" in engines else "cudnn"
    row["attention_us"] = median_us(engines[row["attention"]])
    for kv_format in APPENDED_FORMATS:
        layout = PageLayout(heads, dim, 256, 64, kv_format, k.dtype)
        pages = torch.empty(batch * tokens // 256, layout.page_bytes, dtype=torch.uint8, device="cuda")
        table = (pages.data_ptr() + torch.arange(len(pages), device="cuda") * layout.page_bytes).view(batch, -1)
        lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
        tail = torch.zeros(batch, 2, heads, layout.tail_rows, dim, dtype=k.dtype, device="cuda")
        state = k, v, table, lengths, tail, layout
        row[f"{kv_format}_us"] = us = graph_us(lambda state=state: append_kv_triton(*state))  # type: ignore[misc]
        row[f"{kv_format}_share"] = us / row["attention_us"]
        row[f"{kv_format}_gb_per_s"] = (k.nbytes + v.nbytes + pages.nbytes) / 1e3 / us
    return row


def inputs(shape: tuple[int, int, int, int, int, int | None]) -> list[torch.Tensor]:
    """q, k and v of a shape, [B, H, S, D] views of [B, S, H, D] memory, bf16."""
    batch, q_heads, heads, dim, tokens, _ = shape
    counts = q_heads, heads, heads
    made = (torch.randn(batch, tokens, count, dim, dtype=torch.bfloat16, device="cuda") for count in counts)
    return [x.transpose(1, 2) for x in made]


def exact_tail(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of the last queries in float64, [B, Hq, 256, D]."""
    tokens = q.shape[2]
    query = torch.arange(tokens - CHECKED, tokens, device=q.device)[:, None]
    key = torch.arange(tokens, device=q.device)[None]
    seen = (key <= query) & (key > query - (window or tokens))
    rows = (x.double() for x in (q[:, :, -CHECKED:], k, v))
    return F.scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, variant: str) -> Any:
    batch, heads, _, dim = k.shape
    layout = PageLayout(heads, dim, 256, 64, "int8", torch.bfloat16)
    table = torch.zeros(batch, 0, dtype=torch.int64, device="cuda")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    tail = torch.zeros(batch, 2, heads, 64, dim, dtype=torch.bfloat16, device="cuda")
    rules = None, None, None, dim**-0.5, None, True, window
    return lambda: attend_chunk_triton(q, k, v, table, lengths, lengths, tail, *rules, layout, variant)[0]


def peers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, compiled: bool = True
) -> dict[str, Any]:
    def sdpa(backend: SDPBackend) -> Any:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run

    found: dict[str, Any] = {}
    if window is None:
        found = {"fa2": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    if compiled:
        found["flex"] = flex(q, k, v, window)
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return found
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    sizes = (-1, -1) if window is None else (window - 1, 0)
    found["fa3"] = lambda: first(flash_attn_func(*rows, causal=True, window_size=sizes)).transpose(1, 2)
    return found


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = q.shape[2]
    reach = window or tokens

    def rule(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < reach)

    mask = create_block_mask(rule, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def first(result: Any) -> torch.Tensor:
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def main() -> None:
    if not torch.cuda.is_available():
        print("prefill_kernel needs a GPU: left out")
        return
    rows: list[dict[str, Any]] = []
    jobs = int(sys.argv[sys.argv.index("--jobs") + 1]) if "--jobs" in sys.argv else 0
    for option, name, shapes, row_of in (
        ("--append", "prefill_append", APPENDED, append),
        ("--int8", "prefill_int8", INT8, partial(measure, scores_in_int8=True)),
    ):
        if option in sys.argv:
            for shape in shapes:
                rows.append(row_of(shape))
                print({key: round(x, 5) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
            save(name, rows)
            return
    if "--sweep" in sys.argv:
        shapes = SHAPES[:1] + SHAPES[3:6] if "--quick" in sys.argv else SHAPES
        if jobs:
            compile_all(shapes, jobs, True)
        for shape in shapes:
            rows += (found := sweep(shape))
            for row in found:
                print({key: round(x, 5) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
        save("prefill_sweep", rows)
        return
    shapes = SHAPES[:1] + SHAPES[3:4] if "--quick" in sys.argv else SHAPES
    if jobs and torch.cuda.get_device_capability() == (9, 0):
        compile_all(shapes, jobs, False)
    for shape in shapes:
        torch._dynamo.reset()
        rows.append(measure(shape))
        torch.cuda.empty_cache()
        print({key: round(x, 5) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
    save("prefill_kernel", rows)


if __name__ == "__main__":
    main()
