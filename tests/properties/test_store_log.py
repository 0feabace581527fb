"""The log of a ledger in a store that fails in every way it may, with heads that die, lose their disks, come back from
the dead and race, and standbys that follow them: what was acknowledged is there afterwards, once, and only one head at
a time acknowledges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from echo2.core.errors import LinkError, UserError
from echo2.head.store.decide.log import ALIVE_SECONDS, SILENT_SECONDS, Claim, LogWriter, Mark, SignOfLife, SignWatch
from echo2.head.store.log import (
    ALIVE_KEY,
    LogReader,
    add_mark,
    copy_name,
    encode,
    read_sign,
    sealed,
    send,
    take_log,
    why_over,
)
from seeds import seeds

STEPS = 400


class FaultyObjects:
    """Objects in memory. A request may be lost before it is done or after, or midway, may be done again later, and a
    list may be old."""

    def __init__(self, random: Random) -> None:
        self._random, self._objects, self.fault_rate = random, dict[str, bytes](), 0.06
        self._old_keys: list[str] = []
        self._late: list[Callable[[], object]] = []

    def _fails(self) -> bool:
        if self._late and self._random.random() < 0.2:
            self._late.pop()()
        return self._random.random() < self.fault_rate

    def get(self, key: str) -> bytes | None:
        if self._fails():
            raise LinkError("lost")
        return self._objects.get(key)

    def create(self, key: str, data: bytes) -> bool:
        is_new = key not in self._objects
        self._done(lambda: self._objects.setdefault(key, data), lambda: None)
        return is_new

    def _done(self, whole: Callable[[], object], half: Callable[[], object]) -> None:
        """Do a request, or fail in one of the ways there are."""
        if not self._fails():
            whole()
            return
        kind = self._random.choice(["before", "after", "late", "torn"])
        if kind == "late":
            self._late.append(whole)
        elif kind != "before":
            (whole if kind == "after" else half)()
        raise LinkError("lost")

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
        data = b"".join(pieces)
        put = self._objects.__setitem__
        self._done(lambda: put(key, data), lambda: put(key, data[: self._random.randrange(len(data))]))

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
    asleep_until: float = 0.0
    signed_at: float = -1e9
    num_signs: int = 0


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
            self.fetch()

    def fetch(self) -> None:
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
            self.objects.upload(f"copies/{name}", sealed(one.ledger.copy()))
            one.copying = (position, number, name)
        elif one.writer.stored >= one.copying[1] and one.writer.fenced is None:
            (position, number, name), one.copying = one.copying, None
            add_mark(self.objects, Mark(name, number, position, one.writer.beginnings))


@pytest.mark.parametrize("lag_seconds", [0.0, 4.0])
@pytest.mark.parametrize("seed", seeds(15, 400))
def test_every_acknowledged_record_is_in_the_log_once(lag_seconds: float, seed: int) -> None:
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


# ---- standbys --------------------------------------------------------------------------------------------------------


class Standbys(World):
    """Two standbys, whose clocks are wrong and run too fast or too slow. Heads fall asleep for as long as a standby
    waits, and longer. Machines deliver the same results again, to whichever head, until one has acknowledged them."""

    def __init__(self, random: Random) -> None:
        super().__init__(random, 0.0)
        self.watches = [SignWatch(), SignWatch()]
        self.clocks = [(random.uniform(0.5, 2.0), random.uniform(-1e6, 1e6)) for _ in self.watches]
        self.num_taken_over = self.num_woken = 0

    def act(self) -> None:
        self.now += 2.0 * self.random.random()
        if self.random.random() < 0.7:
            with suppress(LinkError):
                self.look()
        awake = [one for one in self.directories[-4:] if self.now >= one.asleep_until]
        if not awake:
            return
        one = self.random.choice(awake)
        if one.asleep_until and one.writer is not None and one is not self.directories[-1]:
            self.num_woken += one.writer.fenced is None
        one.asleep_until = 0.0
        often = [self.record, self.send, self.acknowledge, self.sign, self.start]
        action = self.random.choice([*often * 5, self.kill, self.copy, self.sleep])
        with suppress(LinkError):
            action(one)

    def record(self, one: Directory) -> None:
        if one.writer is None:
            return
        acknowledged = {record for each in self.directories for record in each.acknowledged}
        delivered = [f"r{number + 1}" for number in range(self.num_records)]
        again = [record for record in delivered if record not in acknowledged]
        if not again or self.random.random() < 0.7:
            super().record(one)
        elif (record := self.random.choice(again)) not in one.ledger.records:  # else the planner refuses it
            one.ledger.records.append(record)
            one.times.append(self.now)
            one.writer.add(one.ledger.number, record.encode(), self.now)

    def sign(self, one: Directory) -> None:
        if one.writer is not None and one.writer.fenced is None and self.now > one.signed_at + ALIVE_SECONDS:
            one.num_signs += 1
            sign = SignOfLife(one.name, one.writer.epoch, one.num_signs)
            self.objects.upload(ALIVE_KEY, [encode(sign)])
            one.signed_at = self.now

    def sleep(self, one: Directory) -> None:
        one.asleep_until = self.now + 3 * self.random.random() * SILENT_SECONDS

    def look(self) -> None:
        number = self.random.randrange(len(self.watches))
        watch, (rate, offset) = self.watches[number], self.clocks[number]
        watch.look(found := self.objects.get(ALIVE_KEY), self.now * rate + offset)
        if watch.is_silent:
            self.fetch()
            sign = read_sign(found)
            if not watch.may_follow(self.directories[-1].claim.after, sign and (sign.head, sign.epoch)):
                return
            self.start(self.directories[-1])
            self.num_taken_over += self.directories[-1].writer is not None
            self.watches[number] = SignWatch()


def settled(world: World) -> Records:
    """What is in the store when all is quiet."""
    world.objects.fault_rate = 0.0
    found = Records()
    LogReader(world.objects, found).catch_up()
    return found


@pytest.mark.parametrize("seed", seeds(15, 400))
def test_only_one_of_a_head_and_its_standbys_acknowledges(seed: int) -> None:
    world = Standbys(Random(seed))
    for _ in range(3 * STEPS):
        world.act()
    found = settled(world)
    assert len(set(found.records)) == len(found.records)
    acknowledged = [record for one in world.directories for record in one.acknowledged]
    assert len(set(acknowledged)) == len(acknowledged)  # by one head each
    assert set(acknowledged) <= set(found.records)


def test_standbys_follow_heads_that_sleep_and_wake_up() -> None:
    worlds = [Standbys(Random(seed)) for seed in range(30)]
    for world in worlds:
        for _ in range(3 * STEPS):
            world.act()
    assert sum(world.num_taken_over for world in worlds) > 40
    assert sum(world.num_woken for world in worlds) > 10
    assert sum(len(one.acknowledged) for world in worlds for one in world.directories) > 100


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_a_head_that_gives_signs_is_not_taken_over_and_a_silent_one_is(rate: float) -> None:
    watch, now = SignWatch(), 0.0
    while now < 100 * SILENT_SECONDS:
        watch.look(b"%d" % (now // (2 * ALIVE_SECONDS)), 7e8 + now * rate)
        assert not watch.is_silent
        now += 1.0
    died_at = now
    while not watch.is_silent:
        watch.look(b"the last", 7e8 + now * rate)
        now += 1.0
    assert SILENT_SECONDS <= (now - died_at) * rate < SILENT_SECONDS + 4 * rate


def test_a_standby_that_slept_counts_no_silence() -> None:
    """It slept, or the store was away, for the head as well."""
    watch = SignWatch()
    for now in (0.0, 2.0, 1e6, 2e6, 2e6 + 2.0):
        watch.look(b"sign", now)
    assert not watch.is_silent


def test_a_final_sign_of_life_counts_unless_another_head_followed() -> None:
    objects = FaultyObjects(Random(0))
    objects.fault_rate = 0.0
    assert why_over(objects, None) == ""
    first = take_log(objects, Records(), Claim("a"), Records().copy)
    words = encode(SignOfLife("a", first.epoch, 5, "finished"))
    assert why_over(objects, encode(SignOfLife("a", first.epoch, 4))) == ""
    assert why_over(objects, words[:-3]) == ""
    assert why_over(objects, words) == "finished"
    take_log(objects, Records(), Claim("b", ("a", first.epoch)), Records().copy)
    assert why_over(objects, words) == ""
