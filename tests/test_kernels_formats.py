"""The integer formats against a second implementation in numpy, and its promises as properties."""

import math

import numpy as np
import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gemkv_compile.kernels.formats import (
    dequantise_groups,
    dequantise_values,
    pack_codes,
    quantise_groups,
    quantise_values,
    spread_norms,
    unpack_codes,
)

NUMBERS = st.floats(-6e6, 6e6, width=32) | st.floats(-4, 4, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)
GROUPS = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 65), st.integers(1, 5)), elements=NUMBERS)
EVEN = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 65), st.sampled_from([2, 4, 6])), elements=NUMBERS
)
every_width = pytest.mark.parametrize("bits", [8, 6, 4])
FEWER = np.float32(16)  # codes of 4 bits reach 7 times the largest scale, not 127 times


@every_width
@settings(max_examples=200, deadline=None)
@given(x=GROUPS)
def test_error_is_at_most_half_a_scale(bits, x):
    x = torch.from_numpy(x if bits == 8 else x / FEWER)
    codes, scale, zero = quantise_groups(x, bits)
    error = (dequantise_groups(codes, scale, zero).double() - x.double()).abs()
    # Subtracting, dividing and adding round in float32, relative to numbers no larger than |x| + |zero|.
    rounding = 2.0**-23 * (x.double().abs() + zero.double().abs().unsqueeze(-2))
    assert (error <= scale.double().unsqueeze(-2) / 2 + rounding).all()


@every_width
@settings(max_examples=200, deadline=None)
@given(x=GROUPS)
def test_scale_is_the_smallest_that_reaches_every_number(bits, x):
    x = x if bits == 8 else x / FEWER
    codes, scale, zero = quantise_groups(torch.from_numpy(x), bits)
    largest = 2 ** (bits - 1) - 1
    reach = (torch.from_numpy(x) - zero.float().unsqueeze(-2)).abs().amax(-2).double()
    below = torch.from_numpy(np.nextafter(scale.numpy(), np.float16(0))).double()
    assert codes.abs().max() <= largest
    assert (reach <= largest * scale.double()).all()
    assert ((largest * below < reach) | ((reach == 0) & (scale == 1))).all()


@every_width
@settings(max_examples=200, deadline=None)
@given(x=GROUPS)
def test_equals_the_numpy_implementation(bits, x):
    for ours, theirs in zip(quantise_groups(torch.from_numpy(x), bits), cases.numpy_quantise(x, bits), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)


@settings(max_examples=200, deadline=None)
@given(EVEN)
def test_values_are_at_most_half_a_scale_off(x):
    x = x / FEWER
    codes, scale, norms = quantise_values(torch.from_numpy(x))
    x = torch.from_numpy(x).double()
    assert codes.abs().max() <= 7 and (norms > 0).all()
    error = (dequantise_values(codes, scale, norms).double() - x).abs()
    step = scale.double().unsqueeze(-2) * spread_norms(norms, x.shape[-1]).double()
    assert (error <= step / 2 + 2.0**-21 * x.abs()).all()


@settings(max_examples=200, deadline=None)
@given(EVEN)
def test_values_equal_the_numpy_implementation(x):
    x = x / FEWER
    for ours, theirs in zip(quantise_values(torch.from_numpy(x)), cases.numpy_quantise_values(x), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)


@every_width
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_codes_are_packed_and_back(bits, seed, fours):
    largest = 2 ** (bits - 1) - 1
    codes = torch.randint(
        -largest, largest + 1, (3, 4 * fours), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
    )
    stored = pack_codes(codes, bits)
    assert stored.dtype == torch.int8 and stored.shape[-1] == 4 * fours * bits // 8
    assert torch.equal(unpack_codes(stored, bits), codes)
    if bits == 4:  # channel d in the low nibble, d + half in the high one
        low, high = (codes.int() % 16).chunk(2, dim=1)
        assert torch.equal(stored.view(torch.uint8).int(), low + 16 * high)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("group", [1, 2, 63, 64])
def test_shapes_and_dtypes(dtype, group):
    x = cases.strided(cases.normal(2, 3, group, 16, dtype=dtype))
    codes, scale, zero = quantise_groups(x)
    assert (codes.shape, codes.dtype) == (x.shape, torch.int8)
    assert scale.shape == zero.shape == (2, 3, 16)
    assert scale.dtype == zero.dtype == torch.float16
    for ours, theirs in zip((codes, scale, zero), cases.numpy_quantise(x.float().numpy()), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    assert dequantise_groups(codes, scale, zero).dtype == torch.float32


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 65504.0])
def test_equal_numbers_are_exact(value):
    codes, scale, zero = quantise_groups(torch.full((64, 16), value))
    assert (scale == 1).all()
    assert (codes == 0).all()
    assert (dequantise_groups(codes, scale, zero) == value).all()


def test_values_of_zero_are_zero():
    codes, scale, norms = quantise_values(torch.zeros(64, 16))
    assert (codes == 0).all() and (scale == 1).all() and norms.isfinite().all()


@pytest.mark.parametrize("value", [1e-9, -1e-30, 0.1])
def test_equal_numbers_that_float16_does_not_hold(value):
    x = torch.full((64, 16), value)
    codes, scale, zero = quantise_groups(x)
    assert (scale > 0).all() and (scale < 1).all()
    assert ((dequantise_groups(codes, scale, zero) - x).abs() <= scale.float() / 2 + 1e-7 * abs(value)).all()


def keys_of_8_bits(x):
    return dequantise_groups(*quantise_groups(x))


def keys_of_4_bits(x):
    return dequantise_groups(*quantise_groups(x, 4))


def values_of_4_bits(x):
    return dequantise_values(*quantise_values(x))


there_and_back = pytest.mark.parametrize("back", [keys_of_8_bits, keys_of_4_bits, values_of_4_bits])


@there_and_back
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 63])
def test_non_finite_numbers_stay_non_finite(back, bad, place):
    x = cases.normal(2, 64, 4)
    x[0, place, 2] = bad
    result = back(x)
    assert not torch.isfinite(result[0, :, 2]).any()
    clean = torch.ones(2, 4, dtype=torch.bool)
    clean[0, 2] = False
    assert torch.isfinite(result.transpose(1, 2)[clean]).all()


@there_and_back
def test_both_infinities_stay_non_finite(back):
    x = torch.tensor([[math.inf], [-math.inf], [0.0]]).expand(3, 2)
    assert not torch.isfinite(back(x)).any()


@there_and_back
def test_a_range_beyond_float16_is_not_silently_clipped(back):
    x = torch.tensor([[-2e7, 1.0], [2e7, 2.0]])
    result = back(x)
    assert not torch.isfinite(result[:, 0]).any()
    assert torch.isfinite(result[:, 1]).all()
