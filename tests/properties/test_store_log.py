"""The log of a ledger in a store that fails in every way it may, with heads that die, lose their disks, come back from
the dead and race: what was acknowledged is there afterwards, once, and only one head at a time acknowledges.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from echo2.core.errors import LinkError, UserError
from echo2.head.store.decide.log import Claim, LogWriter, Mark
from echo2.head.store.log import LogReader, add_mark, copy_name, send, take_log
from seeds import seeds

STEPS = 400


class FaultyObjects:
    """Objects in memory. A request may be lost before it is done or after, may be done again later, and a list may
    be old."""

    def __init__(self, random: Random) -> None:
        self._random, self._objects, self.fault_rate = random, dict[str, bytes](), 0.06
        self._old_keys: list[str] = []
        self._late: list[tuple[str, bytes]] = []

    def _fails(self) -> bool:
        if self._late and self._random.random() < 0.2:
            key, data = self._late.pop()
            self._objects.setdefault(key, data)
        return self._random.random() < self.fault_rate

    def get(self, key: str) -> bytes | None:
        if self._fails():
            raise LinkError("lost")
        return self._objects.get(key)

    def create(self, key: str, data: bytes) -> bool:
        if self._fails():
            kind = self._random.choice(["before", "after", "late"])
            if kind == "after":
                self._objects.setdefault(key, data)
            elif kind == "late":
                self._late.append((key, data))
            raise LinkError("lost")
        is_new = key not in self._objects
        self._objects.setdefault(key, data)
        return is_new

    def keys(self, prefix: str) -> list[str]:
        if self._fails():
            raise LinkError("lost")
        if self._random.random() < 0.5 or not self.fault_rate:
            self._old_keys = sorted(self._objects)
        return [key for key in self._old_keys if key.startswith(f"{prefix}/")]

    def delete(self, keys: Collection[str]) -> None:
        for key in keys:
            if self._fails():
                raise LinkError("lost")
            self._objects.pop(key, None)

    def upload(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        if self._fails():
            raise LinkError("lost")
        self._objects[key] = b"".join(pieces)

    def download(self, key: str) -> Iterator[bytes]:
        if self._fails():
            raise LinkError("lost")
        if key not in self._objects:
            raise FileNotFoundError(key)
        yield self._objects[key]


@dataclass
class Records:
    """A ledger of nothing but its records."""

    records: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        return len(self.records)

    def apply(self, number: int, record: bytes) -> None:
        assert number == self.number + 1
        self.records.append(record.decode())

    def load(self, pieces: Iterator[bytes]) -> None:
        self.records = json.loads(b"".join(pieces))

    def copy(self) -> Iterator[bytes]:
        yield json.dumps(self.records).encode()


@dataclass
class Directory:
    """A head's disk, and the head on it while it lives."""

    name: str
    claim: Claim
    ledger: Records = field(default_factory=Records)
    writer: LogWriter | None = None
    times: list[float] = field(default_factory=list)  # of the records that the living head has added
    acknowledged: dict[str, float] = field(default_factory=dict)  # record -> when it was recorded
    copying: tuple[int, int, str] | None = None


class World:
    def __init__(self, random: Random, lag_seconds: float) -> None:
        self.random, self.objects, self.lag_seconds = random, FaultyObjects(random), lag_seconds
        self.now, self.num_records = 0.0, 0
        self.directories = [Directory("d0", Claim("d0"))]

    def act(self) -> None:
        self.now += self.random.random()
        one = self.random.choice(self.directories[-3:])
        often = [self.record, self.send, self.acknowledge, self.start]
        action = self.random.choice([*often, *often, self.kill, self.lose, self.copy])
        with suppress(LinkError):
            action(one)

    def record(self, one: Directory) -> None:
        if one.writer is not None:
            self.num_records += 1
            one.ledger.records.append(f"r{self.num_records}")
            one.times.append(self.now)
            one.writer.add(one.ledger.number, one.ledger.records[-1].encode(), self.now)

    def send(self, one: Directory) -> None:
        if one.writer is not None and (entry := one.writer.to_send()) is not None:
            one.writer.answered(send(self.objects, one.writer.position, entry))  # type: ignore[arg-type]

    def acknowledge(self, one: Directory) -> None:
        if one.writer is None or not one.times:
            return
        first = one.ledger.number - len(one.times)
        for place, at in enumerate(one.times):
            if one.writer.may_leave(first + place + 1, self.now, self.lag_seconds):
                one.acknowledged[one.ledger.records[first + place]] = at

    def start(self, one: Directory) -> None:
        """Start a head, perhaps one that another has followed long ago."""
        if one.writer is None:
            with suppress(UserError):
                one.writer = take_log(self.objects, one.ledger, one.claim, one.ledger.copy)
                one.times, one.copying = [], None

    def kill(self, one: Directory) -> None:
        if self.random.random() < 0.3:
            one.writer = None

    def lose(self, _: Directory) -> None:
        """Somebody resumes on an empty disk; the head before may be dead, or asleep."""
        if self.random.random() < 0.3:
            name = f"d{len(self.directories)}"
            reader = LogReader(self.objects, Records())
            reader.catch_up()
            if reader.last is not None:
                claim = Claim(name, (reader.last.head, reader.last.epoch))
                self.directories.append(Directory(name, claim, reader._replica))  # type: ignore[arg-type]

    def copy(self, one: Directory) -> None:
        """In two steps, with whatever may come between them."""
        if one.writer is None:
            return
        if one.copying is None:
            position, number = one.writer.position - 1, one.ledger.number
            name = copy_name(number, one.name, one.writer.epoch)
            self.objects.upload(f"copies/{name}", one.ledger.copy())
            one.copying = (position, number, name)
        elif one.writer.stored >= one.copying[1] and one.writer.fenced is None:
            (position, number, name), one.copying = one.copying, None
            add_mark(self.objects, Mark(name, number, position, one.writer.beginnings))


@pytest.mark.parametrize("lag_seconds", [0.0, 4.0])
@pytest.mark.parametrize("seed", seeds(15, 400))
def test_what_was_acknowledged_is_there_once(lag_seconds: float, seed: int) -> None:
    world = World(Random(seed), lag_seconds)
    for _ in range(STEPS):
        world.act()
    world.objects.fault_rate = 0.0
    found = Records()
    LogReader(world.objects, found).catch_up()
    assert len(set(found.records)) == len(found.records)
    assert found.records == sorted(found.records, key=lambda name: int(name[1:]))
    for one in world.directories:
        lost = [at for record, at in one.acknowledged.items() if record not in found.records]
        assert not lost or max(lost) - min(lost) < lag_seconds


def test_the_worlds_are_eventful() -> None:
    """Heads follow each other, some are refused, and records are stored and lost."""
    num_heads, num_stored, num_recorded = 0, 0, 0
    for seed in range(20):
        world = World(Random(seed), 0.0)
        for _ in range(STEPS):
            world.act()
        world.objects.fault_rate = 0.0
        found = Records()
        reader = LogReader(world.objects, found)
        reader.catch_up()
        num_heads += reader.last.epoch if reader.last is not None else 0
        num_stored, num_recorded = num_stored + found.number, num_recorded + world.num_records
    assert num_heads > 60
    assert 50 < num_stored < num_recorded


def test_an_entry_that_the_store_has_altered_is_refused() -> None:
    objects, ledger = FaultyObjects(Random(0)), Records()
    objects.fault_rate = 0.0
    take_log(objects, ledger, Claim("one"), ledger.copy)
    (key,) = objects.keys("log")
    objects._objects[key] = objects._objects[key][:-1]
    with pytest.raises(UserError, match="digest is wrong now"):
        LogReader(objects, Records()).catch_up()
