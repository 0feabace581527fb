"""The service's front over HTTP, with a clock of its own and a back end of one row of logits.

The application runs in a thread of its own, and a `Database` is for one thread. So the application has one, and a test
another: it looks into the store and adds keys as a command does beside the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from echo2_service import tinker_pb2 as pb
from echo2_service.front.app import NO_QUOTAS, App
from echo2_service.front.database import Database
from echo2_service.front.request_guard import ApiKeys
from echo2_service.settings import Quotas, Tariff
from one_row_backend import OneRowBackend

PROTO = {"content-type": "application/x-protobuf"}
START = 1_700_000_000.0


class Service:
    """An application with a clock of its own, and one tenant's client."""

    def __init__(self, folder: Path, url: str, quotas: Quotas = NO_QUOTAS) -> None:
        self.folder, self.url, self.tariff = folder, url, Tariff(quotas)
        self.now, self.stepped = START, 0.0  # the clock, and by how much it has stepped
        self.database = Database(url)
        self.api_keys = ApiKeys(self.database, lambda: self.now)
        self.key = self.api_keys.add_key("ada")
        self.begin()

    def step_clock(self, seconds: float) -> None:
        self.now, self.stepped = self.now + seconds, self.stepped + seconds

    def begin(self, backend: OneRowBackend | None = None) -> None:
        self.backend = backend or OneRowBackend(self.folder)
        self._of_the_front = Database(self.url)
        self.front = App(
            self._of_the_front,
            self.backend,
            self.folder / "checkpoints",
            lambda: self.now,
            self.tariff,
            lambda: self.now - self.stepped,
        )
        self.client = TestClient(self.front.asgi, raise_server_exceptions=True)
        self.client.__enter__()

    def end(self) -> None:
        self.client.__exit__(None, None, None)
        self._of_the_front.close()

    def close(self) -> None:
        self.end()
        self.database.close()

    def in_front(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function gives in the application's thread."""
        assert self.client.portal is not None
        return self.client.portal.call(function, *arguments)

    def sweep(self) -> None:
        self.in_front(self.front.sweep)

    def until_called(self, name: str) -> None:
        """Wait until the back end's latest call is of this name; the front has nothing else to do by then."""
        self.until(lambda: self.backend.calls[-1][0] == name)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait, in the application's thread, until this holds."""

        async def wait() -> None:
            while not holds():  # noqa: ASYNC110  # nobody tells it
                await asyncio.sleep(0.001)

        self.in_front(wait)

    def post(self, path: str, body: Any = None, key: str = "", status: int = 200, **more: Any) -> Any:
        headers = {"x-api-key": key or self.key, **more.pop("headers", {})}
        given = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        answer = self.client.post(f"/api/v1/{path}", headers=headers, **given, **more)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content and "json" in answer.headers["content-type"] else answer.content

    def get(self, path: str, key: str = "", status: int = 200) -> Any:
        answer = self.client.get(f"/api/v1/{path}", headers={"x-api-key": key or self.key})
        assert answer.status_code == status, answer.text
        return answer.json()

    def session(self, key: str = "") -> str:
        return str(self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}, key)["session_id"])

    def model(self, session: str, number: int = 0, key: str = "") -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": "echo2/tiny", "lora_config": {"rank": 4}}
        return str(self.result(self.post("create_model", body, key), key)["model_id"])

    def result(self, future: Any, key: str = "", accept: str = "application/json") -> Any:
        return self.post("retrieve_future", {"request_id": future["request_id"]}, key, headers={"accept": accept})

    def train(self, model: str, number: int, targets: list[int], **more: Any) -> Any:
        return self.post("forward_backward", protobuf(model, number, targets, **more), headers=PROTO)

    def step(self, model: str, number: int, lr: float = 0.1) -> Any:
        return self.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": lr}})


def protobuf(model: str, number: int, targets: list[int], loss: str = "cross_entropy", weight: float = 1.0) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(len(targets), dtype="<i4").tobytes()
    floats = np.full(len(targets), weight, dtype="<f4").tobytes()
    given = {"target_tokens": (np.asarray(targets, "<i8").tobytes(), pb.DTYPE_INT64)}
    given["weights"] = (floats, pb.DTYPE_FLOAT32)
    for name, (data, dtype) in given.items():
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=data, dtype=dtype, shape=[len(targets)]))
    return message.SerializeToString()
