"""What goes: checkpoints deleted in bulk, and what is kept for a time, however much of it there is."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sql

from echo2_service import limits
from echo2_service.front import cleaning
from echo2_service.front.database import Database, checkpoints, metadata, requests, sessions
from front_service import Service


def saved(service: Service, num: int, key: str = "") -> str:
    """A model with so many checkpoints of each kind, n1, n2, ..., a minute apart. Returns its id."""
    model = service.model(service.session(key), key=key)
    for number in range(1, num + 1):
        service.now += 60.0
        for kind, seq in (("save_weights", 2 * number - 1), ("save_weights_for_sampler", 2 * number)):
            body = {"model_id": model, "seq_id": seq, "path": f"n{number}"}
            service.result(service.post(kind, body, key), key)
    return model


def names(service: Service, model: str) -> list[str]:
    rows = service.database.select(checkpoints, "created", model=model)
    return sorted(f"{row.kind}/{row.name}" for row in rows)


def deleted(service: Service, **given: Any) -> int:
    return int(service.post("checkpoints/delete", given)["num_deleted"])


def test_checkpoints_are_deleted_by_path_run_age_and_all_but_the_newest(anywhere: Service) -> None:
    model, other = saved(anywhere, 4), saved(anywhere, 2)
    paths = [f"tinker://{model}/weights/n1", f"logits://{other}/sampler_weights/n1", f"tinker://{model}/weights/none"]
    assert deleted(anywhere, paths=paths) == 2
    assert deleted(anywhere, training_run_id=model, keep_newest=2) == 3
    assert names(anywhere, model) == ["sampler_weights/n3", "sampler_weights/n4", "weights/n3", "weights/n4"]
    assert deleted(anywhere, older_than_seconds=90.0, training_run_id=model) == 4
    assert names(anywhere, other) == ["sampler_weights/n2", "weights/n1", "weights/n2"]
    assert deleted(anywhere, older_than_seconds=30.0, keep_newest=1) == 1
    assert deleted(anywhere, older_than_seconds=0.0, keep_newest=0) == 0  # of this very moment
    anywhere.now += 1.0
    assert deleted(anywhere, older_than_seconds=0.0) == 2
    assert anywhere.database.count(checkpoints) == 0


def test_bulk_deletion_frees_the_disk_at_once_and_in_parts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGE_MAX", 2)
    model = saved(service, 4)
    before = service.get("usage")["disk_gb"]
    assert deleted(service, training_run_id=model) == 8
    assert service.get("usage")["disk_gb"] < before / 2


def test_a_tenant_deletes_only_its_own(service: Service) -> None:
    eve = service.api_keys.add_key("eve")
    model = saved(service, 2, eve)
    service.now += 1.0
    for given in (
        {"training_run_id": model},
        {"paths": [f"tinker://{model}/weights/n1"]},
        {"older_than_seconds": 0.0},
        {"keep_newest": 0},
    ):
        assert deleted(service, **given) == 0
    assert len(names(service, model)) == 4
    service.post("checkpoints/delete", {"keep_newest": 0}, service.api_keys.add_key("eve", ["sample"]), status=403)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"paths": None}, {"keep": 1}, {"keep_newest": -1}, {"older_than_seconds": -1}, {"paths": ["weights/n1"]}],
)
def test_an_unknown_name_deletes_nothing(service: Service, wrong: dict[str, Any]) -> None:
    model = saved(service, 1)
    service.post("checkpoints/delete", wrong, status=400)
    service.post("checkpoints/delete", {"paths": ["tinker://x/weights/y"] * (limits.PAGE_MAX + 1)}, status=400)
    assert len(names(service, model)) == 2


def test_many_deletions_at_once_look_at_the_disk_twice(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's command deletes one checkpoint a call, 32 calls at a time."""
    model, looks = saved(service, 8), []
    front = service.front
    look = front.cleaning._remove_leftovers

    async def counted(_: float = 0.0) -> None:
        looks.append(len(looks))
        await look()

    monkeypatch.setattr(front.cleaning, "_remove_leftovers", counted)

    async def delete_all() -> None:
        await asyncio.gather(*(front.cleaning.tidy("ada", service.now) for _ in range(8)))

    assert deleted(service, training_run_id=model) == 16
    looks.clear()
    service.in_front(delete_all)
    assert len(looks) <= 2


def test_a_database_of_an_earlier_version_gets_what_it_lacks(url: str) -> None:
    def lacks(database: Database) -> set[str]:
        inspector = sql.inspect(database._engine)
        tables = set(metadata.tables) - set(inspector.get_table_names())
        indexes = {
            str(index["name"]) for name in set(metadata.tables) - tables for index in inspector.get_indexes(name)
        }
        return tables | ({str(index.name) for table in metadata.tables.values() for index in table.indexes} - indexes)

    with closing(Database(url)) as database, database.transaction() as connection:
        for statement in ("DROP TABLE steps", "DROP TABLE spending", "DROP INDEX models_tenant"):
            connection.exec_driver_sql(statement)
    with closing(Database(url)) as database:
        assert lacks(database) == set()


def test_no_list_of_all_checkpoints_is_read_beside_the_requests(anywhere: Service) -> None:
    """A hundred thousand of them held up everybody for .7 seconds, every 10 seconds."""
    saved(anywhere, 1)
    read: dict[int, list[str]] = {}

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        read.setdefault(threading.get_ident(), []).append(statement)

    sql.event.listen(anywhere.front.database._engine, "before_cursor_execute", note)
    anywhere.sweep()
    of_all = [
        statement for statement in read[anywhere.in_front(threading.get_ident)] if "checkpoints.directory" in statement
    ]
    assert not [statement for statement in of_all if "WHERE" not in statement]
    assert any("checkpoints.directory" in statement for each in read.values() for statement in each)


def test_files_about_to_be_stored_are_not_deleted_as_leftovers(anywhere: Service) -> None:
    saved(anywhere, 1)
    storage = anywhere.front.work.storage
    directory = storage.directory("ada") / "adapter_new"
    storage.arriving.add(directory.name)
    directory.mkdir()
    for _ in range(2):
        anywhere.sweep()
    assert directory.exists()
    storage.arriving.discard(directory.name)
    anywhere.sweep()
    assert not directory.exists()
    assert len(list(storage.directory("ada").iterdir())) == 2


def test_more_live_sessions_than_a_statement_may_have_values_are_cleaned_up_after(
    anywhere: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty tenants may have as many."""
    rows = [{"id": f"s{n}", "tenant": f"t{n % 20}", "created": 1.0, "seen": 1.0} for n in range(70_000)]
    with anywhere.database.transaction() as connection:
        connection.execute(sessions.insert(), rows)
    anywhere.sweep()
    assert "cleaning up later" not in caplog.text
    assert anywhere.get("usage")["disk_gb"] >= 0.0


def test_answers_go_faster_than_they_can_come(anywhere: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key may make 100,000 calls a minute; there are six cleanups in that time."""
    monkeypatch.setattr(cleaning, "ROWS", 3)
    model = anywhere.model(anywhere.session())
    for number in range(1, 21):
        anywhere.result(anywhere.step(model, number))
    assert anywhere.database.count(requests) == 21
    anywhere.now += cleaning.KEPT_SECONDS + 1.0
    anywhere.sweep()
    assert anywhere.database.count(requests) == 0
