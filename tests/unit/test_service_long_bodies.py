"""Long training data in JSON are read in a process of their own, with the same outcome as short ones; and what they
took goes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo2_service.front.body_reader import LONG_JSON_BYTES
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
    refusals = [service.post("forward_backward", text, status=400) for text in (b"{", b"{" + b" " * LONG_JSON_BYTES)]
    assert [answer["detail"] for answer in refusals] == ["Input data was truncated"] * 2
    assert reader(service) is not None


def test_a_long_body_that_was_not_kept_is_read_again_after_a_restart(service: Service) -> None:
    model = service.model(service.session())
    service.backend.gate.clear()
    future = service.post("forward_backward", body(model, 1, 2500))
    service.end()
    service.backend.gate = asyncio.Event()
    service.backend.gate.set()
    service.begin(service.backend)
    answer = service.result(future)
    assert len(answer["loss_fn_outputs"]) == 2500
    assert reader(service) is not None


def test_a_long_body_is_written_to_the_store_once(service: Service) -> None:
    """A change of the row that has it would write it again, and the event loop waits for that."""
    model = service.model(service.session())
    log = service.folder / "service.sqlite-wal"
    service.backend.gate.clear()
    with service.database._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    text = protobuf(model, 1, [1] * 100_000)
    future = service.post("forward_backward", text, headers=PROTO)
    assert len(text) < log.stat().st_size < 1.2 * len(text)
    assert service.in_front(service.front.dispatcher._open_bytes.__getitem__, "ada") == len(text)
    service.backend.gate.set()
    service.result(future)
    assert service.in_front(service.front.dispatcher._open_bytes.get, "ada") is None


#: A front; then blocks of 1 MiB come and go, with small ones between them that stay. Prints the MiB that are kept.
KEPT = """
import sys
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
