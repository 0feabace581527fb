"""A run with a head, a learner and workers as processes of their own, at set speeds, and when what happened in it.

All is as `echo2 run` starts it (gRPC, mutual TLS, leases, ledger, snapshots), but for two parts. Workers have an engine
without a model, which sleeps for as long as sampling would take. The learner trains a real model on what they send, and
sleeps for what is left of the time that so many tokens are to take. So it fits on two cores.

**The engine.** A batch of n running rollouts makes min(n, full_rows) * v tokens a second: from `full_rows` on it
is saturated. Rollouts are log-normally long. Every round has the same lengths, so that rounds can be compared.

    python overlap_nodes.py learner|worker SETTINGS    # how `overlap.py` starts them
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
import statistics
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import paced_run

from echo2.core.decide.seeds import group_seed
from echo2.core.types import RUN_POLICY, GroupRef
from echo2.head.decide.pacing import WidthSearch

GROUP_SIZE = 8
GROUPS_PER_BATCH = 8
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 12, 0.6, 64

CONFIG = """
[run]
max_steps = {rounds}
seed = {seed}
[model]
path = "{model}"
[tasks]
source = "digit_sorting"
params = {{split = "train"}}
[reward]
functions = ["{reward}"]
[sampling]
group_size = {group_size}
max_tokens = {max_tokens}
groups_per_batch = {groups_per_batch}
[schedule]
groups_per_step = {groups}
max_staleness = 0
order = "{order}"
[learner]
lr = 1e-6
tokens_per_microbatch = 1_000_000
checkpoint_every = {rounds}
[workers]
count = 0
"""


@dataclass(frozen=True, slots=True)
class Fleet:
    """`full_rows`: rollouts at which an engine is saturated; `token_rate`: tokens a second of one that is."""

    workers: int
    full_rows: int
    token_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `train_seconds`: of a round."""

    groups: int
    rounds: int
    seed: int
    order: str
    microbatch: int
    train_seconds: float
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds from the round's first lease: until the first micro-batch was with the learner, until the last group was
    in, until the step was recorded. `train_seconds`: of them, in which the learner trained. `batch_groups`: the largest
    batch that was leased.
    """

    dispatch_seconds: float
    rollout_seconds: float
    window_seconds: float
    train_seconds: float
    batch_groups: int

    @property
    def wait_seconds(self) -> float:
        return self.window_seconds - self.train_seconds

    @property
    def waiting_ratio(self) -> float:
        return self.wait_seconds / self.window_seconds


# ---- how long things take --------------------------------------------------------------------------------------------


@cache
def lengths_of(seed: int, position: int) -> tuple[int, ...]:
    """Tokens of each rollout of the group at this position of a round."""
    rng = random.Random(f"{seed} {position}")
    drawn = (rng.lognormvariate(math.log(MEDIAN_TOKENS), SPREAD) for _ in range(GROUP_SIZE))
    return tuple(min(MAX_TOKENS, max(1, round(length))) for length in drawn)


def round_tokens(seed: int, groups: int) -> int:
    return sum(sum(lengths_of(seed, position)) for position in range(groups))


def batch_ends(groups: Sequence[tuple[int, ...]], fleet: Fleet) -> list[float]:
    """When each group of a batch is complete, in seconds from its start."""
    rows = sorted((length, index) for index, lengths in enumerate(groups) for length in lengths)
    now, position, left, ends = 0.0, 0, len(rows), [0.0] * len(groups)
    for length, index in rows:
        now += (length - position) * max(left, fleet.full_rows) / fleet.token_rate
        position, left, ends[index] = length, left - 1, now
    return ends


def group_ends(seed: int, groups: int, fleet: Fleet, width: int | None = None) -> list[float]:
    """When each group of a round is complete: in whole batches, or in those of a frontier of this width. Who is free
    first gets the next batch; messages take no time.
    """
    frontier = WidthSearch(width or 1)
    free, ends = [0.0] * fleet.workers, list[float]()
    while len(ends) < groups:
        left, first = groups - len(ends), free[0] == 0.0
        size = GROUPS_PER_BATCH if width is None else frontier.width
        if width is not None:  # whoever begins, begins with fewer; and the last groups are shared out
            size = min((frontier.begin(0, fleet.workers) if first else None) or size, -(-2 * left // fleet.workers))
        batch = [lengths_of(seed, len(ends) + at) for at in range(min(size, left))]
        took = batch_ends(batch, fleet)
        ends += [free[0] + seconds for seconds in took]
        heapq.heapreplace(free, free[0] + max(took))
    return ends


def fleet_seconds(seed: int, groups: int, fleet: Fleet) -> float:
    """How long the fleet takes for a round in whole batches."""
    return max(group_ends(seed, groups, fleet))


def window_seconds(ends: Sequence[float], train_seconds: float, microbatch: int) -> float:
    """A round whose groups are complete at these times and trained on as they come."""
    now, ordered = 0.0, sorted(ends)
    for first in range(0, len(ordered), microbatch):
        part = ordered[first : first + microbatch]
        now = max(now, part[-1]) + train_seconds * len(part) / len(ordered)
    return now


def alone_seconds(seed: int, groups: int, fleet: Fleet) -> list[float]:
    """How long each group of a round takes at one worker that does nothing else."""
    return [max(batch_ends([lengths_of(seed, at)], fleet)) for at in range(groups)]


# ---- one run ---------------------------------------------------------------------------------------------------------


def run_case(case: Case, model: Path, directory: Path) -> list[Round]:
    """Run it in `directory`; every round but the first, whose processes were still starting.

    Raises:
        RuntimeError: a process died, or nothing went on; with its log.
    """
    sizes = {"group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS, "groups_per_batch": GROUPS_PER_BATCH}
    reward = f"{Path(__file__).resolve()}:spread_out"
    text = CONFIG.format(**asdict(case), **sizes, model=model.resolve(), reward=reward)
    paced_run.run_paced(directory, text, __file__, case.fleet.workers, {**asdict(case), "reward": reward})
    return read_rounds(directory / "run", case)[1:]


def read_rounds(out: Path, case: Case) -> list[Round]:
    """What the head's event log and metrics say of each round."""
    step_of: dict[int, int] = {}
    began: dict[int, float] = {}
    fed: dict[int, list[float]] = {}
    came: dict[int, float] = {}
    ended: dict[int, float] = {}
    largest: dict[int, int] = {}
    for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for command in record.get("commands", ()):
            now, kind = record["now"], command["type"]
            if kind == "IssueGroup":
                step_of[command["number"]] = command["step"]
            elif kind == "GrantLeases":
                step = command["leases"][0]["step"]
                began.setdefault(step, now)
                largest[step] = max(largest.get(step, 0), len(command["leases"]))
            elif kind == "AcceptDelivery":
                came[step_of[command["group"]["number"]]] = now
            elif kind == "FeedGroup":
                fed.setdefault(command["step"], []).append(now)
            elif kind == "RecordStep":
                ended[command["step"]] = now
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    train = {row["step"] - 1: row["time/train"] for row in map(json.loads, lines) if "time/train" in row}
    return [
        Round(
            dispatch_seconds=fed[step][min(case.microbatch, case.groups) - 1] - began[step],
            rollout_seconds=came[step] - began[step],
            window_seconds=ended[step] - began[step],
            train_seconds=train[step],
            batch_groups=largest[step],
        )
        for step in range(case.rounds)
    ]


# ---- the processes ---------------------------------------------------------------------------------------------------


def spread_out(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """A reward by which every group has something to learn from."""
    return [hashlib.blake2b(bytes(ids), digest_size=1).digest()[0] / 255 for ids in completion_ids]


def run_worker(settings: Mapping[str, Any]) -> None:
    """A worker whose engine has a speed."""
    from echo2.engines.engine import Completion, SampleRequest
    from echo2.engines.fake_engine import FakeDecoder
    from echo2.worker.worker_process import WorkerOptions

    seed, groups, fleet = settings["seed"], settings["groups"], Fleet(**settings["fleet"])
    numbers = range(2 * groups * settings["rounds"])
    position_of = {group_seed(seed, GroupRef(RUN_POLICY, "train", number)): number % groups for number in numbers}

    class PacedDecoder(FakeDecoder):
        """Rows of set lengths; a token of all rows takes as long as in `batch_ends`."""

        def __init__(self) -> None:
            super().__init__()
            self._left: dict[int, int] = {}
            self._made: dict[int, Completion] = {}
            self._until = 0.0

        def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
            ref, _, _, end = self._policy()
            for number in dropped:
                del self._left[number]
            for number, request in added.items():
                length = self._left[number] = lengths_of(seed, position_of[request.seed])[request.sample]
                rng = random.Random(f"{request.seed} {request.sample}")
                tokens = array("i", [*(rng.randrange(3, 60) for _ in range(length - 1)), end])
                spans = ((0, ref.version),)
                self._made[number] = Completion(tokens, array("f", [-4.1] * length), spans, "stop")
            step_seconds = max(len(self._left), fleet.full_rows) / fleet.token_rate
            self._until = max(self._until, time.monotonic() - step_seconds) + step_seconds
            time.sleep(max(0.0, self._until - time.monotonic()))
            self._left = {number: left - 1 for number, left in self._left.items()}
            ended = [number for number, left in self._left.items() if not left]
            self._left = {number: left for number, left in self._left.items() if left}
            return [(number, self._made.pop(number)) for number in ended]

    paced_run.run_worker(settings, PacedDecoder, WorkerOptions(engine="fake"))


def run_learner(settings: Mapping[str, Any]) -> None:
    """A learner whose tokens take a set time."""
    from echo2.config.rundir import RunDir
    from echo2.core.types import RolloutGroup
    from echo2.learner import learner_process
    from echo2.learner.grpo.loop import GrpoClient
    from echo2.learner.grpo.step_meter import LossStats, StepStats

    token_seconds = settings["train_seconds"] / round_tokens(settings["seed"], settings["groups"])

    @paced_run.in_place_of(learner_process, GrpoClient)
    class PacedTrainer(GrpoClient):
        def num_tokens_run(self, group: RolloutGroup) -> int:
            """So that `microbatch` groups fill a micro-batch, however long they are."""
            tokens = self.config.learner.tokens_per_microbatch
            assert tokens != "auto"
            return tokens // int(settings["microbatch"])

        def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
            until = time.monotonic() + token_seconds * sum(group.num_tokens for group in groups)
            stats = super().forward_backward(groups)
            time.sleep(max(0.0, until - time.monotonic()))
            return stats

        def optim_step(self, ends_step: bool = True) -> StepStats:
            """Without what the head judges engines by: these workers' logprobs are made up, and it would expel them."""
            step = super().optim_step(ends_step)
            return replace(step, losses=replace(step.losses, fresh={}))

    learner_process.run_learner(RunDir(Path(settings["run"])), "")


def mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    {"worker": run_worker, "learner": run_learner}[sys.argv[1]](json.loads(sys.argv[2]))
