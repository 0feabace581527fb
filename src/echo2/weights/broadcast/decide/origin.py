"""The origin's state machine: the source of each stripe for each worker, and the replacement of failed sources.

Each payload has one plan for all workers that shall receive it. The plan is made when the payload is assigned, from the
link rates known then, and afterwards only repaired. What was learned about members (rates, pairs that can't reach each
other, senders of wrong bytes) outlives the payload.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from echo2.core.decide.machine import StateMachine
from echo2.core.types import PayloadId
from echo2.weights.broadcast.decide import origin_messages as do
from echo2.weights.broadcast.decide import origin_messages as ev
from echo2.weights.broadcast.decide.origin_messages import ONE_MACHINE, ORIGIN
from echo2.weights.broadcast.decide.plan import MembersView, RoutePlan
from echo2.weights.broadcast.decide.routes import Receiver, Routes, can_link, plan_routes

#: Stripes of a payload: enough to spread a lost relay's stripes over many peers, and to match unequal uplinks.
MAX_STRIPES = 64
#: Plans kept at once. One more replaces the oldest that is done, or the oldest if none is.
MAX_PLANS = 16
#: When this many workers gave a source up, no member uses it any more for this payload. All strangers of one ticket
#: count as one.
BLAMERS = 2
#: A worker that accuses more peers than this of wrong bytes, or of missing chunks that they should have, is more likely
#: the liar: from then on its accusations only separate the worker itself from the accused peers. (Accusations are
#: forgotten only with the head: a worker that leaves and rejoins may not start anew.)
MAX_ACCUSED = 2
#: Seconds after giving up a source in which no other source is replaced for being slow.
CALM_SECONDS = 4.0
#: Failed pairs remembered for each member.
MAX_FAILED_PAIRS = 64
#: Step size with which a relay's speed in earlier broadcasts corrects its measured uplink; bounds of the factor.
BIAS_STEP = 0.2
BIAS_BOUNDS = (0.1, 2.0)
#: Share of the origin's measured uplink that is filled: at more, the connections fight for it again. Above this rate in
#: bytes per second nothing is paced: processors are the limit there, and a short burst does not tell a link's rate.
PACE = 0.97
PACED_MAX = 50e6
#: Broadcasts shorter than this say nothing about rates.
MIN_TALLY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class BroadcastOptions:
    """Options of the broadcast.

    plan        makes the routes of workers that start together; None: the origin sends everything to each worker
    fan_out     distinct workers that one worker sends to at a time
    origin_up   bytes per second: the origin's uplink (B_0), if it is known beforehand
    """

    plan: Callable[..., Routes] | None = plan_routes
    fan_out: int = 8
    origin_up: float | None = None


class Broadcast(StateMachine):
    """The origin's state, and one method per kind of event."""

    def __init__(self, options: BroadcastOptions) -> None:
        super().__init__()
        self.options = options
        self.origin_up = options.origin_up
        self.members: dict[str, Receiver] = {}
        self.bias: dict[str, float] = {}
        self.plans: dict[PayloadId, RoutePlan] = {}
        self.holdings: dict[str, tuple[PayloadId, ...]] = {}
        self.suspects: set[str] = set()
        self.failed_pairs: dict[str, dict[str, None]] = {}
        self.accused: dict[str, set[str]] = {}
        self.accusers: dict[str, set[str]] = {}
        self.tickets: dict[str, str] = {}
        self._ups = list[float]()  # sorted, as members measured them
        self._far_downs = list[float]()  # likewise, of the owner's machines that are not this one
        self._reason = ""

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Handle one event and return the commands, in order."""
        self.begin(event)
        match event:
            case ev.MemberJoined():
                self._joined(event)
            case ev.MemberLeft():
                self._left(event)
            case ev.LinkMeasured():
                self._measured(event)
            case ev.PayloadAssigned():
                self._assigned(event)
            case ev.PayloadDropped():
                self.plans.pop(event.payload, None)
                remaining = {key: tuple(set(value) - {event.payload}) for key, value in self.holdings.items()}
                self.holdings = {key: value for key, value in remaining.items() if value}
            case ev.PayloadReceived():
                self._received(event)
            case ev.SnapshotHeld():
                self._holds(event)
            case ev.SourceFailed():
                self._failed(event, now)
        for plan in self.plans.values():
            self._send_routes(plan)
        return self.out

    @property
    def fleet(self) -> MembersView:
        """The members as a plan sees them."""
        return MembersView(self.members, self._up, self._can_serve, self.options.fan_out)

    def rate_limit(self, worker_id: str, payload: PayloadId) -> float | None:
        """Return the bytes per second at which the origin shall send this payload to a member; None: as fast as it can.

        The members of a plan begin together, each with a connection of its own, and every member waits for the chunks
        that come through the others. Left to themselves such connections share the origin's uplink unevenly for
        seconds: some get a tenth of what others get. So each is sent its stripes in the time that one copy of the
        payload takes.
        """
        plan, member = self.plans.get(payload), self.members.get(worker_id)
        stripes = {} if plan is None else plan.children.get(ORIGIN, {})
        if plan is None or member is None or member.reach == ONE_MACHINE or stripes.keys() <= {worker_id}:
            return None
        near = [self.members[key] for key in stripes if key in self.members]
        downs = self._downs(other for other in near if other.reach == member.reach)
        # The middle, for a burst after a stall measures more than the link has.
        uplink = self.options.origin_up or (downs[(len(downs) - 1) // 2] if downs else math.inf)
        if uplink > PACED_MAX:
            return None
        return PACE * uplink * stripes.get(worker_id, 1) / plan.num_stripes

    def _downs(self, members: Iterable[Receiver]) -> list[float]:
        """Return the downlinks that members measured, sorted: those of the owner's machines. Where none of these has
        measured, of each ticket the fastest, without the slowest of them: a stranger could slow down all others."""
        own, of_ticket = list[float](), dict[str, float]()
        for member in members:
            ticket = self.tickets[member.worker_id]
            if member.down and ticket:
                of_ticket[ticket] = max(member.down, of_ticket.get(ticket, 0.0))
            elif member.down:
                own.append(member.down)
        others = sorted(of_ticket.values())
        return sorted(own) or others[1:] or others

    def _up(self, worker_id: str) -> float:
        member = self.members.get(worker_id)
        measured = member.up if member is not None and member.up else self._usual_up()
        return max(1e-9, measured * self.bias.get(worker_id, 1.0))

    def _usual_up(self) -> float:
        """Return the median uplink."""
        return self._ups[len(self._ups) // 2] if self._ups else 1.0

    def _can_serve(self, source: str, worker_id: str) -> bool:
        return (
            source not in self.suspects
            and worker_id not in self.failed_pairs.get(source, ())
            and source not in self.failed_pairs.get(worker_id, ())
        )

    # ---- members -----------------------------------------------------------------------------------------------------

    def _joined(self, event: ev.MemberJoined) -> None:
        old = self.members.get(event.worker_id)
        member = Receiver(event.worker_id, event.address, event.reach)
        if old is not None:
            member = replace(member, up=old.up, down=old.down)
        self._put(event.worker_id, member, event.ticket)
        self._forget_pairs(event.worker_id)
        self._reason = f"{event.worker_id} is here" if old is None else f"{event.worker_id} is back, or moved"
        moved = old is not None and (old.address, old.reach) != (member.address, member.reach)
        for plan in self.plans.values():
            if event.worker_id in plan.routes and event.worker_id not in plan.whole:
                plan.changed[event.worker_id] = None
            if moved:
                self._link_anew(plan, member)

    def _put(self, worker_id: str, member: Receiver | None, ticket: str = "") -> None:
        """Replace a member (None: it left). The rates that members measured stay sorted: to sort those of all members
        at each join or measurement would take a large fleet seconds.
        """
        if (old := self.members.get(worker_id)) is not None:
            for rates, rate in self._rates_of(old, self.tickets[worker_id]):
                del rates[bisect.bisect_left(rates, rate)]
        if member is None:
            self.members.pop(worker_id, None)
            self.tickets.pop(worker_id, None)
            return
        self.members[worker_id], self.tickets[worker_id] = member, ticket
        for rates, rate in self._rates_of(member, ticket):
            bisect.insort(rates, rate)

    def _rates_of(self, member: Receiver, ticket: str) -> Iterator[tuple[list[float], float]]:
        if member.up:
            yield self._ups, member.up
        if member.down and not ticket and member.reach != ONE_MACHINE:
            yield self._far_downs, member.down

    def _link_anew(self, plan: RoutePlan, member: Receiver) -> None:
        """After a change of a member's address: tell its neighbours, and unlink those that can no longer reach it."""
        children = list(plan.children.get(member.worker_id, ()))
        lost = [child for child in children if not can_link(member, self.members[child])]
        plan.replace_source(member.worker_id, lost, self.fleet)
        plan.changed.update(dict.fromkeys(children))
        if member.worker_id in plan.routes and member.worker_id not in plan.whole:
            for source in dict.fromkeys(plan.routes[member.worker_id]):
                if source != ORIGIN and not can_link(self.members[source], member):
                    plan.replace_source(source, [member.worker_id], self.fleet)

    def _forget_pairs(self, worker_id: str) -> None:
        self.failed_pairs.pop(worker_id, None)
        for others in self.failed_pairs.values():
            others.pop(worker_id, None)

    def _left(self, event: ev.MemberLeft) -> None:
        self._move_away(event.worker_id, f"{event.worker_id} is gone: {event.reason}", is_gone=True)
        self._put(event.worker_id, None)
        self.holdings.pop(event.worker_id, None)
        self.bias.pop(event.worker_id, None)
        self._forget_pairs(event.worker_id)

    def _move_away(self, source: str, reason: str, is_gone: bool) -> None:
        """Move all members away from this source, for all payloads."""
        self._reason = reason
        for plan in self.plans.values():
            plan.unusable.add(source)
            plan.replace_source(source, list(plan.children.get(source, ())), self.fleet)
            if is_gone:
                plan.drop(source)

    def _measured(self, event: ev.LinkMeasured) -> None:
        if event.worker_id == ORIGIN:
            self.origin_up = event.up or self.origin_up
        elif event.worker_id in self.members:
            member = self.members[event.worker_id]
            measured = replace(member, up=event.up or member.up, down=event.down or member.down)
            self._put(event.worker_id, measured, self.tickets[event.worker_id])
            if self.options.origin_up is None:
                self.origin_up = self._origin_up()

    def _origin_up(self) -> float | None:
        """Estimate the origin's uplink by the median downlink measured by members, which the origin has sustained.
        Members on its own machine, which use no network link, count only where there are no others.
        """
        if self._far_downs:
            return self._far_downs[len(self._far_downs) // 2]
        far = [member for member in self.members.values() if member.reach != ONE_MACHINE]
        for members in (far, self.members.values()):
            if downs := self._downs(members):
                return downs[len(downs) // 2]
        return self.origin_up

    # ---- payloads ----------------------------------------------------------------------------------------------------

    def _assigned(self, event: ev.PayloadAssigned) -> None:
        plan = self.plans.get(event.payload)
        if plan is None:
            stripes = max(1, min(MAX_STRIPES, event.num_chunks))
            plan = self.plans[event.payload] = RoutePlan(event.payload, stripes)
            plan.whole.update((key, None) for key, payloads in self.holdings.items() if event.payload in payloads)
            self._forget_old_plans()
        self._reason = f"{event.payload} is to be sent"
        receivers = [key for key in dict.fromkeys(event.worker_ids) if key in self.members]
        for worker_id in receivers:  # assigned anew: the worker may have lost its chunks
            if worker_id in plan.whole:
                self._move_children(plan, worker_id)
                del plan.whole[worker_id]
                plan.routes.pop(worker_id, None)
            plan.changed.update({worker_id: None} if worker_id in plan.routes else {})
        new = [worker_id for worker_id in receivers if worker_id not in plan.routes]
        if self.options.plan is None:
            for worker_id in new:
                plan.set_route(worker_id, [ORIGIN] * plan.num_stripes)
        elif not plan.is_done:
            for worker_id in new:
                plan.add_late(worker_id, self.fleet)
        else:
            self._plan_together(plan, new)

    def _move_children(self, plan: RoutePlan, source: str) -> None:
        plan.unusable.add(source)
        plan.replace_source(source, list(plan.children.get(source, ())), self.fleet)
        plan.unusable.discard(source)

    def _forget_old_plans(self) -> None:
        while len(self.plans) > MAX_PLANS:
            done = [payload for payload, plan in self.plans.items() if plan.is_done]
            del self.plans[(done or list(self.plans))[0]]

    def _plan_together(self, plan: RoutePlan, worker_ids: Sequence[str]) -> None:
        """Plan routes for workers that start together. Members that hold the payload already relieve the origin."""
        members = [self._rated(worker_id) for worker_id in worker_ids]
        if not members:
            return
        assert self.options.plan is not None
        routes = self.options.plan(
            members,
            fan_out=self.options.fan_out,
            num_stripes=plan.num_stripes,
            origin_up=self.origin_up,
            weak=self.suspects | plan.unusable,
            blocked={(one, other) for one, others in self.failed_pairs.items() for other in others},
        )
        if not plan.routes:
            plan.num_stripes = len(routes[worker_ids[0]])
        for worker_id, sources in routes.items():
            # The number of stripes stays the same for members that join later.
            plan.set_route(worker_id, [sources[stripe % len(sources)] for stripe in range(plan.num_stripes)])
        if any(key in self.members and key not in plan.unusable for key in plan.whole):
            for worker_id in routes:
                plan.spare_origin(worker_id, self.fleet)

    def _rated(self, worker_id: str) -> Receiver:
        member = self.members[worker_id]
        return replace(member, up=self._up(worker_id)) if member.up or worker_id in self.bias else member

    def _received(self, event: ev.PayloadReceived) -> None:
        plan = self.plans.get(event.payload)
        if plan is None or event.worker_id not in plan.routes or event.worker_id in plan.whole:
            return  # repeated reports count once
        plan.received(event.worker_id)
        plan.unusable.discard(event.worker_id)
        if self.tickets.get(event.worker_id):
            return  # what a stranger says of others changes nobody's routes
        peers = [tally for tally in event.tallies if tally.source in self.members and tally.num_bytes > 0]
        times = sorted(tally.seconds for tally in event.tallies if tally.num_bytes > 0)
        if not times or times[-1] < MIN_TALLY_SECONDS:
            return
        middle = times[len(times) // 2]
        for tally in peers:
            factor = min(1.25, max(0.25, middle / max(tally.seconds, 1e-9)))
            self._correct(tally.source, 1.0 + BIAS_STEP * (factor - 1.0))

    def _correct(self, worker_id: str, factor: float) -> None:
        low, high = BIAS_BOUNDS
        self.bias[worker_id] = min(high, max(low, self.bias.get(worker_id, 1.0) * factor))

    def _holds(self, event: ev.SnapshotHeld) -> None:
        if event.worker_id not in self.members:
            return
        below = () if event.base_model is None else (event.base_model,)
        self.holdings[event.worker_id] = (event.payload, *below)
        for payload in self.holdings[event.worker_id]:
            if (plan := self.plans.get(payload)) is not None:
                plan.received(event.worker_id)

    # ---- failures ----------------------------------------------------------------------------------------------------

    def _failed(self, event: ev.SourceFailed, now: float) -> None:
        plan, source = self.plans.get(event.payload), event.source
        if plan is None or event.worker_id not in plan.routes or event.reason not in ev.SOURCE_FAILURES:
            return
        is_taking = event.worker_id in plan.children.get(source, ())
        is_own = not self.tickets[event.worker_id]
        may_accuse = event.reason == "corrupt" and (is_own or source in plan.past_sources.get(event.worker_id, ()))
        if source == ORIGIN or source not in self.members or not (is_taking or may_accuse):
            plan.changed[event.worker_id] = None  # not its source (any more): send the current routes again
            return
        self._reason = f"{event.worker_id} found {source} {event.reason}"
        if event.reason == "corrupt":
            self._accused(event.worker_id, source)
        else:
            blamers = plan.blamed.setdefault(source, set())
            blamers.add(event.worker_id)
            blamed = sum(event.worker_id in others for others in plan.blamed.values())
            num_blamers = self._num_owners(blamers)
            if event.reason == "missing" and blamed <= MAX_ACCUSED and (is_own or num_blamers >= BLAMERS):
                self._give_up(plan, source)
            if event.reason == "slow":
                if is_own or num_blamers >= BLAMERS:
                    self._correct(source, 0.7)
                if now < plan.calm_until:
                    return  # the last replaced source changed all rates; the worker will report again
            if num_blamers >= BLAMERS:
                self._give_up(plan, source)
                plan.calm_until = now + CALM_SECONDS
        self._remember_pair(event.worker_id, source)
        plan.replace_source(source, [event.worker_id], self.fleet)
        if event.reason not in ("unreachable", "corrupt"):
            self.failed_pairs[event.worker_id].pop(source, None)
        plan.changed[event.worker_id] = None

    def _give_up(self, plan: RoutePlan, source: str) -> None:
        """Stop using this source for this payload, and move the members that still do."""
        plan.whole.pop(source, None) if source not in plan.routes else None
        plan.unusable.add(source)
        plan.replace_source(source, list(plan.children.get(source, ())), self.fleet)
        if source in plan.routes and source not in plan.whole:
            plan.spare_origin(source, self.fleet)  # its children's new sources can serve it, too

    def _num_owners(self, worker_ids: Iterable[str]) -> int:
        """Count independent reporters: each machine of the owner is one, all strangers of one ticket are one."""
        return len({self.tickets.get(worker_id) or f"own {worker_id}" for worker_id in worker_ids})

    def _accused(self, accuser: str, source: str) -> None:
        """Handle an accusation of wrong bytes. It takes one machine of the owner, or strangers of two tickets."""
        accused, ticket = self.accused.setdefault(accuser, set()), self.tickets[accuser]
        if len(accused) <= MAX_ACCUSED:
            accused.add(source)
        if source in self.suspects or len(accused) > MAX_ACCUSED:
            return
        accusers = self.accusers.setdefault(source, set())
        accusers.add(ticket)
        if ticket and len(accusers) < BLAMERS:
            return
        self.suspects.add(source)
        detail = f"{source} sent {accuser} wrong bytes"
        self.emit(do.NameSuspect, detail, worker_id=source, accused_by=accuser)
        self._move_away(source, detail, is_gone=False)

    def _remember_pair(self, worker_id: str, source: str) -> None:
        pairs = self.failed_pairs.setdefault(worker_id, {})
        pairs[source] = None
        if len(pairs) > MAX_FAILED_PAIRS:
            del pairs[next(iter(pairs))]

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _send_routes(self, plan: RoutePlan) -> None:
        changed, plan.changed = plan.changed, {}
        for worker_id in changed:
            if worker_id not in plan.routes or worker_id in plan.whole:
                continue
            member, sources = self.members[worker_id], tuple(plan.routes[worker_id])
            peers = [self.members[source] for source in dict.fromkeys(sources) if source != ORIGIN]
            self.emit(
                do.SetRoutes,
                self._reason,
                worker_id=worker_id,
                payload=plan.payload,
                sources=sources,
                addresses={peer.worker_id: peer.address for peer in peers if peer.address},
            )
            for peer in peers:
                if not peer.address:
                    reason = f"{worker_id} can't dial it"
                    self.emit(do.DialPeer, reason, worker_id=peer.worker_id, peer_id=worker_id, address=member.address)
