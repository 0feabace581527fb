"""What lies on the service's disk, and when it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from echo2.service import app, dispatch
from echo2.service.database import models, sessions
from echo2.service.settings import Quotas
from front_service import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as made:
        yield made


def test_a_checkpoint_that_is_replaced_leaves_the_disk(service: Service) -> None:
    model = service.model(service.session())
    for number in (1, 2):
        body = {"model_id": model, "seq_id": number, "path": "last", "overwrite": True}
        service.result(service.post("save_weights", body))
    service.sweep()
    assert len(list((service.folder / "checkpoints").glob("req_*"))) == 1


def test_what_is_published_stays_as_long_as_a_sampler_or_a_checkpoint_names_it(service: Service) -> None:
    session, other = service.session(), service.session()
    model = service.model(session)
    save = {"model_id": model, "seq_id": 1, "path": "a"}
    path = service.result(service.post("save_weights_for_sampler", save))["path"]
    sampler = {"session_id": other, "sampling_session_seq_id": 0, "model_path": path}
    named = service.post("create_sampling_session", sampler)["sampling_session_id"]
    service.result(service.post("save_weights_for_sampler", {**save, "seq_id": 2, "path": None}))
    folder = service.folder / "checkpoints"

    def count() -> int:
        service.sweep()
        return len(list(folder.glob("req_*")))

    assert count() == 2
    headers = {"x-api-key": service.key}
    assert service.client.delete(f"/api/v1/training_runs/{model}/checkpoints/a", headers=headers).status_code == 204
    assert count() == 2
    service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
    assert count() == 1
    sample = {"sampling_session_id": named, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    assert service.result(service.post("asample", sample))["sequences"]
    service.post(f"sessions/{other}/finish", {"reason": {"type": "success"}}, status=204)
    assert count() == 0


def test_a_sample_that_is_open_keeps_the_weights_that_inflight_samplers_left(service: Service) -> None:
    model = service.model(service.session())
    save = {"model_id": model, "kind": "inflight"}
    first = service.post("save_weights_for_sampler", {**save, "seq_id": 1, "sampling_session_seq_id": 0})
    sampler = service.result(first)["sampling_session_id"]
    service.backend.gate.clear()
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    future = service.post("asample", sample)
    service.now += 1.0
    for number in (2, 3):
        service.result(
            service.post("save_weights_for_sampler", {**save, "seq_id": number, "sampling_session_seq_id": number})
        )
    service.sweep()
    assert len(list((service.folder / "checkpoints").glob("req_*"))) == 3
    service.in_front(service.backend.gate.set)
    assert service.result(future)["sequences"]
    service.sweep()
    assert [entry.name for entry in (service.folder / "checkpoints").glob("req_*")] == [
        Path(service.database.select(models)[0].inflight).name
    ]


def test_a_quota_of_disk_ends_saves_until_something_is_deleted(tmp_path: Path) -> None:
    service = Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", Quotas(quota_disk_gb={"ada": 1e-9}))
    try:
        model = service.model(service.session())
        saved = service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "first"}))
        assert service.get("usage")["disk_gb"] > 1e-9
        again = {"model_id": model, "seq_id": 2, "path": "second"}
        for path, body in (("save_weights", again), ("copy_weights", {"source_path": saved["path"]})):
            assert "are allowed. Delete some" in service.post(path, body, status=400)["detail"]
        adapter = service.client.post(
            "/api/v1/adapters?base_model=echo2/tiny&name=own", headers={"x-api-key": service.key}, content=b""
        )
        assert (adapter.status_code, "Delete some" in adapter.text) == (400, True)
        url_of = f"/api/v1/training_runs/{model}/checkpoints/weights/first"
        assert service.client.delete(url_of, headers={"x-api-key": service.key}).status_code == 204
        assert service.result(service.post("save_weights", again))["path"].endswith("/second")
    finally:
        service.close()


def test_adapters_that_only_samplers_name_count_until_their_session_ends(tmp_path: Path) -> None:
    quotas = Quotas(quota_disk_gb={"ada": 1e-9})
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", quotas)) as service:
        session, other = service.session(), service.session()
        model, kept = service.model(session), service.model(other)
        saved = service.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
        assert service.result(saved)["sampling_session_id"] == f"{session}:sample:0"
        assert service.get("usage")["disk_gb"] > 1e-9
        again = {"model_id": kept, "seq_id": 1, "path": "last"}
        assert "finish sessions" in service.post("save_weights", again, status=400)["detail"]
        service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
        assert service.get("usage")["disk_gb"] == 0.0
        assert service.result(service.post("save_weights", again))["path"].endswith("/last")


#: What keeps a request from being stored: a statement that fails, or only the commit (a reference to no key).
FULL = {
    "UPDATE": "CREATE TRIGGER full BEFORE UPDATE OF next_number ON models BEGIN SELECT RAISE(ABORT, 'full'); END",
    "COMMIT": "CREATE TRIGGER full AFTER INSERT ON requests BEGIN INSERT INTO refused VALUES ('none'); END",
}


def execute(service: Service, *statements: str) -> None:
    """These statements in the front's database."""

    def run() -> None:
        with service.front.database.transaction() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    service.in_front(run)


@pytest.mark.parametrize(("fails", "first"), [("UPDATE", 1), ("COMMIT", 1), ("COMMIT", 2)])
def test_what_the_database_does_not_store_is_not_in_memory_either(
    service: Service, fails: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "OPEN_MAX", 2)
    model = service.model(service.session())
    service.backend.gate.clear()

    def send(number: int) -> dict[str, str]:
        sent: dict[str, str] = service.train(model, 1, [1]) if number == 1 else service.step(model, 2)
        return sent

    refused = "CREATE TABLE refused (key VARCHAR REFERENCES keys (id) DEFERRABLE INITIALLY DEFERRED)"
    execute(service, "PRAGMA foreign_keys = ON", refused, FULL[fails])
    for _ in range(3):
        with pytest.raises(IntegrityError):
            send(first)
    execute(service, "DROP TRIGGER full")
    futures = [send(first), send(3 - first)]
    service.in_front(service.backend.gate.set)
    for future in futures:
        assert "metrics" in service.result(future)
    assert [call[0] for call in service.backend.calls] == ["create_model", "forward_backward", "optim_step"]


def test_the_cleanup_goes_on_once_the_database_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "SWEEP_SECONDS", 0.01)
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:
        service.session()
        execute(service, "ALTER TABLE sessions RENAME TO away")
        service.until(lambda: "cleaning up later" in caplog.text)
        execute(service, "ALTER TABLE away RENAME TO sessions")
        service.now += app.SILENCE_SECONDS + 1
        service.until(lambda: not service.front.database.count(sessions, finished=None))
