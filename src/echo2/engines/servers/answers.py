"""The HTTP client for one token server. Every token that it returns is checked (id, logprob, version, support).

Answers are bounded; errors tell a server that is gone from one that refuses.
"""

from __future__ import annotations

import binascii
import io
import itertools
import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import msgspec
import numpy as np

from echo2.core.errors import LinkError, PeerError
from echo2.engines.engine import Completion, SampleRequest
from echo2.engines.servers.models import ServedModel
from echo2.transport.limits import LOGPROB_SLACK, SUPPORT_WIDTH_MAX
from echo2.transport.routes import why_impossible

logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it logs every request

T = TypeVar("T")

#: Size limit of an answer other than a completion.
ANSWER_BYTES_MAX = 1 << 20
#: Characters of a refusal that the error message quotes.
REFUSAL_CHARS = 500
CONNECT_SECONDS = 10.0
#: Servers write this, or less, for a probability of 0.
NO_LOGPROB = -9999.0


class ServerLink:
    """Connections to the server at `url`, or behind a Unix socket. For one event loop."""

    def __init__(self, url: str, socket: str | None = None, key: str = "") -> None:
        headers = {"accept-encoding": "identity"}  # no compression: the byte limit counts real sizes
        if key:
            headers["authorization"] = f"Bearer {key}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        transport = httpx2.AsyncHTTPTransport(uds=socket, limits=limits, trust_env=False)
        self._client = httpx2.AsyncClient(base_url=url, headers=headers, transport=transport, trust_env=False)
        self.url = url

    async def call(
        self,
        path: str,
        body: Any = None,
        seconds: float | None = None,
        bytes_max: int = ANSWER_BYTES_MAX,
        method: str = "POST",
    ) -> bytes:
        """Send one request and return the answer. Cancelling closes its connection. `seconds`: the longest silence of
        the server (None: no limit).

        Raises:
            LinkError: the server is gone, or was silent for `seconds`.
            PeerError: it refused, or its answer is longer than `bytes_max`.
        """
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"content-type": "application/json"} if data else {}
        timeout = httpx2.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            async with self._client.stream(method, path, content=data, headers=headers, timeout=timeout) as response:
                parts, size = [], 0
                async for part in response.aiter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > bytes_max:
                        raise PeerError("oversized", f"{path} answered more than {bytes_max} bytes")
        except httpx2.TimeoutException as error:
            raise LinkError(f"no answer to {path} for {seconds or CONNECT_SECONDS:g} s") from error
        except httpx2.HTTPError as error:
            raise LinkError(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        answer = b"".join(parts)
        if response.status_code != httpx2.codes.OK:
            refusal = answer[:REFUSAL_CHARS].decode(errors="replace")
            raise PeerError("server_refused", f"{path} answered {response.status_code}: {refusal}")
        return answer

    async def close(self) -> None:
        await self._client.aclose()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A server's answer: T tokens, their logprobs, spans (first token, label of the weights), the support of each token
    (None: not reported), and the experts of each token that was read: an .npy file [prompt + T - 1, layers, chosen],
    base64 (None: not reported)."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[int, str]]
    supports: Sequence[Sequence[int]] | None = None
    routes: str | None = None


def decode(data: bytes, kind: type[T]) -> T:
    """Decode an answer's JSON into a `msgspec.Struct`.

    Raises:
        PeerError: "bad_answer", it has another form.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise PeerError("bad_answer", f"the token server's answer: {error}") from error


def width_of(request: SampleRequest, served: ServedModel) -> int:
    """Return the largest support that a narrowed token may have."""
    return min(request.params.top_k or SUPPORT_WIDTH_MAX, SUPPORT_WIDTH_MAX, served.vocab_size)


def room_of(request: SampleRequest, served: ServedModel) -> int:
    """Return the largest number of tokens that the completion may have."""
    return min(request.params.max_tokens, served.max_positions - len(request.prompt_tokens))


def completion_of(drawn: Drawn, request: SampleRequest, served: ServedModel, versions: Mapping[str, int]) -> Completion:
    """Check a server's answer to a request, and return it as a completion. `versions`: policy versions of the newest
    and earlier weights, by label.

    Raises:
        PeerError: "bad_answer", it is not a possible answer to this request.
    """
    tokens, ends = drawn.tokens, served.end_tokens | request.stop_tokens
    _require(1 <= len(tokens) <= room_of(request, served), f"{len(tokens)} tokens of {request.params.max_tokens}")
    _check_tokens(tokens, served)
    _require(not ends.intersection(tokens[:-1]), "it goes on after an end token")
    has_ended = tokens[-1] in ends
    _require(has_ended or len(tokens) == room_of(request, served), f"it breaks off after {len(tokens)} tokens")
    _require(len(drawn.logprobs) == len(tokens), f"{len(drawn.logprobs)} logprobs for {len(tokens)} tokens")
    wrong = next((x for x in drawn.logprobs if not NO_LOGPROB < x <= LOGPROB_SLACK), None)  # NaN is wrong, too
    _require(wrong is None, f"a logprob is {wrong}")
    supports, offsets = _supports(drawn, request, served) if request.params.is_narrow else (None, None)
    return Completion(
        tokens=array("i", tokens),
        logprobs=array("f", drawn.logprobs),
        version_spans=_spans(drawn, versions),
        finish="stop" if has_ended else "length",
        support_tokens=supports,
        support_offsets=offsets,
        routes=_routes(drawn, request, served),
    )


def _routes(drawn: Drawn, request: SampleRequest, served: ServedModel) -> bytes:
    """Return the routes that were asked for; empty if the server has none, as after it gave up a part of its cache."""
    routed = served.routes
    if not request.params.routes or drawn.routes is None or routed is None:
        return b""
    num_read, shape = len(request.prompt_tokens) + len(drawn.tokens) - 1, routed.shape
    try:
        file = io.BytesIO(binascii.a2b_base64(drawn.routes))
        np.lib.format.read_magic(file)
        size, _, dtype = np.lib.format.read_array_header_1_0(file)
        ids = np.frombuffer(file.read(), dtype).reshape(size)
    except ValueError as error:
        raise PeerError("bad_answer", f"the token server's answer: its experts are not a .npy file: {error}") from error
    # Dense layers may have a place, too.
    places = {routed.num_layers: list(routed.places), shape.layers: list(range(shape.layers))}
    is_fit = ids.ndim == 3 and dtype.kind in "iu" and ids.shape[1] in places
    is_fit = is_fit and (ids.shape[0], ids.shape[2]) == (num_read, shape.chosen)
    _require(is_fit, f"experts {ids.dtype} {ids.shape}, and {num_read} tokens with {shape} were read")
    chosen = ids[:, places[ids.shape[1]]]
    problem = why_impossible(chosen, shape.experts) or ("a negative expert" if chosen.min() < 0 else "")
    _require(not problem, problem)
    return chosen.astype(shape.dtype).tobytes()


def _spans(drawn: Drawn, versions: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    starts = [start for start, _ in drawn.spans]
    _require(bool(starts) and starts[0] == 0, "the weights of its first token have no version")
    is_rising = all(one < other for one, other in itertools.pairwise(starts)) and starts[-1] < len(drawn.tokens)
    _require(is_rising, f"its versions begin at {starts[:8]}")
    unknown = next((label for _, label in drawn.spans if label not in versions), None)
    _require(unknown is None, f"it was drawn with weights {unknown!r}, which this worker did not load")
    return tuple((start, versions[label]) for start, label in drawn.spans)


def _supports(drawn: Drawn, request: SampleRequest, served: ServedModel) -> tuple[array[int], array[int]]:
    supports, widest = drawn.supports, width_of(request, served)
    if supports is None or len(supports) != len(drawn.tokens):
        raise PeerError("bad_answer", "it does not say what each token was drawn from, and top_k or top_p narrowed it")
    for token, support in zip(drawn.tokens, supports, strict=True):
        _require(len(support) <= widest, f"a token drawn from {len(support)}; {widest} are possible")
        _require(token in support, f"token {token} is not among those that it was drawn from")
        _require(len(set(support)) == len(support), "a token is twice among those that one was drawn from")
        _check_tokens(support, served)
    offsets = itertools.accumulate(map(len, supports), initial=0)
    return array("i", itertools.chain.from_iterable(supports)), array("i", offsets)


def _check_tokens(tokens: Sequence[int], served: ServedModel) -> None:
    outside = next((token for token in tokens if not 0 <= token < served.vocab_size), None)
    _require(outside is None, f"token {outside} is outside 0..{served.vocab_size - 1}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise PeerError("bad_answer", f"the token server's answer: {what}")
