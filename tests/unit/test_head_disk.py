"""A full disk pauses a run until there is room: who notices, what stops, and that nothing is lost or done twice."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from echo2.config import Config
from echo2.config.rundir import claimed, create, read_json, read_metrics, write_atomically
from echo2.core.disk import FLOOR_BYTES, RESUME_FACTOR, SNAPSHOTS_RESERVED, DiskWatch, checkpoint_bytes, free_bytes
from echo2.core.errors import NoRoomError, UserError, write_failed
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions
from echo2.head.ledger.audit import audit
from echo2.head.ledger.eventlog import EventLog, replay
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.metrics import Metrics
from echo2.learner.core import checkpoint
from echo2.learner.core.checkpoint import write_checkpoint
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.weights.store.store import ChunkStore
from planner_cases import OPTIONS, of, running
from seeds import examples

PAUSED = (do.GrantLeases, do.IssueGroup, do.FeedGroup, do.EndStep)


def fill(disk: Path) -> Path:
    """Somebody else's file that takes all there is."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        endlessly(lambda _: file.write(b"x" * 4096))
    return filler


def endlessly(act: Callable[[int], object]) -> None:
    for number in itertools.count(1):
        act(number)


# ---- who notices -----------------------------------------------------------------------------------------------------


def test_the_disk_watch_pauses_at_once_and_resumes_later(tmp_path: Path) -> None:
    free = FLOOR_BYTES
    watch = DiskWatch(tmp_path, lambda _: free)
    assert (watch.look(), watch.reason) == (False, "")
    free -= 1
    assert watch.look()
    assert watch.reason == f"no room on the disk that holds {tmp_path}: 268 MB free, 268 MB needed"
    for still in (0, FLOOR_BYTES, int(FLOOR_BYTES * RESUME_FACTOR) - 1):
        free = still
        assert not watch.look()
        assert watch.reason
    free = int(FLOOR_BYTES * RESUME_FACTOR)
    assert (watch.look(), watch.reason) == (True, "")


def test_room_is_kept_for_what_is_under_way(tmp_path: Path) -> None:
    for step, size in ((1, 70), (2, 50)):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * size)
        (folder / "state.json").write_bytes(b"{}")
    assert (checkpoint_bytes(tmp_path), checkpoint_bytes(tmp_path / "none")) == (72, 0)
    needed = FLOOR_BYTES + SNAPSHOTS_RESERVED * 1000 + 72
    assert DiskWatch(tmp_path, lambda _: needed - 1).look(1000, 72)
    assert not DiskWatch(tmp_path, lambda _: needed).look(1000, 72)
    assert free_bytes(tmp_path) > 0


# ---- what stops ------------------------------------------------------------------------------------------------------


def test_a_paused_run_leases_and_feeds_nothing_and_takes_what_was_leased() -> None:
    desk = running(replace(OPTIONS, max_staleness=3))
    assert of(do.GrantLeases, desk.tell(ev.DiskFull("no room"))) == []
    (first, second), rest = desk.open()[:2], desk.open()[2:]
    for lease_id in (first, second):
        commands = desk.deliver(lease_id)
        assert of(do.AcceptDelivery, commands)
        assert not [command for command in commands if isinstance(command, PAUSED)]
    assert desk.planner.waits(desk.now)[0].reason == "no room"
    commands = desk.tell(ev.DiskFreed())
    assert len(of(do.FeedGroup, commands)) == 2
    assert of(do.EndStep, commands)
    assert of(do.GrantLeases, commands)
    assert set(rest) < set(desk.open())
    assert all(wait.reason != "no room" for wait in desk.planner.waits(desk.now))


def test_a_pause_asks_for_no_timer_that_is_due_already() -> None:
    """A second lease that is overdue is not granted while the run is paused; a timer for it would ring for ever."""
    desk = running(PlannerOptions(groups_per_step=2, group_size=4, max_steps=10))
    for lease_id in desk.open()[:3]:
        desk.now += 1.0
        desk.deliver(lease_id)
    desk.tell(ev.DiskFull("no room"))
    desk.now += 50.0
    for _ in range(3):
        assert all(wake.at > desk.now for wake in of(do.WakeAt, desk.tell(ev.Tick())))


@given(pauses=st.lists(st.sampled_from(["full", "freed", "join", "tick", "expire"]), min_size=1, max_size=40))
@examples(100)
def test_pauses_at_any_instant_delay_a_run_and_change_nothing_else(pauses: list[str]) -> None:
    desk, toggles = running(), iter(pauses)
    for step in range(OPTIONS.max_steps):
        for moment in ("before", "delivered"):
            word = next(toggles, "freed")
            event = {"full": ev.DiskFull("no room"), "freed": ev.DiskFreed()}.get(word, ev.Tick())
            desk.now += 200.0 if word == "expire" else 0.1
            commands = desk.join() if word == "join" else desk.tell(event)
            if moment == "delivered":
                commands += [c for lease_id in desk.open()[:1] for c in desk.deliver(lease_id, step)]
            assert desk.planner.health.paused is None or not [c for c in commands if isinstance(c, PAUSED)]
        desk.tell(ev.DiskFreed())
        desk.join(version=step)
        desk.train(step)
        desk.publish(step + 1)
        desk.join(version=step + 1)
    assert desk.planner.training.version == OPTIONS.max_steps
    trained = [record.number for record in desk.planner.groups if record.state == "trained"]
    assert len(trained) == len(set(trained))


# ---- where it was not foreseen ---------------------------------------------------------------------------------------


def test_only_a_full_disk_or_quota_is_worth_waiting_for() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert type(write_failed(OSError(number, "full"), "x")) is NoRoomError
    assert type(write_failed(OSError(errno.EACCES, "denied"), "x")) is UserError


def test_a_ledger_on_a_full_disk_undoes_the_transaction_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    path = small_disk / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.issue(0, 0, 0, 0.0)
    filler = fill(small_disk)

    def live(number: int) -> None:
        with ledger.together():
            ledger.issue(number, 0, number, 0.0)
            ledger.grant(number, number, "w", 0.0, 1.0, 4)
            ledger.deliver(number, b"x" * 10_000, "w", 0, 0, 4, 1.0, 0.0)

    with pytest.raises(NoRoomError, match="is full"):
        endlessly(live)
    filler.unlink()
    state = ledger.recover()
    assert state.next_number == len(state.groups), "whole transactions only"
    assert all((group.state == "ready") == (group.number > 0) for group in state.groups)
    ledger.issue(state.next_number, 0, state.next_number, 0.0)
    ledger.close()
    found = audit(path)
    assert (found.lost, found.doubled, found.issued) == (0, 0, state.next_number + 1)


def _claim(path: Path) -> None:
    with claimed(path, "head"):
        pass


@pytest.mark.parametrize(
    "opens",
    [
        _claim,
        lambda path: create(path / "run", Config(), resume=False),
        lambda path: ChunkStore(path / "store"),
        lambda path: RunIdentity.create_or_load(path / "identity"),
        lambda path: RunIdentity.create_or_load(path / "there").make_ticket("worker", "127.0.0.1:1", 1, 1.0),
        lambda path: PeerIdentity(path / "peer").request(),
    ],
    ids=["claim", "run directory", "snapshots", "identity", "ticket", "machine"],
)
def test_what_a_start_cannot_write_on_a_full_disk_lets_it_wait_for_room(
    tmp_path: Path, opens: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user's mistake it would end the run."""
    RunIdentity.create_or_load(tmp_path / "there")
    opened = os.open

    def full(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, flags, *args, **kwargs)

    def no_folder(path: Any, *_: Any, **__: Any) -> None:
        if not Path(path).is_dir():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        raise FileExistsError(path)

    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(os, "mkdir", no_folder)
    with pytest.raises(NoRoomError, match="No space left"):
        opens(tmp_path)


def test_every_file_of_a_run_reports_a_full_disk_and_stays_whole(small_disk: Path) -> None:
    options = PlannerOptions(1, 2, 3)
    log, metrics, store = EventLog(small_disk / "e", options), Metrics(small_disk / "m"), ChunkStore(small_disk / "s")
    metrics.write({"step": 0})
    write_atomically(small_disk / "status.json", '{"version": 1}')
    write_checkpoint(small_disk / "step_1", {"version": 1}, {"config.json": b"{}"}, {})
    filler = fill(small_disk)
    planner, chunk = Planner(options), b"x" * 9000

    def log_tick(second: int) -> None:
        log.write(second, ev.Tick(), planner.handle(ev.Tick(), second))
        log.flush()

    with pytest.raises(NoRoomError, match=r"Cannot write .*/e: No space left"):
        endlessly(log_tick)
    with pytest.raises(NoRoomError, match=r"Cannot write .*/m: No space left"):
        endlessly(lambda step: metrics.write({"step": step}))
    with pytest.raises(NoRoomError, match=r"status\.json: No space left"):
        write_atomically(small_disk / "status.json", '{"version": 2}' + " " * 9000)
    with pytest.raises(NoRoomError, match="was not saved: the disk is out of room"):
        write_checkpoint(small_disk / "step_2", {"version": 2}, {"config.json": b"{}" * 9000}, {})
    with pytest.raises(NoRoomError, match="into the snapshot store"):
        store.put(blake3(chunk).digest(), chunk)
    filler.unlink()
    log.close()
    assert replay(small_disk / "e").num_different == 0
    assert read_metrics(small_disk / "m")[0] == {"step": 0}
    assert read_json(small_disk / "status.json") == {"version": 1}
    assert checkpoint.latest(small_disk) == small_disk / "step_1"
    store.put(blake3(chunk).digest(), chunk)
    assert store.get(blake3(chunk).digest()) == chunk


def test_a_checkpoint_may_be_deleted_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "model.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "model.safetensors").write_bytes(b"12345")
    assert checkpoint_bytes(tmp_path) == 5
