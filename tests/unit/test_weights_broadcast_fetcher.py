"""A worker's fetcher: what it asks of whom, when it gives a source up, and that it always ends with everything."""

from __future__ import annotations

import random

import pytest

from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.weights.broadcast.decide import fetcher as do
from echo2.weights.broadcast.decide import fetcher as ev
from echo2.weights.broadcast.decide.fetcher import (
    FIRST_ROUTES_SECONDS,
    MAX_FAILURES,
    MAX_STARVED_SECONDS,
    PATIENCE_SECONDS,
    QUIET_SECONDS,
    REROUTE_JITTER_SECONDS,
    REROUTE_SECONDS,
    SLOW_AGAIN_SECONDS,
    STUCK_SECONDS,
    Fetcher,
)
from echo2.weights.broadcast.decide.origin_messages import SOURCE_FAILURES
from invariants import check
from seeds import seeds

P1, P2 = PayloadId(SnapshotRef(RUN_POLICY, 1, 1)), PayloadId(SnapshotRef(RUN_POLICY, 1, 2))
CHUNKS = tuple(bytes([number]) for number in range(12))
LATEST_REROUTE = REROUTE_SECONDS + REROUTE_JITTER_SECONDS


def wanted(payload: PayloadId = P1, missing: tuple[bytes, ...] = CHUNKS) -> ev.PayloadWanted:
    return ev.PayloadWanted(payload, CHUNKS, frozenset(missing))


class Bench:
    """A fetcher, a clock, and what is asked of whom."""

    def __init__(self) -> None:
        self.fetcher = Fetcher("me")
        self.now = 100.0
        self.asked: dict[str, list[bytes]] = {}

    def tell(self, *events: ev.Event) -> list[do.Command]:
        commands = [command for event in events for command in self.fetcher.handle(event, self.now)]
        check(self.fetcher)
        assert all(command.reason for command in commands)
        for command in commands:
            if isinstance(command, do.RequestChunks):
                self.asked.setdefault(command.source, []).extend(command.chunks)
            if isinstance(command, do.CancelRequests):
                self.asked.pop(command.source)
        return [command for command in commands if not isinstance(command, do.WakeAt)]

    def wait(self, seconds: float, *alive: str) -> list[do.Command]:
        """Ticks, with signs of life of these."""
        commands = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            commands += self.tell(*(ev.SourceAlive(source) for source in alive), ev.Tick())
        return commands

    def give(self, source: str, count: int = 100) -> list[do.Command]:
        """So many of the chunks asked of this source, in order."""
        commands = []
        for chunk in self.asked[source][:count]:
            self.asked[source].remove(chunk)
            commands += self.tell(ev.ChunkStored(source, chunk, 10))
        return commands


def two() -> Bench:
    bench = Bench()
    bench.tell(ev.RoutesSet(P1, ("a", "b")), wanted())
    return bench


def reports(commands: list[do.Command]) -> list[tuple[str, str]]:
    return [(command.source, command.failure) for command in commands if isinstance(command, do.ReportSource)]


def test_each_source_is_asked_for_all_that_its_stripes_lack_in_order() -> None:
    bench = Bench()
    bench.tell(wanted(missing=CHUNKS[3:]), ev.RoutesSet(P1, ("a", "b", "")))
    assert bench.asked == {"a": [*CHUNKS[3::3]], "b": [*CHUNKS[4::3]], "": [*CHUNKS[5::3]]}


def test_a_source_is_asked_for_one_stripe_after_the_other() -> None:
    bench = Bench()
    bench.tell(ev.RoutesSet(P1, ("", "a", "")), wanted())
    assert bench.asked[""] == [*CHUNKS[0::3], *CHUNKS[2::3]]


def test_routes_may_come_first_and_are_waited_for_only_so_long() -> None:
    bench = two()
    assert bench.asked == {"a": [*CHUNKS[0::2]], "b": [*CHUNKS[1::2]]}
    bench = Bench()
    bench.tell(wanted())
    assert bench.asked == {}
    bench.wait(FIRST_ROUTES_SECONDS)
    assert bench.asked == {"": [*CHUNKS]}


def test_the_last_chunk_ends_it_with_what_each_gave() -> None:
    bench = two()
    bench.now += 2.0
    bench.give("a")
    bench.now += 1.0
    (whole,) = bench.give("b")
    assert isinstance(whole, do.PayloadWhole)
    assert {(tally.source, tally.num_bytes, tally.seconds) for tally in whole.tallies} == {
        ("a", 60, 2.0),
        ("b", 60, 3.0),
    }
    assert bench.wait(5.0) == []


def test_stored_chunks_are_not_fetched() -> None:
    (whole,) = Bench().tell(wanted(missing=()))
    assert isinstance(whole, do.PayloadWhole)


def test_a_source_that_failed_is_reported_and_its_stripes_wait_for_routes() -> None:
    bench = two()
    bench.asked.pop("a")
    assert reports(bench.tell(ev.RequestFailed("a", "broken"))) == [("a", "broken")]
    assert bench.asked == {"b": [*CHUNKS[1::2]]}
    bench.tell(ev.RoutesSet(P1, ("c", "b")))
    assert bench.asked == {"b": [*CHUNKS[1::2]], "c": [*CHUNKS[0::2]]}


def test_without_routes_the_origin_is_asked_directly() -> None:
    bench = two()
    bench.tell(ev.RequestFailed("a", "broken"))
    bench.wait(LATEST_REROUTE + 0.5, "b")
    assert bench.asked[""] == [*CHUNKS[0::2]]


def test_while_the_origin_is_away_other_sources_are_asked_and_it_is_told_later() -> None:
    bench = two()
    bench.tell(ev.OriginLost(), ev.RequestFailed("a", "broken"))
    bench.wait(LATEST_REROUTE + 0.5, "b")
    assert set(bench.asked["b"]) == set(CHUNKS)
    assert reports(bench.tell(ev.OriginBack())) == [("a", "broken")]


def test_different_workers_do_not_fall_back_at_the_same_time() -> None:
    times = set()
    for name in ("u", "v", "w", "x"):
        fetcher = Fetcher(name)
        for event in (ev.RoutesSet(P1, ("a", "b")), wanted(), ev.RequestFailed("a", "broken")):
            fetcher.handle(event, 0.0)
        assert fetcher.download is not None
        times.add(fetcher.download.orphaned_until)
    assert len(times) == 4


def test_a_source_that_falls_silent_while_another_delivers_is_stalled() -> None:
    bench = Bench()
    many = tuple(number.to_bytes(2, "big") for number in range(400))
    bench.tell(ev.RoutesSet(P1, ("a", "b")), ev.PayloadWanted(P1, many, frozenset(many)))
    given_up: list[tuple[str, str]] = []
    for step in range(20):
        bench.give("b", 2)
        if step < 4:
            bench.give("a", 2)
        given_up += reports(bench.wait(0.5))
        if given_up:
            break
    assert given_up == [("a", "stalled")]
    assert 1.5 + PATIENCE_SECONDS <= bench.now - 100.0 <= 2.5 + PATIENCE_SECONDS


def test_silence_of_all_sources_blames_none_for_a_while() -> None:
    bench = two()
    bench.give("a", 1)
    bench.give("b", 1)
    assert reports(bench.wait(QUIET_SECONDS - 1.0)) == []
    assert {source for source, _ in reports(bench.wait(2.0))} == {"a", "b"}


def test_a_source_that_announces_its_wait_is_not_blamed() -> None:
    bench = two()
    bench.give("a", 3)
    assert reports(bench.wait(MAX_STARVED_SECONDS - 1.0, "a", "b")) == []


@pytest.mark.parametrize("sources", [("a",), ("a", "b")])
def test_a_source_that_only_announces_waits_is_reported_in_the_end_and_again(sources: tuple[str, ...]) -> None:
    bench = Bench()
    bench.tell(ev.RoutesSet(P1, sources), wanted())
    if "b" in sources:
        bench.give("b")
    assert reports(bench.wait(MAX_STARVED_SECONDS + 1.0, "a")) == [("a", "slow")]
    assert reports(bench.wait(SLOW_AGAIN_SECONDS + 1.0, "a")) == [("a", "slow")]
    bench.tell(ev.RoutesSet(P1, ("",)))
    assert "a" not in bench.asked
    assert reports(bench.wait(5.0, "")) == []


def test_a_source_that_withholds_the_last_chunk_is_reported_once_the_head_is_reachable() -> None:
    bench = Bench()
    bench.tell(ev.RoutesSet(P1, ("a",)), wanted())
    bench.give("a", len(CHUNKS) - 1)
    bench.tell(ev.OriginLost())
    assert reports(bench.wait(STUCK_SECONDS + 1.0, "a")) == []
    assert reports(bench.tell(ev.OriginBack()) + bench.wait(1.0, "a")) == [("a", "slow")]
    assert reports(bench.wait(SLOW_AGAIN_SECONDS + 1.0, "a")) == [("a", "slow")]


def test_a_much_slower_source_is_reported_and_used_until_new_routes_come() -> None:
    bench = Bench()
    many = tuple(number.to_bytes(2, "big") for number in range(300))
    bench.tell(ev.RoutesSet(P1, ("a", "b", "c")), ev.PayloadWanted(P1, many, frozenset(many)))
    found: list[tuple[str, str]] = []
    for _ in range(20):
        bench.give("a", 5)
        bench.give("b", 5)
        bench.give("c", 1)
        found += reports(bench.wait(0.5))
    assert found == [("c", "slow")]
    before = list(bench.asked["c"])
    bench.give("c", 1)
    bench.tell(ev.RoutesSet(P1, ("a", "b", "a")))
    assert set(before[1:]) <= set(bench.asked["a"])
    assert "c" not in bench.asked


def test_a_source_of_wrong_bytes_is_not_asked_again_by_new_routes() -> None:
    bench = two()
    bench.asked.pop("a")
    assert reports(bench.tell(ev.RequestFailed("a", "corrupt"))) == [("a", "corrupt")]
    bench.tell(ev.RoutesSet(P1, ("a", "b")))
    assert "a" not in bench.asked
    assert set(bench.asked[""]) == set(CHUNKS[0::2])


def test_a_source_that_fails_repeatedly_is_not_asked_again() -> None:
    bench = two()
    for _ in range(MAX_FAILURES):
        bench.asked.pop("a")
        bench.tell(ev.RequestFailed("a", "broken"))
        bench.tell(ev.RoutesSet(P1, ("a", "b")))
    assert "a" not in bench.asked


def test_the_origin_is_asked_again_after_a_pause_and_a_chunk_that_it_lacks_is_gone() -> None:
    bench = Bench()
    bench.tell(ev.RoutesSet(P1, ("",)), wanted())
    bench.asked.clear()
    assert bench.tell(ev.RequestFailed("", "broken")) == []
    bench.wait(1.0)
    assert bench.asked == {"": [*CHUNKS]}
    (gone,) = bench.tell(ev.RequestFailed("", "missing"))
    assert isinstance(gone, do.PayloadGone)


def test_a_newer_payload_takes_the_place_of_the_old_one() -> None:
    bench = two()
    commands = bench.tell(wanted(P2, CHUNKS[6:]))
    assert {command.source for command in commands if isinstance(command, do.CancelRequests)} == {"a", "b"}
    bench.tell(ev.RoutesSet(P2, ("c",)))
    assert bench.asked == {"c": [*CHUNKS[6:]]}


def test_a_payload_requested_again_asks_for_its_missing_chunks() -> None:
    bench = two()
    bench.give("a", 2)
    bench.tell(wanted())
    assert set(bench.asked["a"]) == set(CHUNKS[0::2])


def test_duplicates_and_messages_of_strangers_do_no_harm() -> None:
    bench = two()
    bench.tell(ev.ChunkStored("a", CHUNKS[0], 10), ev.ChunkStored("a", CHUNKS[0], 10))
    bench.tell(ev.ChunkStored("z", CHUNKS[1], 10), ev.SourceAlive("z"), ev.RequestFailed("z", "broken"))
    assert bench.tell(ev.RoutesSet(P1, ())) == []
    assert bench.tell(ev.PayloadUnwanted(P2)) == []
    assert kinds(bench.tell(ev.PayloadUnwanted(P1))) == ["CancelRequests", "CancelRequests"]


def kinds(commands: list[do.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


@pytest.mark.parametrize("seed", seeds(24, 120))
def test_a_fetch_completes_once_the_origin_answers(seed: int) -> None:
    """Sources fail, fall silent, come back, routes change at random; then the origin alone answers."""
    rng = random.Random(seed)
    bench = Bench()
    bench.tell(wanted())
    whole = 0
    for _ in range(rng.randint(0, 150)):
        bench.now += rng.choice([0.0, 0.1, 2.0])
        names = ["", "a", "b", "c"]
        source = rng.choice(names)
        events: list[ev.Event] = [
            ev.RoutesSet(rng.choice([P1, P2]), tuple(rng.choices(names, k=rng.randint(1, 5)))),
            ev.ChunkStored(source, rng.choice(CHUNKS), 10),
            ev.SourceAlive(source),
            ev.RequestFailed(source, rng.choice([failure for failure in SOURCE_FAILURES if failure != "missing"])),
            ev.OriginLost(),
            ev.OriginBack(),
            ev.Tick(),
        ]
        event = rng.choice(events)
        if isinstance(event, ev.RequestFailed):
            bench.asked.pop(source, None)
        whole += sum(isinstance(command, do.PayloadWhole) for command in bench.tell(event))
    bench.tell(ev.OriginBack())
    for _ in range(600):
        if bench.fetcher.download is None:
            break
        bench.now += 0.5
        whole += sum(isinstance(command, do.PayloadWhole) for command in bench.tell(ev.Tick()))
        for chunk in list(bench.asked.pop("", [])):
            bench.asked.pop("", None)
            whole += sum(isinstance(c, do.PayloadWhole) for c in bench.tell(ev.ChunkStored("", chunk, 10)))
    assert whole == 1, f"seed {seed}: {bench.fetcher.download}"
