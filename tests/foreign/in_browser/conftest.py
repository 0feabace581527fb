"""A real browser. Where there is none, its tests are skipped and say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import view_cases
from browser_page import CHROMIUM, DRIVER, Page, chromium, view_of
from echo2.config.rundir import RunDir


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """Chromium without a window. What its console says is kept."""
    pytest.importorskip("selenium", reason="selenium is not installed: `make test-foreign` installs it")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium with its driver here: apt install chromium chromium-driver")
    made = chromium()
    yield made
    made.quit()


@pytest.fixture(scope="module")
def rundirs(tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    folder = tmp_path_factory.mktemp("runs")
    return [view_cases.make_run(folder / name, num_steps) for name, num_steps in (("sorting", 120), ("sums", 90))]


@pytest.fixture(scope="module")
def served(rundirs: list[RunDir]) -> Iterator[str]:
    """The address that `echo2 view` prints for the runs."""
    with view_of(*(rundir.path for rundir in rundirs)) as address:
        yield address


@pytest.fixture
def page(driver: Any, served: str) -> Page:
    return Page(driver, served)
