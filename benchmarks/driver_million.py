"""Memory and time of driver, planner and ledger over many groups: both should stay flat.

    python benchmarks/driver_million.py --groups 1000000

One worker delivers, one learner trains, nothing crosses a link; the ledger is a file, the rollouts are a few bytes. A
checkpoint covers each step but the newest few, as in a run. Prints a line each tenth of the way.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from echo2.buffer import Ledger
from echo2.buffer.driver import Driver, Stored
from echo2.control.head import commands as do
from echo2.control.head import events as ev
from echo2.control.head.state import PlannerOptions
from echo2.types import RUN_POLICY, Attachment, Lease, SnapshotRef

KEPT_STEPS = 4
SECONDS_PER_STEP = 1.0


class World:
    """The driver's effects: leases that are granted are kept, what is fed is counted."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.scores: list[do.ScoreGroup] = []
        self.fed: list[int] = []

    def decided(self, event: ev.Event, now: float, commands: Sequence[do.Command]) -> None:
        pass

    def carry_out(self, command: do.Command, now: float) -> None:
        match command:
            case do.GrantLeases():
                self.leases += command.leases
            case do.ScoreGroup():
                self.scores.append(command)
            case do.FeedGroup():
                self.fed.append(command.number)


def steps(directory: Path, num_steps: int, per_step: int) -> None:
    options = PlannerOptions(groups_per_step=per_step, group_size=8, max_steps=num_steps + 1, max_staleness=2)
    ledger, world = Ledger(directory / "ledger.sqlite"), World()
    driver = Driver(options, ledger, world)
    driver.start({RUN_POLICY: Stored((SnapshotRef(RUN_POLICY, 1, 0),))}, 0.0)
    driver.handle(ev.LearnerJoined(0), 0.0)
    driver.handle(ev.WorkerJoined("w", 64, 0.0, SnapshotRef(RUN_POLICY, 1, 0)), 0.0)
    began = time.process_time()
    for step in range(num_steps):
        now = step * SECONDS_PER_STEP
        driver.handle(ev.GroupsWanted(step), now)
        while len(world.fed) < per_step:
            lease = world.leases.pop(0)
            rollouts = Attachment(b"tokens of a group")
            what = (lease.lease_id, lease.group, lease.num_samples, step, step, 256, 0.01, rollouts)
            driver.handle(ev.GroupDelivered("w", *what), now)
            for asked in world.scores:
                driver.handle(ev.GroupScored(asked.group, False, scores=Attachment(b"scores")), now)
            world.scores.clear()
        driver.handle(ev.StepTrained(step, tuple(world.fed)), now)
        world.fed.clear()
        driver.handle(ev.SnapshotPublished(SnapshotRef(RUN_POLICY, 1, step + 1), 100), now)
        driver.handle(ev.WorkerReported("w", SnapshotRef(RUN_POLICY, 1, step + 1)), now)
        driver.handle(ev.CheckpointSaved(step + 1, max(0, step + 1 - KEPT_STEPS)), now)
        if (step + 1) % max(1, num_steps // 10) == 0:
            seconds, began = time.process_time() - began, time.process_time()
            counting = time.perf_counter()
            trained = ledger.counts()["trained"]
            figures = {
                "groups": trained,
                "groups_per_cpu_second": round(per_step * max(1, num_steps // 10) / seconds, 1),
                "mebibytes_at_most": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                "counts_microseconds": round(1e6 * (time.perf_counter() - counting), 1),
                "ledger_mebibytes": round((directory / "ledger.sqlite").stat().st_size / 2**20, 1),
            }
            print(json.dumps(figures), flush=True)
    ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--per-step", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps(Path(folder), max(1, options.groups // options.per_step), options.per_step)


if __name__ == "__main__":
    main()
