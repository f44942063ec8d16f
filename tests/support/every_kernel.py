"""Every kernel once on a GPU, with mixed head sizes, formats and rules: what compute-sanitizer watches."""

import paged_cases as cases
import torch
from triton_devices import to_device

from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.attend_chunk.kernel import attend_chunk_triton
from gemkv_compile.kernels.attend_chunk.kernel_int8 import attend_int8_triton
from gemkv_compile.kernels.attend_pages.kernel import attend_pages_triton
from gemkv_compile.kernels.attention_shares.kernel import attention_shares_triton
from gemkv_compile.kernels.engines import int8
from gemkv_compile.kernels.layout import KV_FORMATS
from gemkv_compile.kernels.linears.kernel import linears_triton
from gemkv_compile.kernels.qk_norm_rope.kernel import qk_norm_rope_triton

# Format, head size, K/V heads, query heads of each. Compiling is most of the time, so each format has one head size;
# packed codes have sizes that are no power of two, whose masks they need most.
CASES = [
    ("model", 64, 2, 4),
    ("k6v4", 80, 3, 2),
    ("int4", 96, 2, 3),
    ("k8v4", 256, 2, 2),
    ("int8", 512, 1, 1),
]
LENGTHS = [130, 63, 127]  # a token more completes the second sequence's first group, which guards keep, and the third's
CHUNKS = (1, 70)


def main():
    assert {case[0] for case in CASES} == set(KV_FORMATS)
    batch = len(LENGTHS)
    for kv_format, head_dim, heads, groups in CASES:
        cache = cases.PagedCache(batch, heads, head_dim, 64, 64, kv_format, torch.bfloat16, 4).fill(LENGTHS)
        table, lengths, starts, tail = to_device(cache, "cuda")
        padding = torch.ones(batch, 300, dtype=torch.bool, device="cuda")
        padding[:, :5] = False
        for q_len in CHUNKS:
            k, v = (cases.normal(batch, heads, q_len, head_dim, dtype=torch.bfloat16).cuda() for _ in range(2))
            q = cases.normal(batch, heads * groups, q_len, head_dim, dtype=torch.bfloat16).cuda()
            state = table, lengths, starts, tail, padding, None, None, 0.1
            attend_chunk_triton(q, k, v, *state, None, True, 100, cache.layout)
            append_kv_triton(k, v, table, lengths, tail, cache.layout)
            attend_pages_triton(q[:, :, :1], *state, 30.0, 100, cache.layout)
            if head_dim in int8.HEAD_DIMS:
                attend_int8_triton(q, k, v, padding, 0.1, 30.0, True, 100)
        assert lengths.tolist() == [length + sum(CHUNKS) for length in LENGTHS]
        equal = cases.PagedCache(2, heads, head_dim, 128, 64, kv_format, torch.bfloat16, 4).fill([210, 210])
        table, _, starts, tail = to_device(equal, "cuda")
        positions, rules = torch.arange(200, 210, device="cuda"), (padding[:2], 0.1, 30.0, 190, 210, equal.layout)
        q = cases.normal(2, heads * groups, 10, head_dim, dtype=torch.bfloat16).cuda()
        attention_shares_triton(q, positions, table, starts, tail, *rules)
    for rows in (1, 3):
        weights = [cases.normal(width, 192, dtype=torch.bfloat16).cuda() for width in (33, 7, 64)]
        linears_triton(cases.normal(rows, 192, dtype=torch.bfloat16).cuda(), weights, [])
    for head_dim, rotary, norm in ((64, 64, "rounded_weight"), (96, 24, "weight"), (256, 256, "one_plus_weight")):
        q, k, v = (cases.normal(3, heads, 1, head_dim, dtype=torch.bfloat16).cuda() for heads in (5, 2, 2))
        weight = torch.ones(head_dim, dtype=torch.bfloat16, device="cuda")
        cos = cases.normal(3, 1, 1, rotary, dtype=torch.bfloat16).cuda()
        qk_norm_rope_triton(q, k, v if norm == "weight" else None, weight, weight, cos, cos, norm, 1e-6)
    torch.cuda.synchronize()
    print("every kernel ran")


def hopper_prefill():
    """The Hopper prefill kernel, and the plain one that adds the past to its results."""
    for head_dim in (64, 128, 256):
        cache = cases.PagedCache(2, 2, head_dim, 64, 64, "int8", torch.bfloat16, 4).fill([130, 63])
        state = *to_device(cache, "cuda"), None, None, None, 0.1
        k, v = (cases.normal(2, 2, 70, head_dim, dtype=torch.bfloat16).cuda() for _ in range(2))
        q = cases.normal(2, 4, 70, head_dim, dtype=torch.bfloat16).cuda()
        attend_chunk_triton(q, k, v, *state, None, True, 100, cache.layout, variant="hopper")
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
