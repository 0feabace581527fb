"""The service's front over HTTP, with a clock of its own and a back end of one row of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from echo2.service import tinker_pb2 as pb
from echo2.service.access import Doorkeeper
from echo2.service.app import NO_QUOTAS, Front
from echo2.service.database import Database
from echo2.service.settings import Quotas
from one_row_backend import OneRowBackend

PROTO = {"content-type": "application/x-protobuf"}
START = 1_700_000_000.0


class Service:
    """An application with a clock of its own, and one tenant's client."""

    def __init__(self, folder: Path, url: str, quotas: Quotas = NO_QUOTAS) -> None:
        self.folder, self.now, self.quotas = folder, START, quotas
        self.database = Database(url)
        self.keeper = Doorkeeper(self.database, lambda: self.now)
        self.key = self.keeper.add_key("ada")
        self.begin()

    def begin(self, backend: OneRowBackend | None = None) -> None:
        self.backend = backend or OneRowBackend(self.folder)
        self.front = Front(self.database, self.backend, self.folder / "checkpoints", lambda: self.now, self.quotas)
        self.client = TestClient(self.front.app, raise_server_exceptions=True)
        self.client.__enter__()

    def end(self) -> None:
        self.client.__exit__(None, None, None)

    def close(self) -> None:
        self.end()
        self.database.close()

    def sweep(self) -> None:
        assert self.client.portal is not None
        self.client.portal.call(self.front.sweep)

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
