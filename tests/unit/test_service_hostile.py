"""Attacks on the service that succeeded once: of tenants, of strangers, and of an owner's bad luck."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sql

from echo2_service.front import account
from echo2_service.front.database import TIDIED, Database, checkpoints, sessions
from echo2_service.front.request_guard import SCOPES
from echo2_service.settings import Quotas
from front_service import Service
from one_row_backend import OneRowBackend


def test_an_unstorable_refusal_leaves_no_request_open(anywhere: Service) -> None:
    """The bytes of such bodies counted for ever; three tenants could fill what all may have under way."""
    body = b'{"model_id": "a\\u0000", "seq_id": 1, "adam_params": 3, "more": "' + bytes([97]) * 100_000 + b'"}'
    for _ in range(3):
        anywhere.post("optim_step", body, status=400)
    assert anywhere.front.guard.traffic.num_bytes == 0


@pytest.mark.parametrize("depth", [200, 960, 985])
def test_deep_bodies_are_the_clients_mistake(service: Service, depth: int) -> None:
    """They were read, and then could not be written: an error of ours, which SDKs send again."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    service.post("create_session", b'{"user_metadata": %s}' % deep, status=400)
    filler = b" " * (32 << 10)  # read in a thread, whose stack is short
    chat = b'{"model": "echo2/tiny", "messages": [{"role": "user", "content": "x", "y": %s}]%s}' % (deep, filler)
    url, headers = "/oai/api/v1/chat/completions", {"x-api-key": service.key}
    answer = service.client.post(url, content=chat, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed")


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


def test_calls_that_list_all_checkpoints_do_not_block_others(anywhere: Service) -> None:
    """With 130,000 of them each such call held up everybody for .3 to 1.3 seconds, and a deletion did so 130 times."""
    model = anywhere.model(anywhere.session())
    save = {"model_id": model, "seq_id": 1, "path": "x"}
    anywhere.result(anywhere.post("save_weights", save))
    read: dict[int, list[str]] = {}

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        read.setdefault(threading.get_ident(), []).append(statement.replace("\n", ""))

    sql.event.listen(anywhere.front.database._engine, "before_cursor_execute", note)
    anywhere.get("usage")
    anywhere.get("account")
    anywhere.get("checkpoints?limit=1")
    anywhere.get(f"training_runs/{model}/checkpoints")
    for given in ({"keep_newest": 1}, {"older_than_seconds": 1.0}, {"paths": [f"tinker://{model}/weights/x"]}):
        anywhere.post("checkpoints/delete", given)
    assert anywhere.database.count(checkpoints) == 0
    of_all = re.compile(r"SELECT (?!count).*FROM checkpoints.*WHERE checkpoints.tenant = ")
    mine = read.pop(anywhere.in_front(threading.get_ident))
    assert not [statement for statement in mine if of_all.match(statement)]
    assert sum(bool(of_all.match(statement)) for each in read.values() for statement in each) >= 6


def test_concurrent_measurements_of_a_disk_are_made_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, storage = [], service.front.work.storage
    look = storage._look

    def counted(*given: Any) -> int:
        looks.append(given)
        return look(*given)

    monkeypatch.setattr(storage, "_look", counted)

    async def measure_all() -> None:
        await asyncio.gather(*(storage.measure("ada") for _ in range(50)))

    service.in_front(measure_all)
    assert len(looks) == 2  # the second one began after all others had asked


def test_pages_of_samples_are_read_one_at_a_time_of_a_tenant_and_beside_the_requests(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has up to 20 MB of answers, and a tenant may ask for 4096 pages at once."""
    at_once, most, read = Counter[str](), Counter[str](), account._read_samples
    front = service.in_front(threading.get_ident)

    def counted(database: Database, tenant: str) -> list[dict[str, Any]]:
        assert threading.get_ident() != front
        at_once[tenant] += 1
        most[tenant] = max(most[tenant], at_once[tenant])
        try:
            return read(database, tenant)
        finally:
            at_once[tenant] -= 1

    monkeypatch.setattr(account, "_read_samples", counted)
    asked = [service.key, service.api_keys.add_key("eve")] * 8
    with ThreadPoolExecutor(len(asked)) as threads:
        assert list(threads.map(lambda key: service.get("samples", key), asked)) == [{"samples": []}] * len(asked)
    assert most == {"ada": 1, "eve": 1}


def test_the_error_says_that_a_base_model_is_no_longer_served(service: Service) -> None:
    """The owner took it out of the file; it was an error of ours, for which SDKs ask again."""
    session = service.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "echo2/tiny"}
    sampler = service.post("create_sampling_session", body)["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1]}]}}
    service.in_front(service.backend.gate.clear)
    future = service.post("asample", sample)
    service.end()
    without = OneRowBackend(service.folder)
    without.bases = {}
    service.begin(without)
    told = service.result(future)
    assert told["category"] == "user"
    for words in (told["error"], service.post("asample", sample, status=400)["detail"]):
        assert "served any more" in words


def test_a_tenant_cannot_keep_a_checkpoint_for_longer_than_the_operator_keeps_it(service: Service) -> None:
    """Each call for another time to live began the operator's days anew."""
    service.front.tariff.quotas = Quotas(checkpoint_days={"*": 2.0})
    model = service.model(service.session())
    service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "x"}))
    ends = service.now + 2 * 86400
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/x/ttl"
    for ttl in (None, 10**9, 86400, None):
        service.now += 3600.0
        assert service.client.put(url, headers={"x-api-key": service.key}, json={"ttl_seconds": ttl}).is_success
        (row,) = service.database.select(checkpoints)
        assert row.expires == (service.now + 86400 if ttl == 86400 else ends)


def test_tenants_texts_are_not_logged_while_the_database_fails(service: Service) -> None:
    """The owner's page shows the log, of which each request was another fault, and hid all others."""
    with service.database.transaction() as connection:
        connection.execute(sql.text("ALTER TABLE sessions DROP COLUMN seen"))
    for word in ("of-nobody-else", "nor-this"):
        service.post("create_session", {"user_metadata": {"is": word}}, status=503)
    (fault,) = service.get("owner", service.api_keys.add_key("owner", SCOPES))["faults"]
    assert (fault["num"], "no column named seen" in fault["text"]) == (2, True)
    assert "of-nobody-else" not in fault["text"]


def test_simultaneous_results_share_transactions(anywhere: Service) -> None:
    """A thousand, each written to a disk before the next one, held up everybody for seconds where that takes long."""
    model = anywhere.model(session := anywhere.session())
    save = {"model_id": model, "seq_id": 1, "path": "x", "ttl_seconds": 60}
    anywhere.result(anywhere.post("save_weights", save))
    row, ended = anywhere.database.find(checkpoints), anywhere.database.find(sessions, id=session)
    assert row is not None
    assert ended is not None
    old = {"finished": 1.0, "seen": TIDIED}
    with anywhere.database.transaction() as connection:
        for number in range(300):
            more = {**row._mapping, "id": f"chk_{number}", "name": str(number)}
            connection.execute(sql.insert(checkpoints), more)
            connection.execute(sql.insert(sessions), {**ended._mapping, "id": f"old{number}", **old})
    committed: list[object] = []
    sql.event.listen(anywhere.front.database._engine, "commit", committed.append)
    anywhere.now += 61.0
    anywhere.sweep()
    assert (anywhere.database.count(checkpoints), anywhere.database.count(sessions)) == (0, 1)
    assert len(committed) < 100
