"""The broadcast's machine at the origin: plans, what changes when somebody fails, what is remembered, what never is."""

from __future__ import annotations

import random

import pytest
from broadcast_schemes import SCHEMES

from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.weights.broadcast.decide import origin_messages as do
from echo2.weights.broadcast.decide import origin_messages as ev
from echo2.weights.broadcast.decide.origin import (
    CALM_SECONDS,
    MAX_ACCUSED,
    MAX_PLANS,
    PACE,
    PACED_MAX,
    Broadcast,
    BroadcastOptions,
)
from echo2.weights.broadcast.decide.routes import can_link
from invariants import check
from seeds import seeds
from test_head_fleet import count_lines

P1 = PayloadId(SnapshotRef(RUN_POLICY, 1, 1))
P2 = PayloadId(SnapshotRef(RUN_POLICY, 1, 2), SnapshotRef(RUN_POLICY, 1, 1))
UP = 12.5e6


class Bench:
    """A machine, and the routes of each worker as it was told them."""

    def __init__(self, count: int = 0, scheme: str = "trees", fan_out: int = 8, tickets: tuple[str, ...] = ()) -> None:
        self.machine = Broadcast(BroadcastOptions(SCHEMES[scheme], fan_out, origin_up=UP))
        self.routes: dict[str, tuple[str, ...]] = {}
        self.now = 0.0
        for at in range(count):
            self.tell(ev.MemberJoined(f"w{at}", f"host:{at}", ticket=tickets[at] if at < len(tickets) else ""))

    def takers_of(self, payload: PayloadId, worker_id: str) -> list[str]:
        """Who takes this payload of it now."""
        plan = self.machine.plans.get(payload)
        return list(plan.children.get(worker_id, ())) if plan is not None else []

    def tell(self, *events: ev.Event) -> list[do.Command]:
        commands = [command for event in events for command in self.machine.handle(event, self.now)]
        check(self.machine)
        assert all(command.reason for command in commands)
        for command in commands:
            if isinstance(command, do.SetRoutes):
                self.routes[command.worker_id] = command.sources
        return commands

    def assign(self, *worker_ids: str, payload: PayloadId = P1) -> list[do.Command]:
        return self.tell(ev.PayloadAssigned(payload, worker_ids, 1000))

    def fail(self, worker_id: str, source: str, reason: str) -> set[str]:
        """Who is told other routes."""
        return told(self.tell(ev.SourceFailed(worker_id, P1, source, reason)))


def told(commands: list[do.Command]) -> set[str]:
    return {command.worker_id for command in commands if isinstance(command, do.SetRoutes)}


def mesh(count: int = 5) -> Bench:
    bench = Bench(count)
    bench.assign(*(f"w{at}" for at in range(count)))
    return bench


def test_all_members_get_routes_and_addresses() -> None:
    bench = Bench(3)
    commands = bench.assign("w0", "w1", "w2")
    assert told(commands) == {"w0", "w1", "w2"}
    first = next(command for command in commands if isinstance(command, do.SetRoutes))
    assert first.addresses == {"w1": "host:1", "w2": "host:2"}
    assert set(first.sources) == {"", "w1", "w2"}


def test_members_of_a_plan_are_paced_to_their_shares_of_the_uplink() -> None:
    bench = mesh(4)
    paces = [bench.machine.rate_limit(f"w{at}", P1) for at in range(4)]
    assert paces == [pytest.approx(PACE * UP / 4)] * 4
    for at in range(3):
        bench.tell(ev.PayloadReceived(f"w{at}", P1, ()))
    assert bench.machine.rate_limit("w3", P1) is None  # it has the uplink to itself
    assert bench.machine.rate_limit("w0", P2) is None


def test_members_that_get_everything_from_the_origin_do_not_share_one_copy_s_pace() -> None:
    bench = Bench(3, scheme="star")
    bench.assign("w0", "w1", "w2")
    assert bench.machine.rate_limit("w1", P1) == pytest.approx(PACE * UP)


def test_a_measured_uplink_sets_the_pace_and_a_single_machine_has_none() -> None:
    machine = Broadcast(BroadcastOptions())
    for at, reach in enumerate(("", "", "", ev.ONE_MACHINE, ev.ONE_MACHINE)):
        machine.handle(ev.MemberJoined(f"w{at}", f"host:{at}", reach), 0.0)
    machine.handle(ev.PayloadAssigned(P1, tuple(f"w{at}" for at in range(5)), 1000), 0.0)
    assert machine.rate_limit("w0", P1) is None  # no link is measured yet
    for at, down in enumerate((1e6, 9e6, 2e6, 800e6)):
        machine.handle(ev.LinkMeasured(f"w{at}", 1e6, down), 0.0)
    taken = machine.plans[P1].children[""]
    assert machine.rate_limit("w0", P1) == pytest.approx(PACE * 2e6 * taken["w0"] / machine.plans[P1].num_stripes)
    assert machine.rate_limit("w3", P1) is None
    for at in range(3):
        machine.handle(ev.LinkMeasured(f"w{at}", 1e6, 1.1 * PACED_MAX), 0.0)
    assert machine.rate_limit("w0", P1) is None  # processors are the limit


def test_a_member_that_cannot_be_dialled_is_asked_to_dial() -> None:
    bench = Bench(2)
    bench.tell(ev.MemberJoined("hidden", ""))
    commands = bench.assign("w0", "w1", "hidden")
    dials = {(c.worker_id, c.peer_id, c.address) for c in commands if isinstance(c, do.DialPeer)}
    assert dials == {("hidden", "w0", "host:0"), ("hidden", "w1", "host:1")}


def test_stripes_of_a_departed_member_are_reassigned_and_no_others_move() -> None:
    bench = mesh(5)
    before = dict(bench.routes)
    bench.tell(ev.MemberLeft("w2", "killed"))
    heirs = set()
    for worker_id in ("w0", "w1", "w3", "w4"):
        pairs = list(zip(before[worker_id], bench.routes[worker_id], strict=True))
        assert all(old == new for old, new in pairs if old != "w2")
        assert all(new != "w2" for _, new in pairs)
        heirs |= {worker_id for old, new in pairs if old == "w2" and new == ""}
    assert heirs == {"w0", "w1", "w3", "w4"}  # each takes over a part


def test_a_single_complaint_moves_the_complainer_and_two_are_believed() -> None:
    bench = mesh(5)
    assert bench.fail("w0", "w1", "stalled") == {"w0"}
    assert "w1" not in bench.routes["w0"]
    assert bench.fail("w2", "w1", "stalled") >= {"w2", "w3", "w4"}
    assert not bench.takers_of(P1, "w1")


def test_only_one_member_at_a_time_is_relieved_for_slowness() -> None:
    bench = mesh(6)
    bench.fail("w0", "w1", "slow")
    bench.fail("w2", "w1", "slow")
    assert not bench.takers_of(P1, "w1")
    assert "" not in bench.routes["w1"]  # what it was the root of reaches it by its heirs
    bench.fail("w0", "w3", "slow")
    bench.fail("w2", "w3", "slow")
    assert bench.takers_of(P1, "w3")
    bench.now = CALM_SECONDS
    bench.fail("w0", "w3", "slow")
    bench.fail("w2", "w3", "slow")
    assert not bench.takers_of(P1, "w3")


def test_a_member_that_sent_wrong_bytes_is_named_once_and_never_a_source_again() -> None:
    bench = mesh(5)
    commands = bench.tell(ev.SourceFailed("w0", P1, "w1", "corrupt"), ev.SourceFailed("w2", P1, "w1", "corrupt"))
    assert [(c.worker_id, c.accused_by) for c in commands if isinstance(c, do.NameSuspect)] == [("w1", "w0")]
    assert not bench.takers_of(P1, "w1")
    bench.tell(ev.MemberLeft("w1", "restarted"), ev.MemberJoined("w1", "host:1"))
    bench.assign("w0", "w1", "w2", payload=P2)
    assert not bench.takers_of(P2, "w1")


def test_a_worker_that_accuses_all_others_is_not_believed() -> None:
    bench = mesh(8)
    for at in range(1, 8):
        bench.fail("w0", f"w{at}", "corrupt")
    assert len(bench.machine.suspects) == MAX_ACCUSED
    assert len(bench.machine.accused["w0"]) == MAX_ACCUSED + 1  # what it says beyond that changes nothing
    assert set(bench.routes["w0"]) == {""}


def strangers(*tickets: str, count: int = 8) -> Bench:
    """A mesh whose first members are strangers, by these tickets."""
    bench = Bench(count, tickets=tickets)
    bench.assign(*(f"w{at}" for at in range(count)))
    return bench


@pytest.mark.parametrize("reason", ["corrupt", "missing", "stalled", "slow"])
def test_strangers_of_one_ticket_ban_no_honest_relay(reason: str) -> None:
    bench = strangers("t", "t", "t", "t")
    for accuser in range(4):
        for source in range(4, 8):
            bench.fail(f"w{accuser}", f"w{source}", reason)
    assert not bench.machine.suspects
    assert not any(bench.machine.bias.values())
    for source in range(4, 8):
        takers = set(bench.takers_of(P1, f"w{source}"))
        assert takers >= {f"w{at}" for at in range(4, 8) if at != source}, f"w{source} serves {takers}"
        assert not takers & {"w0", "w1", "w2", "w3"}  # their own routes change


def test_what_a_stranger_says_of_its_sources_or_its_link_slows_nobody_down() -> None:
    """Not the relays, and not what the origin sends the owner's machines; among strangers, no other ticket."""
    bench = strangers("t", "t", "t")
    tallies = (ev.Tally("w0", 1 << 20, 0.5), *(ev.Tally(f"w{at}", 1 << 20, 900.0) for at in range(3, 8)))
    bench.tell(*(ev.PayloadReceived(f"w{at}", P1, tallies) for at in range(3)))
    assert not bench.machine.bias
    for tickets in (("", "t", "t", "t", "t"), ("t", "t", "t", "u")):
        machine = Broadcast(BroadcastOptions())
        for at, ticket in enumerate(tickets):
            machine.handle(ev.MemberJoined(f"w{at}", f"host:{at}", ticket=ticket), 0.0)
        machine.handle(ev.PayloadAssigned(P1, tuple(f"w{at}" for at in range(len(tickets))), 1000), 0.0)
        for at, ticket in enumerate(tickets):
            machine.handle(ev.LinkMeasured(f"w{at}", 1.0, 1.0 if ticket == "t" else 2e6), 0.0)
        paced = [pace for at in range(len(tickets)) if (pace := machine.rate_limit(f"w{at}", P1)) is not None]
        assert sum(paced) >= 0.9 * PACE * 2e6
        assert machine.origin_up == 2e6


def test_two_strangers_of_different_tickets_are_believed_and_so_is_a_machine_of_the_owner() -> None:
    bench = strangers("t", "t", "u")
    bench.fail("w0", "w5", "corrupt")
    bench.fail("w1", "w5", "corrupt")
    assert not bench.machine.suspects
    bench.fail("w2", "w5", "corrupt")
    bench.fail("w7", "w6", "corrupt")
    assert bench.machine.suspects == {"w5", "w6"}


def test_strangers_are_not_believed_of_a_source_that_they_were_never_to_take_from() -> None:
    bench = Bench(2, tickets=("t", "u"))
    bench.assign("w0", "w1")
    bench.tell(ev.MemberJoined("w2", "host:2"))
    bench.fail("w0", "w2", "corrupt")
    bench.fail("w1", "w2", "corrupt")
    assert not bench.machine.suspects


def test_a_returning_accuser_may_not_accuse_again() -> None:
    bench = mesh(8)
    for at in range(1, 8):
        bench.fail("w0", f"w{at}", "corrupt")
        bench.tell(ev.MemberLeft("w0", "gone"), ev.MemberJoined("w0", "host:0"))
        bench.assign("w0")
    assert len(bench.machine.suspects) == MAX_ACCUSED


def test_a_worker_that_misses_everything_everywhere_is_not_believed() -> None:
    bench = mesh(8)
    for at in range(1, 8):
        bench.fail("w0", f"w{at}", "missing")
    left = [at for at in range(1, 8) if bench.takers_of(P1, f"w{at}")]
    assert len(left) == 7 - MAX_ACCUSED


@pytest.mark.parametrize("reason", sorted(set(ev.SOURCE_FAILURES) - {"corrupt"}))
def test_complaints_about_a_source_of_another_member_do_not_count(reason: str) -> None:
    bench = Bench(3)
    bench.assign("w0", "w1")
    bench.tell(ev.SnapshotHeld("w2", P1))
    assert bench.fail("w0", "w2", reason) == {"w0"}  # it is told its routes once more
    assert not bench.machine.suspects
    bench.assign("w2", "w1")
    assert bench.takers_of(P1, "w1")


def test_a_report_that_is_repeated_counts_once() -> None:
    bench = mesh(4)
    tallies = tuple(ev.Tally(f"w{at}", 1 << 20, 1.0 if at < 3 else 9.0) for at in range(1, 4))
    bench.tell(ev.PayloadReceived("w0", P1, tallies))
    once = dict(bench.machine.bias)
    bench.tell(*(ev.PayloadReceived("w0", P1, tallies) for _ in range(20)))
    assert bench.machine.bias == once


def test_an_unreachable_pair_is_remembered_until_one_member_returns() -> None:
    bench = mesh(4)
    bench.fail("w0", "w1", "unreachable")
    bench.assign("w0", "w1", "w2", "w3", payload=P2)
    assert "w1" not in bench.routes["w0"]
    assert "w0" not in bench.routes["w1"]
    bench.tell(ev.MemberLeft("w1", "gone"), ev.MemberJoined("w1", "host:1"))
    third = PayloadId(SnapshotRef(RUN_POLICY, 1, 3))
    bench.assign("w0", "w1", "w2", "w3", payload=third)
    assert "w1" in bench.routes["w0"]


def test_a_late_member_takes_chunks_from_members_that_have_them() -> None:
    bench = mesh(4)
    for at in range(4):
        bench.tell(ev.PayloadReceived(f"w{at}", P1))
    bench.tell(ev.MemberJoined("late", "host:9"))
    assert told(bench.assign("late")) == {"late"}
    assert "" not in bench.routes["late"]
    assert len(set(bench.routes["late"])) == 4


def test_a_member_that_joins_during_a_broadcast_is_a_leaf() -> None:
    bench = mesh(4)
    bench.tell(ev.MemberJoined("late", "host:9"))
    assert told(bench.assign("late")) == {"late"}
    assert "" not in bench.routes["late"]
    assert not bench.takers_of(P1, "late")


def test_workers_serve_a_content_whatever_payload_it_came_in() -> None:
    bench = Bench(3)
    whole = PayloadId(SnapshotRef(RUN_POLICY, 1, 5))
    bench.tell(ev.SnapshotHeld("w0", whole), ev.SnapshotHeld("w1", whole))
    bench.assign("w2", payload=whole)
    assert set(bench.routes["w2"]) == {"w0", "w1"}
    assert told(bench.tell(ev.SourceFailed("w2", whole, "w0", "missing"))) == {"w2"}
    assert set(bench.routes["w2"]) == {"w1"}


def test_workers_with_an_adapter_serve_its_base_model() -> None:
    bench = Bench(3)
    adapter, base = PayloadId(SnapshotRef(RUN_POLICY, 1, 5)), PayloadId(SnapshotRef("base-" + "0" * 16, 0, 0))
    bench.tell(ev.SnapshotHeld("w0", adapter, base), ev.SnapshotHeld("w1", adapter, base))
    for payload in (base, adapter):
        bench.assign("w2", payload=payload)
        assert set(bench.routes["w2"]) == {"w0", "w1"}
    bench.tell(ev.PayloadDropped(adapter))
    assert bench.machine.holdings == {"w0": (base,), "w1": (base,)}


def test_a_lagging_relay_is_given_less_next_time() -> None:
    bench = mesh(10)
    slow = tuple(ev.Tally(f"w{at}", 1 << 24, 40.0 if at == 3 else 20.0) for at in range(10))
    for at in range(10):
        bench.tell(ev.PayloadReceived(f"w{at}", P1, tuple(tally for tally in slow if tally.source != f"w{at}")))
    bench.assign(*(f"w{at}" for at in range(10)), payload=P2)
    loads = {at: sum(sources.count(f"w{at}") for sources in bench.routes.values()) for at in range(10)}
    assert loads[3] < 0.75 * sum(loads.values()) / len(loads)


def test_a_returning_member_gets_its_routes_again() -> None:
    bench = mesh(3)
    assert told(bench.tell(ev.MemberJoined("w1", "host:1"))) == {"w1"}
    bench.tell(ev.PayloadReceived("w1", P1))
    assert told(bench.tell(ev.MemberJoined("w1", "host:1"))) == set()


def test_a_member_found_undialable_is_separated_from_others_like_it() -> None:
    bench = mesh(4)
    bench.tell(ev.MemberJoined("w0", ""))
    bench.tell(ev.MemberJoined("w1", ""))
    assert "w1" not in bench.routes["w0"]
    assert "w0" not in bench.routes["w1"]
    assert {"w2", "w3"} <= set(bench.routes["w0"])


def random_event(rng: random.Random, machine: Broadcast) -> ev.Event:
    """Anything that the driver could say, in any order."""
    ids = [f"w{at}" for at in range(12)]
    worker_id, source = rng.choice(ids), rng.choice([*ids, ""])
    payload = PayloadId(
        SnapshotRef(RUN_POLICY, 1, rng.randint(0, 3)), rng.choice([None, SnapshotRef(RUN_POLICY, 1, 0)])
    )
    plan = machine.plans.get(payload)
    if plan is not None and worker_id in plan.routes and rng.random() < 0.8:
        source = rng.choice(plan.routes[worker_id])
    some = tuple(rng.sample(ids, rng.randint(1, 12)))
    return rng.choice(
        [
            ev.MemberJoined(worker_id, rng.choice(["", worker_id, worker_id]), rng.choice(["", "", "", "lan"])),
            ev.MemberJoined(worker_id, worker_id),
            ev.MemberLeft(worker_id, "killed"),
            ev.LinkMeasured(rng.choice([worker_id, ""]), rng.choice([None, UP * rng.random() + 1.0]), UP),
            ev.PayloadAssigned(payload, some, rng.randint(1, 200)),
            ev.PayloadAssigned(payload, some, rng.randint(1, 200)),
            ev.PayloadDropped(payload),
            ev.PayloadReceived(worker_id, payload, (ev.Tally(source, 5, rng.uniform(0.0, 9.0)),)),
            ev.SnapshotHeld(worker_id, PayloadId(payload.ref)),
            ev.SourceFailed(worker_id, payload, source, rng.choice(ev.SOURCE_FAILURES)),
        ]
    )


@pytest.mark.parametrize("seed", seeds(20, 80))
def test_no_order_of_events_breaks_its_invariants_and_it_is_deterministic(seed: int) -> None:
    rng = random.Random(seed)
    options = BroadcastOptions(SCHEMES[rng.choice(["star", "chain", "trees", "trees"])], rng.randint(1, 9))
    one, twin, now = Broadcast(options), Broadcast(options), 0.0
    for _ in range(250):
        now += rng.random()
        event = random_event(rng, one)
        commands = one.handle(event, now)
        assert commands == twin.handle(event, now), f"seed {seed}: {event}"
        check(one)
        for command in commands:
            if isinstance(command, do.SetRoutes):
                member = one.members[command.worker_id]
                for source in set(command.sources) - {""}:
                    assert can_link(one.members[source], member), f"seed {seed}: {event}"
                    assert source not in one.suspects, f"seed {seed}: {event}"
    assert len(one.plans) <= MAX_PLANS


def test_the_origins_uplink_is_measured_by_members_on_other_machines() -> None:
    machine = Broadcast(BroadcastOptions())
    for at in range(3):
        machine.handle(ev.MemberJoined(f"here-{at}", f"127.0.0.1:{at}", ev.ONE_MACHINE), 0.0)
        machine.handle(ev.LinkMeasured(f"here-{at}", 20 * UP, 20 * UP), 0.0)
    assert machine.origin_up == 20 * UP
    machine.handle(ev.MemberJoined("far", "host:1"), 0.0)
    machine.handle(ev.LinkMeasured("far", UP, UP), 0.0)
    assert machine.origin_up == UP


def test_a_join_and_a_measurement_cost_no_more_in_a_large_fleet() -> None:
    costs = []
    for count in (20, 600):
        machine = Broadcast(BroadcastOptions())
        for at in range(count):
            machine.handle(ev.MemberJoined(f"w{at}", f"host:{at}"), 0.0)
            machine.handle(ev.LinkMeasured(f"w{at}", UP + at, UP + at), 0.0)
        late = ev.MemberJoined("late", "host:9999"), ev.LinkMeasured("late", UP, UP)
        costs.append([count_lines(machine, event, 0.0) for event in late])
        assert machine.origin_up == UP + (count - 1) // 2
    assert costs[0] == costs[1]


def test_the_usual_rates_are_those_of_the_members_that_are_here() -> None:
    """Joined again, measured again, of a stranger, or gone: the sorted rates are what sorting them all would give."""
    machine, draw = Broadcast(BroadcastOptions()), random.Random(3)
    for _ in range(600):
        name = f"w{draw.randrange(12)}"
        joins = ev.MemberJoined(name, "host:1", draw.choice(("", ev.ONE_MACHINE)), ticket=draw.choice(("", "a", "b")))
        measured = ev.LinkMeasured(name, draw.choice((None, UP * draw.random())), draw.choice((None, UP)))
        machine.handle(draw.choice((joins, measured, measured, ev.MemberLeft(name, "it ended"))), 0.0)
        members = machine.members.values()
        assert machine._ups == sorted(member.up for member in members if member.up)
        far = (one for one in members if one.reach != ev.ONE_MACHINE and not machine.tickets[one.worker_id])
        assert machine._far_downs == sorted(member.down for member in far if member.down)
