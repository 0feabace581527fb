"""What a worker says of itself, as far as people get to see it: no control character and no endless text of a worker's
reaches the run's files for people or the terminal, and a pid is only ever its word."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from echo2.sandbox.plugins import TRACEBACK_CHARS
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import connect
from real_runs import ENDLESS, REPOSITORY, Run

SECONDS = 30.0
WORDS = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202edne\r\n[red]forged[/red]\x00" + "x" * 100_000


def controls(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")}


async def talk(run: Run, state: Path) -> None:
    """Attend with hostile words until `echo2 status` has shown them."""
    link, worker_id = await connect(f"@{run.out / 'ticket'}", state)
    hello = wire.WorkerHello(
        protocol=limits.PROTOCOL_VERSION, slots=1, host=WORDS, engine=WORDS, device=WORDS, pid=2**31
    )
    orders = aiter(link.stream("Attend", hello))
    assert (await anext(orders)).HasField("settings")
    await link.call("Report", wire.WorkerReport(doing=WORDS, engine=WORDS), SECONDS)
    await link.call("FailLease", wire.LeaseFailed(lease_id=1, reason=WORDS[:40], detail=WORDS), SECONDS)
    await asyncio.to_thread(judge, run, worker_id)
    await link.close()


def judge(run: Run, worker_id: str) -> None:
    def mine() -> list[dict[str, object]]:
        return [w for w in run.status().get("workers", []) if w["id"] == worker_id and "forged" in w["doing"]]

    run.wait(lambda: bool(mine()), "word of the hostile worker")
    (said,) = mine()
    for key in ("host", "engine", "device", "doing"):
        assert not controls(str(said[key])), key
        assert len(str(said[key])) <= limits.NAME_CHARS_MAX
    command = [sys.executable, "-m", "echo2", "status", str(run.out)]
    wide = {**os.environ, "COLUMNS": "1000"}
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, env=wide)
    assert not controls(shown.stdout.replace("\n", ""))
    assert "forged" in shown.stdout
    (process,) = [p for p in run.command("status")["processes"] if p["id"] == worker_id]
    assert process["alive"] is None


@pytest.mark.slow
def test_text_from_workers_is_harmless_wherever_people_read_it(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, *ENDLESS).start()
    run.wait_version(1)
    asyncio.run(talk(run, tmp_path / "state"))
    assert run.process is not None
    run.process.terminate()
    run.process.communicate(timeout=150)
    for line in (run.out / "events.jsonl").read_text(encoding="utf-8").splitlines():
        assert not controls(line)
        assert "x" * TRACEBACK_CHARS not in line
    assert not controls((run.out / "logs" / "head.log").read_text(encoding="utf-8").replace("\n", ""))
    assert json.loads((run.out / "outcome.json").read_text())["kind"] == "stopped"
