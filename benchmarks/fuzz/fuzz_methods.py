"""Targets of the fuzzer: every method that the head answers, called on a real head with a learner and two workers; and
what differs where the run has an environment, on a head that has one.

What a worker sends may be refused and nothing else: any other error, and any end of the run that is a bug of ours, is a
finding. A head is used for CALLS_PER_HEAD calls, or until its run is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import shutil
from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_files import tokenizer_files
from fuzz_inputs import filled
from fuzz_target import Target, folder
from fuzz_wire import ROLLOUT
from weights_cases import encode

from echo2 import config
from echo2.config import rundir
from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.core.types import RUN_POLICY, GroupRef, RolloutGroup, SnapshotRef, TensorBytes
from echo2.head.serve.effects import HeadEffects
from echo2.head.serve.head import Head
from echo2.head.serve.service import Service
from echo2.transport import message_bytes, messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import METHODS, Handlers, Method, Peer, parse
from echo2.transport.certificates import make_key, make_request
from echo2.transport.identity import RunIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket

CALLS_PER_HEAD = 3000
#: The machine that samples the first step: what strangers deliver waits for checks, which nobody makes here.
OWN = 100
#: Workers that one head sees come, each when the one before was expelled for what it sent; and who says hello again and
#: again beside them.
SENDERS_MAX = 40
CLOSE_SECONDS = 5.0
#: Turns of the event loop that a stream is given for its next message.
TURNS = 20
VOCABULARY = 1000
LEARNER = Peer("l-0123456789", "learner", "192.0.2.7")
#: The environment of the second kind of head; rollouts of one and of two turns in it.
ENVIRONMENT = f"{Path(__file__).resolve().parent / 'fuzz_environment.py'}:Three"
TURNS_MAX = 4
_PLAYED = (
    replace(ROLLOUT, tokens=array("i", [5, 7]), logprobs=array("f", [-0.5, -1.5]), loss_mask=b"\1\1"),
    replace(
        ROLLOUT,
        tokens=array("i", [5, 6, 3, 5, 7]),
        logprobs=array("f", [-0.5, -0.25, 0.0, -1.5, -0.25]),
        loss_mask=b"\1\1\0\1\1",
        version_spans=((0, 0),),
    ),
)
#: The smallest lease ids of an input stand for those of open leases.
STAND_INS = 16
SHARES = {
    "Deliver": 0.4,
    "ReportCheckpoint": 0.05,
    "ReportStep": 0.02,
    "OfferChunks": 0.1,
    "Publish": 0.05,
    "PutChunk": 0.02,
    "Attend": 0.1,
}


def targets() -> list[Target]:
    """One for each method that the head serves; `Enrol` is a target of fuzz_wire.py."""
    plain = [_target(METHODS[name]) for name in (*_WORKERS, *_LEARNERS)]
    return plain + [_target(METHODS[name], with_environment=True) for name in ("Attend", "FailLease", "Deliver")]


_WORKERS = (
    "Attend",
    "Report",
    "FailLease",
    "Deliver",
    "ReportCheck",
    "FetchManifest",
    "FetchChunks",
    "ReportFetch",
    "Probe",
    "PutProbe",
)
_LEARNERS = (
    *("LearnerHello", "TakeGroups", "ReportStep", "OfferChunks", "PutChunk", "Publish", "ReportCheckpoint"),
    "LearnerReport",
)


@cache
def _run_identity() -> RunIdentity:
    return RunIdentity.create_or_load(folder() / "run-identity")


@cache
def worker(number: int) -> Peer:
    """Strangers' machines, each enrolled by a ticket of its own; `OWN` is the owner's."""
    ticket = Ticket.parse(_run_identity().make_ticket("worker", "192.0.2.1:4000", 1, 24.0, is_own=number == OWN))
    peer_id, _ = _run_identity().enrol(ticket.ticket_id, "worker", make_request(make_key()))
    return Peer(peer_id, "worker", f"192.0.2.{8 + number}")


class World:
    """A head of its own, with one step trained, and what calls on it."""

    def __init__(self, number: int, with_environment: bool = False) -> None:
        self.environment = ENVIRONMENT if with_environment else ""
        self.loop = asyncio.new_event_loop()
        self.path = folder() / f"run-{os.getpid()}-{number}"
        self.calls = self.sender = 0
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        settings = config.Config(
            tasks=config.sections.TasksConfig(source="digit_sorting", environment=self.environment),
            reward=config.sections.RewardConfig(functions=["environment" if self.environment else "exact_match"]),
            sampling=config.sections.SamplingConfig(group_size=2, max_tokens=16, max_turns=TURNS_MAX),
            schedule=config.sections.ScheduleConfig(groups_per_step=16),
        )
        made = rundir.create(self.path, settings, resume=False)
        self.head = await Head.open(made, settings, _run_identity(), HeadEffects)
        self.handlers: Handlers = {**Service(self.head).handlers()}
        hello = wire.LearnerHello(protocol=PROTOCOL_VERSION, policy=RUN_POLICY, version=0, vocab_size=VOCABULARY)
        self.session: Any = self.handlers["LearnerHello"](LEARNER, hello)
        self.epoch = (await anext(self.session)).epoch  # 1: what the samples say
        request, content = snapshot(self.head.planner.training.lineage)
        await self.handlers["OfferChunks"](LEARNER, wire.ChunkOffer(hashes=content, epoch=1))
        for hash_, data in content.items():
            chunk = wire.OfferedChunk(hash=hash_, data=bytes(data), epoch=1)
            await self.handlers["PutChunk"](LEARNER, chunk)
        await self.handlers["Publish"](LEARNER, request)
        _, expected = snapshot(self.head.planner.training.lineage, fill=b"\1")
        await self.handlers["OfferChunks"](LEARNER, wire.ChunkOffer(hashes=expected, epoch=1))
        self.streams: list[Any] = []
        await self._attend(worker(OWN))
        await self._train_a_step()
        await self.streams.pop().aclose()
        await self._attend(self.peer)
        await self._attend(worker(SENDERS_MAX))

    @property
    def is_used_up(self) -> bool:
        return self.calls >= CALLS_PER_HEAD or self.sender == SENDERS_MAX - 1 or self.head.ending.outcome is not None

    def replace_expelled(self) -> None:
        """Nothing more is taken of an expelled worker: another takes its place."""
        if self.head.planner.penalties.expulsion(self.peer.peer_id, self.head.clock.now()) is not None:
            self.sender += 1
            self.loop.run_until_complete(self._attend(self.peer))

    @property
    def peer(self) -> Peer:
        return worker(self.sender)

    async def _attend(self, peer: Peer) -> None:
        self.streams.append(self.handlers["Attend"](peer, said_hello(self.environment)))
        await anext(self.streams[-1])

    async def _train_a_step(self) -> None:
        feed: Any = self.handlers["TakeGroups"](LEARNER, wire.TakeGroups(step=0, epoch=self.epoch))
        fed, is_done = list[int](), False
        while not is_done:
            for lease_id, group in self.leases(worker(OWN)):
                delivery = _delivery(lease_id, group.number, bool(self.environment))
                await self.handlers["Deliver"](worker(OWN), wire.Deliveries(items=[delivery]))
            part = wire.FedGroups.FromString(await anext(feed))
            fed += [messages.parse_group(group).group.number for group in part.groups]
            is_done = part.HasField("done")
        report = wire.StepReport(groups=fed, metrics_json="{}", epoch=self.epoch)
        await self.handlers["ReportStep"](LEARNER, report)

    def call(self, method: Method, message: Any) -> None:
        self.calls += 1
        peer = self.peer if "worker" in method.roles else LEARNER
        self.loop.run_until_complete(
            self._call(method, worker(SENDERS_MAX) if method.name == "Attend" else peer, message)
        )
        if self.head.ending.outcome is not None and self.head.ending.outcome[0] in ("bug", "user_error"):
            raise AssertionError(f"the run ended: {self.head.ending.outcome}")

    async def _call(self, method: Method, peer: Peer, message: Any) -> None:
        answer = self.handlers[method.name](peer, message)
        if not method.streaming:
            await answer
            return
        first = asyncio.ensure_future(anext(answer))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if not first.done():
            first.cancel()
        try:
            await first
        except (asyncio.CancelledError, StopAsyncIteration):
            pass  # it has nothing to say yet, or at all
        finally:
            await answer.aclose()

    def leases(self, peer: Peer) -> list[tuple[int, GroupRef]]:
        """(id, group) of what a worker holds."""
        held = self.head.planner.leases.open_leases()
        return [(lease.lease_id, lease.group) for worker_id, lease in held if worker_id == peer.peer_id]

    def close(self) -> None:
        self.loop.run_until_complete(self._close())
        self.loop.close()
        shutil.rmtree(self.path, ignore_errors=True)

    async def _close(self) -> None:
        self.head.ending.end("stopped", "enough calls")
        for stream in self.streams:
            await stream.aclose()
        await self.head.machines.close()
        await self.head.close()
        await self.head.distribution.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # cancelled once already: they end what they started
        if left:
            await asyncio.wait(left, timeout=CLOSE_SECONDS)
        for _ in range(TURNS):
            await asyncio.sleep(0.001)  # the pipes of the reward process that was ended close


class _Worlds:
    """The head in use; another one when it has answered enough."""

    def __init__(self, with_environment: bool) -> None:
        self._with_environment = with_environment
        self._world: World | None = None

    def world(self) -> World:
        world = self._world
        if world is not None and (
            world.calls >= CALLS_PER_HEAD or world.head.ending.outcome or world.sender == SENDERS_MAX - 1
        ):
            self.forget()
        if self._world is None:
            logging.disable(logging.CRITICAL)  # a head tells its log of each refusal
            self._world = World(next(_NUMBERS), self._with_environment)
        self._world.replace_expelled()
        return self._world

    def forget(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()


_NUMBERS = itertools.count()
_WORLDS = {with_environment: _Worlds(with_environment) for with_environment in (False, True)}


def close() -> None:
    """Let go of the heads in use."""
    for worlds in _WORLDS.values():
        worlds.forget()
    logging.disable(logging.NOTSET)


def _target(method: Method, with_environment: bool = False) -> Target:
    worlds = _WORLDS[with_environment]

    def read(data: bytes) -> None:
        message = data if method.raw else parse(method.request, data)
        world = worlds.world()
        try:
            world.call(method, _stand_in(message, world.leases(world.peer)))
        except (PeerError, UserError, InvariantError):
            raise
        except BaseException:
            worlds.forget()  # it may be in any state
            raise

    # A learner that contradicts the head is a bug of ours: it is our program, on a machine of the run's owner.
    errors = (PeerError,) if "worker" in method.roles else (PeerError, UserError, InvariantError)
    kind = None if method.raw else method.request
    name = f"method.{method.name}" + (".environment" if with_environment else "")
    seeds = _seeds(method, with_environment)
    return Target(name, read, seeds, kind, share=SHARES.get(method.name, 0.2), errors=errors)


def _stand_in(message: Any, leases: list[tuple[int, GroupRef]]) -> Any:
    """The message about an open lease and its group, where it says a small lease id."""
    items = message.items if isinstance(message, wire.Deliveries) else [message]
    for item in items:
        if leases and getattr(item, "lease_id", STAND_INS) < STAND_INS:
            item.lease_id, group = leases[item.lease_id % len(leases)]
            if isinstance(item, wire.Delivery) and item.group.number < STAND_INS:
                item.group.kind, item.group.number = group.kind, group.number
    return message


# ---- valid calls -----------------------------------------------------------------------------------------------------


def snapshot(lineage: int, fill: bytes = b"\0") -> tuple[wire.PublishRequest, dict[bytes, memoryview]]:
    tensors = {"a": TensorBytes("BF16", (100,), fill * 200)}
    manifest, content = encode(SnapshotRef(RUN_POLICY, lineage, 0), tensors, tokenizer_files())
    return wire.PublishRequest(manifest=manifest.text, epoch=1), content


def said_hello(environment: str = "") -> wire.WorkerHello:
    environments = [environment] if environment else []
    hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=4, pid=7, environments=environments, engine="compact")
    hello.installed.CopyFrom(wire.SnapshotId(policy=RUN_POLICY, lineage=1))
    return hello


def _delivery(lease_id: int, number: int, is_played: bool) -> wire.Delivery:
    rollouts = _PLAYED if is_played else (ROLLOUT, ROLLOUT)
    group = RolloutGroup(GroupRef(RUN_POLICY, "train", number), 0, 1, 0, array("i"), rollouts, "", 1.5)
    return messages.encode_delivery(lease_id, group)


def _seeds(method: Method, with_environment: bool) -> tuple[bytes, ...]:
    if method.raw:
        return (b"", message_bytes.pack(bytes(32), b"filler"))
    payload = wire.PayloadId(ref=wire.SnapshotId(policy=RUN_POLICY, lineage=1))
    request, content = snapshot(1)
    expected = snapshot(1, fill=b"\1")[1]
    tally = wire.Tally(source="", num_bytes=202, seconds=0.5)
    found: dict[str, list[Any]] = {
        "Attend": [said_hello(ENVIRONMENT if with_environment else "")],
        "Report": [
            wire.WorkerReport(installed=wire.SnapshotId(policy=RUN_POLICY, lineage=1), doing="samples", bytes_sent=9)
        ],
        "FailLease": [wire.LeaseFailed(lease_id=1, reason="oom", detail="out of memory")],
        "Deliver": [
            wire.Deliveries(items=[_delivery(1, 1, with_environment)]),
            wire.Deliveries(items=[_delivery(number, number, with_environment) for number in (0, 2)]),
        ],
        "ReportCheck": [wire.CheckReport(policy=RUN_POLICY, number=0, num_tokens=9, fault="9 of 9 tokens")],
        "FetchManifest": [wire.ManifestRequest(policy=RUN_POLICY, lineage=1, version=0)],
        "FetchChunks": [wire.ChunkRequest(hashes=list(content), payload=payload)],
        "ReportFetch": [
            wire.FetchReport(payload=payload, bytes_stored=202, bytes_total=202, whole=True, tallies=[tally]),
            wire.FetchReport(payload=payload, failed_source=worker(SENDERS_MAX).peer_id, failure="corrupt"),
            wire.FetchReport(up=1e6, down=1e7),
        ],
        "Probe": [wire.ProbeRequest(num_bytes=1000)],
        "LearnerHello": [
            wire.LearnerHello(
                protocol=PROTOCOL_VERSION, policy=RUN_POLICY, version=1, vocab_size=VOCABULARY, pid=8, epoch=1
            )
        ],
        "TakeGroups": [wire.TakeGroups(step=1, epoch=1)],
        "ReportStep": [wire.StepReport(step=0, groups=[0, 1], metrics_json='{"time/step": 1.5, "ess": 0.9}', epoch=1)],
        "OfferChunks": [wire.ChunkOffer(hashes=content, epoch=1)],
        "Publish": [request],
        "PutChunk": [wire.OfferedChunk(hash=hash_, data=bytes(data), epoch=1) for hash_, data in expected.items()],
        "ReportCheckpoint": [wire.CheckpointReport(version=0, oldest_kept=0, epoch=1)],
        "LearnerReport": [wire.LearnerReport(doing="trains", epoch=1)],
    }
    rng = random.Random(0)
    return (*(each.SerializeToString() for each in found[method.name]), filled(method.request, rng).SerializeToString())
