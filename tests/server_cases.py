"""A token server to test engines with: the stand-in for vLLM, and weights from which it draws known tokens."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import vllm_standin
from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.engine import Completion, Engine, SampleRequest
from vllm_standin import END, VOCAB

CONFIG = json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 100, "eos_token_id": END}).encode()
STANDIN = str(Path(vllm_standin.__file__))


def snapshot(number: float, version: int = 0, **changes: Any) -> Snapshot:
    """Weights from which the stand-in draws the tokens number, number + 1, ..."""
    weights = np.array([number, 1.0, 2.0], np.float32)
    tensors = {"model.embed_tokens.weight": TensorBytes("F32", (3,), weights.tobytes())}
    return replace(Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, {"config.json": CONFIG}), **changes)


def adapter(number: float, version: int, base: Snapshot) -> Snapshot:
    config = {"adapter_config.json": b'{"r": 5, "lora_alpha": 8, "peft_type": "LORA"}'}
    return snapshot(number, version, files=base.files | config, base_model=base.ref)


def write_model(directory: Path, name: str, number: float) -> None:
    """What the stand-in reads of a file of weights."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes((2).to_bytes(8, "little") + b"{}" + np.float32(number).tobytes())


def request(max_tokens: int = 5, seed: int = 3, **params: Any) -> SampleRequest:
    return SampleRequest(array("i", [4, 5, 6]), seed, 0, SamplingParams(max_tokens=max_tokens, **params))


@contextmanager
def served(tmp_path: Path, **settings: Any) -> Iterator[tuple[vllm_standin.Served, str]]:
    """A stand-in in this process, and its URL."""
    write_model(tmp_path, "model.safetensors", 0)
    state = vllm_standin.Served(str(tmp_path), **settings)
    server = vllm_standin.TcpServer(("127.0.0.1", 0), vllm_standin.handler_of(state))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield state, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        state.is_closed = True
        server.shutdown()
        server.server_close()


@asynccontextmanager
async def closing(engine: Engine) -> AsyncIterator[Engine]:
    try:
        yield engine
    finally:
        await engine.close()


def completed(outcome: object) -> Completion:
    assert isinstance(outcome, Completion), outcome
    return outcome
