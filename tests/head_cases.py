"""A real head without its sockets: a learner that has published, workers that attend, and what they may say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from weights_cases import encode

from echo2 import config as configuration
from echo2.config.rundir import RunDir
from echo2.core.types import RUN_POLICY, RolloutGroup, SnapshotRef, TensorBytes
from echo2.head.serve.effects import HeadEffects
from echo2.head.serve.head import Head
from echo2.head.serve.service import Service
from echo2.head.store.mirror import Mirror
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer, parse
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.messages import parse_group
from echo2.transport.tickets import Ticket
from rollout_cases import VOCAB, tokenizer_files

LEARNER = Peer("learner", "learner")
#: For what must happen, however slow the machine.
SECONDS = 30.0


def rows(path: Path, *prompts: Any, **columns: Any) -> str:
    """A file of tasks; each has the answer 35 and a secret."""
    lines = [json.dumps({"prompt": prompt, "answer": "35", "secret": "xyzzy", **columns}) for prompt in prompts]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def settings(source: str, **changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A run of one group a step, four rollouts each; changes by section."""
    raw: dict[str, dict[str, Any]] = {
        "model": {"path": "none"},
        "run": {"max_steps": 9},
        "tasks": {"source": source},
        "reward": {"functions": ["exact_match"]},
        "sampling": {"group_size": 4, "max_tokens": 12, "groups_per_batch": 1},
        "schedule": {"groups_per_step": 1, "max_staleness": 1},
    }
    for section, values in changes.items():
        raw.setdefault(section, {}).update(values)
    return raw


class OpenHead:
    """`async with` it. Snapshot 1.0 is published and the learner waits for step 0."""

    def __init__(self, path: Path, raw: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        self._path, self._raw, self._files = path, raw, files or tokenizer_files()
        self.fed: list[RolloutGroup] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._peers: dict[str, Peer] = {}

    async def __aenter__(self) -> OpenHead:
        rundir = RunDir(self._path / "run")
        for folder in (rundir.path, rundir.rollouts, rundir.logs):
            folder.mkdir(parents=True, exist_ok=True)
        rundir.config.write_text("{}")
        config = configuration.build(self._raw, "test")
        self._mirror = Mirror.open(rundir, *config.head.store_place) if config.head.store else None
        identity = RunIdentity.create_or_load(rundir.identity)
        self.head = await Head.open(rundir, config, identity, HeadEffects, self._mirror)
        if self._mirror is not None and self.head.contents is not None:
            self.head.contents.keep_files()
            self._tasks.append(asyncio.ensure_future(self._mirror.run(self.head.ending.fail)))
        self.service = Service(self.head)
        version = self.head.planner.training.version
        hello = wire.LearnerHello(protocol=PROTOCOL_VERSION, policy=RUN_POLICY, version=version, vocab_size=VOCAB)
        self.session = self.service.learner.learner_hello(LEARNER, hello)
        self.epoch = (await anext(self.session)).epoch
        self.learn()
        if not self.head.planner.snapshots.published:
            await self.publish(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.aclose()
        await self.head.close()
        await self.head.distribution.close()

    def peer(self, name: str) -> Peer:
        """A machine of the run's owner, enrolled when it is first named; its id is made of its key."""
        if name not in self._peers:
            identity = self.head.identity
            ticket = Ticket.parse(identity.make_ticket("worker", "127.0.0.1:1", 1, 1.0, is_own=True))
            csr = PeerIdentity(self._path / name).request()
            self._peers[name] = Peer(identity.enrol(ticket.ticket_id, "worker", csr)[0], "worker")
        return self._peers[name]

    async def publish(self, version: int) -> None:
        tensors = {"w": TensorBytes("I16", (4,), bytes([version]) * 8)}
        manifest, chunks = encode(SnapshotRef(RUN_POLICY, 1, version), tensors, self._files)
        request = wire.PublishRequest(manifest=manifest.text, epoch=self.epoch)
        missing = await self.service.learner.offer_chunks(
            LEARNER, wire.ChunkOffer(hashes=manifest.hashes, epoch=self.epoch)
        )
        for hash_ in missing.hashes:
            chunk = wire.OfferedChunk(hash=hash_, data=bytes(chunks[hash_]), epoch=self.epoch)
            await self.service.learner.put_chunk(LEARNER, chunk)
        await self.service.learner.publish(LEARNER, request)

    async def report(self, name: str = "w-1", version: int = 0) -> None:
        """A worker's heartbeat: it has this version installed."""
        ref = wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=version)
        await self.service.report(self.peer(name), wire.WorkerReport(installed=ref))

    def learn(self) -> None:
        """The learner takes the groups of the next step."""
        self._tasks.append(asyncio.ensure_future(self._learn()))

    async def _learn(self) -> None:
        wanted = wire.TakeGroups(step=self.head.planner.training.version, epoch=self.epoch)
        async for fed in self.service.learner.take_groups(LEARNER, wanted):
            self.fed.extend(map(parse_group, parse(wire.FedGroups, fed).groups))

    @contextlib.asynccontextmanager
    async def attending(self, name: str = "w-1", version: int = 0, **more: Any) -> AsyncIterator[list[wire.Lease]]:
        """A worker; the leases that it is sent, as they come."""
        leases: list[wire.Lease] = []
        hello = wire.WorkerHello(
            protocol=PROTOCOL_VERSION,
            slots=1,
            installed=wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=version),
            **more,
        )
        orders = self.service.attend(self.peer(name), hello)

        async def listen() -> None:
            async for order in orders:
                leases.extend(order.leases.leases)

        listening = asyncio.ensure_future(listen())
        try:
            yield leases
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def deliver(self, *deliveries: wire.Delivery, name: str = "w-1") -> list[tuple[bool, str]]:
        replies = await self.service.deliver(self.peer(name), wire.Deliveries(items=deliveries))
        return [(reply.accepted, reply.reason) for reply in replies.items]


async def until(holds: Any) -> None:
    """Wait until `holds()`; fail instead of hanging."""

    async def wait() -> None:
        while not holds():  # noqa: ASYNC110  # what it waits for tells nobody
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), SECONDS)


def sample(tokens: Iterable[int], version: int = 0, **fields: Any) -> wire.Rollout:
    """A rollout as an honest worker with no top-k or top-p tells it."""
    ids = array("i", tokens)
    values: dict[str, Any] = {
        "tokens": ids.tobytes(),
        "logprobs": array("f", [-0.5] * len(ids)).tobytes(),
        "loss_mask": b"\x01" * len(ids),
        "version_spans": [wire.VersionSpan(start=0, version=version)],
        "finish": "stop",
    }
    return wire.Rollout(**{**values, **fields})


def delivery(lease: wire.Lease, samples: Iterable[wire.Rollout], **fields: Any) -> wire.Delivery:
    values = {
        "policy": lease.policy,
        "kind": lease.kind,
        "number": lease.number,
        "lineage": 1,
        "generate_seconds": 0.01,
        **{name: fields.pop(name) for name in set(fields) - {"lease_id", "rewards", "rows", "lost"}},
    }
    return wire.Delivery(**{"lease_id": lease.lease_id, "group": {**values, "rollouts": samples}, **fields})


#: The longest duration that a message may hold, nearly.
HUGE_SECONDS = math.nextafter(1e7, 0)
