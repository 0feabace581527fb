"""The service's front behind its real HTTP server on loopback, in a thread of its own, and clients over sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echo2_service.front.app import NO_QUOTAS, App
from echo2_service.front.database import Database
from echo2_service.front.http_server import HttpServer, listening
from echo2_service.front.request_guard import ApiKeys
from echo2_service.settings import Quotas, Tariff
from front_service import START
from one_row_backend import OneRowBackend


class FrontServer:
    """A front that serves at `port`. `now`: its clock, which stands still."""

    def __init__(self, folder: Path, quotas: Quotas = NO_QUOTAS) -> None:
        self.folder, self.tariff, self.now = folder, Tariff(quotas), START
        self.database = Database(f"sqlite:///{folder}/service.sqlite")
        self.api_keys = ApiKeys(self.database, lambda: self.now)
        self._listener = listening("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._is_up.wait()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._is_up.set()

    async def _serve(self) -> None:
        database = Database(f"sqlite:///{self.folder}/service.sqlite")
        self.loop, self.backend = asyncio.get_running_loop(), OneRowBackend(self.folder)
        self.front = App(
            database, self.backend, self.folder / "checkpoints", lambda: self.now, self.tariff, lambda: self.now
        )
        self.server = HttpServer(self.front.asgi, self.front.requests.stop)
        self.loop.call_soon(self._is_up.set)
        await self.server.serve([self._listener])
        database.close()

    def in_front(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function gives in the application's thread."""

        async def call() -> Any:
            found = function(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def client(self, tenant: str) -> Client:
        """A client of a tenant, with a key of its own."""
        return Client(self.port, self.api_keys.add_key(tenant))

    def close(self) -> None:
        self.in_front(self.front.requests.stop)
        self.in_front(self.backend.gate.set)
        self.server.should_exit = True
        self._thread.join()
        self.database.close()


class Client:
    """Requests of one key, each over a connection of its own."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(
            method, path if path[0] == "/" else f"/api/v1/{path}", data, {"x-api-key": self.key, **(headers or {})}
        )
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if "json" in answer.headers.get("content-type", "") else text

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        return self.ask("POST", path, {} if body is None else body, headers)

    def ok(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        status, answer = self.post(path, body, headers)
        assert status < 300, (path, status, answer)
        return answer

    def session(self) -> str:
        return str(self.ok("create_session")["session_id"])

    def model(self, session: str, number: int = 0, **more: Any) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": "echo2/tiny", **more}
        return str(self.result(self.ok("create_model", body))["model_id"])

    def sampler(self, session: str, number: int = 0) -> str:
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "echo2/tiny"}
        return str(self.ok("create_sampling_session", body)["sampling_session_id"])

    def result(self, future: Any) -> Any:
        status, answer = 408, None
        while status == 408:
            status, answer = self.post("retrieve_future", {"request_id": future["request_id"]})
        assert status == 200, answer
        return answer

    def is_served(self) -> bool:
        """Whether a whole small piece of work is done for this client."""
        session = self.session()
        model = self.model(session)
        step = self.ok("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        sample = {"sampling_session_id": self.sampler(session), "prompt": {"chunks": [{"tokens": [1]}]}}
        sample["sampling_params"] = {"max_tokens": 2}
        return "metrics" in self.result(step) and "sequences" in self.result(self.ok("asample", sample))


@contextmanager
def serving(folder: Path, quotas: Quotas = NO_QUOTAS) -> Iterator[FrontServer]:
    server = FrontServer(folder, quotas)
    try:
        yield server
    finally:
        server.close()


def raw(client: Client, head: str, body: bytes = b"") -> socket.socket:
    """A connection with the beginning of a request."""
    opened = socket.create_connection(("127.0.0.1", client.port), timeout=120)
    begun = f"POST /api/v1/{head} HTTP/1.1\r\nHost: x\r\nX-API-Key: {client.key}\r\n"
    opened.sendall(begun.encode() + body)
    return opened


def everything(opened: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    try:
        while data := opened.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    opened.close()
    return found


def come(opened: socket.socket, words: bytes) -> bytes:
    """All that comes until these words have."""
    found = b""
    while words not in found:
        data = opened.recv(1 << 16)
        assert data, found
        found += data
    return found


def archived(client: Client) -> str:
    """The path of the archive of a new checkpoint."""
    model = client.model(client.session())
    client.result(client.ok("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"}))
    return f"training_runs/{model}/checkpoints/a/archive"


def location(client: Client, path: str) -> str:
    """To where a path redirects."""
    opened = socket.create_connection(("127.0.0.1", client.port), timeout=120)
    head = f"GET /api/v1/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-API-Key: {client.key}\r\n\r\n"
    opened.sendall(head.encode())
    found = re.search(rb"(?i)location: \S*/api/v1/(\S+)", everything(opened))
    assert found
    return found[1].decode()
