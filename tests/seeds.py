"""Seeds of random worlds, examples of properties and pairs: a few at each commit, all of them in `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(num_all: int) -> settings:
    """Of a property that needs more of them than the profile has (`conftest.py`): a third at each commit."""
    return settings(max_examples=num_all if "HYPOTHESIS_PROFILE" in os.environ else num_all // 3)


def seeds(num_quick: int, num_all: int) -> list[Any]:
    """The numbers below `num_all` as parameters. Those from `num_quick` on are slow tests."""
    return [pytest.param(seed, marks=() if seed < num_quick else pytest.mark.slow) for seed in range(num_all)]


def pairs(left: Iterable[Any], right: Iterable[Any]) -> list[Any]:
    """Each of `left` with each of `right` as parameters. At a commit each of both has its turn, in as few pairs as that
    needs, for these are two questions; the other pairs are slow tests."""
    rows, columns = list(left), list(right)
    num = min(len(rows), len(columns))
    return [
        pytest.param(row, column, marks=() if (at - place) % num == 0 else pytest.mark.slow)
        for at, row in enumerate(rows)
        for place, column in enumerate(columns)
    ]
