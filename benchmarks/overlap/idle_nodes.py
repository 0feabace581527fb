"""A run with a head, a learner and workers as processes of their own, whose speeds are set.

All is as `echo2 run` starts it (gRPC, mutual TLS, leases, ledger, snapshots), but for two parts: workers have the fake
engine, which sleeps for as long as its tokens would take, and which takes a new snapshot `broadcast_seconds` after that
is there; the trainer sleeps for what is left of `train_seconds`. So many of them fit on two cores.

With `dying`, each rollout's reward is an environment that raises in such a share of them, plus a judge that fails as
often (`tests/judge_standin.py`).

    python idle_nodes.py learner|worker SETTINGS    # how `measure` starts them
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import paced_run

from echo2.config.rundir import RunDir
from echo2.head.ledger.audit import audit
from echo2.head.ledger.schema import open_for_reading
from judge_standin import PROBE, judge_standin

MAX_TOKENS = 12
#: Of rollouts that are spread evenly over 1..MAX_TOKENS.
MEAN_TOKENS = (1 + MAX_TOKENS) / 2
#: Of the longest of eight such.
LONGEST_TOKENS = 11.0
SLOW_FACTOR = 10.0

CONFIG = """
[run]
max_steps = {steps}
seed = {seed}
[model]
path = "{model}"
[tasks]
source = "digit_sorting"
params = {{split = "train"}}
[reward]
functions = ["exact_match"]
[sampling]
group_size = {group_size}
max_tokens = {max_tokens}
groups_per_batch = {slots}
[schedule]
groups_per_step = {groups_per_step}
max_staleness = {max_staleness}
publish_every = {publish_every}
lease_seconds = {lease_seconds}
[learner]
lr = 0.0
tokens_per_microbatch = 1_000_000
checkpoint_every = {steps}
[workers]
count = 0
"""

#: A judge's answer that hangs does so for a minute; the head waits this long for it.
JUDGE_SECONDS = 5.0
ENVIRONMENT = f"{Path(__file__).resolve()}:Dying"
JUDGE_FAULTS = ("429", "429 1", "500", "hang")

FAILING = """
[tasks]
source = "digit_sorting"
params = {{split = "train"}}
environment = "{environment}"
[reward]
functions = ["environment", "judge"]
timeout_seconds = {judge_seconds}
judge = {{model = "m", base_url = "{url}", rubric = "More digits are better.", max_concurrency = 64}}
"""


class Dying:
    """An environment of one turn that raises by its seed, in such a share of the rollouts."""

    share = 0.15

    def __init__(self, columns: Mapping[str, Any], seed: int) -> None:
        self.dies = Random(seed).random() < self.share

    def step(self, action: str) -> tuple[str, float, bool]:
        if self.dies:
            raise RuntimeError("as the benchmark wants")
        return "", 1.0, True


@dataclass(frozen=True, slots=True)
class Fleet:
    """One run. `rate`: rollouts a second of one worker whose engine is full; `full`: groups with which it is; `slots`:
    groups that a run begins with; `room`: groups that fit (0: as many as `slots`). The last `slow` of the workers are
    ten times slower. `has_faults`: 15 % of environments and of the judge's answers fail."""

    workers: int
    rate: float
    max_staleness: int
    publish_every: int
    groups_per_step: int
    group_size: int
    train_seconds: float
    broadcast_seconds: float
    steps: int
    has_faults: bool = False
    slots: int = 1
    full: int = 1
    room: int = 0
    slow: int = 0
    lease_seconds: float = 120.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rewards:
    """Seconds from a group's delivery to its rewards: the median of those in time, and the mean of what the late ones,
    which waited for a judge that hung, took beyond that. `late_share`: of all groups."""

    usual_seconds: float
    late_share: float
    late_seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Over the second half of the steps. `idle_ratio`: the learner's waiting over its time; `live_prediction`: what the
    head said meanwhile that it should be. `broadcast_seconds`: median time until 1 / 1.1 of the workers had a version.
    `cpu_share`: of all cores, whoever used them. Of the whole run: its steps' `run_seconds`, `audit`, `rollouts_lost`,
    and how long groups waited for their rewards.
    """

    idle_ratio: float
    live_prediction: float | None
    step_seconds: float
    train_seconds: float
    broadcast_seconds: float
    max_staleness: int
    mean_staleness: float
    cpu_share: float
    run_seconds: float
    audit: dict[str, Any]
    rollouts_lost: int
    rewards: Rewards


def measure(fleet: Fleet, model: Path, directory: Path) -> Measured:
    """Run it in `directory`.

    Raises:
        RuntimeError: a process died, or nothing went on; with its log.
    """
    text = CONFIG.format(**asdict(fleet), model=model.resolve(), max_tokens=MAX_TOKENS)
    with ExitStack() as stack:
        if fleet.has_faults:
            url = stack.enter_context(judge_standin(_fault)).url
            text = _with_faults(text, url)
        share = paced_run.run_paced(directory, text, __file__, fleet.workers, asdict(fleet))
    out = directory / "run"
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ledger = RunDir(out).ledger
    return _summed_up([json.loads(line) for line in lines], share, audit(ledger).to_dict(), _rewards(ledger))


def _rewards(ledger: Path) -> Rewards:
    with closing(open_for_reading(ledger)) as connection:
        taken = connection.execute("SELECT scored_at - delivered_at FROM groups WHERE scored_at IS NOT NULL")
        found = [seconds for (seconds,) in taken]
    late = [seconds for seconds in found if seconds > JUDGE_SECONDS / 2]
    usual = statistics.median(seconds for seconds in found if seconds <= JUDGE_SECONDS / 2)
    return Rewards(usual, len(late) / len(found), statistics.fmean(late) - usual if late else 0.0)


def _with_faults(config: str, url: str) -> str:
    """Return the config with an environment and a judge that fail, in place of its tasks and rewards."""
    failing = FAILING.format(environment=ENVIRONMENT, judge_seconds=JUDGE_SECONDS, url=url)
    before, _, rest = config.partition("[tasks]")
    return before + failing + rest[rest.index("[sampling]") :]


def _fault(question: str, n: int) -> str:
    """Return what is wrong with the judge's nth answer to a question."""
    drawn = int.from_bytes(blake2b(f"{n} {question}".encode()).digest()[:4], "big")
    fails = drawn // len(JUDGE_FAULTS) % 100 < 100 * Dying.share and question != PROBE
    return JUDGE_FAULTS[drawn % len(JUDGE_FAULTS)] if fails else ""


def _summed_up(rows: Sequence[dict[str, Any]], cpu_share: float, found: dict[str, Any], rewards: Rewards) -> Measured:
    late = [row for row in rows if "time/step" in row][len(rows) // 2 :]
    seconds = sum(row["time/step"] for row in late)
    said = [row["learner/idle_predicted"] for row in late if row.get("learner/idle_predicted") is not None]
    arrived = [row["broadcast/t_bcast"] for row in late if row.get("broadcast/t_bcast") is not None]
    return Measured(
        idle_ratio=sum(row["time/wait_for_batch"] for row in late) / seconds,
        live_prediction=statistics.median(said) if said else None,
        step_seconds=seconds / len(late),
        train_seconds=statistics.median(row["time/train"] for row in late),
        broadcast_seconds=statistics.median(arrived) if arrived else 0.0,
        max_staleness=max(row["off_policy/max"] for row in late),
        mean_staleness=statistics.fmean(row["off_policy/mean"] for row in late),
        cpu_share=cpu_share,
        run_seconds=sum(row["time/step"] for row in rows if "time/step" in row),
        audit=found,
        rollouts_lost=max(row.get("rollouts/lost", 0) for row in rows),
        rewards=rewards,
    )


# ---- the processes ---------------------------------------------------------------------------------------------------


def run_worker(settings: Mapping[str, Any]) -> None:
    """A worker whose engine has a speed."""
    from echo2.core.types import Snapshot
    from echo2.engines.engine import Completion, SampleRequest
    from echo2.engines.fake_engine import FakeDecoder
    from echo2.worker.worker_process import WorkerOptions

    is_slow = settings["number"] >= settings["workers"] - settings["slow"]
    rate = settings["rate"] / (SLOW_FACTOR if is_slow else 1.0)
    is_wide = settings["full"] > 1
    full_rows = settings["full"] * settings["group_size"] if is_wide else 1
    tokens_per_second = rate * (LONGEST_TOKENS if is_wide else MEAN_TOKENS)

    class SlowDecoder(FakeDecoder):
        def load(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
            time.sleep(settings["broadcast_seconds"])
            return super().load(snapshot, base)

        def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
            num_rows = len(self._rows) + len(added) - len(dropped)
            time.sleep(max(num_rows, full_rows) / tokens_per_second)
            return super().step(added, dropped)

    options = WorkerOptions(engine="fake", allow_environments=(ENVIRONMENT,), slots=settings["room"])
    paced_run.run_worker(settings, SlowDecoder, options)


def run_learner(settings: Mapping[str, Any]) -> None:
    """A learner whose steps take a set time."""
    from echo2.core.types import RolloutGroup
    from echo2.learner import learner_process
    from echo2.learner.grpo.loop import GrpoClient
    from echo2.learner.grpo.step_meter import LossStats

    @paced_run.in_place_of(learner_process, GrpoClient)
    class SteadyTrainer(GrpoClient):
        def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
            until = time.monotonic() + settings["train_seconds"] * len(groups) / settings["groups_per_step"]
            stats = super().forward_backward(groups)
            time.sleep(max(0.0, until - time.monotonic()))
            return stats

    learner_process.run_learner(RunDir(Path(settings["run"])), "")


if __name__ == "__main__":
    {"worker": run_worker, "learner": run_learner}[sys.argv[1]](json.loads(sys.argv[2]))
