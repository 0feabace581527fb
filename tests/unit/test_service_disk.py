"""What lies on the service's disk, and when it leaves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.exc import IntegrityError

from echo2_service import limits
from echo2_service.front import app
from echo2_service.front.cleaning import SILENCE_SECONDS
from echo2_service.front.database import TIDIED, models, requests, sessions
from echo2_service.settings import Quotas
from front_service import Service


def test_a_checkpoint_that_is_replaced_leaves_the_disk(service: Service) -> None:
    model = service.model(service.session())
    for number in (1, 2):
        body = {"model_id": model, "seq_id": number, "path": "last", "overwrite": True}
        service.result(service.post("save_weights", body))
    service.sweep()
    assert len(list((service.folder / "checkpoints").rglob("req_*"))) == 1


def test_published_weights_stay_while_a_sampler_or_checkpoint_names_them(service: Service) -> None:
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
        return len(list(folder.rglob("req_*")))

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
    assert len(list((service.folder / "checkpoints").rglob("req_*"))) == 3
    service.in_front(service.backend.gate.set)
    assert service.result(future)["sequences"]
    service.sweep()
    assert [entry.name for entry in (service.folder / "checkpoints").rglob("req_*")] == [
        Path(service.database.select(models)[0].inflight).name
    ]


#: A row and a file take some kB each.
SMALL = Quotas(quota_disk_gb={"ada": 40e-6})


def failed(service: Service, future: dict[str, str]) -> str:
    return str(service.result(future)["error"])


def test_a_quota_of_disk_ends_saves_until_something_is_deleted_and_never_training(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", SMALL)) as service:
        model, paths = service.model(service.session()), []
        for number in range(1, 20):
            save = {"model_id": model, "seq_id": number, "path": f"n{number}"}
            done = service.result(service.post("save_weights", save))
            if "error" in done:
                break
            paths.append(done["path"])
        assert "allowed; the last tenth is for training. Delete checkpoints" in done["error"]
        assert 1 < len(paths) < 10
        assert 0.7 * 40e-6 < service.get("usage")["disk_gb"] <= 40e-6
        trained = [service.train(model, number + 1, [1]), service.step(model, number + 2)]
        assert ["metrics" in service.result(future) for future in trained] == [True, True]
        assert "allowed" in service.post("copy_weights", {"source_path": paths[0]}, status=400)["detail"]
        adapter = service.client.post(
            "/api/v1/adapters?base_model=echo2/tiny&name=own", headers={"x-api-key": service.key}, content=b""
        )
        assert (adapter.status_code, "Delete" in adapter.text) == (400, True)
        for name in ("n1", "n2"):
            url_of = f"/api/v1/training_runs/{model}/checkpoints/weights/{name}"
            assert service.client.delete(url_of, headers={"x-api-key": service.key}).status_code == 204
        again = {"model_id": model, "seq_id": number + 3, "path": "last"}
        assert service.result(service.post("save_weights", again))["path"].endswith("/last")


def test_adapters_that_only_samplers_name_count_until_their_session_ends(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", SMALL)) as service:
        session, other = service.session(), service.session()
        model, kept = service.model(session), service.model(other)
        for number in range(1, 20):
            save = {"model_id": model, "seq_id": number, "sampling_session_seq_id": number}
            done = service.result(service.post("save_weights_for_sampler", save))
            if "error" in done:
                break
        again = {"model_id": kept, "seq_id": 1, "path": "last"}
        assert "finish sessions" in failed(service, service.post("save_weights", again))
        service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
        assert service.get("usage")["disk_gb"] < 0.7 * 40e-6
        assert service.result(service.post("save_weights", {**again, "seq_id": 2}))["path"].endswith("/last")


def test_a_save_larger_than_the_remaining_quota_is_deleted(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", SMALL)) as service:
        model = service.model(service.session())
        service.backend.more_bytes = 40_000
        assert "allowed" in failed(service, service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
        assert list((service.folder / "checkpoints").rglob("req_*")) == []
        assert service.get("checkpoints")["checkpoints"] == []
        service.backend.more_bytes = 0
        assert "path" in service.result(service.post("save_weights", {"model_id": model, "seq_id": 2, "path": "a"}))


def test_a_finished_session_makes_room_for_another(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is kept for a day. A program that opens a session for each of its jobs had no other one after 4,096."""
    for name, most in {"SESSIONS_MAX": 1, "MODELS_MAX": 1, "ENDED_MAX": 3}.items():
        monkeypatch.setattr(limits, name, most)
    for number in range(3):
        session = service.session()
        model = service.model(session)
        error = service.post("create_session", {"type": "create_session"}, status=400)
        assert ("you have 1 sessions" if number < 2 else "you have 3 sessions, those that ended") in error["detail"]
        service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
        service.until(lambda: service.database.count(sessions, seen=TIDIED) == number + 1)  # noqa: B023  # called here
        assert service.backend.deleted[-1] == model
    error = service.post("create_session", {"type": "create_session"}, status=400)
    assert "those that ended within a day included" in error["detail"]


def test_models_leave_the_disk_when_their_session_is_finished_or_long_silent(service: Service) -> None:
    session, silent, live = (service.session() for _ in range(3))
    finished, forgotten, used = (service.model(one) for one in (session, silent, live))
    service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
    service.until(lambda: service.backend.deleted == [finished])
    service.now += SILENCE_SECONDS - 1
    service.post("session_heartbeat", {"session_id": live})
    service.now += 2
    service.sweep()
    assert service.backend.deleted == [finished], "a client that was asleep may come back"
    for _ in range(49):
        service.now += SILENCE_SECONDS - 1
        service.post("session_heartbeat", {"session_id": live})
        service.sweep()
    service.until(lambda: service.backend.deleted == [finished, forgotten])
    service.sweep()
    service.sweep()
    assert service.get("sessions")["sessions"] == [live]
    assert [run["training_run_id"] for run in service.get("training_runs")["training_runs"]] == [used]
    assert "metrics" in service.result(service.train(used, 1, [1]))


def test_a_copy_is_charged_to_its_owner_and_not_to_the_owner_of_the_original(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", SMALL)) as service:
        service.backend.more_bytes = 10_000
        model, eve = service.model(service.session()), service.api_keys.add_key("eve")
        path = service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
        service.post(f"training_runs/{model}/checkpoints/weights/a/publish", status=204)
        service.post("copy_weights", {"source_path": path}, key=eve)
        before = service.get("usage")["disk_gb"]
        assert service.get("usage", key=eve)["disk_gb"] > 10e-6
        url_of = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
        assert service.client.delete(url_of, headers={"x-api-key": service.key}).status_code == 204
        assert service.get("usage")["disk_gb"] < before - 10e-6
        assert service.get("usage", key=eve)["disk_gb"] > 10e-6


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
def test_rejected_writes_are_not_kept_in_memory(
    service: Service, fails: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OPEN_MAX", 2)
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
        service.now += SILENCE_SECONDS + 1
        service.until(lambda: not service.front.database.count(sessions, finished=None))


def test_a_part_of_the_cleanup_that_fails_keeps_nothing_else_from_being_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "SWEEP_SECONDS", 0.01)
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:
        model = service.model(service.session())
        save = {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 60}
        service.result(service.post("save_weights", save))
        (tmp_path / "checkpoints").rename(tmp_path / "away")
        service.until(lambda: "cleaning up later" in caplog.text)
        assert "FileNotFoundError" in caplog.text
        service.now += SILENCE_SECONDS + 1
        service.until(lambda: not service.front.database.count(sessions, finished=None))
        (tmp_path / "away").rename(tmp_path / "checkpoints")
        service.until(lambda: not list((tmp_path / "checkpoints").rglob("req_*")))


def test_sessions_that_are_over_leave_no_tasks_behind(service: Service) -> None:
    def num_tasks() -> int:
        return len(service.in_front(asyncio.all_tasks))

    before = 0
    for _ in range(30):
        session = service.session()
        model = service.model(session)
        assert "metrics" in service.result(service.step(model, 1))
        service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
        service.until(lambda: service.backend.deleted[-1:] == [model])  # noqa: B023  # waited for here
        before = before or num_tasks()
    service.until(lambda: len(asyncio.all_tasks()) <= before + 1)


def test_an_outcome_that_cannot_be_stored_fails_its_request_and_no_other(service: Service) -> None:
    model = service.model(service.session())
    execute(
        service,
        "CREATE TRIGGER odd BEFORE UPDATE OF state ON requests WHEN NEW.state = 'done' AND NEW.number IN (1, 3) "
        "BEGIN SELECT RAISE(ABORT, 'odd'); END",
    )
    futures = [service.step(model, number) for number in (1, 2, 3, 4)]
    outcomes = [service.result(future) for future in futures]
    assert ["metrics" in outcome for outcome in outcomes] == [False, True, False, True]
    assert "its log says more" in outcomes[0]["error"]


@contextmanager
def noted_statements() -> Iterator[list[str]]:
    """What is asked of databases meanwhile."""
    statements: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        statements.append(statement)

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", note)


def test_bodies_are_read_when_they_come_and_not_again(service: Service) -> None:
    """Megabytes had been read from the store three times, and parsed as often."""
    session = service.session()
    model = service.model(session)
    with noted_statements() as statements:
        assert "metrics" in service.result(service.train(model, 1, [1, 2, 3]))
        assert "99" in service.result(service.train(model, 2, [99]))["error"]
        assert "metrics" in service.result(service.step(model, 3))
        path = service.result(service.post("save_weights", {"model_id": model, "seq_id": 4, "path": "a"}))["path"]
        service.result(service.post("load_weights", {"model_id": model, "seq_id": 5, "path": path}))
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        named = service.post("create_sampling_session", sampler)["sampling_session_id"]
        sample = {"sampling_session_id": named, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1] * 20_000}]}}
        error = str(service.post("asample", sample, status=400))
        assert "The prompt has 20000 tokens" in error, "also what is read in a thread is refused at once"
        sample["prompt"] = {"chunks": [{"tokens": [1]}]}
        assert service.result(service.post("asample", sample))["sequences"]
    assert not [one for one in statements if re.search(r"SELECT[^(]*requests\.body\b", one)]
    service.backend.gate.clear()
    futures = [service.train(model, 6, [1]), service.step(model, 7), service.train(model, 8, [1])]
    service.end()
    service.backend.gate = asyncio.Event()
    service.backend.gate.set()
    service.begin(service.backend)
    assert all("metrics" in service.result(future) for future in futures), "after a start, from the store"


def test_neither_the_cleanup_nor_a_start_loads_bodies_or_answers(service: Service) -> None:
    """They may be megabytes each, and thousands."""
    model = service.model(service.session())
    for number in (1, 2):
        service.result(service.step(model, number))
    held = service.train(model, 4, [1])
    service.end()
    with noted_statements() as statements:
        service.begin(service.backend)
        service.now += 86401.0
        service.sweep()
    assert "never came" in service.result(held)["error"]
    read = [one.partition(" FROM ")[0] for one in statements if one.startswith("SELECT") and "FROM requests" in one]
    assert len(read) > 5
    assert not [one for one in read if re.search(r"(?<!length\()requests\.(body|answer)", one) and "arrival" not in one]
    whole = [one for one in statements if one.startswith("SELECT") and "requests.arrival, " in one]
    assert len(whole) <= 2, "one row at a time, of a request whose turn comes"
    assert service.database.count(requests) == 1


def test_a_clock_that_steps_ends_no_session_and_fails_no_request_that_waits(service: Service) -> None:
    slow = service.api_keys.add_key("ada", per_minute=10)
    session = service.session()
    model = service.model(session)
    held = service.train(model, 2, [1])
    service.post("telemetry", key=slow)
    for seconds in (SILENCE_SECONDS + 1, -3 * SILENCE_SECONDS, SILENCE_SECONDS):
        service.step_clock(seconds)
        service.sweep()
        service.post("session_heartbeat", {"session_id": session})
        service.post("telemetry", key=slow)
    assert "metrics" in service.result(service.train(model, 1, [1]))
    assert "metrics" in service.result(held)
    service.now += SILENCE_SECONDS + 1
    service.sweep()
    service.post("session_heartbeat", {"session_id": session}, status=410)


def test_sessions_do_not_end_because_the_service_was_away(service: Service) -> None:
    session = service.session()
    service.end()
    service.now += SILENCE_SECONDS + 1
    service.begin()
    service.sweep()
    service.post("session_heartbeat", {"session_id": session})
    service.now += SILENCE_SECONDS - 1
    service.sweep()
    service.post("session_heartbeat", {"session_id": session})
    service.now += SILENCE_SECONDS + 1
    service.sweep()
    service.post("session_heartbeat", {"session_id": session}, status=410)


def test_answers_of_a_tenant_without_room_make_room_after_ten_minutes(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", SMALL)) as service:
        model = service.model(service.session())
        number = 1
        while "error" not in service.result(service.post("save_weights", {"model_id": model, "seq_id": number})):
            number += 1
            service.result(service.train(model, number, [1] * 500))
            number += 1
        service.now += 601.0
        service.sweep()
        assert "path" in service.result(service.post("save_weights", {"model_id": model, "seq_id": number + 1}))
