"""Snapshots in random worlds: whatever happens, no worker samples with weights that are not the learner's (the
simulation checks that at every batch), and every live worker gets the newest version in the end.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from echo2.planning.sim.fleet import SimWorker
from echo2.planning.sim.head import MortalLedger, SimHead
from echo2.planning.sim.report import History
from echo2.planning.sim.world import HEAD, SimWorld
from echo2.planning.simulate import build_world
from invariants import Checker
from seeds import seeds
from worlds import random_scenario

#: After the last fault and the last step: long enough for a snapshot that was refused, and for lost connections.
SETTLE_SECONDS = 300.0
SEEDS_A_BLOCK = 20


def run_and_settle(seed: int) -> tuple[SimHead, list[SimWorker], History]:
    """The world of this seed, some time after its run has ended and nothing fails any more."""
    scenario = random_scenario(seed)
    world, history, ledger = SimWorld(seed, Checker()), History(), MortalLedger(Path(":memory:"))
    try:
        workers = build_world(world, scenario, seed, ledger, history)
        while not history.ended and world.next_at <= scenario.time_limit_seconds and world.step():
            pass
        until = max(world.now, scenario.faults_until_seconds) + SETTLE_SECONDS
        while world.next_at <= until and world.step():
            pass
    finally:
        ledger.close()
    head = world.actors[HEAD]
    assert isinstance(head, SimHead)
    return head, workers, history


@pytest.mark.parametrize("block", seeds(1, 2))
def test_every_live_worker_gets_the_newest_version_in_the_end(block: int) -> None:
    behind: list[str] = []
    for seed in range(SEEDS_A_BLOCK * block, SEEDS_A_BLOCK * (block + 1)):
        head, workers, history = run_and_settle(seed)
        newest = head.driver.planner.snapshots.published[max(head.driver.planner.snapshots.published)]
        for worker in workers:
            scenario = worker.scenario
            # A link that loses a tenth of its messages, or weights that are torn again and again, may take longer.
            hard = worker.spec.loss >= 0.1 or worker.spec.corrupt_snapshots > 0 or scenario.snapshot_chunks > 10
            if worker.up and not hard and worker.scheduler.installed != newest:
                behind.append(f"seed {seed}: {worker.name} has {worker.scheduler.installed}, {newest} is the newest")
            if worker.scheduler.installed is not None:
                assert worker.peering.weights == history.digests[worker.scheduler.installed], f"seed {seed}"
    assert not behind, "\n".join(behind)


@pytest.mark.slow
def test_the_random_worlds_reach_what_they_are_meant_to_attack() -> None:
    given_up: Counter[str] = Counter()
    peer_bytes = origin_bytes = deltas = 0
    for seed in range(60):
        _, workers, history = run_and_settle(seed)
        given_up += history.given_up
        peer_bytes += history.peer_bytes
        origin_bytes += history.origin_bytes
        deltas += sum(worker.peering.installed.base is not None for worker in workers)
    assert {"broken", "stalled", "corrupt", "missing"} <= set(given_up), given_up
    assert peer_bytes > 0.1 * origin_bytes
    assert deltas > 10
