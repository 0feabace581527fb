"""A worker with a valid ticket that sends what no worker would: it is refused, word by word, and the run goes on."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from echo2.core.errors import LinkError, PeerError
from echo2.head.strangers.decide.trust import PATIENCE, PATIENCE_PER_LEASE, PATIENCE_PER_SECOND
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.transport.grpc_link import connect
from echo2.transport.identity import RunIdentity
from real_runs import ENDLESS, Run, free_port

pytestmark = pytest.mark.timeout(600)

SECONDS = 30.0
HUGE = 2**64 - 1
HELLO = wire.WorkerHello(protocol=limits.PROTOCOL_VERSION, slots=1)

BAD_HELLOS = [
    wire.WorkerHello(),
    wire.WorkerHello(protocol=HUGE >> 32, slots=1),
    wire.WorkerHello(protocol=limits.PROTOCOL_VERSION),
    *(
        wire.WorkerHello(protocol=limits.PROTOCOL_VERSION, slots=1, **claim)  # type: ignore[arg-type]
        for claim in (
            {"price_usd_per_hour": math.nan},
            {"price_usd_per_hour": math.inf},
            {"price_usd_per_hour": -1.0},
            {"price_usd_per_hour": 1e300},
            {"held_leases": [HUGE]},
            {"held_leases": [1] * 10_001},
            {"installed": wire.SnapshotId(policy="policy", lineage=1, version=HUGE)},
            {"installed": wire.SnapshotId(policy="policy", lineage=HUGE, version=1)},
            {"installed": wire.SnapshotId(policy="../policy", lineage=1, version=1)},
            {"environments": ["a" * 1000]},
        )
    ),
]
GROUP = {"policy": "policy", "kind": "train"}
PAYLOAD = wire.PayloadId(ref=wire.SnapshotId(policy="policy", lineage=7, version=99))
BAD_CALLS: list[tuple[str, Any]] = [
    ("Report", wire.WorkerReport(installed=wire.SnapshotId(policy="policy", version=HUGE))),
    ("Report", wire.WorkerReport(pause_seconds=math.nan)),
    ("FailLease", wire.LeaseFailed(lease_id=HUGE, reason="busy")),
    ("Deliver", wire.Deliveries(items=[wire.Delivery(lease_id=HUGE, group=GROUP)])),
    ("Deliver", wire.Deliveries(items=[wire.Delivery()] * 5000)),
    ("FetchManifest", wire.ManifestRequest(policy="policy", lineage=HUGE, version=HUGE)),
    (
        "FetchManifest",
        wire.ManifestRequest(policy="policy", version=1, base=wire.SnapshotId(policy="policy", lineage=HUGE)),
    ),
    ("ReportFetch", wire.FetchReport(payload=wire.PayloadId(ref=wire.SnapshotId(policy="policy", lineage=HUGE)))),
    ("ReportFetch", wire.FetchReport(payload=PAYLOAD, bytes_stored=2, bytes_total=1)),
    ("ReportFetch", wire.FetchReport(payload=PAYLOAD, failure="no such word", failed_source="w-1")),
    ("ReportFetch", wire.FetchReport(payload=PAYLOAD, failure="slow", failed_source="a" * 1000)),
    ("ReportFetch", wire.FetchReport(payload=PAYLOAD, whole=True, tallies=[wire.Tally(num_bytes=HUGE)])),
    ("OfferChunks", wire.ChunkOffer()),
    ("PutChunk", wire.OfferedChunk(hash=bytes(32))),
    ("Publish", wire.PublishRequest()),
    ("ReportStep", wire.StepReport(step=1, metrics_json="{")),
]
ODD_CALLS: list[tuple[str, Any]] = [
    ("Report", wire.WorkerReport(doing="a" * 1_000_000, bytes_sent=HUGE, bytes_received=HUGE)),
    ("ReportFetch", wire.FetchReport(up=math.nan, down=-1.0)),
    ("ReportFetch", wire.FetchReport(payload=PAYLOAD, failure="corrupt", failed_source="w-0123456789")),
    ("FailLease", wire.LeaseFailed(lease_id=1, reason="no such reason", detail="a" * 1_000_000)),
    ("FailLease", wire.LeaseFailed(lease_id=2**53, reason="busy")),
    ("Deliver", wire.Deliveries(items=[wire.Delivery(lease_id=2**53, group={**GROUP, "number": 2**53})])),
    ("Deliver", wire.Deliveries(items=[wire.Delivery(lease_id=1)])),
]


async def misbehave(ticket: str, state: Path) -> None:
    link, _ = await connect(ticket, state)
    for hello in BAD_HELLOS:
        with pytest.raises(PeerError):
            await anext(aiter(link.stream("Attend", hello)))
    orders = aiter(link.stream("Attend", HELLO))
    assert (await anext(orders)).HasField("settings")
    for method, request in BAD_CALLS:
        with pytest.raises(PeerError):
            await link.call(method, request, SECONDS)
    for method, request in ODD_CALLS:
        await link.call(method, request, SECONDS)
    for hashes in ([b"../../config.json"], [bytes(32)], [bytes(32)] * 5000):
        with pytest.raises(PeerError):
            _ = [chunk async for chunk in link.stream("FetchChunks", wire.ChunkRequest(hashes=hashes))]
    await come_and_go(link)
    await link.close()


async def come_and_go(link: Link) -> None:
    """Attend many times over without reading; each displaces the one before."""
    for _ in range(20):
        await anext(aiter(link.stream("Attend", HELLO)))
    attending = [asyncio.ensure_future(anext(aiter(link.stream("Attend", HELLO)))) for _ in range(20)]
    await asyncio.wait(attending)
    for each in attending:
        try:
            each.result()
        except (LinkError, StopAsyncIteration):
            pass  # displaced before its first order


async def claim_and_send_junk(ticket: str, state: Path) -> tuple[int, float]:
    """Attend with 10,000 leases again and again, and deliver for leases that it does not hold, until it is shut out and
    twenty times more: how often it attended, and how long all of it took.
    """
    link, _ = await connect(ticket, state)
    claims = wire.WorkerHello(
        protocol=limits.PROTOCOL_VERSION, slots=4096, engine="compact", held_leases=range(1, 10_001)
    )
    claims.host, claims.pid = "\x1b[2J", 2**31
    junk = wire.Deliveries(items=[wire.Delivery(lease_id=2**40, group=GROUP)] * 20)
    begin, num_attended, refusals = time.monotonic(), 0, list[str]()
    while len(refusals) < 20 and num_attended < 100:
        try:
            await anext(aiter(link.stream("Attend", claims)))
            num_attended += 1
            await link.call("Deliver", junk, SECONDS)
        except PeerError as error:
            refusals.append(error.reason)
    await link.close()
    assert refusals == ["expelled"] * 20
    return num_attended, time.monotonic() - begin


@pytest.mark.slow
def test_claims_and_junk_cost_the_head_kilobytes(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--schedule.lease_seconds", "5", *ENDLESS).start()
    run.wait(lambda: run.status().get("version", -1) >= 1, "first step")
    num_attended, seconds = asyncio.run(claim_and_send_junk(f"@{run.out / 'ticket'}", tmp_path / "state"))
    run.stop()
    lines = [json.loads(line) for line in (run.out / "events.jsonl").read_bytes().splitlines()]
    commands = [command for line in lines for command in line.get("commands", ())]
    assert [command["seconds"] for command in commands if command["type"] == "ExpelWorker"] == [60.0]
    patience = PATIENCE + PATIENCE_PER_LEASE * num_attended + PATIENCE_PER_SECOND * seconds
    assert sum(command["type"] == "RefuseDelivery" for command in commands) <= patience + 1
    joins = [line for line in lines if line.get("event", {}).get("type") == "WorkerJoined"]
    assert max(len(json.dumps(line)) for line in joins) < 4000
    assert num_attended < 10
    assert run.command("replay")["num_different"] == 0


async def ask_and_hold(ticket: str, state: Path) -> int:
    """A stranger that asks too much, then nothing, and holds what it gets: how many leases it was granted."""
    link, _ = await connect(ticket, state)
    dear = wire.WorkerHello(protocol=limits.PROTOCOL_VERSION, slots=4096, engine="compact", price_usd_per_hour=10_000.0)
    with pytest.raises(PeerError, match=r"too_dear: it asks \$10000 an hour, and this run pays strangers \$0\.36"):
        await anext(aiter(link.stream("Attend", dear)))
    hello = wire.WorkerHello(protocol=limits.PROTOCOL_VERSION, slots=4096, engine="compact")
    installed = wire.SnapshotId(policy="policy", lineage=1, version=0)
    hello.installed.CopyFrom(installed)
    num_leases = 0
    async for order in link.stream("Attend", hello):
        num_leases += len(order.leases.leases)
        if order.HasField("stop"):
            break
        await link.call("Report", wire.WorkerReport(installed=installed), SECONDS)
    await link.close()
    return num_leases


@pytest.mark.slow
def test_a_stranger_does_not_spend_the_budget_and_holds_one_lease(tmp_path: Path, sort_model: Path) -> None:
    port = free_port()
    identity = RunIdentity.create_or_load(tmp_path / "identity")
    ticket = identity.make_ticket("worker", f"127.0.0.1:{port}", 5, 1.0)
    settings = ("--head.listen", f"127.0.0.1:{port}", "--fleet.budget_usd", "5", "--schedule.lease_seconds", "5")
    run = Run(tmp_path / "run", sort_model, *settings)
    run.out.mkdir()
    (tmp_path / "identity").rename(run.out / "identity")
    run.start()
    run.wait(lambda: run.status().get("published") is not None, "first snapshot")
    num_leases = asyncio.run(ask_and_hold(ticket, tmp_path / "state"))
    summary = run.finish()
    assert summary["groups"]["trained"] == 24 * 16
    assert summary["cost_usd"] < 0.36
    assert num_leases <= 8
    assert run.command("replay")["num_different"] == 0


def test_the_run_outlives_a_hostile_worker(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--schedule.lease_seconds", "5", *ENDLESS).start()
    run.wait(lambda: run.status().get("version", -1) >= 1, "first step")
    asyncio.run(misbehave(f"@{run.out / 'ticket'}", tmp_path / "state"))
    run.wait_version(run.status()["version"] + 4)  # beyond every step that was begun meanwhile
    version = run.stop()
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, version * 16)
    assert run.command("replay")["num_different"] == 0
    assert os.path.getsize(run.out / "status.json") < 100_000
