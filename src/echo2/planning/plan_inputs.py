"""What a plan is made from: the run, its learner, the weights that travel, the machines on offer, and what an earlier
run has measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo2.config.offers import Offer
from echo2.config.rundir import RunDir, read_metrics
from echo2.core.documents import is_number, parse_json
from echo2.core.errors import UserError, counted
from echo2.head.fleet.decide import activation, formulas
from echo2.head.fleet.decide.forecast import ScoringDelays
from echo2.head.fleet.decide.formulas import INSTALLED_QUANTILE, Demand

#: So many times of rewards are kept, and an event's type is looked for in so many bytes of its line.
DELAYS_MAX, EVENT_TYPE_BYTES = 512, 200


@dataclass(frozen=True, slots=True)
class BroadcastInputs:
    """Size and speed of a publication. `seconds`: measured time of transfer and reload, used instead of the formulas;
    `at_least_seconds`: measured in another run, a lower bound here. `delta_bytes`: size of one step's delta.
    `base_bytes`: of the model under the adapter, which travels once. Without `full_bytes`, sizes are not known.
    """

    full_bytes: float = 0.0
    delta_bytes: float | None = None
    head_up_bps: float = 1e9
    seconds: float | None = None
    at_least_seconds: float = 0.0
    base_bytes: float = 0.0

    def num_bytes(self, publish_every: int) -> float:
        """Return the bytes of a publication: kappa deltas of one step at most, and never more than a full snapshot."""
        full = self.full_bytes
        return full if self.delta_bytes is None else min(full, self.delta_bytes * publish_every)

    def seconds_to(self, links: Sequence[formulas.Links], publish_every: int) -> float:
        if self.seconds is not None:
            return self.seconds
        travels = formulas.transfer_seconds(self.num_bytes(publish_every), links, self.head_up_bps)
        return max(self.at_least_seconds, travels)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Inputs of a plan. `publish_every`: None lets the planner choose. `max_idle`: largest share of its time that the
    learner may wait for workers. `train_seconds`: from step to step; `waits_for_rewards`: share of that time in which
    the learner waits for reward functions, which more machines do not change. `delays`: of a group's rewards; None:
    not known, or within that share.
    """

    groups_per_step: int
    group_size: int
    steps: int
    max_staleness: int
    train_seconds: float
    offers: tuple[Offer, ...]
    broadcast: BroadcastInputs = field(default_factory=BroadcastInputs)
    learner_usd_per_hour: float = 0.0
    groups_per_batch: int = 8
    publish_every: int | None = None
    generate_during_broadcast: bool = True
    gamma: float = formulas.GAMMA
    max_idle: float = 0.02
    budget_usd: float | None = None
    waits_for_rewards: float = 0.0
    delays: ScoringDelays | None = None

    def demand(self, max_staleness: int, publish_every: int, broadcast_seconds: float) -> Demand:
        return Demand(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            publish_every=publish_every,
            max_staleness=max_staleness,
            train_seconds=self.train_seconds,
            broadcast_seconds=broadcast_seconds,
            generate_during_broadcast=self.generate_during_broadcast,
        )

    @property
    def is_free(self) -> bool:
        """Whether neither the learner nor any machine has a price."""
        return not any((self.learner_usd_per_hour, *(offer.price_usd_per_hour for offer in self.offers)))

    def offer(self, name: str) -> Offer:
        return next(offer for offer in self.offers if offer.name == name)

    def deciding(self, machines: Mapping[str, int]) -> list[str]:
        """Return the offers of these machines, and the cheapest for a rollout that was not taken."""
        order = [offer.name for offer, _ in self.pool(self.max_staleness)]
        return [*(name for name in order if name in machines), *[name for name in order if name not in machines][:1]]

    def batch(self, offer: Offer) -> int:
        """Return the number of groups that a machine of this offer samples at once."""
        return offer.groups_per_batch or self.groups_per_batch

    def broadcast_seconds(self, machines: Mapping[str, int], publish_every: int) -> float:
        """Return T_bcast for these machines, given as a number by offer."""
        links = [
            formulas.Links(self.offer(name).up_mbps * 1e6, self.offer(name).down_mbps * 1e6, count)
            for name, count in machines.items()
        ]
        return self.broadcast.seconds_to(links, publish_every)

    def joins(self, machines: Mapping[str, int], hours: float) -> float:
        """Return how many workers join in so many hours: these machines, and those that take the place of lost ones."""
        lives = ((count, self.offer(name).mean_life_hours) for name, count in machines.items())
        return math.fsum(count * (1 + (hours / life if life else 0.0)) for count, life in lives)

    def least_broadcast_seconds(self, publish_every: int) -> float:
        """Return T_bcast for a single machine, of the offer with the fastest broadcast."""
        return min(self.broadcast_seconds({offer.name: 1}, publish_every) for offer in self.offers)

    def usd_per_step(self, workers_usd_per_hour: float, step_seconds: float) -> float:
        return (self.learner_usd_per_hour + workers_usd_per_hour) * step_seconds / 3600

    def pool(self, max_staleness: int, without: Container[str] = ()) -> list[tuple[Offer, activation.Kind]]:
        """Return the offers except those `without`, cheapest for a rollout first. No more machines of one offer count
        than there are groups that may be sampled at a time: those of max_staleness + 1 steps.
        """
        most = (max_staleness + 1) * self.groups_per_step
        offers = (one for one in self.offers if one.name not in without)
        rates = [(one, one.effective_rate, one.effective_usd_per_hour) for one in offers]
        rates.sort(key=lambda one: (one[2] / one[1], -one[1], one[0].name))
        return [(one, activation.Kind(rate, usd, min(one.count, most))) for one, rate, usd in rates]

    def outrun(self, max_staleness: int, publish_every: int) -> dict[str, float]:
        """Return the offers whose machines never get a group where the learner does not wait, and how many steps their
        new weights travel: by then the steps that these may sample are over. On-policy the learner waits for all.
        """
        most = max_staleness * self.train_seconds
        seconds = {offer.name: self.broadcast_seconds({offer.name: 1}, publish_every) for offer in self.offers}
        return {name: late / self.train_seconds for name, late in seconds.items() if late > most > 0}


@dataclass(frozen=True, slots=True)
class PastRun:
    """Measurements of an earlier run. `train_seconds`: median over steps. `broadcast_seconds`: quantile 1 / 1.1 over
    publications, or None. `delta_ratio`: bytes sent over bytes of the full snapshot, median, or None. `reward_seconds`:
    time of the reward functions, and of a judge, per group, median, or None. `judge_usd`: what a judge cost in a step,
    mean, or None. `teacher_wait_seconds`: of a step for teachers that compute elsewhere, median, or None. `delays`:
    seconds from a group's delivery to its rewards, ascending.
    """

    num_steps: int
    train_seconds: float
    broadcast_seconds: float | None
    delta_ratio: float | None
    reward_seconds: float | None = None
    judge_usd: float | None = None
    teacher_wait_seconds: float | None = None
    delays: tuple[float, ...] = ()


def read_past_run(directory: Path) -> PastRun:
    """Read `metrics.jsonl` of a run directory. The first step is a warm-up and is left out if there are more; steps
    whose groups were all flat trained nothing and do not count.

    Raises:
        UserError: there is no such directory, or the file is damaged or has no trained step.
    """
    if not directory.is_dir():
        raise UserError(f"There is no directory {directory}. Name the directory of a run that has trained.")
    rows = read_metrics(RunDir(directory).metrics, refuses_damage=True)
    timed = [row for row in rows if _number(row.get("time/train")) is not None]
    steps = [row for row in timed if "loss/mean" in row or row.get("reward/frac_zero_std") != 1.0]
    if timed and not steps:
        raise UserError(
            f"{directory}: {counted(len(timed), 'step')} trained nothing: all rewards of each group were equal. Name "
            "the directory of a run that has learned something, or give --train-seconds."
        )
    if not steps:
        raise UserError(
            f"{directory} has no trained step yet: no row of {directory / 'metrics.jsonl'} has time/train. Name the "
            "directory of a run that has trained."
        )
    warm = steps[1:] or steps
    broadcasts = sorted(_numbers(warm, "broadcast/t_bcast"))
    ratios, rewards = _numbers(warm, "broadcast/delta_ratio"), _numbers(warm, "time/reward")
    return PastRun(
        num_steps=len(steps),
        train_seconds=statistics.median(_numbers(warm, "time/train")),
        broadcast_seconds=broadcasts[math.ceil(len(broadcasts) * INSTALLED_QUANTILE) - 1] if broadcasts else None,
        delta_ratio=statistics.median(ratios) if ratios else None,
        reward_seconds=statistics.median(rewards) if rewards else None,
        judge_usd=_usd_per_step(rows),
        teacher_wait_seconds=statistics.median(waits) if (waits := _numbers(warm, "time/teacher_wait")) else None,
        delays=_delays(RunDir(directory).events),
    )


def _delays(events: Path) -> tuple[float, ...]:
    """Read how long groups waited for their rewards after their delivery, from the newest part of the event log: the
    middle of each of `DELAYS_MAX` equal parts of them. Empty if there are none, as in logs that were deleted."""
    delivered, delays = dict[int, float](), list[float]()
    try:
        with events.open("rb") as file:
            for line in file:
                kind = next((one for one in (b"GroupDelivered", b"GroupScored") if one in line[:EVENT_TYPE_BYTES]), b"")
                with suppress(ValueError, KeyError, TypeError):  # the last line may be half-written
                    record = parse_json(line) if kind else {}
                    if "options" in record or not kind:
                        continue
                    now, number = float(record["now"]), record["event"]["group"]["number"]
                    if record["event"]["group"]["kind"] != "train":
                        continue
                    if kind == b"GroupDelivered":
                        delivered[number] = now
                    elif (since := delivered.pop(number, None)) is not None:
                        delays.append(max(0.0, now - since))
    except OSError:
        return ()
    delays.sort()
    count = min(DELAYS_MAX, len(delays))
    return tuple(delays[int((place + 0.5) * len(delays) / count)] for place in range(count))


def _usd_per_step(rows: list[dict[str, Any]]) -> float | None:
    """Return what a judge has cost in a step: the rows say what it has cost since the start."""
    spent = [(row["step"], usd) for row in rows if (usd := _number(row.get("cost/judge_usd"))) is not None]
    return spent[-1][1] / spent[-1][0] if spent and spent[-1][0] else None


def _numbers(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := _number(row.get(key))) is not None]


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
