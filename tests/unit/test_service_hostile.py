"""Attacks on the service that succeeded once: of tenants, of strangers, and of an owner's bad luck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from front_service import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as made:
        yield made


@pytest.fixture
def anywhere(tmp_path: Path, url: str) -> Iterator[Service]:
    """With each kind of database."""
    with closing(Service(tmp_path, url)) as made:
        yield made


def test_a_refusal_that_no_database_can_store_leaves_nothing_under_way(anywhere: Service) -> None:
    """The bytes of such bodies counted for ever; three tenants could fill what all may have under way."""
    body = b'{"model_id": "a\\u0000", "seq_id": 1, "adam_params": 3, "more": "' + bytes([97]) * 100_000 + b'"}'
    for _ in range(3):
        anywhere.post("optim_step", body, status=400)
    assert anywhere.front.guard.traffic.num_bytes == 0
