"""How much rollout capacity keeps the learner busy, and how stale that makes its data: ECHO-2's section 3, extended.

Equation numbers are the paper's; `docs/capacity.md` derives them. T = seconds of a training step, Tb = seconds from a
publication until workers can generate with it, kappa = publish_every, S = max_staleness, R = rollouts of a step,
mu = rollouts per second of all active workers. The paper lets every worker pause for all of Tb; workers that go on with
the old version (`generate_during_broadcast`) do not. This is a fluid model; `forecast.py` is discrete.

How long a snapshot takes to send, before anything is measured: section 6. G = bits to send, B0 = the head's uplink,
Bw = a worker's link, n workers, c = bits of a chunk. A worker can't have the snapshot before G / Bw; a head that sends
it to each worker needs n G / B0. These are lower bounds: links that lose packets or also carry rollouts take longer. A
run measures the real time (`broadcast/t_bcast`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from echo2.core.errors import UserError

#: Safety factor between the smallest sufficient rate and the one to aim for (section 3.1).
GAMMA = 1.1
#: Share of the active workers that must have installed a snapshot for its broadcast to count as over (section 4.2).
INSTALLED_QUANTILE = 1 / GAMMA
_SLACK = 1e-9  # tolerance for quotients that would be whole numbers without rounding errors
CHUNK_BYTES = 1 << 20
#: Workers that one worker sends to, and one-way latency between any two.
FAN_OUT, LATENCY_SECONDS = 8, 0.05


@dataclass(frozen=True, slots=True)
class Demand:
    """What the learner requires of its workers. `rollout_seconds`: one group from start to delivery, used where the
    fluid model needs it.
    """

    groups_per_step: int
    group_size: int
    publish_every: int
    max_staleness: int
    train_seconds: float
    broadcast_seconds: float
    generate_during_broadcast: bool = True
    rollout_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "group_size", "publish_every", "train_seconds"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise UserError(f"{name} = {getattr(self, name)} must be a positive number.")
        for name in ("max_staleness", "broadcast_seconds", "rollout_seconds"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise UserError(f"{name} = {getattr(self, name)} must be a number that is not negative.")
        if self.max_staleness < self.publish_every - 1:
            raise UserError(
                f"max_staleness = {self.max_staleness} with publish_every = {self.publish_every} would wait for ever: "
                f"set max_staleness >= {self.publish_every - 1} or publish_every <= {self.max_staleness + 1}."
            )

    @property
    def rollouts_per_step(self) -> int:
        """R: rollouts that a step trains on."""
        return self.groups_per_step * self.group_size

    @property
    def period_seconds(self) -> float:
        """kappa * T: the duration of one publication period if the learner never waits."""
        return self.publish_every * self.train_seconds

    @property
    def pause_seconds(self) -> float:
        """Seconds of each period in which workers do not generate."""
        return 0.0 if self.overlaps else self.broadcast_seconds

    @property
    def overlaps(self) -> bool:
        """Whether workers go on sampling while a snapshot travels."""
        return self.generate_during_broadcast and self.max_staleness > 0

    @property
    def lead_seconds(self) -> float:
        """Seconds from a version's installation until the learner wants the first step that needs it:
        (S - kappa + 1) T - Tb, less one rollout. The staleness window leaves workers this long to sample that step.
        """
        slack = (self.max_staleness - self.publish_every + 1) * self.train_seconds
        return slack - self.broadcast_seconds - self.rollout_seconds


# ---- rates -----------------------------------------------------------------------------------------------------------


def mu_min(demand: Demand) -> float:
    """Equation (2): kappa R / (kappa T - pause), rollouts per second below which a period cannot fill.

    Raises:
        UserError: kappa T <= pause: no fleet is large enough.
    """
    room = demand.period_seconds - demand.pause_seconds
    if room <= 0:
        raise UserError(_no_room(demand))
    return demand.publish_every * demand.rollouts_per_step / room


def mu_window(demand: Demand) -> float:
    """R / ((S - kappa + 1) T - Tb): at a lower rate the window of S steps makes the learner wait for each new version.

    It is equation (7) <= S solved for mu; in the paper's mode with kappa = S - 1 and Tb < T equation (2) implies it.

    Raises:
        UserError: the window closes before the snapshot arrives: no fleet is large enough.
    """
    if demand.lead_seconds <= 0:
        raise UserError(_no_window(demand))
    return demand.rollouts_per_step / demand.lead_seconds


def mu_needed(demand: Demand) -> float:
    """The least rate, in rollouts per second, at which the learner never waits.

    Raises:
        UserError: no such rate exists; the message names what is missing and a remedy.
    """
    if demand.max_staleness == 0:
        raise UserError(
            "max_staleness = 0 (on-policy) leaves the learner waiting at any rate: each step is broadcast "
            f"({demand.broadcast_seconds:.4g} s) + sampling + training ({demand.train_seconds:.4g} s), one after the "
            "other. Set max_staleness >= 1."
        )
    return max(mu_min(demand), mu_window(demand))


def window_limit(demand: Demand) -> str:
    """Return what to set where the window of S steps, and not the learner's pace, sets the rate needed; "" elsewhere.

    Raises: as `mu_needed`.
    """
    pace = mu_min(demand)
    if mu_needed(demand) <= pace * (1 + _SLACK):
        return ""
    sampled = demand.broadcast_seconds + demand.rollout_seconds + demand.rollouts_per_step / pace
    wide = demand.publish_every - 1 + _ceil(sampled / demand.train_seconds)
    return (
        f"Set max_staleness >= {wide}: with max_staleness = {demand.max_staleness} a new version leaves workers "
        f"{demand.lead_seconds:.4g} s to sample a step"
    )


def mu_target(demand: Demand) -> float:
    """gamma * mu_needed: the rate to aim for."""
    return GAMMA * mu_needed(demand)


# ---- staleness -------------------------------------------------------------------------------------------------------


def staleness_bound(publish_every: int, train_seconds: float, broadcast_seconds: float) -> int:
    """Equation (12): kappa + ceil((1 - 1/kappa) Tb / T), the largest staleness of a pool that meets (1).

    Raises:
        UserError: kappa T <= Tb, where (1) cannot be met.
    """
    if publish_every * train_seconds <= broadcast_seconds:
        raise UserError(
            f"publish_every x train_seconds = {publish_every * train_seconds:.4g} s does not exceed broadcast_seconds ="
            f" {broadcast_seconds:.4g}: no bound holds. Publish every {_least_kappa(train_seconds, broadcast_seconds)} "
            "steps or more, or make snapshots smaller."
        )
    return publish_every + _ceil((1 - 1 / publish_every) * broadcast_seconds / train_seconds)


# ---- waiting ---------------------------------------------------------------------------------------------------------


def step_seconds(demand: Demand, mu: float) -> float:
    """Mean seconds of a step in the steady state: the slowest of three feedback loops.

    The learner (T); the workers (R / mu + pause / kappa); and version -> broadcast -> first m steps that need it ->
    training up to the next version, for each m. Exact for a fluid without pauses; with pauses a lower bound (a pause
    may fall into the third loop), where kappa T > pause.
    """
    kappa, sampling = demand.publish_every, demand.rollouts_per_step / mu
    slowest = max(demand.train_seconds, sampling + demand.pause_seconds / kappa)
    ahead = demand.max_staleness - kappa
    for num_steps in range(1, kappa + 1):
        periods = max(1, -(-(ahead + num_steps + 1) // kappa))
        loop = demand.broadcast_seconds + demand.rollout_seconds + num_steps * sampling
        loop += (periods * kappa - ahead - num_steps) * demand.train_seconds
        slowest = max(slowest, loop / (periods * kappa))
    return slowest


def idle_ratio(demand: Demand, mu: float) -> float:
    """Share of the time for which the learner waits, in the steady state."""
    return 1 - demand.train_seconds / step_seconds(demand, mu)


def binding(demand: Demand, mu: float) -> str:
    """Return the bottleneck at this rate: learner, rollouts, broadcast or staleness."""
    pace = step_seconds(demand, mu)
    if pace <= demand.train_seconds * (1 + _SLACK):
        return "learner"
    if step_seconds(replace(demand, broadcast_seconds=0.0), mu) <= demand.train_seconds * (1 + _SLACK):
        return "broadcast"
    if step_seconds(replace(demand, max_staleness=demand.max_staleness + demand.publish_every), mu) < pace:
        return "staleness"
    return "rollouts"


# ---- error messages --------------------------------------------------------------------------------------------------


def _no_room(demand: Demand) -> str:
    least = _least_kappa(demand.train_seconds, demand.pause_seconds)
    return (
        f"The broadcast cannot be hidden: publish_every x train_seconds = {demand.publish_every} x "
        f"{demand.train_seconds:.4g} s does not exceed the {demand.pause_seconds:.4g} s in which workers do not "
        f"generate; {demand.pause_seconds - demand.period_seconds:.4g} s are missing. Publish every {least} steps "
        f"(then max_staleness >= {staleness_bound(least, demand.train_seconds, demand.pause_seconds)}), make snapshots "
        "smaller (deltas, bfloat16), or let workers generate during the broadcast."
    )


def _no_window(demand: Demand) -> str:
    late = demand.broadcast_seconds + demand.rollout_seconds
    window = (demand.max_staleness - demand.publish_every + 1) * demand.train_seconds
    needed = demand.publish_every + math.floor(late / demand.train_seconds + _SLACK)
    freshest = demand.max_staleness - math.floor(late / demand.train_seconds + _SLACK)
    fixes = [
        f"Larger steps (schedule.groups_per_step; steps more than {_above(late / window)} times as large)"
        if window > 0
        else "",
        f"publish_every <= {freshest}" if 1 <= freshest < demand.publish_every else "",
        f"max_staleness >= {needed}",
    ]
    return (
        f"The learner is faster than weights travel: a step takes {demand.train_seconds:.2g} s, new weights and the "
        f"first rollouts {late:.2g} s. With max_staleness = {demand.max_staleness} and publish_every = "
        f"{demand.publish_every} it waits, however many workers there are. {' or '.join(filter(None, fixes))} help."
    )


def _above(value: float) -> str:
    """Three digits, rounded up."""
    digits = 2 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits - _SLACK) / 10**digits:.4g}"


def _least_kappa(train_seconds: float, broadcast_seconds: float) -> int:
    return math.floor(broadcast_seconds / train_seconds + _SLACK) + 1


def _ceil(value: float) -> int:
    return math.ceil(value - _SLACK)


@dataclass(frozen=True, slots=True)
class Links:
    """`count` equal workers' links, in bits per second."""

    up_bps: float
    down_bps: float
    count: int = 1


def star_seconds(num_bytes: float, num_workers: int, head_up_bps: float, worker_down_bps: float) -> float:
    """max(G / Bw, n G / B0): the head sends to every worker itself."""
    bits = 8 * num_bytes
    return max(bits / worker_down_bps, num_workers * bits / head_up_bps)


def chain_seconds(
    num_bytes: float, num_workers: int, worker_bps: float, head_up_bps: float, chunk_bytes: float = CHUNK_BYTES
) -> float:
    """G / Bw + (L - 1) c / Bw: N = B0 / Bw chains of L = n / N workers, each worker forwarding to the next."""
    bits, chunk = 8 * num_bytes, 8 * min(chunk_bytes, num_bytes)
    num_chains = max(1, math.floor(head_up_bps / worker_bps))
    length = math.ceil(num_workers / num_chains)
    return bits / min(worker_bps, head_up_bps / min(num_chains, num_workers)) + (length - 1) * chunk / worker_bps


def slowest_bps(links: Sequence[Links]) -> float:
    """Return the downlink of the worker at INSTALLED_QUANTILE, with which a broadcast ends; slower ones don't count."""
    total, have = sum(one.count for one in links), 0
    for one in sorted(links, key=lambda one: -one.down_bps):
        have += one.count
        if have >= total * INSTALLED_QUANTILE:
            return one.down_bps
    return min(one.down_bps for one in links)


def transfer_seconds(num_bytes: float, links: Sequence[Links], head_up_bps: float) -> float:
    """Return max(G / B0, G / Bw, n G / (B0 + sum of uplinks)) plus a chunk per hop: seconds until INSTALLED_QUANTILE of
    these workers have the snapshot, where every worker relays a part.

    Raises:
        UserError: no workers, or a link without bandwidth.
    """
    if not links or min(min(one.up_bps, one.down_bps) for one in links) <= 0 or head_up_bps <= 0:
        raise UserError("A broadcast needs workers, and every link needs some bandwidth.")
    bits, chunk = 8 * num_bytes, 8 * min(CHUNK_BYTES, num_bytes)
    count, slowest = sum(one.count for one in links), slowest_bps(links)
    uplinks = head_up_bps + sum(one.up_bps * one.count for one in links)
    hops = min(count, 2) if count <= FAN_OUT + 1 else 1 + math.ceil(math.log(count, FAN_OUT))
    floor = max(bits / head_up_bps, bits / slowest, count * bits / uplinks)
    return floor + (hops - 1) * chunk / slowest + hops * LATENCY_SECONDS
