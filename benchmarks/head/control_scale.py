"""What one event costs the planner, and how much memory it takes, with 10 to 10,000 workers.

The real planner is driven by a fleet in miniature: every worker reports each `HEARTBEAT_SECONDS`, samples batches of
groups, delivers them one by one, installs each snapshot a few seconds after it was announced, now and then loses its
connection or dies and comes back. The learner asks for steps, trains, publishes and checkpoints, and is just as fast as
the fleet. Only the processor time inside `Planner.handle` is counted: events a second are those that one core could
decide, whatever else this machine does.
The planner's memory is that of all objects reachable from it.

    make bench-control_scale                    # 10, 100, 1,000, 10,000 workers; writes benchmarks/results/
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from recording import save

from echo2.core.types import RUN_POLICY, Lease, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions

GROUPS_PER_BATCH = 4
GROUP_SIZE = 8
#: Median time of one group in a batch; with two batches at each worker and heartbeats, this sets the mix of events.
GROUP_SECONDS = 30.0
HEARTBEAT_SECONDS = 2.0
INSTALL_SECONDS = 8.0
TRAIN_SECONDS = 30.0
#: Mean times between a worker's closed connections, and between its deaths.
CUT_EVERY_SECONDS = 1200.0
LIFE_SECONDS = 3600.0


class Driver:
    """A fleet and a learner in a heap of (time, sequence, action, argument)."""

    def __init__(self, num_workers: int, seed: int) -> None:
        per_step = max(1, int(num_workers * GROUPS_PER_BATCH * TRAIN_SECONDS / (1.3 * GROUP_SECONDS)))
        self.planner = Planner(
            PlannerOptions(
                groups_per_step=per_step,
                group_size=GROUP_SIZE,
                max_steps=10**9,
                max_staleness=3,
                publish_every=1,
                lease_seconds=300.0,
            )
        )
        self.rng = random.Random(seed)
        self.now, self.num_pushed = 0.0, 0
        self.queue: list[tuple[float, int, str, Any]] = []
        self.work: dict[str, list[tuple[Lease, ...]]] = {}
        self.installed: dict[str, SnapshotRef | None] = {}
        self.lives: Counter[str] = Counter()
        self.fed: list[int] = []
        self.nanoseconds: dict[str, list[int]] = {}
        self.tell(ev.HeadStarted())
        self.tell(ev.LearnerJoined(0))
        self.tell(ev.SnapshotPublished(SnapshotRef(RUN_POLICY, 1, 0), 1))
        self.tell(ev.GroupsWanted(0))
        for index in range(num_workers):
            self.push(self.rng.uniform(0.0, 10.0), "join", f"w{index}")

    def push(self, delay_seconds: float, action: str, argument: Any) -> None:
        self.num_pushed += 1
        heapq.heappush(self.queue, (self.now + delay_seconds, self.num_pushed, action, argument))

    def tell(self, event: ev.Event) -> None:
        before = time.thread_time_ns()
        commands = self.planner.handle(event, self.now)
        self.nanoseconds.setdefault(type(event).__name__, []).append(time.thread_time_ns() - before)
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: do.Command) -> None:
        match command:
            case do.GrantLeases():
                batches = self.work[command.worker_id]
                batches.append(command.leases)
                if len(batches) == 1:
                    self.start_batch(command.worker_id)
            case do.FeedGroup():
                self.fed.append(command.number)
            case do.EndStep():
                self.push(self.rng.gauss(TRAIN_SECONDS, 1.0), "trained", (command.step, tuple(self.fed)))
                self.fed = []
            case do.AnnounceSnapshot():
                for worker_id in command.worker_ids:
                    self.push(self.rng.expovariate(1 / INSTALL_SECONDS), "install", (worker_id, command.ref))
            case do.WakeAt():
                self.push(command.at - self.now, "tick", None)

    def start_batch(self, worker_id: str) -> None:
        for lease in self.work[worker_id][0]:
            seconds = GROUP_SECONDS * self.rng.lognormvariate(0.0, 0.3)
            self.push(seconds, "deliver", (worker_id, self.lives[worker_id], lease, self.installed[worker_id]))

    def step(self) -> None:
        self.now, _, action, argument = heapq.heappop(self.queue)
        getattr(self, action)(argument)

    def join(self, worker_id: str) -> None:
        held = tuple(lease.lease_id for batch in self.work.get(worker_id, ()) for lease in batch)
        self.work.setdefault(worker_id, [])
        self.installed.setdefault(worker_id, None)
        self.tell(ev.WorkerJoined(worker_id, GROUPS_PER_BATCH * GROUP_SIZE, 0.35, self.installed[worker_id], held))
        self.push(HEARTBEAT_SECONDS, "beat", (worker_id, self.lives[worker_id]))
        self.push(self.rng.expovariate(1 / CUT_EVERY_SECONDS), "cut", (worker_id, self.lives[worker_id]))
        self.push(self.rng.expovariate(1 / LIFE_SECONDS), "die", (worker_id, self.lives[worker_id]))

    def beat(self, argument: tuple[str, int]) -> None:
        worker_id, life = argument
        if life == self.lives[worker_id]:
            self.tell(ev.WorkerReported(worker_id, self.installed[worker_id]))
            self.push(HEARTBEAT_SECONDS, "beat", argument)

    def cut(self, argument: tuple[str, int]) -> None:
        worker_id, life = argument
        if life == self.lives[worker_id]:
            self.tell(ev.WorkerDetached(worker_id, "cut"))
            self.push(1.0, "back", argument)

    def back(self, argument: tuple[str, int]) -> None:
        if argument[1] == self.lives[argument[0]]:
            self.lives[argument[0]] += 1
            self.work[argument[0]] = []
            self.join(argument[0])

    def die(self, argument: tuple[str, int]) -> None:
        worker_id, life = argument
        if life == self.lives[worker_id]:
            self.lives[worker_id] += 1
            self.work[worker_id], self.installed[worker_id] = [], None
            self.tell(ev.WorkerLeft(worker_id, "its machine was taken away"))
            self.push(20.0, "join", worker_id)

    def install(self, argument: tuple[str, SnapshotRef]) -> None:
        worker_id, ref = argument
        before = self.installed[worker_id]
        if before is None or before < ref:
            self.installed[worker_id] = ref
            self.tell(ev.WorkerReported(worker_id, ref))

    def deliver(self, argument: tuple[str, int, Lease, SnapshotRef]) -> None:
        worker_id, life, lease, ref = argument
        if life != self.lives[worker_id]:
            return
        batch = tuple(other for other in self.work[worker_id][0] if other is not lease)
        self.work[worker_id][0] = batch
        version = ref.version
        self.tell(ev.GroupDelivered(worker_id, lease.lease_id, lease.group, GROUP_SIZE, version, version, 4000))
        self.tell(ev.GroupScored(lease.group))
        if not batch and life == self.lives[worker_id]:
            self.work[worker_id].pop(0)
            if self.work[worker_id]:
                self.start_batch(worker_id)

    def trained(self, argument: tuple[int, tuple[int, ...]]) -> None:
        step, numbers = argument
        self.tell(ev.StepTrained(step, numbers))
        self.tell(ev.SnapshotPublished(SnapshotRef(RUN_POLICY, 1, step + 1), 1))
        if step % 5 == 4:
            self.tell(ev.CheckpointSaved(step + 1, step - 4))
        self.tell(ev.GroupsWanted(step + 1))

    def tick(self, _: None) -> None:
        self.tell(ev.Tick())


def deep_bytes(root: object) -> int:
    """Bytes of every object that can be reached from this one; code and types not counted."""
    seen, stack, total = set[int](), [root], 0
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        stack.extend(gc.get_referents(item))
    return total


def head_bytes() -> int:
    """Resident memory of a process that has imported all that a head does, with no run."""
    code = "import echo2.head.serve.process; print(open('/proc/self/status').read())"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return next(int(line.split()[1]) * 1024 for line in answer.stdout.splitlines() if line.startswith("VmRSS"))


def measure(num_workers: int, num_events: int, seed: int) -> dict[str, Any]:
    """Warm the fleet up for three minutes of its time, then count events for two minutes (four steps) at least, and
    `num_events` at least.
    """
    driver = Driver(num_workers, seed)
    while driver.now < 180.0:
        driver.step()
    driver.nanoseconds, first, since = {}, driver.planner.num_events, driver.now
    version = driver.planner.training.version
    gc.collect()
    gc.freeze()  # a head does this once it is warm; without it, a full collection looks at every object ever made
    while driver.now < since + 4 * TRAIN_SECONDS or driver.planner.num_events < first + num_events:
        driver.step()
    gc.unfreeze()
    num_events = driver.planner.num_events - first
    total = sum(sum(times) for times in driver.nanoseconds.values())
    return {
        "workers": num_workers,
        "groups_per_step": driver.planner.options.groups_per_step,
        "events": num_events,
        "events_per_second": num_events / (total / 1e9),
        "core_share": total / 1e9 / (driver.now - since),
        "simulated_seconds": driver.now - since,
        "steps_trained": driver.planner.training.version - version,
        "open_leases": len(driver.planner.leases.open_leases()),
        "planner_bytes": deep_bytes(driver.planner),
        "microseconds": {
            name: {
                "count": len(times),
                "mean": sum(times) / len(times) / 1e3,
                "p99": sorted(times)[int(0.99 * len(times))] / 1e3,
            }
            for name, times in sorted(driver.nanoseconds.items())
        },
    }


def to_text(row: dict[str, Any]) -> str:
    kinds = row["microseconds"]
    shown = ("WorkerReported", "GroupDelivered", "WorkerJoined", "WorkerLeft", "StepTrained", "SnapshotPublished")
    costs = "  ".join(f"{name} {kinds[name]['mean']:.1f}" for name in shown if name in kinds)
    return (
        f"{row['workers']:>6} workers  {row['events_per_second']:>9,.0f} events/s  {row['core_share']:>7.2%} of a core"
        f"  {row['planner_bytes'] / 1e6:>6.1f} MB  {row['open_leases']:>6} leases   µs: {costs}"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    rows = []
    for num_workers in options.workers:
        rows.append(measure(num_workers, options.events, options.seed))
        print(to_text(rows[-1]), flush=True)
    head = head_bytes()
    print(f"a head process without a run: {head / 1e6:.0f} MB, to which the planner's bytes come")
    result = {"seed": options.seed, "head_bytes": head, "rows": rows}
    print(f"written to {save('control_scale', result, options.out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
