"""An HTTP client for one token server. Answers are bounded; errors tell a server that is gone from one that refuses."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx2

from echo2.errors import LinkError, PeerError

logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it logs every request
#: Size limit of an answer other than a completion.
ANSWER_BYTES_MAX = 1 << 20
#: Characters of a refusal that the error message quotes.
REFUSAL_CHARS = 500
CONNECT_SECONDS = 10.0


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
            said = answer[:REFUSAL_CHARS].decode(errors="replace")
            raise PeerError("server_refused", f"{path} answered {response.status_code}: {said}")
        return answer

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()
