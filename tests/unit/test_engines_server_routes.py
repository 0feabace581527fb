"""The routes of a mixture, as a token server returns them, and what is not asked of vLLM: against its stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllm_standin
from echo2.config.values import ServerPlace
from echo2.core.errors import PeerError, UserError
from echo2.core.types import TensorBytes
from echo2.engines.engine import Engine
from echo2.engines.registry import make_engine
from echo2.engines.servers import vllm
from echo2.engines.servers.models import ModelDirectories
from echo2.engines.tokenizer import stop_rule
from rollout_cases import plain_tokenizer
from server_cases import CONFIG, closing, completed, request, served, snapshot

MIXTURE = {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
MIXTURE_CONFIG = json.dumps({**json.loads(CONFIG), **MIXTURE}).encode()


def on_mixture(
    tmp_path: Path, doing: Callable[[Engine, vllm_standin.Served], Awaitable[None]], **settings: Any
) -> None:
    async def run(state: vllm_standin.Served, url: str) -> None:
        place = ServerPlace(url=url, directory=tmp_path / "models", routes=True)
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(snapshot(10, files={"config.json": MIXTURE_CONFIG}))
            await doing(engine, state)

    with served(tmp_path, **settings) as (state, url):
        asyncio.run(run(state, url))


@pytest.mark.parametrize("layers", [2, 3])  # without a place for the dense layer, and with one
def test_a_servers_routes_come_with_the_tokens(tmp_path: Path, layers: int) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        assert completed(await engine.submit(request())).routes == b""
        found = np.frombuffer(completed(await engine.submit(request(routes=True))).routes, np.uint8).reshape(-1, 2, 2)
        assert len(found) == 3 + 5 - 1
        places = (0, 1) if layers == 2 else (0, 2)
        assert found[6].tolist() == [[(6 + place) % 4, (7 + place) % 4] for place in places]
        # A stop string that is not complete: the server is asked twice, and the routes of both parts are joined.
        stop = stop_rule(plain_tokenizer(), ("xa",))
        joined = completed(await engine.submit(replace(request(routes=True, max_tokens=4), stop=stop)))
        assert len(state.requests) == 5
        assert joined.routes == found[: 3 + 4 - 1].tobytes()

    on_mixture(tmp_path, doing, routed=(layers, 2, 4))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("no routes", ""),
        ("routes of fewer tokens", r"experts uint8 \(1, 2, 2\), and 7 tokens"),
        ("a foreign expert", "expert 8 of 4"),
        ("one expert twice", "chosen twice"),
        ("a huge file", "not a .npy file"),
        ("no file", "not a .npy file"),
    ],
)
def test_routes_that_no_mixture_has_are_refused(tmp_path: Path, wrong: str, what: str) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        asked = engine.submit(request(routes=True))
        if not what:
            assert completed(await asked).routes == b""
        else:
            with pytest.raises(PeerError, match=what):
                await asked

    on_mixture(tmp_path, doing, wrong=wrong, routed=(2, 2, 4))


def test_a_server_of_a_mixture_is_started_to_return_routes(tmp_path: Path) -> None:
    directories = ModelDirectories(tmp_path)
    mixture = directories.write(snapshot(1, files={"config.json": MIXTURE_CONFIG}), None, None)
    dense = directories.write(snapshot(1), None, None)
    for model, asked, is_told in ((mixture, True, True), (mixture, False, False), (dense, True, False)):
        server = vllm.VllmServer(ServerPlace(routes=asked), "cpu", 8)
        assert ("--enable-return-routed-experts" in server._command(model, tmp_path / "socket")) == is_told


def test_a_mixture_is_refused_on_a_cpu(tmp_path: Path) -> None:
    """What vLLM would do: `tests/foreign/test_vllm.py`."""
    place = ServerPlace(python="/there/is/none", directory=tmp_path)
    engine = make_engine("vllm", "cpu", 8, place)
    with pytest.raises(UserError, match=r"experts wrongly.*workers\.engine = \"transformers\""):
        asyncio.run(engine.update_weights(snapshot(1, files={"config.json": MIXTURE_CONFIG})))
    asyncio.run(engine.close())


@pytest.mark.parametrize("argument", ["--quantization=fp8", "--quantization_config={}", "-q"])
@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        ("cpu", "F32", "On a CPU, no quantisation of vLLM.*leave --quantization out.*llamacpp-q8_0"),
        ("cpu", "BF16", "On a CPU, no quantisation of vLLM"),
        ("cuda:0", "F32", r'publishes float32: set model\.snapshot_dtype = "bfloat16"'),
        ("cuda:0", "BF16", "--engine-python /nowhere/python"),  # it would be started
    ],
)
def test_weights_are_rounded_only_where_vllm_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, device: str, dtype: str, said: str
) -> None:
    """Refused before a process is started, so before a lease is taken. What vLLM does: `tests/foreign/test_vllm.py`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    place = ServerPlace("/nowhere/python", "", ("--max-model-len", "64", argument, "fp8"), tmp_path / "models")
    tensors = {"model.embed_tokens.weight": TensorBytes(dtype, (4,), bytes(16 if dtype == "F32" else 8))}

    async def start() -> None:
        async with closing(make_engine("vllm", device, 8, place)) as engine:
            await engine.update_weights(snapshot(10, tensors=tensors))

    with pytest.raises(UserError, match=said):
        asyncio.run(start())
