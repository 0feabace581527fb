"""Budgets of calls, bodies and bytes: nobody gets more than its own, and nobody else's is touched."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.transport import limits
from echo2.transport.budgets import UNREAD_SECONDS, Buckets, Budgets, OverBudget, Party
from transport_cases import run

MOMENTS = st.lists(st.floats(0.0, 0.5), max_size=200)


@given(MOMENTS, st.floats(1.0, 100.0), st.floats(1.0, 50.0))
def test_no_stretch_of_time_has_more_than_its_rate_and_burst(pauses: list[float], rate: float, burst: float) -> None:
    buckets, now, taken = Buckets(), 0.0, list[float]()
    for pause in pauses:
        now += pause
        if buckets.take("a", rate, burst, now) >= 0:
            taken.append(now)
    for first, begun_at in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - begun_at) + 1e-6


@given(MOMENTS, st.floats(10.0, 100.0))
def test_a_caller_that_keeps_to_the_rate_is_never_refused_whatever_others_do(pauses: list[float], rate: float) -> None:
    buckets, now = Buckets(), 0.0
    for pause in pauses:
        now += pause
        buckets.take("other", rate, 1.0, now)
        buckets.take("other", rate, 1.0, now, debt_max=10.0)
        if pause * rate >= 1.0:
            assert buckets.take("honest", rate, 1.0, now) >= 0


def test_debt_is_repaid_and_bounded() -> None:
    buckets = Buckets()
    assert [buckets.take("a", 1.0, 1.0, 0.0, debt_max=2.0) for _ in range(5)] == [0.0, -1.0, -2.0, -3.0, -3.0]
    assert buckets.take("a", 1.0, 1.0, 2.5, debt_max=2.0) == -0.5
    assert buckets.take("a", 1.0, 1.0, 100.0) == 0.0


def test_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUCKETS_MAX", 10)
    buckets = Buckets()
    for number in range(1000):
        buckets.take(str(number), 1.0, 2.0, float(number))
        buckets.take("busy", 1.0, 1e6, float(number), 100.0)
    assert len(buckets._levels) <= 10
    assert buckets.take("busy", 1.0, 1e6, 1000.0) < 1e6 - 90_000


def test_a_flooding_peer_is_warned_first_and_cut_off_later() -> None:
    async def scenario() -> None:
        budgets = Budgets()
        parties = (Party("w-1", 1e-6, 10.0), Party("ticket", 1e-6, 1e6))
        for _ in range(10):
            budgets.called(parties)
        floods = []
        for _ in range(int(limits.REFUSALS_MAX) + 5):
            with pytest.raises(OverBudget, match="w-1") as caught:
                budgets.called(parties)
            floods.append(caught.value.is_flood)
        assert not any(floods[: int(limits.REFUSALS_MAX)])
        assert floods[-1]
        budgets.called((Party("w-2", 1e-6, 10.0), Party("ticket", 1e-6, 1e6)))

    run(scenario())


def test_bodies_are_read_in_turn_by_peer_and_by_ticket() -> None:
    async def scenario() -> None:
        budgets, reading, most = Budgets(), list[str](), dict[str, int]()
        free = asyncio.Event()

        async def read(peer: str, ticket: str) -> None:
            parties = (Party(peer, reads=2), Party(ticket, reads=3))
            async with budgets.reading(parties, True):
                reading.extend((peer, ticket))
                for name in (peer, ticket):
                    most[name] = max(most.get(name, 0), reading.count(name))
                await free.wait()
                reading.remove(peer)
                reading.remove(ticket)

        liars = [asyncio.ensure_future(read(f"w-{number}", "t-1")) for number in range(4) for _ in range(10)]
        for _ in range(10):
            await asyncio.sleep(0)
        honest = asyncio.ensure_future(read("w-9", "t-2"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert "w-9" in reading  # whatever waits elsewhere
        free.set()
        await asyncio.gather(honest, *liars)
        assert most.pop("t-1") == 3
        assert max(most.values()) == 2
        assert reading == []
        assert dict(budgets._read_slots) == {}

    run(scenario())


def test_bytes_are_read_at_their_rate() -> None:
    async def scenario() -> None:
        budgets, loop = Budgets(), asyncio.get_running_loop()
        parties = (Party("w-1", bytes_per_second=10_000.0, bytes_burst=1000.0),)
        begun_at = loop.time()
        for _ in range(4):
            async with budgets.reading(parties, True):
                pass
            budgets.has_read(parties, 1000)
        assert loop.time() - begun_at >= 0.15  # the second thousand is owed when it is read, and two more

    run(scenario())


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1000)), max_size=50))
def test_bytes_that_are_handled_count_no_longer_and_others_do(sent: list[tuple[int, int]]) -> None:
    async def scenario() -> None:
        budgets, ticket, clock = Budgets(), Party("ticket", unread=1e9), asyncio.get_running_loop().time
        began_at = clock()
        peers = [(Party(f"w-{number}", unread=1e6), ticket) for number in range(2)]
        for number, size in sent:
            assert budgets.count_unread(peers[number], size) is None
        for number, parties in enumerate(peers):
            own = sum(size for whose, size in sent if whose == number)
            unread = budgets.unread(parties[0])
            forgotten = 1e6 / UNREAD_SECONDS * (clock() - began_at)  # at most: in all the time since
            assert own - forgotten - 1e-6 <= unread <= own
            for whose, size in sent:
                if whose == number:
                    budgets.handled(parties, size)
            assert budgets.unread(parties[0]) == 0.0

    run(scenario())


def test_a_ticket_with_too_many_unread_bytes_gets_an_error() -> None:
    async def scenario() -> None:
        budgets, ticket = Budgets(), Party("ticket", unread=2500.0)
        peers = [(Party(f"w-{number}", unread=1000.0), ticket) for number in range(4)]
        assert [budgets.count_unread(parties, 800) for parties in peers] == [None, None, None, ticket]
        assert budgets.count_unread(peers[0], 300) == ticket
        own = peers[0][0]
        assert budgets.count_unread((own,), 1) == own

    run(scenario())


def test_calls_under_way_are_counted_by_peer() -> None:
    budgets = Budgets()
    held = [budgets.under_way("w-1") for _ in range(limits.CALLS_PER_PEER_MAX)]
    for each in held:
        each.__enter__()
    with pytest.raises(OverBudget, match="under way"), budgets.under_way("w-1"):
        pass
    with budgets.under_way("w-2"):
        pass
    held[0].__exit__(None, None, None)
    with budgets.under_way("w-1"):
        pass
