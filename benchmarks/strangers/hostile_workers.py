"""Simulated workers that mean harm, one way each, for `hostile_fleet.py` and the tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hostile_liars import Liar, LiarSpec

from echo2.core.decide.machine import Event
from echo2.core.types import RUN_POLICY, SamplingFailure, SnapshotRef
from echo2.head.decide import events as ev
from echo2.planning.sim.fleet import SimWorker
from echo2.planning.sim.report import History
from echo2.planning.sim.scenario import Scenario, WorkersSpec
from echo2.planning.sim.world import SimNetwork, SimWorld
from echo2.worker.decide import messages as do
from echo2.worker.decide import messages as wev

#: Of leases that one claims to hold, and of groups that it claims to sample together.
CLAIMS = 10_000
#: Between two results for leases that it does not hold.
JUNK_SECONDS = 0.2
#: Before a lease is failed.
FAILS_AFTER_SECONDS = 0.01

#: Of the leases of one that holds some and is good otherwise.
HELD_SHARE = 0.25


class _Junk(Event):
    pass


class _Fail(Event):
    lease_id: int


@dataclass(frozen=True, slots=True)
class HostileSpec(WorkersSpec):
    """`hostile`: these hold their leases, or some of them, to their deadline, fail them at once, deliver only what is
    malformed, send junk for leases that they do not hold, claim leases, a snapshot and a capacity that they do not
    have, and hold what they get, or name other weights than they sampled with: such as nobody can check, if they can.
    """

    hostile: Literal["holds", "holds_some", "fails", "malformed", "junk", "claims", "misnames"] = "holds"


def make_worker(
    world: SimWorld, network: SimNetwork, name: str, spec: WorkersSpec, scenario: Scenario, history: History
) -> SimWorker:
    """For `run_scenario`: a worker of the kind that its spec is of."""
    kinds: dict[type, type[SimWorker]] = {HostileSpec: HostileWorker, LiarSpec: Liar}
    return kinds.get(type(spec), SimWorker)(world, network, name, spec, scenario, history)


class HostileWorker(SimWorker):
    """As any worker, but for what it does with its leases and says of itself."""

    @property
    def hostile(self) -> str:
        assert isinstance(self.spec, HostileSpec)
        return self.spec.hostile

    def handle(self, event: object) -> None:
        match event:
            case _Junk():
                if self.scheduler.connected:
                    lease_id = self.world.rng.randrange(1, CLAIMS)
                    self._call(ev.DeliveryMalformed(self.name, lease_id, "malformed", "noise"))
                self.post(JUNK_SECONDS, event)
            case _Fail():
                reasons: tuple[SamplingFailure, ...] = ("engine_failed", "prompt_too_long", "environment_failed")
                reason = self.world.rng.choice(reasons)
                self._call(ev.LeaseFailed(self.name, event.lease_id, reason, "it says so"))
            case _:
                super().handle(event)

    def _start(self) -> None:
        super()._start()
        if self.hostile == "junk":
            self.post(JUNK_SECONDS, _Junk())

    def _joined(self) -> ev.WorkerJoined:
        joined = super()._joined()
        if self.hostile != "claims":
            return joined
        held = tuple(range(1, CLAIMS))
        return replace(joined, slots=CLAIMS, installed=SnapshotRef(RUN_POLICY, 99, CLAIMS), held_leases=held)

    def _ordered(self, body: object) -> None:
        if isinstance(body, wev.LeasesGranted) and self.hostile in ("fails", "junk"):
            for lease in body.leases if self.hostile == "fails" else ():
                self.post(FAILS_AFTER_SECONDS, _Fail(lease.lease_id))
            return
        super()._ordered(body)

    def _carry_out(self, command: do.Command) -> None:
        if isinstance(command, do.Deliver):
            is_held = self.hostile == "holds_some" and self.world.rng.random() < HELD_SHARE
            if is_held or self.hostile in ("holds", "claims"):
                return
        super()._carry_out(command)

    def _deliver(self, lease_id: int, result: ev.GroupDelivered) -> None:
        if self.hostile == "malformed":
            self._call(ev.DeliveryMalformed(self.name, lease_id, "malformed", "not a number"))
            return
        super()._deliver(lease_id, self._misnamed(result) if self.hostile == "misnames" else result)

    def _misnamed(self, result: ev.GroupDelivered) -> ev.GroupDelivered:
        """The same with weights that may not have been published, or of a lineage before."""
        rng, oldest, newest = self.world.rng, result.oldest_version, result.newest_version
        later = newest + rng.randint(1, self.scenario.max_staleness + 1)
        match rng.choice(("all later", "some later", "between", "lineage")):
            case "all later":
                return replace(result, oldest_version=later, newest_version=later)
            case "some later":
                return replace(result, newest_version=later)
            case "between":
                return replace(result, newest_version=later, versions_between=tuple(range(oldest + 1, later)))
            case _:
                return replace(result, lineage=rng.randint(1, result.lineage))
