"""What a caller may do at any instant, and what a stranger may send, is never reported as a failure of the head: such a
report ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import LinkError, PeerError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers
from echo2.transport.gates import GatedServer
from echo2.transport.grpc_link import GrpcLink, connect
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.tickets import Ticket
from seeds import examples

ROUNDS = 40  # of a race: without the handling, about every fifth round went wrong
CHUNK = wire.Chunk(hash=bytes(32), data=bytes(1 << 20))
EC_PUBLIC_KEY = bytes.fromhex("06072a8648ce3d0201")  # DER of the object identifier of an EC key


@asynccontextmanager
async def head(
    directory: Path, handlers: Handlers, is_gated: bool = False
) -> AsyncIterator[tuple[str, list[BaseException]]]:
    """A head that serves: a ticket for it, and what it has reported as its own failure."""
    identity, failures = RunIdentity.create_or_load(directory), list[BaseException]()
    server = (GatedServer if is_gated else GrpcServer)("127.0.0.1", 0, identity, handlers, failures.append)
    try:
        ticket = identity.make_ticket("worker", f"127.0.0.1:{await server.start()}", 1, 1.0)
        if isinstance(server, GatedServer):
            server.gates.open()
            while not server.gates._gates:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield ticket, failures
    finally:
        await server.stop()  # waits for, or ends, what is still under way


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_caller_that_leaves_during_a_reply_is_not_a_failure(is_gated: bool, tmp_path: Path) -> None:
    under_way = 0

    async def chunks(peer: Any, request: Any) -> AsyncIterator[wire.Chunk]:
        nonlocal under_way
        under_way += 1
        try:
            for _ in range(64):
                yield CHUNK
        finally:
            under_way -= 1

    async def main() -> None:
        async with head(tmp_path / "run", {"FetchChunks": chunks}, is_gated) as (ticket, failures):
            for round_number in range(ROUNDS):
                link, _ = await connect(ticket, tmp_path / "peer")
                replies = link.stream("FetchChunks", wire.ChunkRequest())
                for _ in range(1 + round_number % 8):
                    await anext(replies)
                await link.close()
        assert failures == []
        assert under_way == 0

    asyncio.run(main())


@pytest.mark.parametrize("is_gated", [False, True])
def test_signing_request_with_a_key_of_an_unknown_kind_is_refused_and_no_failure(
    is_gated: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        async with head(tmp_path / "run", {}, is_gated) as (text, failures):
            ticket = Ticket.parse(text)
            link = GrpcLink(ticket.address, ticket.credentials)
            odd = PeerIdentity(tmp_path / "peer").request().replace(EC_PUBLIC_KEY, EC_PUBLIC_KEY[:-1] + b"\x7f")
            try:
                with pytest.raises(PeerError, match="malformed"):
                    await link.call("Enrol", wire.EnrolRequest(protocol=limits.PROTOCOL_VERSION, csr_der=odd), 10.0)
            finally:
                await link.close()
        assert failures == []

    asyncio.run(main())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunIdentity, str]:
    identity = RunIdentity.create_or_load(tmp_path_factory.mktemp("run"))
    return identity, Ticket.parse(identity.make_ticket("worker", "nowhere:1", 10**6, 1.0)).ticket_id


def signing_request() -> bytes:
    key = ec.derive_private_key(7, ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


REQUEST = signing_request()


@examples(1000)
@given(st.integers(0, len(REQUEST) - 1), st.integers(1, 255))
def test_altered_signing_request_is_malformed_or_admits_the_key_that_signed(
    run: tuple[RunIdentity, str], place: int, mask: int
) -> None:
    identity, ticket_id = run
    altered = REQUEST[:place] + bytes([REQUEST[place] ^ mask]) + REQUEST[place + 1 :]
    word, admitted = "", ""
    try:
        admitted, _ = identity.enrol(ticket_id, "worker", altered)
    except PeerError as error:
        word = error.reason
    # The number of unused bits, which nobody signs, may be 1 where the signature's last bit is 0: it is the same key.
    assert word == "malformed" or admitted == identity.enrol(ticket_id, "worker", REQUEST)[0]


@pytest.mark.parametrize(
    ("address", "cause"), [("127.0.0.1:1", "Connection refused"), ("host.invalid:7", "there is no such host")]
)
def test_the_error_explains_that_no_head_answers(tmp_path: Path, address: str, cause: str) -> None:
    ticket = RunIdentity.create_or_load(tmp_path / "run").make_ticket("worker", address, 1, 1.0)
    with pytest.raises(LinkError) as caught:
        asyncio.run(connect(ticket, tmp_path / "peer", patience_seconds=0.0))
    assert str(caught.value).startswith(
        f"The head did not answer for 0 s: {address} does not answer: {cause}. Is it running? "
    )
    assert "`echo2 doctor @TICKET`" in str(caught.value)


def test_the_error_explains_that_another_run_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with head(tmp_path / "other", {}) as (of_the_other, _):
            address = Ticket.parse(of_the_other).address
            ticket = RunIdentity.create_or_load(tmp_path / "run").make_ticket("worker", address, 1, 1.0)
            with pytest.raises(LinkError, match=f"{address} answers, but its certificate is not valid for this run"):
                await connect(ticket, tmp_path / "peer", patience_seconds=0.0)

    asyncio.run(main())
