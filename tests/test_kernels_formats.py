"""The integer format against a second implementation in numpy, and its promises as properties."""

import math

import numpy as np
import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gemkv_compile.kernels.formats import dequantise_groups, quantise_groups

NUMBERS = st.floats(-6e6, 6e6, width=32) | st.floats(-4, 4, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)
GROUPS = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 65), st.integers(1, 5)), elements=NUMBERS)


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_error_is_at_most_half_a_scale(x):
    x = torch.from_numpy(x)
    codes, scale, zero = quantise_groups(x)
    error = (dequantise_groups(codes, scale, zero).double() - x.double()).abs()
    # Subtracting, dividing and adding round in float32, relative to numbers no larger than |x| + |zero|.
    rounding = 2.0**-23 * (x.double().abs() + zero.double().abs().unsqueeze(-2))
    assert (error <= scale.double().unsqueeze(-2) / 2 + rounding).all()


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_scale_is_the_smallest_that_reaches_every_number(x):
    codes, scale, zero = quantise_groups(torch.from_numpy(x))
    reach = (torch.from_numpy(x) - zero.float().unsqueeze(-2)).abs().amax(-2).double()
    below = torch.from_numpy(np.nextafter(scale.numpy(), np.float16(0))).double()
    assert codes.abs().max() <= 127
    assert (reach <= 127 * scale.double()).all()
    assert ((127 * below < reach) | ((reach == 0) & (scale == 1))).all()


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_equals_the_numpy_implementation(x):
    for ours, theirs in zip(quantise_groups(torch.from_numpy(x)), cases.numpy_quantise(x), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)


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


@pytest.mark.parametrize("value", [1e-9, -1e-30, 0.1])
def test_equal_numbers_that_float16_does_not_hold(value):
    x = torch.full((64, 16), value)
    codes, scale, zero = quantise_groups(x)
    assert (scale > 0).all() and (scale < 1).all()
    assert ((dequantise_groups(codes, scale, zero) - x).abs() <= scale.float() / 2 + 1e-7 * abs(value)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 63])
def test_non_finite_numbers_stay_non_finite(bad, place):
    x = cases.normal(2, 64, 4)
    x[0, place, 2] = bad
    result = dequantise_groups(*quantise_groups(x))
    assert not torch.isfinite(result[0, :, 2]).any()
    clean = torch.ones(2, 4, dtype=torch.bool)
    clean[0, 2] = False
    assert torch.isfinite(result.transpose(1, 2)[clean]).all()


def test_both_infinities_stay_non_finite():
    x = torch.tensor([[math.inf], [-math.inf], [0.0]])
    assert not torch.isfinite(dequantise_groups(*quantise_groups(x))).any()


def test_a_range_beyond_float16_is_not_silently_clipped():
    x = torch.tensor([[-2e7, 1.0], [2e7, 2.0]])
    result = dequantise_groups(*quantise_groups(x))
    assert not torch.isfinite(result[:, 0]).any()
    assert torch.isfinite(result[:, 1]).all()
