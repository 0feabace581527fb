"""Long training data are read in a process of their own and lie in a file, with the same outcome as short ones; and
what they took goes back."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.responses import Response

from disk_cases import no_file_beyond
from echo2_service import limits
from echo2_service.backend import TrainOutput
from echo2_service.front.body_reader import LONG_BYTES
from echo2_service.front.data import answer_as_json, train_answer
from echo2_service.front.request_guard import Body, Counted, Traffic
from front_service import PROTO, Service, protobuf


def body(model: str, number: int, count: int, token: Any = 7) -> dict[str, Any]:
    """`count` data, each of two tokens."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    inputs = {"target_tokens": {"data": [2, token], "dtype": "int64", "shape": [2]}}
    data = [{"model_input": prompt, "loss_fn_inputs": inputs}] * count
    return {"model_id": model, "seq_id": number, "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}


def reader(service: Service) -> int | None:
    return service.front.bodies._process.process_id


def test_a_long_body_is_read_by_another_process_that_may_die(service: Service) -> None:
    model = service.model(service.session())
    short = service.result(service.post("forward_backward", body(model, 1, 2)))
    assert reader(service) is None
    for number in (2, 3):
        long = service.result(service.post("forward_backward", body(model, number, 2500)))
        assert long["loss_fn_outputs"] == short["loss_fn_outputs"][:1] * 2500
        pid = reader(service)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        service.until(lambda killed=pid: reader(service) != killed)  # type: ignore[misc]


def test_errors_in_long_bodies_read_like_those_in_short_ones(service: Service) -> None:
    model = service.model(service.session())
    answers = [
        service.result(service.post("forward_backward", body(model, number, count, 1.5)))["error"]
        for number, count in ((1, 1), (2, 2500))
    ]
    assert answers[0] == answers[1]
    assert "datum 0: an int64 tensor" in answers[0]
    refusals = [service.post("forward_backward", text, status=400) for text in (b"{", b"{" + b" " * LONG_BYTES)]
    assert [answer["detail"] for answer in refusals] == ["Input data was truncated"] * 2
    assert reader(service) is not None


def restarted(service: Service) -> None:
    service.end()
    service.backend.gate = asyncio.Event()
    service.backend.gate.set()
    service.begin(service.backend)


def files(service: Service) -> list[Path]:
    """The files with data of long bodies, and those of bodies that are being read."""
    return [path for path in (service.folder / "checkpoints").rglob("req_*") if path.is_file()]


def test_the_data_of_a_long_body_outlive_the_front_and_are_not_read_again(service: Service) -> None:
    model = service.model(service.session())
    service.backend.gate.clear()
    future = service.post("forward_backward", body(model, 1, 2500))
    (file,) = files(service)
    restarted(service)
    assert service.in_front(service.front.dispatcher._open_bytes.get, "ada") in (None, file.stat().st_size)
    assert len(service.result(future)["loss_fn_outputs"]) == 2500
    assert reader(service) is None
    service.until(lambda: not files(service))


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"\x09\0\0\0junk")])
def test_data_that_are_gone_or_damaged_fail_their_request_alone(service: Service, damage: Any) -> None:
    """A power failure may take the end of a file."""
    model = service.model(service.session())
    service.backend.gate.clear()
    future = service.post("forward_backward", body(model, 1, 2500))
    damage(files(service)[0])
    restarted(service)
    error = service.result(future)["error"]
    assert "training data are gone or damaged: send them again" in error
    again = service.post("forward_backward", body(model, 2, 2500))
    assert len(service.result(again)["loss_fn_outputs"]) == 2500


@pytest.mark.parametrize("is_protobuf", [False, True])
def test_the_store_has_a_row_of_a_long_body_and_one_file(service: Service, is_protobuf: bool) -> None:
    """A row with the body would be walked through for each look at what stands behind it, and the event loop waits."""
    model, log = service.model(service.session()), service.folder / "service.sqlite-wal"
    service.backend.gate.clear()
    with service.database._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    text: Any = protobuf(model, 1, [1] * 100_000) if is_protobuf else body(model, 1, 8000)
    futures = [service.post("forward_backward", text, headers=PROTO if is_protobuf else {}) for _ in range(2)]
    assert futures[0] == futures[1], "the same request, sent again"
    (file,) = files(service)
    assert file.name == futures[0]["request_id"]
    assert log.stat().st_size < 200_000 < 300_000 < file.stat().st_size
    service.sweep()
    assert files(service) == [file]
    assert service.in_front(service.front.dispatcher._open_bytes.__getitem__, "ada") == file.stat().st_size
    service.in_front(service.backend.gate.set)
    service.result(futures[0])
    assert service.in_front(service.front.dispatcher._open_bytes.get, "ada") is None
    service.until(lambda: not files(service))


def test_a_long_body_that_is_refused_leaves_no_file(service: Service) -> None:
    model = service.model(service.session())
    service.post("forward_backward", body("nobody", 1, 2500), status=404)
    service.post("forward_backward", b"[" * 300_000, headers=PROTO, status=400)
    assert "1.5" not in service.result(service.post("forward_backward", body(model, 1, 2500, 1.5)))
    assert not files(service)


@pytest.mark.parametrize("is_at_the_reader", [False, True])
def test_a_body_for_which_the_disk_has_no_room_may_come_again(service: Service, is_at_the_reader: bool) -> None:
    model, everything = service.model(service.session()), resource.RLIM_INFINITY
    text = json.dumps(body(model, 1, 8000)).encode()
    service.post("forward_backward", body("nobody", 1, 2500), status=404)
    pid = reader(service)
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000 if is_at_the_reader else everything, everything))
    with no_file_beyond(len(text) + 1_000_000 if is_at_the_reader else 1_000_000):
        answer = service.post("forward_backward", text, status=503)
    assert "disk is full" in answer["detail"]
    assert not files(service)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (everything, everything))
    assert len(service.result(service.post("forward_backward", text))["loss_fn_outputs"]) == 8000


def test_a_file_that_nobody_asked_for_is_removed(service: Service) -> None:
    """Its front died between the two halves of a stored request."""
    left = service.front.work.storage.directory("ada") / "req_left"
    left.write_bytes(b"data")
    service.sweep()
    assert not left.exists()


def test_a_body_is_handed_on_without_a_copy() -> None:
    """A copy of 32 MiB kept the event loop for 20 to 50 ms, and one for each piece of a long answer for seconds."""
    body = Body()
    for part in (b"x" * 1000, b"y" * 50_000):
        body.add(part)
    content = body.content
    assert content == b"x" * 1000 + b"y" * 50_000
    assert body.content is content
    body.set(content)
    assert body.content is content
    assert len(body) == len(content) == 51_000


@pytest.mark.parametrize("size", [0, 1, limits.PROGRESS_BYTES, limits.PROGRESS_BYTES + 1, 3 * limits.PROGRESS_BYTES])
def test_a_long_answer_is_sent_in_pieces(size: int) -> None:
    pieces: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            pieces.append(message["body"])
            assert message.get("more_body", False) == (sum(map(len, pieces)) < size)

    text = random.Random(size).randbytes(size)
    scope, passage = {"type": "http", "method": "GET"}, Traffic().begin("ada")
    asyncio.run(Counted(Response(text), passage)(scope, send, send))  # nothing is received
    assert b"".join(pieces) == text
    assert max(map(len, pieces)) <= limits.PROGRESS_BYTES


def test_a_long_answer_in_json_is_encoded_part_by_part() -> None:
    """No other thread runs while a part is encoded: 40 ms for the answer to a body of 10 MB."""
    output = TrainOutput([array("f", [-1.5] * 1000)] * 50, {"loss:sum": 2.0})
    answered = answer_as_json("forward_backward", train_answer(output, [0] * 50))
    assert {type(part) for part in answered["loss_fn_outputs"]} == {msgspec.Raw}
    read = msgspec.json.decode(msgspec.json.encode(answered))
    tensor = {"data": [-1.5] * 1000, "dtype": "float32", "shape": [1000]}
    assert read["loss_fn_outputs"] == [{"logprobs": tensor}] * 50
    assert read["metrics"] == {"loss:sum": 2.0}


#: A front; then blocks of 1 MiB come and go, with small ones between them that stay. Prints the MiB that are kept.
KEPT = """
import sys
from array import array
from pathlib import Path
from front_server import FrontServer

def resident():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS"))) / 1024

front = FrontServer(Path(sys.argv[1]))
before = resident()
bytes(16 << 20)  # malloc takes blocks of a size that was freed before from its heap, unless it is told not to
blocks, between = [], []
for _ in range(64):
    blocks.append(b"x" * (1 << 20))
    between.append(b"y" * 60_000)
del blocks
print("kept", resident() - before)
front.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_what_long_bodies_took_returns_to_the_system(tmp_path: Path) -> None:
    """After 16 bodies of 10 MB a front kept 280 MiB, most of them free in malloc's heap."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KEPT, tmp_path]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=paths).stdout
    assert float(told.split("kept ")[1].split()[0]) < 16
