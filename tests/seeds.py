"""Seeds of random worlds: a few at each commit, all of them in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(num_quick: int, num_all: int) -> list[Any]:
    """The numbers below `num_all` as parameters. Those from `num_quick` on are slow tests."""
    return [pytest.param(seed, marks=() if seed < num_quick else pytest.mark.slow) for seed in range(num_all)]
