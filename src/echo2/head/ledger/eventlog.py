"""Writes events.jsonl: every event of the planner with the commands that answered it, so that a run can be replayed.

One JSON object per line. A head writes its planner's options and its version when it starts, then one line per event:
{"now": ..., "event": {"type": ..., ...}, "commands": [{"type": ..., ...}, ...]}. A line torn by a kill is the last one
of its head; readers skip it. The log is kept in parts (`core.logs`); once the oldest part is deleted, a replay begins
with the first head that started after it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from echo2 import __version__
from echo2.core import logs
from echo2.core.disk import append_whole
from echo2.core.errors import UserError, write_failed
from echo2.core.types import Attachment
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions

log = logging.getLogger(__name__)

#: Maximum bytes of a part, and number of old parts that are kept: half a gigabyte in all.
PART_BYTES_MAX = 64 << 20
PARTS_KEPT = 7
OTHER_VERSION = "A log is replayed by the version of echo2 that wrote it."

_EVENTS: dict[str, type[ev.Event]] = {"Tick": ev.Tick}
_EVENTS.update((kind.__name__, kind) for kind in ev.PlannerEvent.__subclasses__())


def _version() -> str:
    """Return this echo2's version, and what its options, events and commands have, which changes between releases."""
    commands = (one for one in vars(do).values() if isinstance(one, type) and issubclass(one, do.Command))
    kinds: list[Any] = [PlannerOptions, *_EVENTS.values(), *commands]
    shapes = [[kind.__name__, *(f"{one.name}: {one.type}" for one in fields(kind))] for kind in kinds]
    return f"{__version__}-{blake3(msgspec.json.encode(shapes)).hexdigest(8)}"


VERSION = _version()


def to_plain(value: ev.Event | do.Command) -> dict[str, Any]:
    """Return an event or command as plain JSON values, with the name of its type."""
    plain: dict[str, Any] = msgspec.to_builtins(value, enc_hook=_without_attachment)
    return {"type": type(value).__name__, **plain}


def _without_attachment(value: object) -> None:
    """Attachments are for the ledger and the learner; the planner never reads them."""
    if not isinstance(value, Attachment):
        raise NotImplementedError(f"{type(value).__name__} in an event log")


def from_plain(plain: dict[str, Any]) -> ev.Event:
    """Return the event that `to_plain` converted, unchanged.

    Raises:
        KeyError, TypeError, msgspec.ValidationError: the values are not an event.
    """
    values = dict(plain)
    kind = _EVENTS[values.pop("type")]
    event: ev.Event = msgspec.convert(values, type=kind)
    return event


class EventLog:
    """Appends to events.jsonl: `write` buffers a line until `flush`. A line waits until it is written, at the latest
    when the log is closed: the head ends at the first `flush` that fails, so that few lines wait.
    """

    def __init__(self, path: Path, options: PlannerOptions, part_bytes_max: int = PART_BYTES_MAX) -> None:
        self._path, self._part_bytes_max = path, part_bytes_max
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the head)
        self._waiting = b"\n" if torn else b""
        self._add({"options": msgspec.to_builtins(options), "echo2": VERSION})
        self.flush()

    def write(self, now: float, event: ev.Event, commands: Sequence[do.Command]) -> None:
        """Record an event at `now` (seconds of the head's clock) with its commands, for the next `flush`."""
        self._add({"now": now, "event": to_plain(event), "commands": [to_plain(command) for command in commands]})

    def _add(self, record: dict[str, Any]) -> None:
        self._waiting += msgspec.json.encode(record) + b"\n"

    def flush(self) -> None:
        """Write the buffered lines.

        Raises:
            NoRoomError: the disk is full.
            UserError: the log can't be written for another reason.
        """
        try:
            append_whole(self._file, self._waiting)
            self._waiting = b""
            if self._file.tell() > self._part_bytes_max:
                self._begin_part()
        except OSError as error:
            message = f"Cannot write {self._path}: {error.strerror}. Free some space, then --resume."
            raise write_failed(error, message) from error

    def _begin_part(self) -> None:
        logs.shift(self._path, PARTS_KEPT)
        full, self._file = self._file, open(self._path, "ab", buffering=0)  # noqa: SIM115
        full.close()

    def close(self) -> None:
        """Write what waits. Lines for which there is still no room are counted in the log, and lost."""
        try:
            self.flush()
        except UserError as error:
            num_lines = self._waiting.count(b"\n")
            log.error("%d events are not in the event log, which `replay` reads: %s", num_lines, error)
        finally:
            self._file.close()


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay. `num_different`: events whose commands differ from the logged ones; `first_difference`
    describes the first. `num_headless`: events that could not be replayed, because the part of the log with their
    head's options was deleted.
    """

    num_events: int
    num_headless: int
    num_commands: int
    num_heads: int
    num_different: int
    first_difference: str


def replay(path: Path) -> Replay:
    """Feed the logged events to fresh planners and compare their commands with the logged ones.

    Raises:
        UserError: the file is missing, is not an event log, or is of another version.
    """
    planner: Planner | None = None
    parts = logs.parts(path)
    num_headless = num_events = num_commands = num_heads = num_different = 0
    first = ""
    for where, record in _records(parts):
        if "options" in record:
            if (wrote := record.get("echo2")) != VERSION:
                by = f"echo2 {wrote:.80}" if isinstance(wrote, str) else "an echo2 that did not name its version"
                raise UserError(f"{where} was written by {by}, and this is {VERSION}. {OTHER_VERSION}")
            try:
                planner = Planner(msgspec.convert(record["options"], type=PlannerOptions))
            except msgspec.ValidationError as error:
                raise UserError(
                    f"{where} holds no planner options that this version knows: {error}. {OTHER_VERSION}"
                ) from error
            num_heads += 1
            continue
        if planner is None:
            if len(parts) == 1:
                raise UserError(f"{where}: an event stands before any planner options; the event log is incomplete.")
            num_headless += 1
            continue
        try:
            event, now, logged = from_plain(record["event"]), float(record["now"]), record["commands"]
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            raise UserError(f"{where} holds no event that this version knows: {error}. {OTHER_VERSION}") from error
        commands = [to_plain(command) for command in planner.handle(event, now)]
        # Through JSON, like the logged commands: tuples become lists, and infinities null.
        commands = msgspec.json.decode(msgspec.json.encode(commands))
        num_events += 1
        num_commands += len(commands)
        if commands != logged:
            num_different += 1
            first = first or f"{where}, {record['event']}: logged {logged}, now {commands}"
    return Replay(num_events, num_headless, num_commands, num_heads, num_different, first)


def _records(parts: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and record of every complete line. A torn line is allowed at the end, and before a head's start."""
    damage: UserError | None = None
    for path in parts:
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if damage is not None and not line.startswith(b'{"options"'):
                        raise damage
                    damage = None
                    try:
                        record = msgspec.json.decode(line, type=dict[str, Any])
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        damage = UserError(f"{path}:{number} is damaged: {error}.")
                        continue
                    yield f"{path}:{number}", record
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}.") from error
