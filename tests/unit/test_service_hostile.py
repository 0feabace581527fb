"""Attacks on the service that succeeded once: of tenants, of strangers, and of an owner's bad luck."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from echo2_service.settings import Quotas
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


def test_requests_that_come_twice_at_once_are_one(service: Service) -> None:
    """Both waited for the measure of the disk, and the later one was an error of ours."""
    service.front.tariff.quotas = Quotas(quota_disk_gb={"ada": 1.0})
    session = service.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "echo2/tiny"}
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: service.post("create_model", body), range(4)))
        assert len({one["request_id"] for one in made}) == 1
        model = service.result(made[0])["model_id"]
        service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "x"}))
        copy, again = {"source_path": f"tinker://{model}/weights/x"}, {"x-idempotency-key": "k"}
        made = list(threads.map(lambda _: service.post("copy_weights", copy, headers=again), range(4)))
    assert len({one["tinker_path"] for one in made}) == 1
