"""A real head with a store: what it acknowledges is in the store, what waits says why, and nothing leaves a head that
another one has followed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo2.config.rundir import RunDir
from echo2.core.clock import Clock
from echo2.core.errors import PeerError, UserError
from echo2.core.objects import open_objects
from echo2.head.ledger.ledger import Ledger
from echo2.head.serve.head_process import pause
from echo2.head.store import contents
from echo2.head.store import mirror as mirror_module
from echo2.head.store.contents import fetch_run, stand_by
from echo2.head.store.decide import log as log_rules
from echo2.head.store.decide.log import Mark, SignOfLife
from echo2.head.store.log import ALIVE_KEY, add_mark, encode, newest_mark, send
from echo2.head.store.mirror import Mirror, read_claim
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.identity import PeerIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket
from echo2.weights.store.store import ChunkStore
from head_cases import OpenHead, delivery, rows, sample, settings, until
from seeds import seeds


def run_with(tmp_path: Path, store: str) -> OpenHead:
    raw = settings(
        rows(tmp_path / "rows.jsonl", *map(str, range(64))),
        head={"store": store},
        schedule={"groups_per_step": 32, "max_staleness": 1},
        sampling={"group_size": 2, "groups_per_batch": 4},
    )
    return OpenHead(tmp_path, raw)


def delivered(out: Path) -> set[int]:
    with closing(Ledger(RunDir(out).ledger)) as ledger:
        return {group.number for group in ledger.recover().groups if group.state in ("delivered", "ready", "trained")}


@pytest.mark.parametrize("seed", seeds(1, 10))
def test_acknowledged_results_survive_the_loss_of_the_disk(tmp_path: Path, seed: int) -> None:
    """The store as it is at random instants has all results that were acknowledged before."""
    chance, store = random.Random(seed), tmp_path / "store"
    seen: list[tuple[Path, set[int]]] = []

    async def live() -> None:
        acknowledged: set[int] = set()
        async with run_with(tmp_path, str(store)) as opened, opened.attending() as leases:
            deliver = opened.service.handlers()["Deliver"]

            async def one(number: int) -> None:
                await until(lambda: len(leases) > number)
                lease = leases[number]
                replies = await deliver(opened.peer("w-1"), _deliveries(lease))
                assert [reply.accepted for reply in replies.items] == [True]
                acknowledged.add(lease.number)

            for number in range(24):
                await one(number)
                if chance.random() < 0.4:
                    seen.append((tmp_path / f"store{number}", set(acknowledged)))
                    shutil.copytree(store, seen[-1][0], ignore=shutil.ignore_patterns("tmp"))  # half-written objects

    asyncio.run(live())
    assert seen
    for place, acknowledged in seen:
        out = place.with_name(f"{place.name}-run")
        fetch_run(str(place), out)
        assert acknowledged <= delivered(out)


def _deliveries(lease: wire.Lease) -> wire.Deliveries:
    return wire.Deliveries(items=[delivery(lease, [sample([3, 4, 1])] * 2)])


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    return str(tmp_path / "store")


def test_a_replaced_head_writes_nothing_more(tmp_path: Path, store: str) -> None:
    """Whether it had something on its way to the store or not. The store has what it acknowledged before."""

    async def live() -> None:
        async with run_with(tmp_path, store) as opened, opened.attending() as leases:
            await until(lambda: len(leases) > 1)
            deliver = opened.service.handlers()["Deliver"]
            assert (await deliver(opened.peer("w-1"), _deliveries(leases[0]))).items[0].accepted
            rundir = await asyncio.to_thread(fetch_run, store, tmp_path / "other")
            assert leases[0].number in delivered(rundir.path)
            await asyncio.to_thread(Mirror.open, rundir, store, 0.0)
            with pytest.raises(PeerError, match="taken over"):
                await deliver(opened.peer("w-1"), _deliveries(leases[1]))
            kind, reason = opened.head.ending.outcome or ("", "")
            assert kind == "user_error"
            assert "Another head has taken this run over (head 2" in reason

    asyncio.run(live())


def test_an_unreachable_store_delays_acknowledgements_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "TROUBLE_SECONDS", 1e9)
    store = tmp_path / "store"

    async def live() -> None:
        async with run_with(tmp_path, str(store)) as opened, opened.attending() as leases:
            await until(lambda: leases)
            deliver, mirror = opened.service.handlers()["Deliver"], opened.head.mirror
            assert mirror is not None
            (store / "log").rename(store / "away")
            (store / "log").write_text("no folder")
            opened.head.ledger.set_meta("number", 1)
            await until(lambda: mirror.status()["error"])
            delivering = asyncio.ensure_future(deliver(opened.peer("w-1"), _deliveries(leases[0])))
            await until(lambda: mirror.status()["behind_records"] > 1)
            assert not delivering.done()
            monkeypatch.setattr(mirror_module, "TROUBLE_SECONDS", 0.1)
            with pytest.raises(PeerError, match=r"nothing is acknowledged: the store .* cannot be used"):
                await delivering
            (store / "log").unlink()
            (store / "away").rename(store / "log")
            await until(lambda: mirror.status()["behind_records"] == 0)
            assert not mirror.trouble

    asyncio.run(live())


def test_records_wake_no_message_that_waits_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record woke all of them: with ten workers a fifth of the head's time."""
    monkeypatch.setattr(mirror_module, "LOOK_SECONDS", 1e9)
    mirror = Mirror.open(RunDir(tmp_path), str(tmp_path / "store"), 0.0)
    asked, may_leave = list[int](), mirror._writer.may_leave

    def noted(number: int, now: float, lag_seconds: float) -> bool:
        asked.append(number)
        return may_leave(number, now, lag_seconds)

    monkeypatch.setattr(mirror._writer, "may_leave", noted)
    with closing(mirror.open_ledger()) as ledger:

        async def live() -> None:
            ledger.set_meta("number", 0)
            waiting = [asyncio.ensure_future(mirror.stored()) for _ in range(8)]
            for number in range(32):
                await asyncio.sleep(0)
                ledger.set_meta("number", number)
            assert len(asked) == len(waiting)
            running = asyncio.create_task(mirror.run(lambda _: None))
            await asyncio.gather(*waiting)
            running.cancel()

        asyncio.run(live())


def test_writes_that_waited_for_a_starting_head_are_not_blamed_on_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that took over said for half a second that its run is paused, for the seconds that it took to start."""
    later = SimpleNamespace(now=lambda: Clock().now() + 7.0)
    mirror = Mirror.open(RunDir(tmp_path), str(tmp_path / "store"), 0.0)
    with closing(mirror.open_ledger()) as ledger:
        ledger.set_meta("number", 1)

        async def live() -> None:
            monkeypatch.setattr(mirror, "_clock", later)
            assert not mirror.trouble
            running = asyncio.create_task(mirror.run(lambda _: None))
            await mirror.stored()
            assert not mirror.trouble
            running.cancel()

        asyncio.run(live())


def test_a_run_stays_paused_while_one_reason_is_left(tmp_path: Path) -> None:
    """Disk and store may fail together, and are mended one by one."""

    async def live() -> None:
        async with run_with(tmp_path, "") as opened:
            health = opened.head.planner.health
            for full, away in (("disk", ""), ("disk", "store"), ("", "store")):
                pause(opened.head, full or away)
                assert health.paused is not None
            pause(opened.head, "")
            assert health.paused is None

    asyncio.run(live())


def test_the_local_ledger_and_files_catch_up_with_the_store(tmp_path: Path) -> None:
    """After a power failure the local ledger may have lost its end."""

    async def live(number: int) -> None:
        async with run_with(tmp_path, str(tmp_path / "store")) as opened:
            assert opened.head.mirror is not None
            opened.head.ledger.set_meta("number", number)
            await opened.head.mirror.stored()

    asyncio.run(live(1))
    ledger = RunDir(tmp_path / "run").ledger
    shutil.copy(ledger, tmp_path / "before")
    asyncio.run(live(2))
    shutil.copy(tmp_path / "before", ledger)
    mirror = Mirror.open(RunDir(tmp_path / "run"), str(tmp_path / "store"), 0.0)
    assert mirror.has_caught_up
    with closing(Ledger(ledger)) as found:
        assert found.get_meta("number") == 2


def test_a_store_that_has_lost_a_part_says_what_to_do(tmp_path: Path) -> None:
    add_mark(open_objects(str(tmp_path / "store")), Mark("000000000005-head-1", 5, 1, ()))
    with pytest.raises(UserError, match=r"lost its copy of the ledger, .*\. Restore it from a backup, or --resume"):
        fetch_run(str(tmp_path / "store"), tmp_path / "out")


def newest_copy(store: Path) -> Path:
    mark, _ = newest_mark(open_objects(str(store)))
    assert mark is not None
    return store / "copies" / mark.copy


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


#: What a store, a synchronising program or a restored backup may have made of objects.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "copy is empty": lambda store: newest_copy(store).write_bytes(b""),
    "copy is cut off": lambda store: os.truncate(newest_copy(store), newest_copy(store).stat().st_size - 5000),
    "copy has a bit changed": lambda store: flip(newest_copy(store), newest_copy(store).stat().st_size // 3),
    "copy is another file": lambda store: newest_copy(store).write_text("hello"),
    "entry is cut off": lambda store: os.truncate(max((store / "log").iterdir()), 40),
    "entry is empty": lambda store: max((store / "log").iterdir()).write_bytes(b""),
    "entry is another object": lambda store: max((store / "log").iterdir()).write_bytes(encode(SignOfLife("x", 1, 1))),
    "mark is cut off": lambda store: os.truncate(max((store / "marks").iterdir()), 30),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_never_a_run(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    store = leave_a_run(tmp_path)
    Mirror.open(RunDir(tmp_path / "run"), store, 0.0)  # the directory's next head
    damage(Path(store))
    with pytest.raises(UserError, match=r"has lost .*\. Restore it from a backup, or --resume"):
        fetch_run(store, tmp_path / "out")


def test_foreign_files_in_a_store_are_ignored(tmp_path: Path) -> None:
    """What the desktop, a synchronising program or a person puts beside objects."""
    store = Path(leave_a_run(tmp_path))
    for name in ("marks/notes.txt", "log/.DS_Store", "log/desktop.ini", "copies/read me", "checkpoints/x/state.json"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("not ours")
    for folder in ("marks", "log", "copies"):
        ours = min(path for path in (store / folder).iterdir() if path.name[0] == "0")
        shutil.copy(ours, ours.with_name(f"{ours.name} (conflicted copy)"))
    fetch_run(str(store), tmp_path / "out")
    add_mark(open_objects(str(store)), Mark("000000000900-head-1", 900, 900, ()))
    assert {path.name for path in (store / "log").iterdir()} >= {".DS_Store", "desktop.ini"}


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="makes a folder somebody else's")
def test_a_world_writable_directory_of_another_user_is_refused_as_a_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who writes a store has the run."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    open_objects(str(shared))
    assert "every user of this machine may write" in caplog.text
    os.chown(shared, 65534, 65534)
    with pytest.raises(UserError, match=r"every user of this machine may write"):
        open_objects(str(shared))
    shared.chmod(0o770)
    open_objects(str(shared))


@pytest.mark.parametrize(
    "name",
    [
        *("", "a.py", "/etc/passwd", "/config.json", "../config.json", "identity/../ticket"),
        *("checkpoints/config.json", "x/identity/ca.key", "identity/tickets/a/b", "identity/revoked/\0"),
    ],
)
def test_a_ledger_names_only_files_that_a_run_has(tmp_path: Path, name: str) -> None:
    rundir = RunDir(tmp_path / "run")
    (rundir.path / "checkpoints").mkdir(parents=True)
    (rundir.path / "x" / "identity").mkdir(parents=True)
    with closing(Ledger(rundir.ledger)) as ledger:
        ledger.keep("file", name, "text")
        with pytest.raises(UserError, match="a file that no run has"):
            contents.restore_files(rundir, ledger)


@pytest.mark.parametrize("kind", ["", "local://"])
@pytest.mark.parametrize("key", ["../outside", "/{}/outside", "snapshots/../../outside", "snapshots//x", "", "a\0b"])
def test_a_ledger_names_no_object_outside_of_its_store(tmp_path: Path, key: str, kind: str) -> None:
    """By reading, a head that went on from a store deleted the file that was named as a snapshot."""
    outside, key = tmp_path / "outside", key.format(str(tmp_path).lstrip("/"))
    outside.write_text("kept")
    if kind:
        pytest.importorskip("fsspec")
    objects = open_objects(f"{kind}{tmp_path}/store")
    uses: list[Callable[[], object]] = [
        *(lambda: objects.get(key), lambda: list(objects.download(key)), lambda: objects.delete([key])),
        *(lambda: objects.create(key, b"x"), lambda: objects.upload(key, [b"x"])),
    ]
    for use in uses:
        with pytest.raises(UserError, match="names an object outside of it"):
            use()
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.keep("snapshot", "name", key)
        with pytest.raises(UserError, match="names an object outside of it"):
            contents.restore_snapshots(objects, ledger, ChunkStore(tmp_path / "chunks"))
    assert outside.read_text() == "kept"


def test_a_run_is_fetched_into_an_empty_directory_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run in"):
        fetch_run(str(tmp_path / "store"), tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a run\. Choose another --out"):
        fetch_run(str(tmp_path / "store"), tmp_path / "out")


@pytest.mark.parametrize("num_records", [0, 1])
def test_a_run_that_has_stored_nothing_yet_says_what_to_do(tmp_path: Path, num_records: int) -> None:
    """Its head was lost between the beginning of its log and the first records, or before its settings were among."""
    store, rundir = str(tmp_path / "store"), RunDir(tmp_path / "run")
    rundir.path.mkdir()
    mirror = Mirror.open(rundir, store, 0.0)
    with closing(mirror.open_ledger()) as ledger:
        if num_records:
            ledger.set_meta("port", 7)
            entry = mirror._writer.to_send()
            assert entry is not None
            send(mirror.objects, mirror._writer.position, entry)
    for fetch in (fetch_run, lambda url, out: stand_by(url, out, print)):
        with pytest.raises(UserError, match=r"has not stored its settings yet.* start the run anew"):
            fetch(store, tmp_path / "out")
        assert not RunDir(tmp_path / "out").ledger.exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standbys look often, and wait for little silence."""
    monkeypatch.setattr(contents, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(log_rules, "SILENT_SECONDS", 0.3)


def leave_a_run(tmp_path: Path, over: str | None = None) -> str:
    """A run in a store, whose head has died, or has ended the run."""

    async def live() -> None:
        async with run_with(tmp_path, str(tmp_path / "store")) as opened:
            assert opened.head.mirror is not None
            opened.head.ledger.set_meta("number", 7)
            await opened.head.mirror.stored()
            if over is not None:
                await opened.head.mirror.close(over)

    asyncio.run(live())
    return str(tmp_path / "store")


@pytest.mark.usefixtures("impatient")
def test_a_standby_fetches_the_run_of_a_silent_head(tmp_path: Path) -> None:
    store, out, checked = leave_a_run(tmp_path, over=""), tmp_path / "out", list[str]()
    assert stand_by(store, out, lambda found: checked.append(found.config.read_text())) == ""
    assert checked == ["{}"]
    assert not (out / "fetching").exists()
    assert RunDir(out).config.read_text() == "{}"
    with closing(Ledger(RunDir(out).ledger)) as ledger:
        assert ledger.get_meta("number") == 7
    with pytest.raises(UserError, match=r"holds a run\. Choose another --out"):
        stand_by(store, out, print)


@pytest.mark.usefixtures("impatient")
def test_a_standby_whose_head_comes_back_goes_on_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, out, num_fetched = leave_a_run(tmp_path), tmp_path / "out", 0

    def slowly(url: str, where: Path, told: Path) -> RunDir:
        nonlocal num_fetched
        num_fetched += 1
        found = fetch_run(url, where, told)
        if num_fetched == 1 and (head := read_claim(found).after) is not None:
            open_objects(store).upload(ALIVE_KEY, [encode(SignOfLife(*head, 99))])
        return found

    monkeypatch.setattr(contents, "fetch_run", slowly)
    assert stand_by(store, out, lambda _: None) == ""
    assert num_fetched == 2
    assert RunDir(out).config.exists()


def test_a_standby_learns_why_the_run_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stand_by(leave_a_run(tmp_path, over="all steps are trained"), out, lambda _: None) == "all steps are trained"
    assert list(out.iterdir()) == []


def test_a_standby_that_could_not_run_says_so_at_once(tmp_path: Path) -> None:
    def check(found: RunDir) -> None:
        raise UserError("no model here")

    with pytest.raises(UserError, match="no model here"):
        stand_by(leave_a_run(tmp_path), tmp_path / "out", check)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UserError, match="There is no run in"):
        stand_by(str(tmp_path / "another"), tmp_path / "out", print)


def test_an_admitted_machine_is_in_the_store(tmp_path: Path) -> None:
    async def live() -> None:
        async with run_with(tmp_path, str(tmp_path / "store")) as opened:
            ticket = Ticket.parse(opened.head.identity.make_ticket("worker", "nowhere:1", 1, 1.0))
            request = wire.EnrolRequest(protocol=PROTOCOL_VERSION, csr_der=PeerIdentity(tmp_path / "machine").request())
            enrol = opened.service.handlers()["Enrol"]
            admitted = await enrol(Peer(ticket.ticket_id, "join-worker"), request)
            shutil.copytree(tmp_path / "store", tmp_path / "then")
            found = fetch_run(str(tmp_path / "then"), tmp_path / "out")
            assert admitted.peer_id in (found.identity / "members.json").read_text()

    asyncio.run(live())
