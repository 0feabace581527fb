"""Broadcasts on modelled links with the real machines: how long they take, and that nobody is forgotten."""

from __future__ import annotations

import random
from typing import Any

import pytest
from dissemination import EFFICIENCY, DisseminationSpec, NodeSpec, Outcome, disseminate, predict

from seeds import seeds

MIB = 1 << 20
UP = 12.5e6
SLOW = {"up": UP / 10, "down": UP / 10}


def send(count: int, scheme: str = "trees", **changes: dict[str, Any]) -> Outcome:
    """64 MiB over 100 Mbit/s and 100 ms; `changes`: w<number> = fields of that worker."""
    return predict(
        count,
        num_bytes=64 * MIB,
        chunk_bytes=MIB // 8,
        up=UP,
        down=UP,
        latency_seconds=0.05,
        scheme=scheme,
        changes=[(int(name[1:]), fields) for name, fields in changes.items()],
    )


ALONE = send(1).last_seconds


@pytest.mark.parametrize("count", [2, 4, 8, 9, 16, 40])
def test_many_workers_get_a_snapshot_almost_as_fast_as_one_and_the_origin_sends_it_once(count: int) -> None:
    outcome = send(count)
    assert outcome.last_seconds <= 1.10 * ALONE
    assert outcome.origin_bytes <= 1.01 * 64 * MIB
    assert (outcome.wasted_bytes, outcome.reports) == (0, [])


def test_a_stars_time_grows_with_the_workers_and_a_chains_with_its_length() -> None:
    assert send(8, "star").last_seconds > 7.5 * ALONE
    assert ALONE < send(8, "chain").last_seconds < send(40, "chain").last_seconds


@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_slow_member_does_not_delay_others(count: int) -> None:
    outcome = send(count, w2=SLOW)
    assert outcome.finished[-2] <= 1.15 * ALONE
    assert outcome.last_seconds <= 10.5 * ALONE


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_tenth_that_is_slow_delays_nobody_else(count: int) -> None:
    outcome = send(count, **{f"w{at}": SLOW for at in range(0, count, 10)})
    assert outcome.finished[count - count // 10 - 1] <= 1.15 * ALONE
    assert outcome.last_seconds <= 10.5 * ALONE
    assert outcome.origin_bytes <= 1.01 * 64 * MIB


@pytest.mark.slow
def test_a_thousand_have_256_mib_within_a_tenth_of_what_no_scheme_beats() -> None:
    outcome = predict(1000, num_bytes=256 * MIB, chunk_bytes=MIB // 2, up=UP, down=UP, latency_seconds=0.05)
    assert outcome.last_seconds <= 1.10 * 256 * MIB / (UP * EFFICIENCY)
    assert outcome.origin_bytes <= 1.01 * 256 * MIB


@pytest.mark.parametrize("count", [4, 8, 16])
def test_undialable_members_cost_little_up_to_a_third(count: int) -> None:
    hidden = {f"w{at}": {"is_dialable": False} for at in range(0, count, 3)}
    outcome = send(count, "trees", **hidden)
    assert outcome.last_seconds <= 1.15 * ALONE
    assert outcome.origin_bytes <= 1.2 * 64 * MIB


@pytest.mark.parametrize("count", [4, 8, 16, 40])
@pytest.mark.parametrize(("trouble", "noticed_seconds"), [("killed", 0.3), ("vanished", 4.0)])
def test_a_relay_that_drops_out_costs_its_detection_and_little_more(
    count: int, trouble: str, noticed_seconds: float
) -> None:
    outcome = send(count, w1={"trouble": trouble, "trouble_at_seconds": 2.5})
    assert len(outcome.finished) == count - 1
    assert outcome.last_seconds <= 1.15 * send(count).last_seconds + noticed_seconds


def test_a_lying_peer_is_named_and_all_workers_get_the_right_bytes() -> None:
    outcome = send(8, w1={"trouble": "lies", "trouble_at_seconds": 1.0})
    assert outcome.suspects == ["w00001"]
    assert len(outcome.finished) == 8  # the liar, too, has all of it


UNEVEN = [(1.0, 1.0, 0.5, 0.5, 0.2, 0.2, 0.1, 0.1), (1.0, 0.2, 0.2, 0.2), (0.5, 0.5, 0.2, 0.2, 0.15)]


@pytest.mark.parametrize("ups", UNEVEN)
def test_unequal_uplinks_are_used_from_the_beginning(ups: tuple[float, ...]) -> None:
    """Near the bound, although the origin's connections share its uplink evenly."""
    workers = tuple(NodeSpec(up * UP, UP) for up in ups)
    outcome = disseminate(DisseminationSpec(workers, NodeSpec(UP, UP), 128 * MIB, MIB // 4))
    bound = 128 * MIB / EFFICIENCY / min(UP, (UP + sum(ups) * UP) / len(ups))
    assert outcome.last_seconds < 1.13 * bound


def test_a_late_worker_is_fed_by_the_others() -> None:
    outcome = send(8, w3={"joins_at_seconds": 30.0})
    assert outcome.origin_bytes <= 1.01 * 64 * MIB
    assert outcome.seconds[3] is not None
    assert outcome.seconds[3] <= 1.2 * ALONE


def test_an_unmeasured_slow_uplink_is_detected() -> None:
    unknown = {f"w{at}": {"is_probed": False} for at in range(8)}
    outcome = send(8, "trees", **{**unknown, "w2": {"is_probed": False, "up": UP / 10}})
    assert outcome.last_seconds <= 2.5 * ALONE  # as a root that nobody relieves it would take 10 / 8 * 7 times as long


def random_spec(seed: int) -> DisseminationSpec:
    rng = random.Random(seed)

    def node() -> NodeSpec:
        scale = rng.choice([1.0, 1.0, 1.0, 0.1, 3.0])
        return NodeSpec(
            up=UP * scale * rng.uniform(0.5, 1.5),
            down=UP * scale * rng.uniform(0.5, 1.5),
            latency_seconds=rng.choice([0.001, 0.05, 0.2]),
            is_dialable=rng.random() < 0.7,
            is_probed=rng.random() < 0.7,
            joins_at_seconds=rng.choice([0.0, 0.0, 0.0, rng.uniform(0.0, 20.0)]),
            trouble=rng.choice(["", "", "", "killed", "vanished", "lies"]),
            trouble_at_seconds=rng.uniform(0.0, 8.0),
        )

    return DisseminationSpec(
        workers=tuple(node() for _ in range(rng.choice([1, 2, 3, 6, 12, 20]))),
        origin=NodeSpec(UP * rng.uniform(0.5, 8.0), UP),
        num_bytes=rng.choice([1, 5, 16]) * MIB,
        chunk_bytes=MIB // rng.choice([1, 4, 16]),
        scheme=rng.choice(["star", "chain", "trees", "trees", "trees"]),
        fan_out=rng.randint(1, 10),
    )


@pytest.mark.parametrize("seed", seeds(10, 60))
def test_a_living_member_gets_everything_whatever_happens_to_the_others(seed: int) -> None:
    spec = random_spec(seed)
    outcome = disseminate(spec)  # raises where somebody alive is left without
    dead = sum(worker.trouble in ("killed", "vanished") for worker in spec.workers)
    assert len(outcome.finished) >= len(spec.workers) - dead, f"seed {seed}"
    liars = {f"w{at:05d}" for at, worker in enumerate(spec.workers) if worker.trouble == "lies"}
    assert set(outcome.suspects) <= liars, f"seed {seed}"
