"""Weights on their way through real runs: deltas or not, killed relays, a killed head, liars, laggards, a full disk."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.core.errors import LinkError
from echo2.transport import grpc_link, limits, message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from real_runs import REPOSITORY, Run

pytestmark = pytest.mark.timeout(600)

STEPS = 14
FIXED = ("--run.deterministic", "true", "--run.max_steps", str(STEPS), "--schedule.max_staleness", "1")
SMALL_CHANGES = ("--model.snapshot_dtype", "bfloat16", "--learner.lr", "1e-6")
INSTALLED = re.compile(r"@\d+\.(\d+)( over \S+)? installed;")


def installed(*logs: Path) -> list[tuple[int, str]]:
    """(version, " over <base>" or "") of every installation that these logs tell of."""
    return [(int(version), over) for log in logs for version, over in INSTALLED.findall(log.read_text())]


def kept(state: Path) -> list[int]:
    """The versions that a worker has on its disk, in order."""
    refs = [path.stem.partition("-over-")[0] for path in state.rglob("snapshots/manifests/*.json")]
    return sorted(int(ref.rpartition(".")[2]) for ref in refs)


def worker_logs(run: Run) -> list[Path]:
    return sorted((run.out / "logs").glob("worker-*.log"))


def rewards(run: Run) -> list[float]:
    return [row["reward/mean"] for row in run.rows() if "reward/mean" in row]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, sort_model: Path) -> Run:
    """A run with deltas and two workers that nobody disturbs."""
    run = Run(tmp_path_factory.mktemp("calm") / "run", sort_model, *FIXED).start()
    run.finish()
    return run


@pytest.mark.slow
def test_relays_and_the_head_killed_in_mid_broadcast(calm: Run, tmp_path: Path, sort_model: Path) -> None:
    """Each kill comes when a version was just trained, so that its broadcast is under way."""
    run = Run(tmp_path / "killed", sort_model, *FIXED).start()
    for version, name in ((3, "worker-0"), (5, "worker-1"), (7, "head"), (9, "worker-0"), (11, "head")):
        run.wait_version(version)
        run.kill(name)
    run.finish()
    assert run.weights() == calm.weights()
    assert rewards(run) == rewards(calm)
    before, again = installed(*worker_logs(calm)), installed(*worker_logs(run))
    assert any(over for _, over in before)
    assert any(not over for _, over in again[1:]), "the whole content, where a delta has no base"
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"], audit["open"]) == (0, 0, 0)
    assert run.command("replay")["num_different"] == 0


class Liar:
    """A worker with a valid certificate that attends, installs nothing, and gives wrong bytes to all who ask."""

    def __init__(self) -> None:
        self.peer_id = ""
        self.lies = 0

    async def live(self, ticket: str, state: Path) -> None:
        """Until the head ends the run."""
        member = await grpc_link.join(ticket, state)
        self.peer_id = member.peer_id
        network, link = member.network(), member.link()
        handlers = {"FetchChunks": self._lie, "GiveChunk": self._take}
        port = await network.listen("127.0.0.1", 0, handlers, lambda peer_id: None)
        hello = wire.WorkerHello(protocol=limits.PROTOCOL_VERSION, slots=1, listen_port=port)
        beating: asyncio.Task[None] | None = None
        try:
            async for order in link.stream("Attend", hello):
                beating = beating or asyncio.ensure_future(self._beat(link))
                if order.HasField("stop"):
                    break
        except LinkError:
            pass  # the run is over
        finally:
            if beating is not None:
                beating.cancel()
            await network.close()
            await link.close()

    async def _beat(self, link: grpc_link.GrpcLink) -> None:
        while True:
            await link.call("Report", wire.WorkerReport(doing="lying"), 10.0)
            await asyncio.sleep(1.0)

    async def _lie(self, peer: Peer, request: wire.ChunkRequest) -> AsyncIterator[bytes]:
        for name in request.hashes:
            self.lies += 1
            yield message_bytes.pack(name, b"not what you asked for")

    async def _take(self, peer: Peer, message: bytes) -> wire.Empty:
        return wire.Empty()


@pytest.mark.slow
def test_a_peer_with_wrong_bytes_is_named_and_delays_no_learner(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--run.max_steps", "40", "--workers.count", "2").start()
    run.wait(lambda: (run.out / "ticket").exists(), "ticket")
    liar, suspects = Liar(), set[str]()

    async def story() -> None:
        living = asyncio.ensure_future(liar.live(f"@{run.out / 'ticket'}", tmp_path / "state"))
        while not living.done():
            suspects.update(run.status().get("broadcast", {}).get("suspects", {}))
            await asyncio.wait({living}, timeout=0.05)
        living.result()

    asyncio.run(story())
    summary = run.finish()
    assert liar.lies > 0, "nobody asked it for anything"
    assert suspects == {liar.peer_id}
    assert summary["groups"]["trained"] == 40 * 16
    assert f"{liar.peer_id} is suspected" in (run.out / "logs" / "head.log").read_text()
    rows = [row for row in run.rows() if "time/publish_wait" in row]
    # It never had a single version, and was waited for by nobody: what is left is the time of encoding, now and then.
    waited, whole = sum(row["time/publish_wait"] for row in rows), sum(row["time/step"] for row in rows)
    assert waited < 0.25 * whole
    assert rows[-1]["broadcast/t_bcast"] is None, "with the liar, no share of 1/1.1 ever had a version"


def join(run: Run, state: Path, log: Path, **more: Any) -> subprocess.Popen[bytes]:
    """One more worker, with its words in `log`."""
    command = [sys.executable, "-m", "echo2", "worker", f"@{run.out / 'ticket'}", "--state", str(state)]
    with open(log, "ab") as words:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=words, stderr=words, **more
        )


def small_files() -> None:
    """No file of this process may be larger than a small chunk, as on a disk without room."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def wait(holds: Callable[[], bool], run: Run) -> None:
    run.wait(holds, "it to come true")


@pytest.mark.slow
def test_a_worker_that_was_away_gets_one_delta_and_one_with_a_full_disk_ends_alone(
    tmp_path: Path, sort_model: Path
) -> None:
    # Long steps: a payload holds at most 24 deltas, so the learner must not be far ahead of what is read of the logs.
    settings = ("--run.max_steps", "2000", "--workers.count", "1", "--schedule.groups_per_step", "64")
    run = Run(tmp_path / "run", sort_model, *settings, *SMALL_CHANGES).start()
    wait(lambda: (run.out / "ticket").exists(), run)
    log, other_log = tmp_path / "away.log", tmp_path / "full.log"
    away = join(run, tmp_path / "away", log)
    full = join(run, tmp_path / "full", other_log, preexec_fn=small_files)
    wait(lambda: max(kept(tmp_path / "away"), default=0) >= 1, run)
    away.kill()
    away.wait()
    had = kept(tmp_path / "away")[-1]
    # The other worker's log tells each version at once; the run's status does not.
    wait(lambda: max(installed(*worker_logs(run)), default=(0, ""))[0] >= had + 12, run)
    os.kill(run.pids()["learner"], signal.SIGSTOP)  # or a slow machine would be away for as long as it starts
    told = len(installed(log))
    away = join(run, tmp_path / "away", log)
    wait(lambda: len(installed(log)) > told, run)
    os.kill(run.pids()["learner"], signal.SIGCONT)
    version, over = installed(log)[told]
    assert version >= had + 12
    assert re.fullmatch(r" over \S+@\d+\.\d+", over), "one delta over what it had on its disk"
    assert int(over.rpartition(".")[2]) == had
    assert full.wait(timeout=60) == 2
    assert "Cannot write" in other_log.read_text()
    assert run.process is not None
    run.process.terminate()
    run.process.communicate(timeout=60)
    away.wait(timeout=60)
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"]) == (0, 0)
