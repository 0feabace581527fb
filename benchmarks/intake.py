"""How many groups a second one head takes in: delivered, decoded, scored, stored, fed. No network, no engine.

    python benchmarks/intake.py --model outputs/models/digit_sorting

One worker delivers groups of random tokens as fast as it is answered, 64 a call, through the head's real handlers; the
reward is `exact_match`, in its process. Prints two rates: of groups that were answered, and of groups that were fed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from weights_cases import encode

from echo2 import config as configuration
from echo2.rundir import RunDir
from echo2.runtime.head.head import Head
from echo2.runtime.head.service import Service
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.certificates import make_key, make_request
from echo2.transport.identity import RunIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket
from echo2.types import RUN_POLICY, SnapshotRef, TensorBytes

LEARNER = Peer("learner", "learner")
PER_CALL = 64


def settings(groups: int, samples: int, tokens: int) -> dict[str, dict[str, Any]]:
    return {
        "model": {"path": "not loaded"},
        "tasks": {"source": "digit_sorting"},
        "reward": {"functions": ["exact_match"]},
        "sampling": {"group_size": samples, "max_tokens": tokens, "groups_per_batch": PER_CALL},
        "schedule": {"groups_per_step": groups, "max_staleness": 0},
    }


def result(lease: wire.Lease, tokens: int, rng: random.Random) -> wire.Delivery:
    samples = [
        wire.Rollout(
            tokens=array("i", [rng.randrange(2, 12) for _ in range(tokens)]).tobytes(),
            logprobs=array("f", [-0.5] * tokens).tobytes(),
            loss_mask=b"\x01" * tokens,
            version_spans=[wire.VersionSpan(start=0, version=0)],
            finish="length",
        )
        for _ in range(lease.num_samples)
    ]
    return wire.Delivery(
        policy=lease.policy, lease_id=lease.lease_id, kind=lease.kind, number=lease.number, lineage=1, rollouts=samples
    )


async def publish(service: Service, files: dict[str, bytes], epoch: int) -> None:
    manifest, chunks = encode(SnapshotRef(RUN_POLICY, 1, 0), {"w": TensorBytes("I16", (4,), bytes(8))}, files)
    request = wire.PublishRequest(manifest=manifest.text, epoch=epoch)
    for hash_ in (await service.offer_chunks(LEARNER, wire.ChunkOffer(hashes=manifest.hashes, epoch=epoch))).hashes:
        await service.put_chunk(LEARNER, wire.OfferedChunk(hash=hash_, data=bytes(chunks[hash_]), epoch=epoch))
    await service.publish(LEARNER, request)


async def learn(service: Service, epoch: int) -> int:
    """How many groups the step has, once it has them all."""
    return sum([len(fed.groups) async for fed in service.take_groups(LEARNER, wire.TakeGroups(step=0, epoch=epoch))])


async def measure(directory: Path, files: dict[str, bytes], groups: int, samples: int, tokens: int) -> dict[str, Any]:
    rundir, rng = RunDir(directory), random.Random(0)
    rundir.rollouts.mkdir()
    config = configuration.build(settings(groups, samples, tokens), "benchmark")
    identity = RunIdentity.create_or_load(rundir.identity)
    ticket = Ticket.parse(identity.make_ticket("worker", "127.0.0.1:1", 1, 1.0, is_own=True))
    worker = Peer(identity.enrol(ticket.ticket_id, "worker", make_request(make_key()))[0], "worker")
    head = Head(rundir, config, identity)
    service = Service(head)
    await head.reward.start()
    await head.start()
    hello = wire.LearnerHello(protocol=PROTOCOL_VERSION, policy=RUN_POLICY, vocab_size=1 << 20)
    session: Any = service.learner_hello(LEARNER, hello)
    epoch = (await anext(session)).epoch
    learning = asyncio.ensure_future(learn(service, epoch))
    await publish(service, files, epoch)
    attends = wire.WorkerHello(
        protocol=PROTOCOL_VERSION, slots=PER_CALL * samples, installed=wire.SnapshotId(policy=RUN_POLICY, lineage=1)
    )
    started, num_answered = time.perf_counter(), 0
    async with contextlib.aclosing(service.attend(worker, attends)) as orders:  # type: ignore[type-var]
        async for order in orders:
            items = [result(lease, tokens, rng) for lease in order.leases.leases]
            replies = await service.deliver(worker, wire.Deliveries(items=items))
            num_answered += sum(reply.accepted for reply in replies.items)
            if num_answered == groups:
                break
        answered = time.perf_counter() - started
        num_fed = await learning
        fed = time.perf_counter() - started
    await session.aclose()
    await head.close()
    await head.distribution.close()
    return {"answered_per_second": groups / answered, "fed_per_second": num_fed / fed, "groups": num_fed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a model directory; its tokenizer is used")
    parser.add_argument("--groups", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    files = {path.name: path.read_bytes() for path in options.model.iterdir() if path.suffix in (".json", ".jinja")}
    with tempfile.TemporaryDirectory() as folder:
        sizes = (options.groups, options.samples, options.tokens)
        print(json.dumps(asyncio.run(measure(Path(folder), files, *sizes))))


if __name__ == "__main__":
    main()
