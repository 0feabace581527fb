"""What outlives a learner: the run's checkpoints, and the record of the groups on which it was training when it died.

Checkpoints are written in the background and are durable before they are reported to the head. The newest
few, every Nth, and the best evaluated one are kept.

A group that was fed is in the ledger and is fed again after a restart, so a group that kills the learner (out of
memory, a crash of a kernel) would kill every later learner. After TOGETHER_MAX deaths in a micro-batch, its groups are
trained on one by one. A group on which the learner has died ALONE_MAX times, alone, is left out for good and logged. A
group that is trained on without a death is removed from the record. If the learner dies on one group after the other,
the groups are not at fault, and the learner ends with an error that says so.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from echo2.config.rundir import write_atomically
from echo2.core.errors import LinkError, NoRoomError, PeerError, UserError
from echo2.core.objects import open_objects
from echo2.core.types import RolloutGroup
from echo2.learner.core import checkpoint
from echo2.learner.core.publication import NO_ROOM_SECONDS
from echo2.learner.core.state import Saving
from echo2.learner.grpo.trained_policy import TrainedPolicy
from echo2.learner.link.head_client import OVER
from echo2.learner.link.session import HeadSession

log = logging.getLogger(__name__)

TOGETHER_MAX = 2
#: TOGETHER_MAX + ALONE_MAX is one less than the deaths in a row that end a run.
ALONE_MAX = 2
#: Maximum number of groups left out in a row; beyond it the machine is at fault.
LEFT_OUT_MAX = 3
#: Total time that a stopping learner waits for disk space.
LAST_ROOM_SECONDS = 60.0


@dataclass(slots=True)
class _Deaths:
    """The stored record. `together`, `alone`: deaths by group; `at_work`: the groups being trained on."""

    together: dict[int, int] = field(default_factory=dict)
    alone: dict[int, int] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)
    num_in_a_row: int = 0
    at_work: list[int] = field(default_factory=list)


class CrashRecord:
    """Reads the record that the previous learner left in `path`, and counts its death if it died during training.

    Raises:
        UserError: the learner dies on one group after the other.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._deaths = deaths = _read(path)
        counts = deaths.alone if len(deaths.at_work) == 1 else deaths.together
        for number in deaths.at_work:
            counts[number] = counts.get(number, 0) + 1
        for number in [number for number, count in deaths.alone.items() if count >= ALONE_MAX]:
            del deaths.alone[number]
            deaths.left_out.append(number)
            deaths.num_in_a_row += 1
        is_hopeless = deaths.num_in_a_row > LEFT_OUT_MAX
        if is_hopeless:
            deaths.num_in_a_row, deaths.left_out = 0, []  # no group was at fault: --resume tries all again
        if deaths.at_work:
            self._write([])
        if is_hopeless:
            raise UserError(
                f"The learner died on {LEFT_OUT_MAX + 1} groups in a row, each trained on alone: this machine can't "
                "train on what the run samples. See its log; lower sampling.max_tokens or take a larger machine, and "
                "--resume."
            )

    def why_unfit(self, group: RolloutGroup) -> str:
        """Return why the group is left out; empty if it is not."""
        is_fit = group.group.number not in self._deaths.left_out
        return "" if is_fit else f"the learner died {ALONE_MAX} times while it trained on this group alone"

    @property
    def summary(self) -> str:
        """Suffix for the learner's activity, for people: deaths on groups not trained past yet, and groups left out."""
        deaths = max([0, *self._deaths.together.values(), *self._deaths.alone.values()])
        left_out = ", ".join(f"train-{number}" for number in self._deaths.left_out[-LEFT_OUT_MAX:])
        died = f"; it died {deaths} times on groups that it trains again" if deaths else ""
        return died + (f"; left out, for it died of them: {left_out}" if left_out else "")

    def batches(self, groups: Sequence[RolloutGroup]) -> list[list[RolloutGroup]]:
        """Return the batches to train on: all groups without suspicion together, and each of the others alone."""
        suspects = [group for group in groups if self._deaths.together.get(group.group.number, 0) >= TOGETHER_MAX]
        others = [group for group in groups if group not in suspects]
        return [*([others] if others else []), *([group] for group in suspects)]

    @contextmanager
    def training(self, groups: Sequence[RolloutGroup]) -> Iterator[None]:
        """Train on these groups inside this context. A process that does not reach the end of it has died on them."""
        numbers = [group.group.number for group in groups]
        self._write(numbers)
        yield
        for number in numbers:
            self._deaths.together.pop(number, None)
            self._deaths.alone.pop(number, None)
        self._deaths.num_in_a_row = 0
        self._write([])

    def _write(self, at_work: list[int]) -> None:
        """Write the record. A disk error costs the record, not the step."""
        self._deaths.at_work = at_work
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(asdict(self._deaths)))
        except (OSError, UserError) as error:
            log.warning("deaths are not counted: %s", error)


def _read(path: Path) -> _Deaths:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Deaths)
    except FileNotFoundError:
        return _Deaths()
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        log.warning("deaths are counted from nothing: %s is damaged: %s", path, error)
        return _Deaths()


class Checkpoints:
    """Writes one checkpoint at a time, in the background: `begin` starts it, and `finish` waits for its end."""

    def __init__(self, root: Path, client: TrainedPolicy, head: HeadSession) -> None:
        self._root = root
        self._keep, self._keep_every = client.config.learner.keep_checkpoints, client.config.learner.keep_every
        self._client = client
        self._head = head
        self._recorded, self._cursor = client.version, 0
        self._writing: Saving | None = None
        self._give_up_at: float | None = None
        url, _ = client.config.head.store_place
        self._store = open_objects(url) if url else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")
        self._uploading: Future[str] | None = None

    def recorded(self, cursor: int) -> None:
        """The head has recorded the step that made the current version. `cursor`: the task stream's position after it.
        A run can't continue from another version."""
        self._recorded, self._cursor = self._client.version, cursor

    def begin(self) -> None:
        """Begin to write the checkpoint of the current version, which is recorded, once the one before is in the run's
        store, if it has one."""
        self._end_upload(waits=True)
        directory = checkpoint.step_directory(self._root, self._client.version)
        self._writing = self._client.save_state(directory, self._head.lineage, self._cursor)

    def finish(self, tells_head: bool = True, is_last: bool = False) -> None:
        """Wait until the checkpoint under way is durable, if there is one. On a full disk, wait for space: without the
        checkpoint, all steps since the previous one would be trained again. A stopping learner gives the checkpoint up
        after `LAST_ROOM_SECONDS`.

        Raises:
            UserError: the checkpoint can't be written to its directory.
            LinkError: the head was away for too long.
        """
        while self._writing is not None:
            try:
                self._writing.result()
                self._writing = None
            except NoRoomError as error:
                if (self._head.stop_reason or not tells_head) and self._has_waited():
                    log.error(
                        "version %d has no checkpoint; resuming goes on before it: %s", self._client.version, error
                    )
                    self._writing = None
                    return
                self._head.doing = f"waiting for room: {error}"
                log.warning("waiting for room: %s", error)
                time.sleep(NO_ROOM_SECONDS)
                self.begin()
                continue
            if self._store is not None:
                self._upload()
            elif tells_head:
                self._report()
        self._end_upload(waits=is_last or not tells_head, tells_head=tells_head)

    def _upload(self) -> None:
        if self._store is not None:
            directory = checkpoint.step_directory(self._root, checkpoint.versions(self._root)[0])
            self._uploading = self._thread.submit(checkpoint.upload, self._store, directory)

    def _end_upload(self, waits: bool, tells_head: bool = True) -> None:
        """Report a checkpoint that has arrived in the store: before, the head must keep what an earlier one needs. If
        the store cannot be reached, a later checkpoint takes its place."""
        if self._store is None or self._uploading is None or not (waits or self._uploading.done()):
            return
        uploading, self._uploading = self._uploading, None
        try:
            folder = uploading.result()
            if tells_head:
                self._report()
                checkpoint.keep_only(self._store, folder)
        except (LinkError, OSError) as error:
            log.warning("a checkpoint is not in the store: %s", error)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Save the last recorded version when training inside this context ends: the run is over, is stopped, or the
        head is gone. The end of the run is not an error (`HeadSession.stop_reason`).

        Raises:
            LinkError, PeerError: the head is gone.
        """
        try:
            yield
        except (LinkError, PeerError) as error:
            self._save_last()
            if isinstance(error, PeerError) and error.reason == OVER:
                self._head.stop(error.detail)
            if not self._head.stop_reason:
                raise
        else:
            self._save_last()

    def _save_last(self) -> None:
        """Save the current version, unless that is done, without telling the head, which is going away."""
        client = self._client
        if client.is_within_step or client.version != self._recorded:
            log.warning(
                "no checkpoint of the step under way: %s; the run goes on from the newest one before",
                "it has had a part of its updates" if client.is_within_step else "the head has not recorded it",
            )
            return
        self._head.doing = f"saving version {client.version}, the last one"
        self.finish(tells_head=False)
        if not checkpoint.is_whole(checkpoint.step_directory(self._root, client.version)):
            self.begin()
            self.finish(tells_head=False)

    def _has_waited(self) -> bool:
        """Whether a stopping learner has waited long enough for disk space."""
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + LAST_ROOM_SECONDS
        return now >= self._give_up_at

    def report_again(self) -> None:
        """Tell the head which checkpoints exist: the last report may have been lost."""
        if self._client.version in checkpoint.versions(self._root):
            if self._store is None:
                self._report()
            else:
                self._upload()

    def _report(self) -> None:
        """Report the checkpoints, then prune them. Only the head knows the best one, so nothing is deleted before it
        answers.
        """
        whole, every = checkpoint.versions(self._root), self._keep_every
        best = self._head.report_checkpoint(whole[0], whole[: self._keep][-1], whole)
        checkpoint.prune(self._root, self._keep, [v for v in whole if v in best or (every and v % every == 0)])
