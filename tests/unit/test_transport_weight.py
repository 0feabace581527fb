"""What a message weighs is known before it is parsed, and a few bytes that become many objects are not."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from any_values import anything
from door_cases import LOOPBACK, channel, enrolled, head_process, linked, peak_bytes, report
from echo2.core.errors import PeerError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import ENTRY_WEIGHT, MESSAGE_WEIGHT, METHODS, PACKED_WEIGHT, weigh
from echo2.transport.grpc_link import GrpcNetwork
from echo2.transport.grpc_server import SERVICE
from echo2.transport.identity import RunIdentity
from transport_cases import SECONDS, run

MOST = 1 << 40


def field(number: int, data: bytes) -> bytes:
    """One field of bytes, or of a message."""
    head, size = bytearray([number << 3 | 2]), len(data)
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(head) + bytes([size]) + data


def parts(count: int) -> dict[str, bytes]:
    """Deliveries that are nothing but so many parts of one kind, each of two bytes."""
    return {
        "results": field(1, b"") * count,
        "rollouts": field(1, field(15, field(7, b"") * count)),
        "spans": field(1, field(15, field(7, field(4, b"") * count))),
        "rewards": field(1, field(15, field(7, field(7, b"") * count))),
        "scores": field(1, field(15, field(12, b"") * count)),
        "lost": field(1, field(13, b"") * count),
        "long tags": field(1, field(15, b"\xba\x00\x00" * count)),
    }


def least(message: Message) -> int:
    """What the parts of a parsed message weigh."""
    weight = 0
    for described, value in message.ListFields():
        if isinstance(value, Message):
            weight += MESSAGE_WEIGHT + least(value)
        elif isinstance(value, Mapping):
            weight += MESSAGE_WEIGHT * len(value)
        elif described.is_repeated and described.message_type is not None:
            weight += sum(MESSAGE_WEIGHT + least(each) for each in value)
        elif described.is_repeated:
            is_bytes = described.type in (described.TYPE_BYTES, described.TYPE_STRING)
            weight += (ENTRY_WEIGHT if is_bytes else PACKED_WEIGHT) * len(value)
    return weight


@given(st.sampled_from(sorted(METHODS)), st.integers(0, 1 << 30), st.integers(0, 30))
def test_a_message_weighs_as_much_as_its_parts(method: str, seed: int, changes: int) -> None:
    source, message = random.Random(seed), METHODS[method].request()
    for _ in range(changes if message.DESCRIPTOR.fields else 0):
        anything(message, source)
    data = message.SerializeToString()
    assert weigh(type(message), data, MOST) >= max(len(data), least(message))


@given(st.binary(max_size=200) | st.sampled_from(sorted(parts(20).values())), st.data())
def test_any_bytes_are_refused_or_weigh_as_much_as_their_parts(data: bytes, draw: st.DataObject) -> None:
    if data:
        at = draw.draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw.draw(st.binary(max_size=2)) + data[at + 1 :]
    with suppress(PeerError, DecodeError):
        assert weigh(wire.Deliveries, data, MOST) >= least(wire.Deliveries.FromString(data))


@pytest.mark.parametrize("name", sorted(parts(1)))
def test_many_parts_are_refused_before_they_are_parsed(name: str) -> None:
    data = parts(1 << 20)[name]
    assert len(data) < limits.MESSAGE_BYTES_MAX // 16
    with pytest.raises(PeerError, match="oversized"):
        weigh(wire.Deliveries, data, limits.MESSAGE_BYTES_MAX)


def test_a_number_without_end_is_refused_at_its_eleventh_byte() -> None:
    """Read to its end, a million bytes of it would take minutes: each makes all before it longer."""
    with pytest.raises(PeerError, match="more than ten bytes"):
        weigh(wire.LeaseFailed, b"\x08" + b"\xff" * 1_000_000, MOST)
    assert weigh(wire.LeaseFailed, b"\x08" + b"\xff" * 9 + b"\x01", MOST) == 11


def test_honest_results_weigh_their_bytes() -> None:
    rollout: dict[str, Any] = {"tokens": bytes(800), "logprobs": bytes(800), "loss_mask": bytes(200), "finish": "stop"}
    rollout["version_spans"] = [{"start": 0, "version": 7}]
    data = wire.Deliveries(items=[{"lease_id": 1, "group": {"rollouts": [rollout] * 64}}]).SerializeToString()
    assert weigh(wire.Deliveries, data, limits.MESSAGE_BYTES_MAX) == len(data)


@pytest.mark.skipif(sys.platform != "linux", reason="memory of another process is read below /proc")
def test_a_stranger_does_not_fill_a_heads_memory_with_empty_rollouts(tmp_path: Path) -> None:
    """Sixteen megabytes would become more than a gigabyte. Then it is served as before."""
    identity = RunIdentity.create_or_load(tmp_path / "run")
    credentials, data = enrolled(identity, tmp_path / "peer")[1], parts(8 << 20)["rollouts"]

    async def scenario(port: int, pid: int) -> None:
        async with channel(port, credentials) as opened:
            deliver = opened.unary_unary(f"/{SERVICE}/Deliver")
            await deliver(b"", timeout=SECONDS)
            before = peak_bytes(pid)
            with pytest.raises(grpc.aio.AioRpcError, match="oversized: "):
                await deliver(data, timeout=SECONDS)
            assert peak_bytes(pid) - before < 8 * len(data)
        async with linked(port, credentials) as link:
            await report(link)

    with head_process(tmp_path / "run") as (port, pid):
        run(scenario(port, pid))


def test_a_peer_answers_a_worker_with_no_more_than_a_chunk_takes(tmp_path: Path) -> None:
    identity = RunIdentity.create_or_load(tmp_path / "run")

    async def scenario() -> None:
        (name, own), (_, other) = (enrolled(identity, tmp_path / each) for each in ("a", "b"))

        async def give(request: bytes, context: Any) -> bytes:
            return bytes(limits.PEER_MESSAGE_BYTES_MAX + 1)

        server = grpc.aio.server()
        handlers = {"GiveChunk": grpc.unary_unary_rpc_method_handler(give)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        tls = grpc.ssl_server_credentials([(own.key_pem, own.certificate_pem)], own.ca_pem, True)
        port = server.add_secure_port(f"{LOOPBACK}:0", tls)
        await server.start()
        link = GrpcNetwork(other).to_peer(name, f"{LOOPBACK}:{port}")
        with pytest.raises(PeerError) as caught:
            await link.call("GiveChunk", b"", SECONDS)
        assert caught.value.reason == "oversized"
        await link.close()
        await server.stop(None)

    run(scenario())
