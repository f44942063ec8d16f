"""Every way to write a mask that the reader knows, captured by Dynamo, and each operation that it must refuse."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from gemkv_compile.passes.masks.proof import MaskProof, Unproven
from gemkv_compile.passes.prove_masks import prove_mask

QUERIES, KEYS, PAST, BATCH = 5, 8, 3, 2
LOWEST = torch.finfo(torch.float32).min

MakeMask = Callable[..., torch.Tensor]


def verdict_of(make: MakeMask, *inputs: torch.Tensor) -> MaskProof | Unproven:
    """Capture an attention with the mask that `make` builds from `inputs`, and prove that mask."""
    found = []

    def backend(module: torch.fx.GraphModule, _: list) -> Callable:
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                mask = node.kwargs["attn_mask"]
                found.append(prove_mask(mask, is_causal=False, q_len=QUERIES, kv_len=KEYS, num_q_heads=2, batch=BATCH))
        return module.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def attend(query: torch.Tensor, key: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=make(*inputs))

    torch._dynamo.reset()
    attend(torch.zeros(BATCH, 2, QUERIES, 4), torch.zeros(BATCH, 2, KEYS, 4), *inputs)
    (verdict,) = found
    return verdict


def rows() -> torch.Tensor:
    return torch.arange(PAST, PAST + QUERIES)[:, None]


def columns() -> torch.Tensor:
    return torch.arange(KEYS)


def causal() -> torch.Tensor:
    return columns() <= rows()


CAUSAL: dict[str, MakeMask] = {
    "compare": causal,
    "compare_swapped": lambda: rows().ge(columns()[None, :]),
    "function": lambda: torch.less_equal(columns(), rows()),
    "strict": lambda: torch.lt(columns(), rows() + 1),
    "difference": lambda: rows() - columns() >= 0,
    "negative": lambda: -(rows() - columns()) <= 0,
    "rsub_mul": lambda: 2 * (columns() - 1) < 2 * rows(),
    "not": lambda: ~(columns() > rows()),
    "logical_not": lambda: torch.logical_not(torch.gt(columns(), rows())),
    "invert": lambda: (columns() > rows()).bitwise_not(),
    "tril": lambda: torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(diagonal=PAST),
    "tril_of_integers": lambda: torch.tril(torch.ones(QUERIES, KEYS, dtype=torch.int64), PAST) == 1,
    "tril_of_floats": lambda: torch.tril(torch.ones((QUERIES, KEYS)), PAST).bool(),
    "tril_cropped": lambda: torch.ones(KEYS, KEYS, dtype=torch.bool).tril()[PAST:, :],
    "tril_of_a_larger_one": lambda: (
        torch.ones(64, 64).tril().to(torch.bool)[None, None][:, :, PAST : PAST + QUERIES, :KEYS]
    ),
    "triu_inverted": lambda: torch.triu(torch.ones(QUERIES, KEYS), diagonal=PAST + 1) == 0,
    "new_ones": lambda: rows().new_ones((), dtype=torch.bool) & causal(),
    "full": lambda: torch.full((QUERIES, KEYS), True) & causal(),
    "full_like": lambda: torch.full_like(causal(), True).logical_and(causal()),
    "ones_like": lambda: torch.ones_like(causal()) & causal(),
    "or_nothing": lambda: torch.zeros(1, 1, dtype=torch.bool) | causal(),
    "logical_or": lambda: torch.logical_or(causal(), torch.zeros(QUERIES, KEYS)),
    "xor": lambda: (columns() > rows()) ^ torch.tensor(True),
    "product": lambda: causal() * torch.ones(KEYS, dtype=torch.bool),
    "absolute_of_a_positive": lambda: torch.abs(columns()) <= rows(),
    "where": lambda: torch.where(columns() > rows(), False, True),
    "where_method": lambda: causal().where(torch.tensor(True), torch.tensor(False)),
    "masked_fill": lambda: torch.ones(QUERIES, KEYS, dtype=torch.bool).masked_fill(columns() > rows(), False),
    "expand": lambda: causal().expand(BATCH, 1, -1, -1),
    "expand_as": lambda: causal()[None, None].expand_as(torch.empty(BATCH, 2, QUERIES, KEYS)),
    "view": lambda: causal().view(1, 1, QUERIES, KEYS),
    "reshape": lambda: causal().reshape(1, QUERIES, 1, KEYS).squeeze(2).unsqueeze(0),
    "flatten_of_ones": lambda: causal().unsqueeze(0).flatten(0, 1),
    "transpose": lambda: (columns()[:, None] <= rows()[:, 0]).transpose(0, 1),
    "permute": lambda: (columns()[:, None] <= rows()[:, 0])[None, None].permute(0, 1, 3, 2),
    "attribute": lambda: (columns()[:, None] <= rows()[:, 0]).T,
    "matrix_attribute": lambda: (columns()[:, None] <= rows()[:, 0])[None].mT,
    "ellipsis": lambda: causal()[None, ..., :],
    "select": lambda: (columns() <= rows() + torch.arange(3)[:, None, None]).select(0, 0),
    "integer_index": lambda: (columns() <= rows() + torch.arange(3)[:, None, None] - 2)[-1],
    "narrow": lambda: torch.ones(QUERIES, 30, dtype=torch.bool).tril(PAST).narrow(1, 0, KEYS),
    "step": lambda: torch.arange(0, 2 * KEYS)[None, ::2] <= 2 * rows(),
    "arange_step": lambda: torch.arange(0, 3 * KEYS, 3) < 3 * rows() + 3,
    "gather": lambda: torch.ones(64, 64, dtype=torch.bool).tril()[rows(), columns()],
    "int32": lambda: torch.arange(KEYS, dtype=torch.int32) <= rows().to(torch.int32),
    "contiguous": lambda: causal().contiguous().clone().detach().to("cpu").type(torch.bool),
    "floor_division": lambda: columns() <= (rows() * 4) // 4,
    "implied_bound": lambda: causal() & (columns() < KEYS) & (columns() <= rows() + 2) & (rows() >= 0),
    "implied_alternative": lambda: causal() | (columns() > KEYS),
    "shared_by_both": lambda: torch.where(columns() > 2, causal(), causal() & (columns() < KEYS)),
    "one_or_its_opposite": lambda: causal() & ((columns() > rows() - 2) | (columns() <= rows() - 2)),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_spelling(name: str) -> None:
    verdict = verdict_of(CAUSAL[name])
    assert isinstance(verdict, MaskProof), verdict
    assert (verdict.causal, verdict.window, verdict.padding) == (True, None, None)
    assert str(verdict.predicate) == "kv <= q + 3"


ADDITIVE: dict[str, MakeMask] = {
    "where": lambda: torch.where(causal(), 0.0, LOWEST),
    "where_of_tensors": lambda: torch.where(causal(), torch.tensor(0.0), torch.tensor(LOWEST)),
    "infinity": lambda: torch.where(causal(), torch.zeros(()), float("-inf")),
    "masked_fill": lambda: torch.zeros(QUERIES, KEYS).masked_fill(~causal(), LOWEST),
    "full_triu": lambda: torch.full((QUERIES, KEYS), float("-inf")).triu(diagonal=PAST + 1),
    "product": lambda: (1.0 - causal().float()) * LOWEST,
    "product_of_integers": lambda: (1 - causal().long()) * LOWEST,
    "sum_of_two": lambda: torch.where(causal(), 0.0, LOWEST) + torch.where(causal(), 0.0, LOWEST),
    "filled_twice": lambda: torch.where(causal(), 0.0, LOWEST).masked_fill(columns() > rows(), float("-inf")),
    "to_lower_precision": lambda: torch.where(causal(), 0.0, LOWEST).to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("name", ADDITIVE)
def test_additive_spelling(name: str) -> None:
    verdict = verdict_of(ADDITIVE[name])
    assert isinstance(verdict, MaskProof), verdict
    assert (verdict.causal, verdict.window, verdict.padding) == (True, None, None)


WINDOWED: dict[str, MakeMask] = {
    "greater": lambda: causal() & (columns() > rows() - 3),
    "greater_equal": lambda: causal() & (columns() >= rows() - 2),
    "distance": lambda: causal().logical_and(rows() - columns() < 3),
    "absolute": lambda: causal() & ((columns() - rows()).abs() < 3),
    "triu": lambda: causal() & torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(PAST - 2),
    "additive": lambda: torch.where(causal(), 0.0, LOWEST) + torch.where(columns() > rows() - 3, 0.0, LOWEST),
    "filled": lambda: torch.where(causal(), 0.0, LOWEST).masked_fill(columns() <= rows() - 3, LOWEST),
    "the_smaller_of_two": lambda: causal() & (columns() > rows() - 3) & (columns() > rows() - 4),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_window_spelling(name: str) -> None:
    verdict = verdict_of(WINDOWED[name])
    assert isinstance(verdict, MaskProof), verdict
    assert (verdict.causal, verdict.window, verdict.padding) == (True, 3, None)
    assert str(verdict.predicate) == "(kv > q) & (kv <= q + 3)"


def batch_rows() -> torch.Tensor:
    return torch.arange(BATCH)[:, None, None, None]


PADDED: dict[str, tuple[int, MakeMask]] = {
    "broadcast": (0, lambda pad: pad[:, None, None, :KEYS].bool() & causal()),
    "gather": (0, lambda pad: pad.to(torch.bool)[batch_rows(), columns()] & causal()),
    "gather_shifted": (2, lambda pad: pad.bool()[batch_rows(), columns() + 2] & causal()),
    "method_ne": (0, lambda pad: pad.ne(0)[:, None, None, 0:KEYS] & causal()),
    "operator_ne": (0, lambda pad: (pad[:, :KEYS] != 0)[:, None, None] & causal()),
    "not_zero": (0, lambda pad: ~(pad[:, None, None, :KEYS] == 0) & causal()),
    "last_columns": (2, lambda pad: pad[:, -KEYS:].bool()[:, None, None] & causal()),
    "from_three": (
        1,
        lambda pad: pad.bool()[:, 1 : KEYS + 1].view(BATCH, 1, 1, KEYS).expand(-1, -1, QUERIES, -1) & causal(),
    ),
    "additive": (0, lambda pad: torch.where(causal() & pad[:, None, None, :KEYS].bool(), 0.0, LOWEST)),
    "logical_and": (0, lambda pad: torch.logical_and(causal(), pad[:, None, None, :KEYS])),
    "twice": (0, lambda pad: pad[:, None, None, :KEYS].bool() & causal() & pad.bool()[batch_rows(), columns()]),
}


OTHER_DTYPES = [(name, dtype) for name in ("gather", "additive") for dtype in (torch.bool, torch.uint8, torch.int32)]


@pytest.mark.parametrize(("name", "dtype"), [(name, torch.int64) for name in PADDED] + OTHER_DTYPES)
def test_padding_spelling(name: str, dtype: torch.dtype) -> None:
    column, make = PADDED[name]
    verdict = verdict_of(make, torch.ones(BATCH, KEYS + 2, dtype=dtype))
    assert isinstance(verdict, MaskProof), verdict
    assert (verdict.causal, verdict.window) == (True, None)
    assert verdict.padding is not None
    assert verdict.padding.source.op == "placeholder"
    assert verdict.padding.column == column


UNKNOWN: dict[str, tuple[str, MakeMask]] = {
    "an operation": (r"goes through `cumsum` \(at cumsum\)", lambda: causal() & (columns().cumsum(0) > 2)),
    "a float arange": ("floating-point arange", lambda: torch.arange(KEYS, dtype=torch.float32) <= rows()),
    "rounding": ("converts the integers .* to torch.float32", lambda: columns().float() <= rows()),
    "wrapping": ("converts the integers .* to torch.int8", lambda: columns().to(torch.int8) <= rows()),
    "overflow": ("may overflow", lambda: columns() <= rows() + 2**62),
    "a negative index": ("may be negative", lambda pad: pad[batch_rows(), columns() - 1] & causal()),
    "a reshape": (r"is reshaped from \(40,\)", lambda: torch.arange(40).view(QUERIES, KEYS) > 0),
    "alpha": ("calls `add` in a form", lambda: columns() <= torch.add(rows(), 1, alpha=2)),
    "bits": ("combines the bits of integers", lambda: (columns() & 1) <= rows()),
    "a list": ("holds a list of constants", lambda: torch.tensor([True] * KEYS) & causal()),
    "NaN": ("computes NaN", lambda: (1.0 - causal().float()) * float("-inf")),
    "bytes": ("reinterprets the bytes", lambda: causal().to(torch.uint8).view(torch.bool)),
    "mixed index": ("by tensors and by slices at once", lambda: causal()[:, columns()]),
    "selected index": ("as a number of its own", lambda: torch.where(rows() > 4, columns(), 0) <= rows()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_operation_is_named(name: str) -> None:
    text, make = UNKNOWN[name]
    inputs = [torch.ones(BATCH, KEYS, dtype=torch.bool)] if make.__code__.co_argcount else []
    verdict = verdict_of(make, *inputs)
    assert isinstance(verdict, Unproven), verdict
    assert verdict.reason == "mask_unknown_op"
    assert re.search(text, verdict.sentence), verdict.sentence


def _nested() -> torch.Tensor:
    mask = causal()
    for step in range(12):
        mask = mask ^ (columns() > rows() + step)
    return mask


def _deep() -> torch.Tensor:
    position = columns()
    for _ in range(100):
        position = position + 1
    return position <= rows() + 100


@pytest.mark.parametrize(("make", "text"), [(_nested, "formula of more than 256 terms"), (_deep, "64 operations")])
def test_a_mask_that_grows_too_large_is_refused(make: MakeMask, text: str) -> None:
    verdict = verdict_of(make)
    assert isinstance(verdict, Unproven), verdict
    assert verdict.reason == "mask_unknown_op" and text in verdict.sentence


def _filled() -> torch.Tensor:
    mask = causal()
    mask[:, 0] = True
    return mask


def _filled_through_a_view() -> torch.Tensor:
    mask = causal()
    mask.view(-1)[0:2].fill_(False)
    return mask


def _filled_padding(pad: torch.Tensor) -> torch.Tensor:
    pad[:, 0] = 1
    return pad[:, None, None, :].bool() & causal()


def _added_in_place() -> torch.Tensor:
    position = torch.arange(KEYS)
    position += 1
    return position <= rows()


def _with_output() -> torch.Tensor:
    mask = torch.empty(QUERIES, KEYS, dtype=torch.bool)
    torch.le(columns(), rows(), out=mask)
    return mask


@pytest.mark.parametrize("make", [_filled, _filled_through_a_view, _filled_padding, _added_in_place, _with_output])
def test_a_write_in_place_is_refused(make: MakeMask) -> None:
    inputs = [torch.ones(BATCH, KEYS, dtype=torch.int64)] if make.__code__.co_argcount else []
    verdict = verdict_of(make, *inputs)
    assert isinstance(verdict, Unproven), verdict
    assert verdict.reason == "mask_unknown_op"


def test_a_write_into_another_tensor_does_not_matter() -> None:
    def make(pad: torch.Tensor) -> torch.Tensor:
        other = torch.zeros(BATCH, KEYS)
        other[:, 0] = 1
        other.add_(pad)
        return causal()

    assert isinstance(verdict_of(make, torch.ones(BATCH, KEYS)), MaskProof)
