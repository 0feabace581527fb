"""The arithmetic of the overlap benchmark: how long a batch takes, what a round is, what is gained."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import overlap
import overlap_nodes as nodes
import pytest


def test_an_engine_is_as_quick_as_its_rows_until_it_is_full() -> None:
    two = nodes.Fleet(workers=1, full_rows=2, token_rate=10.0)
    assert nodes.batch_ends([(4,)], two) == [pytest.approx(0.8)]  # one row: 5 of the 10 tokens a second
    assert nodes.batch_ends([(4, 4)], two) == [pytest.approx(0.8)]
    assert nodes.batch_ends([(4, 4), (4, 4)], two) == [pytest.approx(1.6)] * 2
    assert nodes.batch_ends([(1, 3), (2, 2)], two) == [pytest.approx(0.9), pytest.approx(0.7)]


def test_a_batch_takes_no_longer_than_its_groups_one_after_the_other() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        fleet = nodes.Fleet(1, rng.randint(1, 16), rng.uniform(1.0, 9.0))
        groups = [tuple(rng.randint(1, 20) for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(1, 6))]
        ends = nodes.batch_ends(groups, fleet)
        alone = [max(nodes.batch_ends([group], fleet)) for group in groups]
        tokens = sum(map(sum, groups))
        assert tokens / fleet.token_rate - 1e-9 <= max(ends) <= sum(alone) + 1e-9, f"seed {seed}"
        assert all(end >= own - 1e-9 for end, own in zip(ends, alone, strict=True)), f"seed {seed}"


def test_whole_batches_go_to_the_first_free_worker() -> None:
    fleet = nodes.Fleet(2, 1, 1.0)
    tokens = [sum(sum(nodes.lengths_of(7, at)) for at in range(first, first + 8)) for first in (0, 8, 16)]
    assert nodes.fleet_seconds(7, 24, fleet) == pytest.approx(max(max(tokens[:2]), min(tokens[:2]) + tokens[2]))
    assert nodes.round_tokens(7, 24) == sum(tokens)


def test_the_learner_takes_groups_as_they_come_and_waits_for_the_next() -> None:
    assert nodes.window_seconds([4.0, 1.0, 3.0, 2.0], 4.0, 2) == 6.0  # begins at 2, has nothing to wait for after
    assert nodes.window_seconds([1.0, 2.0, 9.0], 3.0, 2) == 10.0
    assert nodes.window_seconds([5.0] * 4, 4.0, 4) == 9.0


def test_a_frontier_leases_every_group_once_and_the_first_ones_early() -> None:
    fleet = nodes.Fleet(4, 8, 100.0)
    whole = nodes.group_ends(3, 40, fleet)
    for width in (8, 5, 3, 2, 1):
        ends = nodes.group_ends(3, 40, fleet, width)
        assert len(ends) == len(whole) == 40
        assert sorted(ends)[1] < sorted(whole)[1], width


def line(now: float, *commands: dict[str, Any]) -> str:
    return json.dumps({"now": now, "event": {}, "commands": list(commands)})


def test_a_round_is_read_from_its_first_lease_to_its_record(tmp_path: Path) -> None:
    def lease(*numbers: int) -> dict[str, Any]:
        return {"type": "GrantLeases", "leases": [{"step": 0, "number": number} for number in numbers]}

    def accept(number: int) -> dict[str, Any]:
        return {"type": "AcceptDelivery", "group": {"kind": "train", "number": number}}

    issued = [{"type": "IssueGroup", "number": number, "step": 0} for number in range(3)]
    feeds = [{"type": "FeedGroup", "step": 0, "number": number} for number in range(3)]
    lines = [
        json.dumps({"options": {}}),
        line(10.0, *issued, lease(0, 1)),
        line(10.5, lease(2)),
        line(12.0, accept(1), feeds[1]),
        line(13.0, accept(0), feeds[0]),
        line(15.0, accept(2), feeds[2], {"type": "EndStep"}),
        line(18.0, {"type": "RecordStep", "step": 0}),
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/train": 4.5}) + "\n", encoding="utf-8")
    case = nodes.Case(3, 1, 0, "any", 2, 4.5, nodes.Fleet(1, 1))
    (found,) = nodes.read_rounds(tmp_path, case)
    assert found == nodes.Round(3.0, 5.0, 8.0, 4.5, 2)
    assert (found.wait_seconds, found.waiting_ratio) == (3.5, 3.5 / 8.0)


def test_the_gain_is_against_the_same_seeds_sequential_run() -> None:
    def run(variant: str, seed: int, window: float) -> dict[str, Any]:
        names = ("wait_seconds", "waiting_ratio", "dispatch_seconds", "rollout_seconds", "batch_groups")
        return {
            "variant": variant,
            "groups": 32,
            "seed": seed,
            "window_seconds": window,
            "optimum_seconds": 6.0,
            **dict.fromkeys(names, 1.0),
        }

    runs = [
        run("sequential", 1, 10.0),
        run("sequential", 2, 14.0),
        run("+ frontier", 1, 7.0),
        run("+ frontier", 2, 6.0),
    ]
    rows = {row["variant"]: row for row in overlap.compare(runs)}
    assert rows["sequential"]["gain"][0] == 0.0
    assert rows["+ frontier"]["gain"][0] == pytest.approx((0.75 + 1.0) / 2)
    assert rows["+ frontier"]["saved"][0] == pytest.approx((0.3 + 8 / 14) / 2)
