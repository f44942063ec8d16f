"""Which cases of a test every run has, and which `make test-slow` adds."""

import pytest


def tiers(fast, slow):
    """Cases for `parametrize`, all in one list; a case is a tuple of values."""
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]
