"""A stranger's group goes to a machine of the owner, is read there, and the verdict comes back: real head and engines,
no sockets."""

from __future__ import annotations

import asyncio
import io
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, GroupRef, Rollout, RolloutGroup
from echo2.engines.registry import make_engine
from echo2.head.serve.report import status
from echo2.head.strangers.copies import CopiedRollouts
from echo2.head.strangers.decide.trust import NEWCOMER_CHECKS
from echo2.rollouts.generate import sample_group
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.identity import PeerIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket
from echo2.views.status import show_trust, trust_rows
from echo2.worker.sampling import check
from head_cases import OpenHead, rows, settings, until
from rollout_cases import plain_tokenizer, snapshot_of, tiny_module

INSTALLED = wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=0)


class Attending:
    """A worker by one ticket; its orders as they come."""

    def __init__(self, head: OpenHead, path: Path, is_own: bool) -> None:
        self.head, self.leases, self.checks = head, list[wire.Lease](), list[wire.Check]()
        identity = head.head.identity
        ticket = Ticket.parse(identity.make_ticket("worker", "127.0.0.1:1", 1, 1.0, is_own=is_own))
        self.ticket_id = ticket.ticket_id
        self.peer = Peer(identity.enrol(ticket.ticket_id, "worker", PeerIdentity(path).request())[0], "worker")
        hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=4, installed=INSTALLED, engine="compact")
        self._task = asyncio.ensure_future(self._listen(head.service.attend(self.peer, hello)))

    async def _listen(self, orders: Any) -> None:
        async for order in orders:
            self.leases.extend(order.leases.leases)
            if order.HasField("check"):
                self.checks.append(order.check)

    async def sample(self, engine: Any, lease: wire.Lease, shift: int = 0) -> RolloutGroup:
        """Sample a lease, and deliver it; `shift` is added to the group's seed first."""
        lying = wire.Lease()
        lying.CopyFrom(lease)
        lying.seed += shift
        group = await sample_group(engine, plain_tokenizer(), messages.decode_assignment(lying), self.peer.peer_id)
        assert isinstance(group, RolloutGroup)
        reply = await self.deliver(lease, group)
        assert reply.accepted, reply.reason
        return group

    async def deliver(self, lease: wire.Lease, group: RolloutGroup) -> Any:
        delivery = messages.encode_delivery(lease.lease_id, group)
        return (await self.head.service.deliver(self.peer, wire.Deliveries(items=[delivery]))).items[0]

    def close(self) -> None:
        self._task.cancel()


def run_of(path: Path, **more: Any) -> dict[str, Any]:
    source = rows(path / "tasks.jsonl", *(f"{number}+{number}" for number in range(10, 40)))
    changes = {"sampling": {"max_tokens": 12}, "schedule": {"groups_per_step": 40}, "run": {"max_steps": 2}, **more}
    return settings(source, **changes)


@dataclass
class Scene:
    """A head, an engine that has the run's weights, and workers that joined."""

    path: Path
    head: OpenHead
    engine: Any
    workers: list[Attending] = field(default_factory=list)

    async def joins(self, name: str, is_own: bool = False) -> Attending:
        worker = Attending(self.head, self.path / name, is_own)
        self.workers.append(worker)
        await until(lambda: worker.leases)
        return worker


@asynccontextmanager
async def scene(path: Path, **more: Any) -> AsyncIterator[Scene]:
    engine = make_engine("compact", "cpu")
    await engine.update_weights(snapshot_of(tiny_module("qwen3")))
    async with OpenHead(path, run_of(path, **more)) as head:
        head.head.planner.fleet.heartbeat_seconds = 3600.0  # whoever samples slowly here is not silent for too long
        found = Scene(path, head, engine)
        yield found
        for worker in found.workers:
            worker.close()
    await engine.close()


def test_honest_groups_pass_and_a_liar_ends_in_quarantine_and_is_expelled(tmp_path: Path) -> None:
    async def go() -> None:
        async with scene(tmp_path) as here:
            head, engine = here.head, here.engine
            own, stranger = await here.joins("own", is_own=True), await here.joins("stranger")
            call = head.service.handlers()["ReportCheck"]
            book = head.head.planner.trust

            async def verdict(at: int) -> wire.CheckReport:
                await until(lambda: len(own.checks) > at)
                report = await check(engine, own.checks[at])
                await call(own.peer, report)  # type: ignore[misc]
                return report

            for at in range(NEWCOMER_CHECKS):
                await until(lambda at=at: len(stranger.leases) > at)
                await stranger.sample(engine, stranger.leases[at])
                report = await verdict(at)
                assert (report.fault, report.missed) == ("", "")
                assert report.num_tokens > 0
            assert not book.of(stranger.ticket_id).is_new
            assert await until(lambda: len(head.fed) == NEWCOMER_CHECKS) is None
            liar = await here.joins("liar")
            for at in range(2):
                await until(lambda at=at: len(liar.leases) > at)
                await liar.sample(engine, liar.leases[at], shift=1)
                assert "random numbers" in (await verdict(NEWCOMER_CHECKS + at)).fault
            assert head.head.planner.penalties.expulsion(liar.peer.peer_id, head.head.clock.now()) is not None
            least, most = trust_rows(status(head.head))
            assert (least["ticket"], least["is_quarantined"], least["num_failed"]) == (liar.ticket_id, True, 2)
            assert (most["ticket"], most["is_quarantined"]) == (stranger.ticket_id, False)
            assert most["num_passed"] == NEWCOMER_CHECKS
            shown = io.StringIO()
            show_trust([least, most], Console(width=200, file=shown))
            assert "in quarantine" in shown.getvalue()
            before = book.all()
        async with OpenHead(tmp_path, run_of(tmp_path)) as restarted:
            after = restarted.head.planner.trust.all()
            assert {ticket: replace(one, num_groups=0) for ticket, one in before.items()} == {
                ticket: replace(one, num_groups=0) for ticket, one in after.items()
            }

    asyncio.run(go())


def test_a_malformed_verdict_is_refused_and_an_unreadable_group_is_reported(tmp_path: Path) -> None:
    async def go() -> None:
        async with scene(tmp_path) as here:
            head, engine = here.head, here.engine
            own, stranger = await here.joins("own", is_own=True), await here.joins("stranger")
            await stranger.sample(engine, stranger.leases[0])
            await until(lambda: own.checks)
            asked = own.checks[0]
            assert "no distributions" in (await check(object(), asked)).missed
            await engine.update_weights(snapshot_of(tiny_module("qwen3", seed=1), version=1))
            await engine.update_weights(snapshot_of(tiny_module("qwen3", seed=2), version=2))
            assert "does not hold" in (await check(engine, asked)).missed
            other = wire.Check()
            other.CopyFrom(asked)
            other.lease.prompt_tokens = array("i", [2]).tobytes()
            with pytest.raises(PeerError, match="is to be checked as"):
                await check(engine, other)
            report: Any = head.service.handlers()["ReportCheck"]
            with pytest.raises(PeerError, match="this run's policy"):
                await report(own.peer, wire.CheckReport(policy="another", number=0))
            await report(stranger.peer, wire.CheckReport(policy=RUN_POLICY, number=0, num_tokens=9))
            assert head.head.planner.trust.of(stranger.ticket_id).num_passed == 0

    asyncio.run(go())


def test_rollouts_that_a_stranger_delivered_before_are_refused(tmp_path: Path) -> None:
    async def go() -> None:
        async with scene(tmp_path, workers={"require_checks": False}) as here:
            worker = await here.joins("stranger")
            group = await worker.sample(here.engine, worker.leases[0])
            await until(lambda: len(worker.leases) > 1)
            other = messages.decode_assignment(worker.leases[1]).lease.group
            reply = await worker.deliver(worker.leases[1], replace(group, group=other))
            assert not reply.accepted
            assert f"is a copy of rollout 0 of group {group.group.number}" in reply.reason

    asyncio.run(go())


def grouped(number: int, *rollouts: tuple[int, float]) -> RolloutGroup:
    """A group of such rollouts: the token that it repeats eight times, and the logprob of each."""
    made = tuple(
        Rollout(array("i", [token] * 8), array("f", [logprob] * 8), b"\1" * 8, ((0, 0),), "length")
        for token, logprob in rollouts
    )
    return RolloutGroup(GroupRef(RUN_POLICY, "train", number), 0, 1, 0, array("i", [1]), made)


def test_copies_are_what_honest_workers_do_not_draw_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = CopiedRollouts()
    copies.check(grouped(0, (5, -6.0), (6, -0.1)), "t")
    copies.check(grouped(0, (5, -6.0), (6, -0.1)), "t")  # the answer to it was lost, or another lease on it
    copies.check(grouped(1, (6, -0.1), (6, -0.1)), "t")  # likely enough
    for copied in (
        grouped(1, (7, -6.0), (5, -6.0)),
        grouped(2, (7, -6.0), (7, -6.0)),
        grouped(0, (7, -6.0), (5, -6.0)),
    ):
        with pytest.raises(PeerError, match="is a copy of rollout"):
            copies.check(copied, "t")
    monkeypatch.setattr("echo2.head.strangers.copies.COPIES_KEPT", 1)
    copies.check(grouped(3, (8, -6.0)), "t")
    copies.check(grouped(4, (5, -6.0)), "t")  # forgotten


def test_copying_the_rollouts_of_others_does_not_incriminate_them() -> None:
    """With the run's seed and the tasks a stranger can sample what others will deliver, and deliver it before them."""
    copies = CopiedRollouts()
    copies.check(grouped(0, (5, -6.0), (6, -6.0)), "liar")
    copies.check(grouped(1, (5, -6.0)), "honest")
    with pytest.raises(PeerError, match="is a copy of rollout"):
        copies.check(grouped(2, (5, -6.0)), "honest")
