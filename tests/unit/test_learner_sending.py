"""Several ranks publish as one learner: each sends its own share, and the payloads are those of a single rank."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weights_cases import bytes_of, decode, new_content

from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, SnapshotRef, StoredTensor, TensorBytes
from echo2.learner.core.publication import BorrowedWeights, Publisher, share_of
from echo2.learner.link.head_client import LearnerInfo
from echo2.learner.link.sending import OtherRanks, RankSender
from echo2.learner.link.session import HeadSession
from echo2.transport import wire_pb2 as wire
from echo2.weights.format import segments
from echo2.weights.format.manifest import Manifest

RANKS = 3
FILES = {"config.json": b"{}", "tokenizer.json": b"words"}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64 << 10)


class Head:
    """What a head does for a learner that publishes. Any thread may call; `fault(rank, method)` is asked first."""

    def __init__(self) -> None:
        self.epoch = 0
        self.offered: set[bytes] = set()
        self.chunks: dict[bytes, bytes] = {}
        self.sent_by: Counter[tuple[int, bytes]] = Counter()
        self.published: list[Manifest] = []
        self.refused_deltas = 0
        self.fault: Callable[[int, str], None] = lambda rank, method: None
        self.busy = threading.Lock()

    def answer(self, rank: int, method: str, request: Any) -> Any:
        with self.busy:
            self.fault(rank, method)
            if request.epoch != self.epoch:
                raise PeerError("unknown_learner", "say hello")
            if method == "OfferChunks":
                self.offered |= set(request.hashes)
                return wire.MissingChunks(hashes=[name for name in request.hashes if name not in self.chunks])
            if method == "PutChunk":
                assert request.hash in self.offered
                self.sent_by[rank, request.hash] += 1
                self.chunks[request.hash] = request.data
            if method == "Publish":
                manifest = Manifest.from_bytes(request.manifest)
                if manifest.base is not None and self.refused_deltas:
                    self.refused_deltas -= 1
                    raise PeerError("base", "the whole content is needed")
                if not set(manifest.hashes) <= self.chunks.keys():
                    raise PeerError("missing", "some chunks are not here")
                self.published.append(manifest)
                self.offered.clear()
            return wire.Empty()


class HeadLink:
    """A rank's connection to it."""

    def __init__(self, head: Head, rank: int) -> None:
        self._head, self._rank = head, rank

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        return self._head.answer(self._rank, method, request)

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        with self._head.busy:
            self._head.epoch += 1
            welcome = wire.LearnerWelcome(lineage=1, max_steps=9, epoch=self._head.epoch)
        yield welcome
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


class Learner:
    """A learner of `RANKS` ranks."""

    def __init__(self, head: Head, directory: Path) -> None:
        async def connect(rank: int) -> Any:
            return HeadLink(head, rank)

        self.others = OtherRanks(RANKS - 1)
        publishers = [Publisher(directory, share=share_of(rank, RANKS)) for rank in range(RANKS)]
        self.meeting = self.others.meeting("127.0.0.1", "ticket")
        self.senders = [
            RankSender(rank, self.meeting, publishers[rank], lambda _, rank=rank: connect(rank))  # type: ignore[misc]
            for rank in range(1, RANKS)
        ]
        info = LearnerInfo("cpu", 8)
        self.session = HeadSession(lambda: connect(0), 0, info, publishers[0], others=self.others)

    def publish(self, version: int, of_rank: Callable[[int], BorrowedWeights]) -> None:
        for rank, sender in enumerate(self.senders, 1):
            sender.lend(version, of_rank(rank))
        self.session.publish(version, of_rank(0))

    def close(self) -> None:
        self.session.close()
        for sender in self.senders:
            sender.close()


@contextmanager
def learner(head: Head, directory: Path) -> Iterator[Learner]:
    made = Learner(head, directory)
    try:
        yield made
    finally:
        made.close()


def content(version: int) -> dict[str, TensorBytes]:
    """Large tensors, which are cut, and small ones that share a segment; of each a few items change."""
    draw = np.random.default_rng(7)
    tensors = {}
    for name, size in {"large": 200_000, "small": 100, "middle": 30_000, "other": 77_777}.items():
        items = draw.integers(0, 1 << 16, size).astype(np.uint16)
        items[:: 50 - version] += np.uint16(version)
        tensors[name] = TensorBytes("BF16", (size,), items.tobytes())
    return tensors


def lent(version: int) -> Callable[[int], BorrowedWeights]:
    """Each rank can read its own share and nothing else."""
    tensors = content(version)

    def of_rank(rank: int) -> BorrowedWeights:
        entries = segments.tensor_index(tensors)
        mine: set[tuple[str, int, int]] = set()
        for number, parts in enumerate(segments.pieces(entries, segments.cut_stream(entries))):
            mine |= set(parts) if number % RANKS == rank else set()

        def reader(name: str) -> Callable[[int, int], memoryview]:
            def read(start: int, stop: int) -> memoryview:
                assert (name, start, stop) in mine
                return tensors[name].read(start, stop)

            return read

        sources = {
            name: StoredTensor(one.dtype, one.shape, one.num_bytes, reader(name)) for name, one in tensors.items()
        }
        return BorrowedWeights(sources, FILES)

    return of_rank


def alone(directory: Path, versions: range) -> list[Manifest]:
    """What one rank publishes."""
    publisher, made = Publisher(directory), []
    for version in versions:
        payload = publisher.payload(SnapshotRef(RUN_POLICY, 1, version), BorrowedWeights(content(version), FILES))
        for _ in payload.parts():
            pass
        made.append(payload.manifest)
    return made


def test_the_payloads_are_those_of_one_rank_and_every_rank_sends_its_own_share(tmp_path: Path) -> None:
    head = Head()
    with learner(head, tmp_path) as made:
        for version in range(3):
            made.publish(version, lent(version))
        made.session.finish_publishing()
    assert [one.text for one in head.published] == [one.text for one in alone(tmp_path, range(3))]
    assert [one.base is None for one in head.published] == [True, False, False]
    whole = head.published[0]
    assert bytes_of(decode(whole, head.chunks.__getitem__))[0]["large"][2] == content(0)["large"].data
    for number, segment in enumerate(whole.segments):
        names = {name for record in segment.records for name, _ in record.chunks()}
        assert {rank for rank, name in head.sent_by if name in names} == {number % RANKS}
    assert set(head.sent_by.values()) == {1}, "no chunk is sent twice"


def test_a_head_that_wants_no_delta_gets_the_whole_content_of_all_ranks(tmp_path: Path) -> None:
    head = Head()
    head.refused_deltas = 1
    with learner(head, tmp_path) as made:
        for version in range(2):
            made.publish(version, lent(version))
        made.session.finish_publishing()
    assert [one.base for one in head.published] == [None, None]
    found = new_content()
    found.apply(head.published[1], head.chunks.__getitem__)
    assert {name: one[2] for name, one in bytes_of(found.snapshot())[0].items()} == {
        name: one.data for name, one in content(1).items()
    }


@pytest.mark.parametrize("method", ["OfferChunks", "PutChunk"])
def test_a_head_that_is_restarted_while_another_rank_sends(tmp_path: Path, method: str) -> None:
    """It forgets the learner and the offered chunks, when the second rank calls; only the first
    rank can say hello."""
    head, calls = Head(), Counter[int]()

    def fault(rank: int, called: str) -> None:
        calls[rank] += called == method
        if rank == 1 and called == method and calls[1] == 1:
            head.epoch += 100
            head.offered.clear()

    head.fault = fault
    with learner(head, tmp_path) as made:
        made.publish(0, lent(0))
        made.session.finish_publishing()
    assert [one.text for one in head.published] == [one.text for one in alone(tmp_path, range(1))]
    assert head.epoch > 100


def test_chunks_that_the_head_lost_are_sent_again_by_the_rank_that_has_them(tmp_path: Path) -> None:
    head, lost = Head(), list[bytes]()

    def fault(rank: int, method: str) -> None:
        if method == "Publish" and not lost:
            lost.extend(name for sender, name in head.sent_by if sender == 2)
            for name in lost:
                del head.chunks[name]

    head.fault = fault
    with learner(head, tmp_path) as made:
        made.publish(0, lent(0))
        made.session.finish_publishing()
    assert lost
    assert {head.sent_by[2, name] for name in lost} == {2}
    assert len(head.published) == 1


def test_a_rank_that_fails_ends_the_publication_with_its_error(tmp_path: Path) -> None:
    def of_rank(rank: int) -> BorrowedWeights:
        def read(start: int, stop: int) -> bytes:
            if rank == 2:
                raise UserError("the disk is gone")
            return bytes(stop - start)

        return BorrowedWeights({"w": StoredTensor("BF16", (200_000,), 400_000, read)}, FILES)

    head = Head()
    with learner(head, tmp_path) as made:
        made.publish(0, of_rank)
        with pytest.raises(UserError, match="Rank 2: the disk is gone"):
            made.session.finish_publishing()
    assert not head.published


def test_a_rank_that_is_gone_ends_the_publication(tmp_path: Path) -> None:
    head = Head()
    with learner(head, tmp_path) as made:
        made.publish(0, lent(0))
        made.session.finish_publishing()
        made.senders[1].close()
        for version in (1, 2):
            made.session.publish(version, lent(version)(0))
            with pytest.raises(RuntimeError, match="rank 2 is gone"):
                made.session.finish_publishing()


def test_a_connection_of_no_rank_is_refused(tmp_path: Path) -> None:
    head = Head()
    with learner(head, tmp_path) as made:
        port = made.others._listening.getsockname()[1]  # type: ignore[union-attr]
        for noise in (b"", bytes(100), (20).to_bytes(8, "big") + b"noise" * 4, b"\xff" * 8):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(noise)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        made.publish(0, lent(0))
        made.session.finish_publishing()
    assert len(head.published) == 1


def test_a_first_rank_that_cannot_be_reached_is_an_error(tmp_path: Path) -> None:
    others = OtherRanks(1)
    meeting = others.meeting("127.0.0.1", "ticket")
    others.close()
    with pytest.raises(UserError, match=r"Rank 1 does not reach the first rank at 127\.0\.0\.1:\d+: .*refused"):
        RankSender(1, meeting, Publisher(tmp_path), lambda _: pytest.fail("no first rank"))


@pytest.mark.parametrize("size", [1, 2, 5, 16, 40])
def test_every_segment_is_in_one_share(size: int) -> None:
    numbers = list(range(100))
    shares = [share_of(rank, size) for rank in range(size)]
    assert sorted(number for first, step in shares for number in numbers[first::step]) == numbers
