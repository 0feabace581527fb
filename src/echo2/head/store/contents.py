"""What of a run directory goes into its ledger when there is a store, so that it is kept in the same order: who has
joined, keys and tickets, the configuration, the rows of metrics; and the snapshots, as objects that the ledger names.
An object is uploaded before the ledger names it, and deleted when it is sure that no ledger names it any more.

`fetch_run` fills an empty directory from a store, so that the run goes on there as after a restart. The head that wrote
it may still be alive: it is shut out only when a head starts in the new directory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from echo2.config.rundir import RunDir, write_atomically
from echo2.core.errors import LinkError, PeerError, UserError, counted
from echo2.core.objects import Objects, open_objects
from echo2.head.ledger.ledger import Ledger
from echo2.head.store.decide.log import LOOK_SECONDS, SignOfLife, SignWatch
from echo2.head.store.log import ALIVE_KEY, FollowedError, LogReader, encode, read_sign, why_over
from echo2.head.store.mirror import LedgerFile, Mirror, read_claim, write_claim
from echo2.learner.core import checkpoint
from echo2.transport.certificates import write_private
from echo2.transport.identity import RunIdentity
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.store import ChunkStore

log = logging.getLogger(__name__)

#: Files that are kept as text. Members are kept one by one: their file grows with the fleet.
_FILES = (
    "config.json",
    "ticket",
    *(f"identity/{name}" for name in ("*.key", "*.pem", "learner-ticket", "tickets/*", "revoked/*")),
)
#: Publishing waits so long for a snapshot's upload. Then it goes on, and the learner would send the snapshot again.
UPLOAD_SECONDS = 30.0


class RunContents:
    """What of a run is kept in its ledger, and beside it in the store of `mirror`."""

    def __init__(
        self, rundir: RunDir, identity: RunIdentity, ledger: Ledger, chunks: ChunkStore, mirror: Mirror
    ) -> None:
        self._rundir, self._identity, self._ledger = rundir, identity, ledger
        self._chunks, self._mirror = chunks, mirror
        self._files: dict[str, str] = ledger.kept("file")
        self._file_stats: dict[str, tuple[int, int]] = {}
        self._members: dict[str, Any] = ledger.kept("member")
        self._num_members = 0
        self._one_by_one = asyncio.Lock()
        mirror.record_first(self.keep_members)

    def keep_row(self, row: dict[str, Any]) -> None:
        """Record a row of metrics, in place of an earlier one of its step."""
        self._ledger.keep("row", row["step"], row)

    def keep_files(self) -> None:
        """Record which files have changed since the last call, and who has joined."""
        root, here = self._rundir.path, set[str]()
        with self._ledger.together():
            for path in (path for pattern in _FILES for path in root.glob(pattern)):
                name, stat = path.relative_to(root).as_posix(), path.stat()
                here.add(name)
                if self._file_stats.get(name) == (stat.st_mtime_ns, stat.st_size):
                    continue
                self._file_stats[name] = (stat.st_mtime_ns, stat.st_size)
                text = path.read_text(encoding="utf-8")
                if self._files.get(name) != text:
                    self._ledger.keep("file", name, text)
                    self._files[name] = text
            for name in [name for name in self._files if name not in here]:
                self._ledger.forget("file", name)
                del self._files[name]
            self.keep_members()

    def keep_members(self) -> None:
        """Record who has joined since the last call."""
        members = self._identity.members
        if len(members) != self._num_members:
            with self._ledger.together():
                for peer_id, entry in islice(members.items(), self._num_members, None):
                    if self._members.get(peer_id) != entry:
                        self._ledger.keep("member", peer_id, entry)
            self._num_members = len(members)

    async def keep_snapshots(self) -> None:
        """Keep the payloads that the store of chunks lists now, and no others: each as one object, of its manifest and
        its chunks in the manifest's order."""
        async with self._one_by_one:
            objects = self._mirror.objects
            keys: dict[str, str] = self._ledger.kept("snapshot")
            listed = {blake3(one.text).hexdigest()[:32]: one for one in self._chunks.manifests()}
            try:
                for name, manifest in listed.items():
                    if name not in keys:
                        key = f"snapshots/{name}-{self._mirror.epoch}"
                        await asyncio.to_thread(objects.upload, key, self._pieces(manifest))
                        self._ledger.keep("snapshot", name, key)
                gone = {name: key for name, key in keys.items() if name not in listed}
                for name in gone:
                    self._ledger.forget("snapshot", name)
                if gone:
                    await self._mirror.stored()
                    await asyncio.to_thread(objects.delete, list(gone.values()))
            except (LinkError, PeerError) as error:  # dropped meanwhile, or no store: the next call tries again
                log.warning("not all snapshots are in the store: %s", error)

    def _pieces(self, manifest: Manifest) -> Iterator[bytes]:
        yield len(manifest.text).to_bytes(8, "big")
        yield manifest.text
        yield from (self._chunks.get(hash_) for hash_ in manifest.chunk_bytes)


def restore_files(rundir: RunDir, ledger: Ledger) -> None:
    """Write the files that `Kept` and the metrics have put into a ledger; the configuration last.

    Raises:
        UserError: the ledger names a file outside the directory, or the disk is full.
    """
    files: dict[str, str] = ledger.kept("file")
    for folder in ("tickets", "revoked"):
        (rundir.identity / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(rundir.identity / "members.json", json.dumps({"members": ledger.kept("member")}).encode())
    rows = sorted(ledger.kept("row").values(), key=lambda row: row["step"])
    write_atomically(rundir.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    for name in sorted(files, key=lambda name: name == "config.json"):
        if name == "config.json" and rundir.config.exists():
            continue  # settings may be given when a run is resumed
        if not _is_of_a_run(name):
            raise UserError(f"The store names a file that no run has: {name!r}. Resume with the echo2 that wrote it.")
        write_private(rundir.path / name, files[name].encode())


def _is_of_a_run(name: str) -> bool:
    """Whether a run has such a file. `match` alone looks at the end of a name."""
    is_plain = ".." not in name and "\0" not in name
    return is_plain and any(
        name.count("/") == pattern.count("/") and PurePosixPath(name).match(pattern) for pattern in _FILES
    )


def restore_snapshots(objects: Objects, ledger: Ledger, store: ChunkStore) -> None:
    """Fetch the payloads that a ledger names. One that is missing or damaged is left out; the learner publishes again.

    Raises:
        LinkError: the store cannot be reached.
        UserError: the disk is full.
    """
    for key in ledger.kept("snapshot").values():
        try:
            _restore(objects.download(key), store)
        except (FileNotFoundError, PeerError) as error:
            log.warning("the snapshot %s is left out: %s", key, error)


def _restore(pieces: Iterator[bytes], store: ChunkStore) -> None:
    buffer = bytearray()

    def take(num_bytes: int) -> bytes:
        while len(buffer) < num_bytes and (piece := next(pieces, b"")):
            buffer.extend(piece)
        data = bytes(buffer[:num_bytes])
        del buffer[:num_bytes]
        return data

    manifest = Manifest.from_bytes(take(int.from_bytes(take(8), "big")))
    for hash_, num_bytes in manifest.chunk_bytes.items():
        store.put(hash_, take(num_bytes))
    store.put_manifest(manifest)


def stand_by(url: str, out: Path, check: Callable[[RunDir], object]) -> str:
    """Wait until the head of the run in the store at `url` gives no sign of life any more, and fetch the run as
    `fetch_run` does. Return why the run is over, if it ends before; then nothing is fetched. `check`: called at once
    with a directory that has the run's settings, so that what a head here would lack is known in time.

    Raises:
        UserError: as `fetch_run`, and as `check`.
        LinkError: the store cannot be reached when the wait begins.
    """
    objects, watch, aside = open_objects(url), SignWatch(), RunDir(out / "fetching")
    if RunDir(out).config.exists():
        raise UserError(f"--standby fills an empty directory, and {out} holds a run. Choose another --out.")
    try:
        with closing(Ledger(_fetch_ledger(url, objects, aside))) as ledger:
            restore_files(aside, ledger)
        check(aside)
        log.warning("standing by for the run in %s", url)
        while True:
            shutil.rmtree(aside.path)
            try:
                if over := _await_silence(objects, watch):
                    return over
                log.warning("no sign of life for %.0f s: taking the run over", watch.silent_seconds)
                fetch_run(url, aside.path, out)
                watch.look(sign_bytes := objects.get(ALIVE_KEY), time.monotonic())
                sign = read_sign(sign_bytes)
                signed = (sign.head, sign.epoch) if sign is not None else None
                if watch.may_follow(read_claim(aside).after, signed) and _is_taken(url, aside, out):
                    for path in aside.path.iterdir():
                        path.rename(out / path.name)
                    return ""
                log.warning("the head is back, or another one has begun: standing by")
            except LinkError as error:
                log.warning("%s", error)
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)


def _is_taken(url: str, rundir: RunDir, shown: Path) -> bool:
    """Take the log of the run in this directory, and give a sign, so that other standbys go on waiting. Return False if
    another head was faster."""
    try:
        mirror = Mirror.open(rundir, url, 0.0)
    except FollowedError:
        return False
    mirror.objects.upload(ALIVE_KEY, [encode(SignOfLife(read_claim(rundir).own, mirror.epoch, 0))])
    if mirror.has_caught_up:
        restore(rundir, mirror.objects, shown)
    return True


def _await_silence(objects: Objects, watch: SignWatch) -> str:
    while not watch.is_silent:
        time.sleep(LOOK_SECONDS)
        watch.look(sign_bytes := objects.get(ALIVE_KEY), time.monotonic())
        if over := why_over(objects, sign_bytes):
            return over
    return ""


def fetch_run(url: str, out: Path, shown: Path | None = None) -> RunDir:
    """Fill a directory with the run in the store at `url`. `shown`: the directory that messages name, if it will have
    another name.

    Raises:
        UserError: there is a run in the directory, or none in the store; or the disk is full.
        LinkError: the store cannot be reached.
    """
    rundir, objects = RunDir(out), open_objects(url)
    if rundir.config.exists():
        raise UserError(f"--resume-from fills an empty directory, and {out} holds a run. Choose another --out.")
    _fetch_ledger(url, objects, rundir)
    restore(rundir, objects, shown or out)
    return rundir


def _fetch_ledger(url: str, objects: Objects, rundir: RunDir) -> Path:
    for folder in (rundir.path, rundir.identity, rundir.checkpoints, rundir.snapshots):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(LedgerFile(rundir.ledger)) as ledger:
        reader = LogReader(objects, ledger)
        reader.catch_up()
    if reader.last is None:
        rundir.ledger.unlink()
        raise UserError(f"There is no run in {url}. Give the run's head.store, without ?lag_seconds.")
    with closing(Ledger(rundir.ledger)) as fetched:
        is_begun = rundir.config.name in fetched.kept("file")
    if not is_begun:
        rundir.ledger.unlink()
        raise UserError(
            f"The run in {url} has not stored its settings yet, and nothing of it was acknowledged. If its head has "
            "just begun, try again in a minute; if it is lost, start the run anew from its configuration file, with "
            "another head.store."
        )
    write_claim(rundir, reader.last)
    return rundir.ledger


def restore(rundir: RunDir, objects: Objects, shown: Path) -> None:
    """Write what the ledger of a directory names: a checkpoint that it can go on from, snapshots, and files.
    `shown`: the directory that messages name.

    Raises: as `fetch_run`.
    """
    with closing(Ledger(rundir.ledger)) as ledger:
        version = ledger.recover().version
        saved = checkpoint.fetch(objects, rundir.checkpoints, version)
        restore_snapshots(objects, ledger, ChunkStore(rundir.snapshots))
        restore_files(rundir, ledger)
    what = "no checkpoint" if saved is None else f"the checkpoint of step {saved}"
    log.warning("fetched a run of %s, with %s, into %s", counted(version, "step"), what, shown)
