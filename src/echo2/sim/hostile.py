"""Simulated workers that mean harm, one way each: see `WorkersSpec.hostile`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echo2.control import events as ev
from echo2.control import relay_commands as do
from echo2.control import relay_events as rel
from echo2.sim.fleet import SimWorker
from echo2.types import SnapshotRef

#: Of leases that one claims to hold, and of groups that it claims to sample together.
CLAIMS = 10_000
#: Between two results for leases that it does not hold.
JUNK_SECONDS = 0.2
#: Before a lease is failed.
FAILS_AFTER_SECONDS = 0.01

#: Of the leases of one that holds some and is good otherwise.
HELD_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Junk:
    pass


@dataclass(frozen=True, slots=True)
class _Fail:
    lease_id: int


class HostileWorker(SimWorker):
    """As any worker, but for what it does with its leases and says of itself."""

    def happen(self, event: object) -> None:
        match event:
            case _Junk():
                if self.relay.connected:
                    lease_id = self.world.rng.randrange(1, CLAIMS)
                    self._call(ev.DeliveryMalformed(self.name, lease_id, "malformed", "noise"))
                self.post(JUNK_SECONDS, event)
            case _Fail():
                reason = self.world.rng.choice(("engine_failed", "prompt_too_long", "reward_failed"))
                self._call(ev.LeaseFailed(self.name, event.lease_id, reason, "it says so"))
            case _:
                super().happen(event)

    def _start(self) -> None:
        super()._start()
        if self.spec.hostile == "junk":
            self.post(JUNK_SECONDS, _Junk())

    def _joined(self) -> ev.WorkerJoined:
        joined = super()._joined()
        if self.spec.hostile != "claims":
            return joined
        held = tuple(range(1, CLAIMS))
        return replace(joined, capacity_groups=CLAIMS, installed=SnapshotRef(99, CLAIMS), held_leases=held)

    def _ordered(self, body: object) -> None:
        if isinstance(body, rel.LeasesGranted) and self.spec.hostile in ("fails", "junk"):
            for lease in body.leases if self.spec.hostile == "fails" else ():
                self.post(FAILS_AFTER_SECONDS, _Fail(lease.lease_id))
            return
        super()._ordered(body)

    def _carry_out(self, command: do.Command) -> None:
        if isinstance(command, do.Deliver):
            is_held = self.spec.hostile == "holds_some" and self.world.rng.random() < HELD_SHARE
            if is_held or self.spec.hostile in ("holds", "claims"):
                return
        super()._carry_out(command)

    def _deliver(self, lease_id: int) -> None:
        if self.spec.hostile == "malformed":
            self._call(ev.DeliveryMalformed(self.name, lease_id, "malformed", "not a number"))
            return
        super()._deliver(lease_id)
