"""Targets of the fuzzer: what crosses a link (messages, chunks, addresses, tickets, certificates), and what is sent
in it (manifests, deltas)."""

from __future__ import annotations

import base64
import random
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from fuzz_inputs import filled
from fuzz_target import Target, folder, text
from google.protobuf.message import Message as WireMessage
from weights_cases import apply_delta, encode, encode_delta, new_content

from echo2.config.sections import SamplingConfig
from echo2.core.addresses import PORT_MAX, split
from echo2.core.errors import PeerError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    TensorBytes,
)
from echo2.head.serve import service
from echo2.transport import identity, limits, message_bytes, messages, tickets
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import MESSAGE_WEIGHT, METHODS, Peer, packed, parse, weigh
from echo2.weights.broadcast import origin, serving
from echo2.weights.format.deltas import apply_items, encode_items
from echo2.weights.format.manifest import DELTA, MAX_CHUNK_BYTES, Manifest, Record, compose
from echo2.weights.format.planes import Reader, Writer
from echo2.weights.store.store import ChunkStore

VOCABULARY = 1000
SAMPLING = SamplingConfig(groups_per_batch=2, group_size=2)
PEER = Peer("w-0123456789", "worker", "192.0.2.7")
JSON_WORDS = (b"{", b"}", b"[", b"]", b":", b",", b'"', b"null", b"true", b"NaN", b"Infinity", b"1e999", b"\\ud800")
PEM_WORDS = (b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n", b"-----BEGIN EC PRIVATE KEY-----\n")


def targets() -> list[Target]:
    """All of them, with their seeds."""
    return [*_messages(), _weighing(), *_pieces(), *_identity(), *_weights()]


# ---- messages --------------------------------------------------------------------------------------------------------


ROLLOUT = Rollout(
    tokens=array("i", [5, 6, 7, 8]),
    logprobs=array("f", [-0.5, -0.25, -1.5, -0.25]),
    loss_mask=b"\1\1\1\1",
    version_spans=((0, 0),),
    finish="stop",
)
_PLAYED = replace(ROLLOUT, logprobs=array("f", [-0.5, 0.0, -1.5, -0.25]), loss_mask=b"\1\0\1\1")
_SUPPORT: dict[str, Any] = {"support_tokens": array("i", [5, 7, 9, 8]), "support_offsets": array("i", [0, 1, 1, 3, 4])}
_ROLLOUTS = (
    replace(ROLLOUT, text="5678", reward=0.5, reward_parts={"exact_match": 0.5, "environment": 1.0}),
    replace(_PLAYED, version_spans=((0, 3), (2, 4)), **_SUPPORT),
)
_LEASE = Lease(4, GroupRef(RUN_POLICY, "train", 7), 3, 9, 8, 2, 3, 99.5, 30.0, 11)
_PARAMS = SamplingParams(temperature=0.7, top_p=0.9, top_k=4, max_tokens=64)


def group(num_rollouts: int = 2) -> RolloutGroup:
    """A group as the head keeps it."""
    rollouts = _ROLLOUTS[:num_rollouts]
    return RolloutGroup(GroupRef(RUN_POLICY, "train", 7), 3, 1, 9, array("i", [1, 2]), rollouts, PEER.peer_id, 1.5)


def assignment(is_chat: bool) -> Assignment:
    columns = {"answer": "35", "list": [1, {"a": None}]}
    return Assignment(_LEASE, array("i", [1, 2]), _PARAMS, columns, "own.py:Game", 4, is_chat)


def _read_delivery(message: wire.Delivery) -> None:
    messages.group_ref(message.group)
    lease = replace(_LEASE, num_samples=max(1, len(message.group.rollouts)))
    found = messages.decode_delivery(message, lease, array("i", [1, 2]), PEER.peer_id)
    again = messages.decode_delivery(messages.encode_delivery(4, found), lease, array("i", [1, 2]), PEER.peer_id)
    assert again.rollouts == found.rollouts
    _check(found)


def _read_deliveries(message: wire.Deliveries) -> None:
    for item in message.items:
        _read_delivery(item)


def _check(found: RolloutGroup) -> None:
    messages.check_lengths(found, 64)
    messages.check_vocabulary(found, VOCABULARY)
    messages.check_support(found, _PARAMS, VOCABULARY)
    messages.check_turns(found, 4)


def _read_hello(hello: wire.WorkerHello) -> None:
    service.worker_joined(PEER, hello, SAMPLING)
    address = origin.of_worker(hello, PEER.host)
    assert address.isprintable()
    origin.reach(address)


def _read_order(order: wire.Order) -> None:
    for lease in order.leases.leases:
        messages.decode_assignment(lease)
    serving.decode_payload(order.routes.payload)
    for address in (*(source.address for source in order.routes.sources), order.dial.address):
        origin.reach(address)


def _read_request(request: wire.ChunkRequest) -> None:
    serving.requested(request)
    serving.decode_payload(request.payload)


_DEEPER: dict[type[Any], Callable[[Any], object]] = {
    wire.RolloutGroup: lambda message: messages.parse_group(packed(message)),
    wire.Lease: messages.decode_assignment,
    wire.WorkerHello: _read_hello,
    wire.Order: _read_order,
    wire.ChunkRequest: _read_request,
    wire.PublishRequest: lambda request: Manifest.from_bytes(request.manifest),
    wire.Delivery: _read_delivery,
    wire.Deliveries: _read_deliveries,
    wire.FedGroups: lambda fed: [messages.parse_group(each) for each in fed.groups],
}


def _messages() -> list[Target]:
    """Every kind that a method takes or gives, and what they are made of where that has a decoder."""
    kinds = {kind for method in METHODS.values() for kind in (method.request, method.reply)}
    kinds |= set(_DEEPER)
    return [_message_target(kind) for kind in sorted(kinds, key=lambda kind: kind.__name__)]


def _message_target(kind: type[WireMessage]) -> Target:
    deeper = _DEEPER.get(kind, lambda message: None)

    def read(data: bytes) -> None:
        message = parse(kind, data)
        assert parse(kind, packed(message)) is not None
        deeper(message)

    rng = random.Random(0)
    seeds = (*_encoded(kind), *(filled(kind, rng).SerializeToString() for _ in range(3)))
    return Target(f"wire.{kind.__name__}", read, seeds, kind, share=3.0 if kind in _DEEPER else 0.5)


def _weighing() -> Target:
    """Of the message in which a stranger sends most: what it weighs must never be less than what the parser makes."""

    def read(data: bytes) -> None:
        weight = weigh(wire.Deliveries, data, 1 << 40)
        assert weight >= max(len(data), MESSAGE_WEIGHT * _num_messages(parse(wire.Deliveries, data)))

    return Target("weigh", read, (*_encoded(wire.Deliveries), b"\n\0" * 20), wire.Deliveries, share=3.0)


def _num_messages(message: WireMessage) -> int:
    """How many messages are within one."""
    number = 0
    for described, value in message.ListFields():
        if isinstance(value, Mapping):
            number += len(value)
        elif described.message_type is not None:
            within = [value] if isinstance(value, WireMessage) else value
            number += sum(1 + _num_messages(one) for one in within)
    return number


def _encoded(kind: type[WireMessage]) -> list[bytes]:
    """What the real encoders write."""
    groups = [messages.encode_group(group(number)) for number in (1, 2)]
    leases = [messages.encode_assignment(assignment(is_chat)) for is_chat in (False, True)]
    deliveries = [messages.encode_delivery(4, group(number)) for number in (1, 2)]
    hello = wire.WorkerHello(protocol=limits.PROTOCOL_VERSION, slots=2, engine="compact", device="cpu")
    hello.listen_port, hello.advertise = 4000, "[2001:db8::1]:4000"
    hello.installed.CopyFrom(wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=3))
    payload = wire.PayloadId(ref=hello.installed)
    routes = wire.Routes(payload=payload, sources=[wire.Source(peer_id="w-1", address="192.0.2.9:1")], stripes=[0])
    found: dict[type[Any], list[Any]] = {
        wire.RolloutGroup: groups,
        wire.Delivery: deliveries,
        wire.Deliveries: [wire.Deliveries(items=deliveries)],
        wire.FedGroups: [wire.FedGroups(groups=groups)],
        wire.Lease: leases,
        wire.Order: [wire.Order(leases=wire.LeaseBatch(leases=leases)), wire.Order(routes=routes)],
        wire.WorkerHello: [hello],
        wire.ChunkRequest: [wire.ChunkRequest(hashes=[bytes(32), b"\1" * 32], payload=payload)],
        wire.PublishRequest: [wire.PublishRequest(manifest=_manifest().text)],
    }
    return [message.SerializeToString() for message in found.get(kind, [])]


# ---- chunks and addresses --------------------------------------------------------------------------------------------


def _read_chunk(data: bytes) -> None:
    hash_, piece = message_bytes.unpack(data)
    message_bytes.hash_of(data)
    if piece:
        assert wire.Chunk.FromString(data) == wire.Chunk(hash=hash_, data=bytes(piece))


def _read_address(data: bytes) -> None:
    said = text(data)
    host, port = split(said)
    assert 0 <= port <= PORT_MAX, (host, port)
    origin.reach(said)


def _pieces() -> list[Target]:
    packed_chunks = (
        message_bytes.pack(bytes(32), b"d" * 5),
        message_bytes.pack(b"h" * 32, bytes(300)),
        message_bytes.pack_missing(bytes(32)),
    )
    hosts = (b"192.0.2.1:80", b"[2001:db8::1]:4000", b"[::1]", b"localhost", b"worker.example.org:65535")
    words = (b"[", b"]", b":", b"%eth0", b"::", "²".encode(), "١".encode())
    return [
        Target("chunk", _read_chunk, packed_chunks, share=3.0),
        Target("address", _read_address, hosts, words=words, share=3.0),
    ]


# ---- identity --------------------------------------------------------------------------------------------------------


@cache
def _run_identity() -> identity.RunIdentity:
    return identity.RunIdentity.create_or_load(folder() / "identity")


def _certificates() -> tuple[bytes, ...]:
    """Two of the run in DER, one of another kind of key, one without a name."""
    made = []
    for key, subject in (
        (ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "worker:w-1")])),
        (rsa.generate_private_key(65537, 2048), x509.Name([])),
    ):
        request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
        made.append(request.public_bytes(serialization.Encoding.DER))
    return tuple(made)


def _read_peer_certificate(data: bytes) -> None:
    """What enrolment gave, in DER, kept and read again; then as a file of this machine."""
    own = identity.PeerIdentity(folder() / "peer")
    own.request()
    own.keep(_run_identity().credentials.ca_pem, data)


def _read_peer_file(data: bytes) -> None:
    directory = folder() / "peer-files"
    directory.mkdir(exist_ok=True)
    for name in ("ca.pem", "peer.key"):
        (directory / name).write_bytes(_run_identity().credentials.ca_pem)
    (directory / "peer.pem").write_bytes(data)
    identity.PeerIdentity(directory).load()


def _read_members(data: bytes) -> None:
    directory = folder() / "members"
    identity.RunIdentity.create_or_load(directory)
    (directory / "members.json").write_bytes(data)
    try:
        identity.RunIdentity.create_or_load(directory).member("w-1")
    finally:
        (directory / "members.json").unlink()


def _identity() -> list[Target]:
    run = _run_identity()
    ticket = run.make_ticket("worker", "192.0.2.1:4000", 10, 24.0)
    ticket_id = tickets.Ticket.parse(ticket).ticket_id
    csr, other_csr = _certificates()
    enrolled = run.enrol(ticket_id, "worker", csr)[1]
    signature = run.sign_manifest(b"manifest")
    book = b'{"members": {"w-1": {"ticket": "t", "key": "00"}}}'
    pem = x509.load_der_x509_certificate(enrolled).public_bytes(serialization.Encoding.PEM)
    ca_pem = run.credentials.ca_pem
    return [
        Target("ticket", lambda data: tickets.Ticket.parse(text(data).replace("@", "")), (ticket.encode(),)),
        Target("ticket_json", _read_ticket_json, (_ticket_json(ticket),), words=JSON_WORDS),
        Target("enrol", lambda data: run.enrol(ticket_id, "worker", data), (csr, other_csr)),
        Target("peer_certificate", _read_peer_certificate, (enrolled,), share=0.02),  # a key is written, and synced
        Target("peer_file", _read_peer_file, (pem, ca_pem), words=PEM_WORDS, share=0.5),
        Target("members", _read_members, (book,), words=JSON_WORDS, share=0.1),
        Target("signature", lambda data: identity.verify_manifest(ca_pem, b"manifest", data), (signature,), share=0.3),
    ]


def _ticket_json(ticket: str) -> bytes:
    return base64.urlsafe_b64decode(ticket.removeprefix(tickets.TICKET_PREFIX))


def _read_ticket_json(data: bytes) -> None:
    tickets.Ticket.parse(tickets.TICKET_PREFIX + base64.urlsafe_b64encode(data).decode())


# ---- weights ---------------------------------------------------------------------------------------------------------


def _weights_of(seed: int, share: float) -> Snapshot:
    """1,000 numbers of bfloat16 and a few of 32 bits, of which a share went a step up."""
    draw = np.random.default_rng(0)
    values = (draw.normal(0, 0.02, 1000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    moved = values + (np.random.default_rng(seed).random(1000) < share).astype(np.uint16)
    tensors = {
        "a": TensorBytes("BF16", (1000,), moved.tobytes()),
        "b": TensorBytes("F32", (5, 2), np.arange(seed, seed + 10, dtype=np.float32).tobytes()),
    }
    return Snapshot(
        SnapshotRef(RUN_POLICY, 1, seed), tensors, {"config.json": b"{}", "tokenizer.json": b"%d" % seed * 40}
    )


def _manifest() -> Manifest:
    base = _weights_of(1, 0.0)
    return encode(SnapshotRef(RUN_POLICY, 1, 3), base.tensors, base.files, 600)[0]


def _deltas() -> list[tuple[Manifest, bytes]]:
    """(manifest, encoded bytes of its one coded record) of deltas of every form, over one base."""
    found = []
    for share in (0.01, 0.3, 0.9):
        manifest, sent = encode_delta(_weights_of(1, 0.0), _weights_of(2, share))
        [record] = manifest.segments[_coded(manifest)].records
        found.append((manifest, b"".join(sent[hash_] for hash_, _ in record.chunks())))
    return found


def _coded(manifest: Manifest) -> int:
    """The place of the segment that is sent as a delta; the small ones are sent raw."""
    return next(place for place, segment in enumerate(manifest.segments) if segment.records[0].codec == DELTA)


def _delta_reader() -> Callable[[bytes], object]:
    base, target = _weights_of(1, 0.0), _weights_of(2, 0.3)
    manifest, sent = encode_delta(base, target)
    place = _coded(manifest)
    before, coded, after = manifest.segments[:place], manifest.segments[place], manifest.segments[place + 1 :]

    def read(data: bytes) -> None:
        """The record under a manifest that names its hash: what only a liar sends."""
        if not 0 < len(data) <= coded.num_bytes:
            raise PeerError("malformed", "no manifest has such a record")
        hash_ = blake3(data).digest()
        lie = replace(coded, records=(Record(DELTA, len(data), MAX_CHUNK_BYTES, hash_),))
        apply_delta(
            replace(manifest, segments=(*before, lie, *after)), base, {**sent, hash_: memoryview(data)}.__getitem__
        )

    return read


class _Recorder(Reader):
    """Notes what a record consists of, planes unpacked, in the form that `_written` takes."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data)
        self.parts = bytearray()
        self._is_inside = False

    def raw(self, num_bytes: int) -> memoryview:
        taken = super().raw(num_bytes)
        if not self._is_inside:
            self.parts += b"\1" + num_bytes.to_bytes(2, "little") + taken
        return taken

    def plane(self, num_bytes: int) -> Any:
        self._is_inside = True
        plane = super().plane(num_bytes)
        self._is_inside = False
        self.parts += b"\0" + len(plane).to_bytes(2, "little") + plane.tobytes()
        return plane


def _written(parts: bytes) -> bytes:
    """The record of these parts: raw bytes, and planes, which are packed as they should be."""
    out, at = Writer(), 0
    while at + 3 <= len(parts):
        size = int.from_bytes(parts[at + 1 : at + 3], "little")
        piece = parts[at + 3 : at + 3 + size]
        if parts[at] & 1:
            out.raw(piece)
        else:
            out.plane(np.frombuffer(piece, np.uint8))
        at += 3 + size
    return out.record()


def _items(width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 200, 300).astype(f"<u{width}")


def _read_record(data: bytes) -> None:
    """A record whose planes open, over items of one of four widths."""
    if not data:
        return
    reader = Reader(memoryview(_written(data[1:])))
    apply_items(reader, _items((1, 2, 4, 8)[data[0] % 4]))
    reader.end()


def _record_seeds() -> tuple[bytes, ...]:
    seeds = []
    for number, width in enumerate((1, 2, 4, 8)):
        for share in (0.005, 0.2, 0.9):
            before = _items(width)
            draw = np.random.default_rng(width).random(300)
            after = before + (draw < share).astype(before.dtype) * before.dtype.type(3)
            recorder = _Recorder(memoryview(encode_items(before, after)))
            apply_items(recorder, before.copy())
            seeds.append(bytes((number,)) + bytes(recorder.parts))
    return tuple(seeds)


def _read_manifest(data: bytes) -> None:
    assert Manifest.from_bytes(data).text == data


def _read_listed(data: bytes) -> None:
    """A damaged manifest in a store: passed over or deleted when the store is opened, never loaded."""
    manifest = _manifest()
    directory = folder() / "store"
    listed = directory / "manifests"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / f"{manifest.ref}.json").write_bytes(data)
    store = ChunkStore(directory)
    for each in store.manifests():
        steps = store.chain(each.ref)
        if steps is not None:
            new_content().apply(compose(steps), store.get)


def _read_stored(data: bytes) -> None:
    """A pack that the disk altered: opened, read, and continued."""
    path = folder() / "altered" / "chunks" / "0.pack"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    store, name = ChunkStore(folder() / "altered"), blake3(b"chunk 1").digest()
    try:
        assert store.get(name) == b"chunk 1"
    finally:
        store.put(name, b"chunk 1")
        assert ChunkStore(folder() / "altered").get(name) == b"chunk 1"


def _pack() -> bytes:
    store = ChunkStore(folder() / "whole")
    for data in (b"chunk 0", b"chunk 1", b"chunk 2"):
        store.put(blake3(data).digest(), data)
    return (folder() / "whole" / "chunks" / "0.pack").read_bytes()


def _weights() -> list[Target]:
    manifests = [_manifest(), *(manifest for manifest, _ in _deltas())]
    texts = tuple(dict.fromkeys(manifest.text for manifest in manifests))
    sent = tuple(dict.fromkeys(manifest.to_wire() for manifest in manifests))
    streams = tuple(dict.fromkeys(stream for _, stream in _deltas()))
    return [
        Target("manifest", _read_manifest, texts, words=JSON_WORDS, share=3.0),
        Target("manifest_wire", Manifest.from_wire, sent, share=2.0),
        Target("delta", _delta_reader(), streams, share=2.0),
        Target("delta_record", _read_record, _record_seeds(), share=2.0),
        Target("store_manifest", _read_listed, texts, words=JSON_WORDS, share=0.1),
        Target("store_pack", _read_stored, (_pack(),), share=0.1),
    ]
