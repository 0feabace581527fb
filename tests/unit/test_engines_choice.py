"""The engine that is taken where nobody names one: by the model, and by what the machine has."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from echo2.config import Config, build
from echo2.config.values import ServerPlace
from echo2.core.errors import UserError
from echo2.core.types import Snapshot, SnapshotRef
from echo2.engines.model_values import MODEL_TYPES
from echo2.engines.registry import (
    EngineChoice,
    _has_own_gpu,
    chosen,
    in_worker,
    load_or_replace,
    make_engine,
    obstacle,
    servers_here,
    unchecked,
)
from echo2.worker.sampling import LeaseSampler
from engine_builders import HAS_MLX
from hub_models import FAMILIES
from rollout_cases import load, requests, run, snapshot_of, tiny_module

LLAMA = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
LLAMA |= {"intermediate_size": 8, "max_position_embeddings": 8}


def test_the_default_leaves_everything_open() -> None:
    assert Config().workers.engine == "auto"


def test_compact_is_taken_where_it_knows_the_model_and_transformers_elsewhere() -> None:
    assert str(in_worker(LLAMA)) == "engine compact: it knows llama models"
    choice = in_worker({**LLAMA, "model_type": "gemma4"})
    assert str(choice) == "engine transformers: compact does not support model_type = 'gemma4'"
    assert in_worker({**LLAMA, "sliding_window": 4}).why == "compact does not support sliding_window = 4"
    assert in_worker({"model_type": "llama"}).name == "transformers"


def test_a_mac_with_mlx_takes_it_where_compact_knows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in ("mlx", "mlx_lm"))
    monkeypatch.setattr("echo2.engines.registry.has_metal", lambda: True)
    assert str(in_worker(LLAMA)) == "engine mlx: it knows llama models, and uses this Mac's GPU"
    assert in_worker({**LLAMA, "sliding_window": 4}).name == "transformers"
    assert in_worker({**LLAMA, "model_type": "mistral"}).name == "compact"  # whose classes of mlx-lm were never tried
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert in_worker(LLAMA).name == "compact"


@pytest.mark.skipif(not HAS_MLX, reason="pip install 'echo2[mlx]'")
def test_a_mac_without_metal_takes_compact_and_refuses_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a virtual machine; MLX itself finds no Metal here either."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("mlx.core.metal.is_available", lambda: False)
    assert in_worker(LLAMA).name == "compact"
    assert obstacle("mlx-q8", LLAMA) == "there is no GPU that MLX uses (Metal)"
    for engine in ("mlx", "mlx-q4"):
        with pytest.raises(UserError, match=r"no GPU \(Metal\) on this Mac.*--engine compact.*--device cpu"):
            make_engine(engine)
        asyncio.run(make_engine(engine, "cpu").close())


ROUND = {"forms": ["q8_0"]}
GEMMA = {**LLAMA, "model_type": "gemma2"}


@pytest.mark.parametrize(
    ("workers", "model", "told"),
    [
        ({}, LLAMA, ""),
        ({}, None, ""),
        (ROUND, LLAMA, ""),
        (ROUND, None, ""),
        ({**ROUND, "engine": "compact"}, LLAMA, ""),
        ({"engine": "transformers"}, LLAMA, ""),
        (
            ROUND,
            GEMMA,
            r"compact alone .* does not support model_type = 'gemma2'. New .* that round get no leases",
        ),
        (
            {**ROUND, "engine": "transformers"},
            LLAMA,
            "transformers, checks no rollouts of rounded .* --engine compact,",
        ),
        ({**ROUND, "engine": "mlx"}, LLAMA, "the run's engine, mlx, checks no rollouts of rounded weights"),
        ({"engine": "vllm"}, LLAMA, "vllm, checks no rollouts of strangers.* --engine compact, new .* get no leases"),
        ({"engine": "vllm"}, GEMMA, "started with --engine transformers, new strangers get no leases"),
        ({"engine": "vllm"}, None, "started with --engine compact, new strangers"),
        ({**ROUND, "engine": "vllm"}, LLAMA, "the run's engine, vllm, checks no rollouts of strangers"),
        ({"engine": "llamacpp-q8_0"}, LLAMA, "llamacpp-q8_0, checks no rollouts of strangers"),
        ({"engine": "vllm", "require_checks": False}, LLAMA, "new strangers are trained without a check"),
    ],
)
def test_a_start_says_which_strangers_the_run_s_engine_cannot_check(
    workers: dict[str, Any], model: dict[str, Any] | None, told: str
) -> None:
    config = build({"workers": workers}, "my.toml")
    said = unchecked(config, model, chosen(config, model, ()))
    assert re.search(told, said) if told else not said, said


@pytest.mark.parametrize(
    ("changes", "stored", "is_told"),
    [
        ({"model": {"snapshot_dtype": "bfloat16"}}, "float32", True),
        ({"lora": {"rank": 4}}, "bfloat16", True),
        ({}, "bfloat16", False),  # all weights are trained: they are sent in float32
        ({"model": {"snapshot_dtype": "bfloat16"}, "learner": {"routing_replay": True}}, "bfloat16", False),
    ],
)
def test_a_start_says_that_a_mixture_in_16_bits_is_checked_wrongly_without_routes(
    changes: dict[str, Any], stored: str, is_told: bool
) -> None:
    mixture = {**GEMMA, "model_type": "qwen3_moe", "num_experts": 4, "dtype": stored}
    config = build(changes, "my.toml")
    said = unchecked(config, mixture, chosen(config, mixture, ()))
    assert ("learner.routing_replay = true" in said) == is_told
    assert not unchecked(config, GEMMA, chosen(config, GEMMA, ()))


def test_a_start_with_vllm_warns_that_strangers_are_not_checked() -> None:
    for require_checks in (True, False):
        config = build({"workers": {"require_checks": require_checks}}, "my.toml")
        said = unchecked(config, LLAMA, chosen(config, LLAMA, ("vllm",)))
        assert ("vllm, checks no rollouts of strangers" in said) != require_checks


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_has_an_engine(model_type: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert in_worker(config).name == ("compact" if model_type in MODEL_TYPES else "transformers")


def test_a_server_comes_first_unless_bits_must_repeat_or_the_run_names_an_engine() -> None:
    config = Config()
    assert chosen(config, LLAMA, ["vllm"]).name == "vllm"
    assert chosen(config, LLAMA, []) == EngineChoice("compact", "it knows llama models")
    assert chosen(config, None, []).name == "auto"
    exact = replace(config, run=replace(config.run, deterministic=True))
    assert chosen(exact, LLAMA, ["vllm"]).name == "compact"
    named = build({"workers": {"engine": "transformers"}}, "my.toml")
    assert chosen(named, LLAMA, ["vllm"]) == EngineChoice("transformers", "workers.engine names it")


def test_a_server_needs_a_gpu_for_itself() -> None:
    shared = {"auto:1": 1, "auto:2": 2, "auto": 0, "cpu": 8, "cuda": 0}
    assert not any(_has_own_gpu(device, num_gpus) for device, num_gpus in shared.items())
    alone = {"auto:1": 2, "auto": 1, "cuda:3": 4, "cuda": 1}
    assert all(_has_own_gpu(device, num_gpus) for device, num_gpus in alone.items())
    assert servers_here("cpu", sys.executable) == ()


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


async def no_base(ref: SnapshotRef) -> Snapshot:
    raise AssertionError(f"{ref} is a whole model")


@pytest.mark.parametrize(("changes", "name"), [({}, "compact"), (DYNAMIC, "transformers")])
def test_the_first_snapshot_decides_and_the_worker_says_so_once(
    changes: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    snapshot = snapshot_of(tiny_module("qwen3", **changes))
    auto, named = make_engine("auto", "cpu"), make_engine(name, "cpu")
    for engine in (auto, named):
        load(engine, snapshot)
        load(engine, replace(snapshot, ref=replace(snapshot.ref, version=1)))
    sampler = LeaseSampler(auto, "w", {}, print, print)
    assert sampler.engine_name == "auto"
    asyncio.run(sampler.load(replace(snapshot, ref=replace(snapshot.ref, version=2)), no_base))
    assert sampler.engine_name == name  # which `echo2 status` shows
    asked = requests(0)
    assert [one.tokens for one in run(auto, asked)] == [one.tokens for one in run(named, asked)]
    said = [line for line in caplog.messages if line.startswith("engine")]
    assert said == [str(in_worker(json.loads(bytes(snapshot.files["config.json"]))))]
    assert said[0].startswith(f"engine {name}: ")


def test_a_default_server_that_does_not_start_is_replaced_by_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    snapshot = snapshot_of(tiny_module("qwen3"))
    place = ServerPlace(sys.executable)  # a Python without vLLM

    async def scenario() -> tuple[Any, Any]:
        server = make_engine("vllm", "cpu", 8, place)
        engine, _ = await load_or_replace(server, snapshot, None, "cpu")
        same, _ = await load_or_replace(engine, replace(snapshot, ref=replace(snapshot.ref, version=1)), None, "cpu")
        return engine, same

    engine, same = asyncio.run(scenario())
    assert engine is same
    assert engine.installed.version == 1
    assert engine.slots == 8
    assert "No module named" in caplog.text
    assert "The engine auto takes its place" in caplog.text
