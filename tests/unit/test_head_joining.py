"""What a head makes of a worker's hello, what it is then sent, and what its good-bye does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echo2.config.sections import SamplingConfig
from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, GroupRef, Lease
from echo2.head.decide import events as ev
from echo2.head.serve import claims
from echo2.head.serve.connections import WorkerConnection
from echo2.head.serve.effects import orders
from echo2.head.serve.service import worker_joined
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.identity import PeerIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket
from echo2.worker.worker_process import NO_SLOT_LIMIT
from head_cases import OpenHead, rows, settings, until


@pytest.mark.parametrize(
    ("said", "asked", "slots"),
    [(NO_SLOT_LIMIT, 1, 8), (NO_SLOT_LIMIT, 64, 512), (35, 8, 35), (3, 8, 3), (99, 8, 99), (1000, 8, 512)],
)
def test_a_worker_counts_for_as_many_slots_as_it_will_fill(said: int, asked: int, slots: int) -> None:
    """It says hello before it knows what the run asks for. If its owner sets no limit, it may have room for no more."""
    hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=said)
    sampling = SamplingConfig(groups_per_batch=asked, group_size=8)
    assert worker_joined(Peer("w", "worker"), hello, sampling).slots == slots


def test_a_worker_with_room_for_more_makes_its_engine_larger_and_begins_as_set(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head:
            sampling = open_head.head.config.sampling
            batch = sampling.groups_per_batch * sampling.group_size
            for slots, told in ((3 * batch, batch), (NO_SLOT_LIMIT, 0)):
                hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=slots)
                stream = open_head.service.attend(open_head.peer("w-1"), hello)
                first, second = await anext(stream), await anext(stream) if told else wire.Order()
                assert first.settings.slots == (slots if told else batch)
                assert second.slots == told
                await stream.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_worker_that_samples_nothing_is_refused() -> None:
    with pytest.raises(PeerError, match="at least 1"):
        worker_joined(Peer("w", "worker"), wire.WorkerHello(protocol=PROTOCOL_VERSION), SamplingConfig())


def test_the_leases_of_a_worker_that_leaves_go_to_others_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending("w-1") as first:
            await until(lambda: first)
            async with open_head.attending("w-2") as second:
                await open_head.service.leave(open_head.peer("w-1"), wire.Empty())
                await until(lambda: {lease.number for lease in first} <= {lease.number for lease in second})
                assert {lease.lease_id for lease in first}.isdisjoint(lease.lease_id for lease in second)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


@pytest.mark.parametrize(("deterministic", "batches"), [(False, [[1, 2], [3]]), (True, [[1], [2], [3]])])
def test_leases_that_wait_for_a_worker_go_together(tmp_path: Path, deterministic: bool, batches: list[Any]) -> None:
    """In a deterministic run each grant stays a message: what is granted together is sampled together."""

    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), run={"deterministic": deterministic})
        async with OpenHead(tmp_path, raw) as open_head:
            head = open_head.head
            presence = head.connections.workers["w"] = WorkerConnection("", 1, "", "")
            stream = orders(head, presence)
            sent: list[list[int]] = []
            for lease_ids in ([1, 2], [3]):
                for lease_id in lease_ids:
                    lease = Lease(lease_id, GroupRef(RUN_POLICY, "train", 0), 0, 0, 4, 0, None, 9.0, 9.0, 0)
                    head.connections.grant("w", [lease])
                while presence.outbox.qsize():
                    sent.append([lease.lease_id for lease in (await anext(stream)).leases.leases])
            assert sent == batches

    asyncio.run(scenario())


def stranger_of(open_head: OpenHead, path: Path) -> Peer:
    """A machine that joined with a ticket for others."""
    identity = open_head.head.identity
    ticket = Ticket.parse(identity.make_ticket("worker", "127.0.0.1:1", 1, 1.0, is_own=False))
    return Peer(identity.enrol(ticket.ticket_id, "worker", PeerIdentity(path / "stranger").request())[0], "worker")


@pytest.mark.parametrize(
    ("engine", "workers", "named"),
    [
        ("vllm", {}, "'vllm'"),
        ("fake", {}, "'fake'"),
        ("", {}, "''"),
        ("auto", {"engine": "vllm"}, "the run's, vllm"),
        ("vllm", {"require_checks": False}, ""),
        ("auto", {}, ""),
        ("transformers", {"engine": "vllm"}, ""),
        ("llamacpp-q8_0", {"forms": ["q8_0"]}, ""),
    ],
)
def test_a_stranger_joins_with_an_engine_that_can_be_checked(
    tmp_path: Path, engine: str, workers: dict[str, Any], named: str
) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, settings(rows(tmp_path / "rows.jsonl", "53="), workers=workers)) as open_head:
            peer = stranger_of(open_head, tmp_path)
            hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1, engine=engine)
            if named:
                with pytest.raises(PeerError) as refused:
                    await anext(open_head.service.attend(peer, hello))
                assert refused.value.reason == "unchecked_engine"
                for words in (f"its engine is {named}, which", "--engine compact", "workers.require_checks = false"):
                    assert words in refused.value.detail
            else:
                stream = open_head.service.attend(peer, hello)
                await anext(stream)
                await stream.aclose()
            assert open_head.head.books.turned_away == ({peer.peer_id: refused.value.detail} if named else {})
            async with open_head.attending("w-1", engine=engine) as leases:  # a machine of the owner has any
                await until(lambda: leases)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_worker_without_the_environment_or_without_trust_for_a_harness_is_turned_away(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        harness = "harness:own.py:Asking"
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), tasks={"environment": harness})
        raw["reward"]["functions"] = ["environment"]
        async with OpenHead(tmp_path, raw) as open_head:
            hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1)
            with pytest.raises(PeerError, match=f"no_environment: .* --allow-environment {harness}"):
                await anext(open_head.service.attend(open_head.peer("w-1"), hello))
            hello.environments.append(harness)
            with pytest.raises(PeerError, match=f"not_own: this run's rollouts are played by {harness}"):
                await anext(open_head.service.attend(stranger_of(open_head, tmp_path), hello))
            async with open_head.attending("w-1", environments=[harness]) as leases:
                await until(lambda: leases)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("engine", "workers", "said"),
    [
        ("llamacpp-q8_0", {}, "the form q8_0, and this run takes no rounded weights from strangers"),
        ("llamacpp-q4_0", {"forms": ["q8_0"]}, "the form q4_0, and this run takes only q8_0 from strangers"),
        ("auto", {"engine": "llamacpp-q4_0"}, "the form q4_0, and this run takes no rounded weights from strangers"),
        ("llamacpp-q8_0", {"require_checks": False}, "takes no rounded weights"),
    ],
)
def test_a_stranger_rounds_its_weights_only_to_a_form_that_the_run_takes(
    tmp_path: Path, engine: str, workers: dict[str, Any], said: str
) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, settings(rows(tmp_path / "rows.jsonl", "53="), workers=workers)) as open_head:
            peer = stranger_of(open_head, tmp_path)
            hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1, engine=engine)
            with pytest.raises(PeerError) as refused:
                await anext(open_head.service.attend(peer, hello))
            assert refused.value.reason == "form_not_taken"
            assert said in refused.value.detail
            assert "workers.forms" in refused.value.detail
            async with open_head.attending("w-1", engine=engine) as leases:  # a machine of the owner rounds as it likes
                await until(lambda: leases)
                (worker,) = open_head.head.planner.fleet.own()
                assert worker.form == (engine.rpartition("-")[2] if engine != "auto" else "q4_0")
                assert not worker.can_check()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_stranger_that_returns_with_another_form_has_lost_its_leases(tmp_path: Path) -> None:
    """Else it could sample with both, and deliver what it likes better."""

    async def scenario() -> None:
        workers = {"forms": ["q8_0"]}
        async with OpenHead(tmp_path, settings(rows(tmp_path / "rows.jsonl", "53="), workers=workers)) as open_head:
            async with open_head.attending("w-1") as leases:
                await until(lambda: leases)  # so that there was a lease
            peer = stranger_of(open_head, tmp_path)
            stream = open_head.service.attend(
                peer, wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1, engine="llamacpp-q8_0")
            )
            await anext(stream)
            await until(lambda: open_head.head.planner.fleet.get(peer.peer_id) is not None)
            for engine, kept in (("llamacpp-q8_0", (1,)), ("compact", ())):
                joined = ev.WorkerJoined(peer.peer_id, 1, 0.0, None, held_leases=(1,))
                assert claims.known(open_head.head, claims.with_engine(joined, engine), engine).held_leases == kept
            await stream.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


@pytest.mark.parametrize(
    ("workers", "deterministic", "is_own", "server"),
    [
        ({}, False, True, "vllm"),
        ({}, True, True, ""),
        ({}, False, False, ""),
        ({"require_checks": False}, False, False, "vllm"),
        ({"engine": "compact"}, False, True, ""),
    ],
)
def test_a_token_server_is_chosen_if_the_run_leaves_the_engine_open_and_needs_no_checks(
    tmp_path: Path, workers: dict[str, Any], deterministic: bool, is_own: bool, server: str
) -> None:
    async def scenario() -> None:
        run = {"deterministic": deterministic}
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), workers=workers, run=run)
        async with OpenHead(tmp_path, raw) as open_head:
            peer = open_head.peer("w-1") if is_own else stranger_of(open_head, tmp_path)
            hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1, engine="auto", servers=["other", "vllm"])
            stream = open_head.service.attend(peer, hello)
            told = (await anext(stream)).settings
            assert (told.engine, told.server) == (workers.get("engine", "auto"), server)
            head = open_head.head
            assert head.connections.workers[peer.peer_id].engine == (server or told.engine)
            worker = head.planner.fleet.get(peer.peer_id)
            assert worker is not None
            assert worker.draws == (not server)  # whom nobody can check, checks nobody
            await stream.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_one_machine_of_the_owner_keeps_an_engine_that_can_check_invited_strangers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, settings(rows(tmp_path / "rows.jsonl", "53="))) as open_head:
            stranger_of(open_head, tmp_path)

            async def joins(name: str, engine: str = "auto", servers: Sequence[str] = ("vllm",)) -> Any:
                hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1, engine=engine, servers=servers)
                stream = open_head.service.attend(open_head.peer(name), hello)
                return stream, (await anext(stream)).settings.server

            first, of_first = await joins("w-1")
            second, of_second = await joins("w-2")
            assert (of_first, of_second) == ("", "vllm")
            await first.aclose()
            again, of_again = await joins("w-1")
            assert of_again == ""
            for stream in (again, second):
                await stream.aclose()
            returned, _ = await joins("w-2", "vllm", ())  # as a worker says whose engine is made
            worker = open_head.head.planner.fleet.get(open_head.peer("w-2").peer_id)
            assert worker is not None
            assert not worker.draws
            await returned.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_stranger_does_not_take_the_name_of_a_rented_machine(tmp_path: Path) -> None:
    """It would be paid as that one; and the machine itself, when it comes, would not be known."""
    spot = (
        'name = "spot"',
        "price_usd_per_hour = 0.5",
        "rollouts_per_second = 1.0",
        'rent = "true"',
        'release = "true"',
    )
    (tmp_path / "offers.toml").write_text("\n".join(("[[offers]]", *spot)))

    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), fleet={"offers": str(tmp_path / "offers.toml")})
        async with OpenHead(tmp_path, raw) as open_head:
            head = open_head.head
            (tmp_path / "run" / "ticket").write_text("a ticket")
            head.machines.rent("spot")
            (machine,) = head.machines.names()
            stranger = stranger_of(open_head, tmp_path)
            hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1, offer=machine, engine="compact")
            stream = open_head.service.attend(stranger, hello)
            await anext(stream)
            worker = head.planner.fleet.get(stranger.peer_id)
            assert worker is not None
            assert worker.offer == ""
            async with open_head.attending("w-1", offer=machine) as leases:
                own = open_head.peer("w-1").peer_id
                await until(lambda: leases)  # it has all that it is sent: it does not go while a task is read for it
                rented = head.planner.fleet.get(own)
                assert rented is not None
                assert rented.offer == "spot"
            await stream.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
