"""Route planning: what each scheme looks like, and what always holds of routes."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from broadcast_schemes import plan_chain

from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.weights.broadcast.decide.origin_messages import ORIGIN
from echo2.weights.broadcast.decide.plan import PLACES_EXAMINED, MembersView, RoutePlan
from echo2.weights.broadcast.decide.routes import Receiver, can_link, plan_routes
from seeds import seeds

UP = 12.5e6


def members(count: int, **fields: float) -> list[Receiver]:
    rates = {"up": UP, "down": UP, **fields}
    return [Receiver(f"w{at:05d}", f"host:{at}", "", rates["up"], rates["down"]) for at in range(count)]


def hide(member: Receiver) -> Receiver:
    return Receiver(member.worker_id, "", member.reach, member.up, member.down)


def loads(routes: dict[str, list[str]]) -> Counter[str]:
    """Payloads that each source sends."""
    stripes = len(next(iter(routes.values())))
    counts = Counter(source for sources in routes.values() for source in sources)
    return Counter({source: count / stripes for source, count in counts.items()})


def depth(routes: dict[str, list[str]], worker_id: str, stripe: int) -> int:
    hops, source = 1, routes[worker_id][stripe]
    while source:
        hops, source = hops + 1, routes[source][stripe]
        assert hops <= len(routes), f"a circle at {source}, stripe {stripe}"
    return hops


def deepest(routes: dict[str, list[str]]) -> int:
    stripes = len(next(iter(routes.values())))
    return max(depth(routes, worker_id, stripe) for worker_id in routes for stripe in range(stripes))


def children(routes: dict[str, list[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for worker_id, sources in routes.items():
        for source in sources:
            found.setdefault(source, set()).add(worker_id)
    return found


@pytest.mark.parametrize("count", [2, 3, 5, 8, 9])
def test_few_workers_form_a_mesh_of_two_hops_with_equal_loads(count: int) -> None:
    routes = plan_routes(members(count), fan_out=8, num_stripes=64, origin_up=UP)
    sent = loads(routes)
    assert sent[""] == 1.0
    assert deepest(routes) == 2
    assert {round(sent[worker_id], 6) for worker_id in routes} == {round((count - 1) / count, 6)}


@pytest.mark.parametrize(("count", "hops"), [(10, 3), (16, 3), (40, 4), (100, 4), (1024, 6)])
def test_many_workers_form_trees_of_few_hops_and_none_sends_more_than_it_receives(count: int, hops: int) -> None:
    routes = plan_routes(members(count), fan_out=8, num_stripes=64, origin_up=UP)
    sent = loads(routes)
    assert sent.pop("") == 1.0
    assert deepest(routes) <= hops
    assert max(sent.values()) <= 1.05
    assert max(len(mine) for source, mine in children(routes).items() if source) <= 8


def test_routes_of_ten_thousand_workers_are_planned_in_seconds() -> None:
    began = time.process_time()
    plan_routes(members(10_000), fan_out=8, num_stripes=64, origin_up=UP)
    assert time.process_time() - began < 10.0


@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_slow_receiver_is_a_leaf_and_the_others_do_as_well_as_without_it(count: int) -> None:
    fleet = [*members(count - 1), Receiver("zslow", "host:1", "", UP / 10, UP / 10)]
    routes = plan_routes(fleet, fan_out=8, num_stripes=64, origin_up=UP)
    assert "zslow" not in loads(routes)
    fast = loads({key: value for key, value in routes.items() if key != "zslow"})
    assert max(fast.values()) <= 1.05


@pytest.mark.parametrize("count", [40, 100, 1000])
def test_a_tenth_that_is_slow_costs_the_origin_nothing_and_the_relays_little(count: int) -> None:
    slow = {f"w{at:05d}" for at in range(0, count, 10)}
    fleet = [replace(one, up=UP / 10, down=UP / 10) if one.worker_id in slow else one for one in members(count)]
    routes = plan_routes(fleet, fan_out=8, num_stripes=64, origin_up=UP)
    assert loads(routes)[""] == 1.0  # no slow member takes anything from it
    assert max(len(mine) for source, mine in children(routes).items() if source) <= 8
    weights = {worker_id: 0.1 if worker_id in slow else 1.0 for worker_id in routes}
    stripes = len(next(iter(routes.values())))
    sent = Counter[str]()
    for worker_id, sources in routes.items():
        for source in sources:
            sent[source] += weights[worker_id] / stripes
    assert max(sent.values()) <= 1.11
    assert not slow & sent.keys()


def test_uplinks_are_loaded_in_proportion() -> None:
    fleet = [Receiver(f"w{at}", f"host:{at}", "", UP * (2 if at % 2 else 0.7), 2 * UP) for at in range(8)]
    routes = plan_routes(fleet, fan_out=8, num_stripes=64, origin_up=4 * UP)
    used = {member.worker_id: loads(routes)[member.worker_id] / (member.up or 1.0) for member in fleet}
    assert max(used.values()) < 1.4 * min(used.values())


def test_the_origin_sends_what_relays_cannot_carry() -> None:
    fleet = members(8, up=UP / 10)
    routes = plan_routes(fleet, fan_out=8, num_stripes=64, origin_up=10 * UP)
    sent = loads(routes)
    assert 6.0 < sent[""] <= 8.0  # eight payloads at 10 B_w need 0.8 of the time that one takes at B_w
    assert plan_routes(fleet, fan_out=8, num_stripes=64) != routes


@pytest.mark.parametrize("count", [3, 6, 9, 16, 100])
def test_undialable_members_relay_to_dialable_ones(count: int) -> None:
    fleet = [hide(member) if at % 3 == 0 else member for at, member in enumerate(members(count))]
    routes = plan_routes(fleet, fan_out=8, num_stripes=64, origin_up=UP)
    sent = loads(routes)
    assert sent.pop("") <= 1.2
    assert max(sent.values()) <= 1.15
    hidden = {member.worker_id for member in fleet if not member.address}
    assert sum(sent[worker_id] for worker_id in hidden) > 0
    for worker_id in hidden:
        assert not hidden & set(routes[worker_id])


def test_a_chain_has_one_child_each_slow_ones_last_and_as_many_chains_as_the_origin_feeds() -> None:
    fleet = [Receiver("aslow", "host:1", "", UP / 10, UP / 10), *members(6)]
    for num_chains in (1, 3):
        routes = plan_chain(fleet, fan_out=8, num_stripes=8, origin_up=num_chains * UP)
        found = children(routes)
        assert len(found.pop("")) == num_chains
        assert all(len(mine) == 1 for mine in found.values())
        assert all(len(set(sources)) == 1 for sources in routes.values())
        assert "aslow" not in found


def random_fleet(rng: random.Random) -> list[Receiver]:
    def rate() -> float | None:
        return rng.choice([None, UP, UP, UP * rng.uniform(0.05, 5.0)])

    return [
        Receiver(
            f"w{at:03d}", rng.choice(["", f"host:{at}", f"host:{at}"]), rng.choice(["", "", "lan"]), rate(), rate()
        )
        for at in range(rng.choice([1, 2, 3, 5, 8, 13, 40]))
    ]


@pytest.mark.parametrize("seed", seeds(30, 150))
def test_all_routes_use_possible_links_and_reach_all_workers(seed: int) -> None:
    rng = random.Random(seed)
    fleet = random_fleet(rng)
    ids = [member.worker_id for member in fleet]
    weak = frozenset(rng.sample(ids, len(ids) // 4))
    blocked = frozenset((rng.choice(ids), rng.choice(ids)) for _ in range(len(ids) // 2))
    make, fan_out = rng.choice([plan_chain, plan_routes, plan_routes]), rng.randint(1, 9)
    origin_up = rng.choice([None, UP, 5 * UP])

    def plan(of: list[Receiver]) -> dict[str, list[str]]:
        return make(of, fan_out=fan_out, num_stripes=16, origin_up=origin_up, weak=weak, blocked=blocked)

    routes = plan(fleet)
    assert routes == plan(rng.sample(fleet, len(fleet))), f"seed {seed}: the order of members matters"
    assert routes.keys() == set(ids), f"seed {seed}"
    assert len({len(sources) for sources in routes.values()}) == 1, f"seed {seed}"
    deepest(routes)
    by_id = {member.worker_id: member for member in fleet}
    for source, mine in children(routes).items():
        if not source:
            continue
        assert source not in weak, f"seed {seed}: {source} is weak"
        assert len(mine) <= (1 if make is plan_chain else fan_out), f"seed {seed}: {source} has {len(mine)} children"
        for child in mine:
            assert can_link(by_id[source], by_id[child]), f"seed {seed}: {source} -> {child}"
            assert not {(source, child), (child, source)} & blocked, f"seed {seed}: {source} -> {child}"


@pytest.mark.parametrize("origin", [1.0, 4.0])
@pytest.mark.parametrize(
    "ups",
    [(0.47, 0.83, 1.07, 0.77, 0.63), (0.63, 0.46, 0.48, 1.41), (0.65, 0.67, 0.39), (1.2, 0.3, 0.4, 0.6, 0.7, 0.7)],
)
def test_few_members_with_unequal_uplinks_do_as_well_beside_a_slow_one(ups: tuple[float, ...], origin: float) -> None:
    names = [f"w{at}" for at in range(len(ups))]
    fast = [Receiver(name, f"{name}:1", "", up * UP, 4 * UP) for name, up in zip(names, ups, strict=True)]
    slow = Receiver("slow", "slow:1", "", UP / 10, UP / 10)
    routes = plan_routes([*fast, slow], fan_out=8, num_stripes=64, origin_up=origin * UP)
    best = 1.0 / min(origin, (origin + sum(ups)) / len(ups))
    del routes["slow"]
    sent = loads(routes)
    for name, up in zip(["", *names], [origin, *ups], strict=True):
        assert sent[name] / up <= 1.15 * best, f"{name!r} sends {sent[name]} contents at {up}"


def test_chunks_that_the_origin_sends_to_all_come_last() -> None:
    fleet = [Receiver(f"w{at}", f"host:{at}", "", up * UP, UP) for at, up in enumerate((0.5, 0.5, 0.2, 0.2))]
    routes = plan_routes(fleet, fan_out=8, num_stripes=64, origin_up=UP)
    by_all = [all(sources[stripe] == "" for sources in routes.values()) for stripe in range(64)]
    assert 0 < sum(by_all) < 64
    assert by_all == sorted(by_all)


@pytest.mark.parametrize("ups", [(50.0, 50.0, 20.0, 20.0, 15.0), (90.0, 30.0), (10.0, 40.0, 40.0)])
def test_few_members_with_unequal_uplinks_get_shares_that_no_scheme_can_beat(ups: tuple[float, ...]) -> None:
    names = [f"w{number}" for number in range(len(ups))]
    members = [Receiver(name, f"{name}:1", up=up, down=100.0) for name, up in zip(names, ups, strict=True)]
    routes = plan_routes(members, fan_out=8, num_stripes=64, origin_up=100.0)
    best = 1.0 / min(100.0, (100.0 + sum(ups)) / len(ups))  # seconds a byte
    for name, up in zip(names, ups, strict=True):
        sent = sum(list(mine).count(name) for mine in routes.values()) / 64
        assert sent / up <= 1.2 * best, f"{name} sends {sent} contents at {up}"
    assert sum(list(mine).count("") for mine in routes.values()) / 64 / 100.0 <= 1.2 * best
    for name, mine in routes.items():
        for stripe, source in enumerate(mine):
            assert source == "" or (source != name and routes[source][stripe] == ""), "two hops"


def test_late_members_of_a_large_fleet_spare_the_origin_and_are_spread_over_all_that_can_serve() -> None:
    """A late member looks at some of the members only, in turn."""
    those = {f"w{at}": Receiver(f"w{at}", f"10.0.{at // 250}.{at % 250}:1", up=1e7) for at in range(1200)}
    fleet = MembersView(those, lambda _: 1e7, lambda *_: True, fan_out=8)
    plan = RoutePlan(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)), num_stripes=8)
    plan.whole.update((f"w{at}", None) for at in range(600))
    for at in range(600, 1200):
        plan.add_late(f"w{at}", fleet)
        assert ORIGIN not in plan.routes[f"w{at}"]
    served = [plan.load(source) for source in those]
    assert sum(served) == 8 * 600
    assert max(served) <= 3 * 8  # 8 each, were those that have the payload the only ones to serve
    assert sum(load > 0 for load in served) > 2 * PLACES_EXAMINED
