"""Token servers as engines, against a stand-in for vLLM that answers over real HTTP: what is asked, what of an answer
is refused, weights that come while requests run, and a server that dies, hangs or refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllm_standin
from echo2.config.values import ServerPlace
from echo2.core.child import ChildProcess
from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, Backoff, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.engine import Engine, RequestFailure
from echo2.engines.registry import make_engine
from echo2.engines.servers import engine as server_engine
from echo2.engines.servers import guard, vllm
from echo2.engines.tokenizer import stop_rule
from echo2.weights.format.model_files import tensor_shapes
from echo2.worker.sampling import LeaseSampler
from rollout_cases import plain_tokenizer
from server_cases import CONFIG, STANDIN, adapter, closing, completed, request, served, snapshot, write_model
from vllm_standin import END, VOCAB


def on_standin(
    tmp_path: Path, doing: Callable[[Engine, vllm_standin.Served], Awaitable[None]], **settings: Any
) -> None:
    """Attached to a stand-in that has the weights of version 0."""

    async def run(state: vllm_standin.Served, url: str) -> None:
        async with closing(
            make_engine("vllm", "cpu", 8, ServerPlace(url=url, directory=tmp_path / "models"))
        ) as engine:
            await engine.update_weights(snapshot(10))
            await doing(engine, state)

    with served(tmp_path, **settings) as (state, url):
        asyncio.run(run(state, url))


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what a server's thread or process does."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def test_a_request_says_all_that_sampling_depends_on(tmp_path: Path) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        assert engine.slots == engine.free_slots == 8
        asked = replace(request(temperature=0.7), stop_tokens=frozenset({13}))
        completion = completed(await engine.submit(asked))
        assert completion.tokens.tolist() == [10, 11, 12, 13]
        assert completion.logprobs.tolist() == [-0.5] * 4
        assert (completion.finish, completion.version_spans) == ("stop", ((0, 0),))
        assert completion.support_tokens is None
        assert completed(await engine.submit(request())).finish == "length"
        body = state.requests[1]
        params = body["sampling_params"]
        assert body["token_ids"] == [4, 5, 6]
        assert (params["stop_token_ids"], params["ignore_eos"]) == ([END, 13], True)
        assert (params["temperature"], params["top_k"], params["max_tokens"]) == (0.7, 0, 5)
        assert 0 <= params["seed"] < 1 << 63
        assert state.requests[2]["sampling_params"]["seed"] == params["seed"]
        await engine.submit(request(seed=4))
        assert state.requests[3]["sampling_params"]["seed"] != params["seed"]
        await engine.submit(request(max_tokens=500))
        assert state.requests[4]["sampling_params"]["max_tokens"] == 61  # 64 is the server's context

    on_standin(tmp_path, doing)


@pytest.mark.parametrize(("original", "is_refused"), [(32, True), (64, False)])
def test_a_server_that_would_take_the_other_rotary_frequencies_is_refused(
    tmp_path: Path, original: int, is_refused: bool
) -> None:
    """The stand-in allows 64 tokens. vLLM takes the second set of frequencies if it allows more than the first has."""
    rope = {"rope_type": "longrope", "long_factor": [2.0], "original_max_position_embeddings": original}
    config = json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 100, "rope_parameters": rope}).encode()

    async def run(url: str) -> None:
        place = ServerPlace(url=url, directory=tmp_path / "models")
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(snapshot(10, files={"config.json": config}))

    with served(tmp_path) as (_, url):
        if is_refused:
            with pytest.raises(UserError, match="Start it with --max-model-len 32"):
                asyncio.run(run(url))
        else:
            asyncio.run(run(url))


def test_a_server_continues_until_a_stop_string_is_complete(tmp_path: Path) -> None:
    """The stand-in draws 8, 9, a, b, ... at each request. What may end one is named to it, in tokens."""

    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        twice = replace(request(), stop=stop_rule(plain_tokenizer(), ("88",)))
        completion = completed(await engine.submit(twice))
        assert (completion.tokens.tolist(), completion.finish) == ([10, 10], "stop")
        assert (completion.logprobs.tolist(), completion.version_spans) == ([-0.5] * 2, ((0, 0),))
        first, second = state.requests[1:]
        assert (first["token_ids"], second["token_ids"]) == ([4, 5, 6], [4, 5, 6, 10])
        assert [one["sampling_params"]["stop_token_ids"] for one in (first, second)] == [[END, 10]] * 2
        assert [one["sampling_params"]["max_tokens"] for one in (first, second)] == [5, 4]
        assert len({one["sampling_params"]["seed"] for one in (first, second)}) == 2
        never = replace(request(top_k=3), stop=stop_rule(plain_tokenizer(), ("+9",)))
        completion = completed(await engine.submit(never))
        assert (completion.tokens.tolist(), completion.finish) == ([10, 11, 10, 11, 10], "length")
        assert completion.support_offsets is not None
        assert completion.support_offsets.tolist() == [0, 3, 6, 9, 12, 15]
        at_once = replace(request(), stop=stop_rule(plain_tokenizer(), ("9",)))
        assert completed(await engine.submit(at_once)).tokens.tolist() == [10, 11]

    on_standin(tmp_path, doing)


@pytest.mark.parametrize(
    "wrong",
    [
        *("another version", "no versions", "late versions", "foreign token", "negative token", "huge logprob"),
        *("clamped logprob", "too long", "breaks off", "oversized"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(tmp_path: Path, wrong: str) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        with pytest.raises(PeerError, match=r"bad_answer|oversized"):
            await engine.submit(request())
        assert engine.free_slots == 8
        state.wrong = ""
        completed(await engine.submit(request()))

    on_standin(tmp_path, doing, wrong=wrong)


@pytest.mark.parametrize("wrong", ["text", "no logprob", "raw logprobs", "refuses /inference/v1/generate"])
def test_a_server_without_a_needed_feature_is_refused_at_the_start(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(UserError, match=r"vLLM 0.32|processed_logprobs|could not be started"):
        on_standin(tmp_path, lambda engine, state: asyncio.sleep(0), wrong=wrong)


def test_a_server_whose_likeliest_tokens_are_equal_is_taken(tmp_path: Path) -> None:
    on_standin(tmp_path, lambda engine, state: asyncio.sleep(0), wrong="tied logits")


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.5, "top_k": 3}, {"top_p": 0.5}])
def test_the_distribution_of_a_narrowed_token_is_returned(tmp_path: Path, params: dict[str, Any]) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        completion = completed(await engine.submit(request(2, **params)))
        width = params.get("top_k", VOCAB)
        offsets, tokens = completion.support_offsets, completion.support_tokens
        assert offsets is not None
        assert tokens is not None
        assert offsets.tolist() == [0, width, 2 * width]
        assert tokens[:3].tolist() == [10, 11, 12]
        state.wrong = "wide mask"
        if "top_k" in params:
            with pytest.raises(PeerError, match="31; 3 are possible"):
                await engine.submit(request(2, **params))
        state.wrong = "mask without the token"
        with pytest.raises(PeerError, match="not among those"):
            await engine.submit(request(2, **params))

    on_standin(tmp_path, doing)


def test_new_weights_come_while_requests_run(tmp_path: Path) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        running = [engine.submit(request(8)) for _ in range(4)]
        await until(lambda: state.num_running == 4)
        assert engine.free_slots == 4
        assert await engine.update_weights(snapshot(20, 1)) > 0
        assert engine.installed == SnapshotRef(RUN_POLICY, 1, 1)
        for completion in map(completed, await asyncio.gather(*running)):
            assert completion.version_spans == ((0, 0), (3, 1))
            assert completion.tokens.tolist() == [10, 11, 12, 23, 24, 25, 26, 27]
        assert len(list((tmp_path / "models").iterdir())) == 1
        completed(await engine.submit(request(2)))
        assert len({one["cache_salt"] for one in state.requests if "cache_salt" in one}) == 2

    on_standin(tmp_path, doing, hold_at=3)


def test_cancelling_aborts_the_request_at_the_server(tmp_path: Path) -> None:
    """Both are held under way, so that neither ends by itself before it is looked at; the other one goes on."""

    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        first, second = engine.submit(request(60)), engine.submit(request(8))
        await until(lambda: state.num_running == 2)
        first.cancel()
        await until(lambda: state.num_aborted == 1)
        assert state.num_running == 1
        state.hold_at = 0
        assert len(completed(await second).tokens) == 8
        assert engine.free_slots == 8

    on_standin(tmp_path, doing, hold_at=3)


def test_requests_that_cannot_be_sampled_fail_alone(tmp_path: Path) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        long = replace(request(), prompt_tokens=array("i", [4] * 64))
        foreign = replace(request(), prompt_tokens=array("i", [VOCAB]))
        found = await asyncio.gather(*map(engine.submit, (long, foreign, request())))
        assert [getattr(one, "reason", "") for one in found] == ["prompt_too_long", "engine_failed", ""]
        with pytest.raises(UserError, match="deterministic"):
            engine.submit_together([request()])

    on_standin(tmp_path, doing)


TORN: dict[str, Callable[[Snapshot], Snapshot]] = {
    "NaN": lambda one: replace(one, tensors={"w": TensorBytes("F32", (1,), np.float32([np.nan]).tobytes())}),
    "infinity": lambda one: replace(one, tensors={"w": TensorBytes("BF16", (1,), b"\x80\x7f")}),
    "other tensors": lambda one: replace(one, tensors={"w": one.tensors["model.embed_tokens.weight"]}),
    "no config": lambda one: replace(one, files={}),
    "another config": lambda one: replace(one, files={"config.json": CONFIG.replace(b"100", b"50")}),
    "no size": lambda one: replace(one, files={"config.json": b"{}"}),
}


@pytest.mark.parametrize("change", TORN)
def test_a_torn_snapshot_never_reaches_the_server(tmp_path: Path, change: str) -> None:
    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        with pytest.raises(PeerError):
            await engine.update_weights(TORN[change](snapshot(20, 1)))
        assert state.label == f"{RUN_POLICY}-1.0"
        assert completed(await engine.submit(request())).tokens[0] == 10
        assert len(list((tmp_path / "models").iterdir())) == 1

    on_standin(tmp_path, doing)


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version", "/resume"])
def test_a_refused_reload_leaves_the_old_weights_serving(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "RESTART_SECONDS", Backoff(0.01, 0.02))

    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        state.wrong = f"refuses {path}"
        with pytest.raises(PeerError, match=r"load_failed.*as the test wants"):
            await engine.update_weights(snapshot(20, 1))
        completion = completed(await engine.submit(request()))
        assert (completion.tokens[0], completion.version_spans) == (10, ((0, 0),))
        await engine.update_weights(snapshot(20, 1))
        assert completed(await engine.submit(request())).version_spans == ((0, 1),)

    on_standin(tmp_path, doing)


def test_adapters_are_loaded_hot_over_their_base(tmp_path: Path) -> None:
    base = snapshot(7, 0, ref=SnapshotRef("base-0123456789abcdef", 0, 0))

    async def run(state: vllm_standin.Served, url: str) -> None:
        async with closing(
            make_engine("vllm", "cpu", 8, ServerPlace(url=url, directory=tmp_path / "models"))
        ) as engine:
            with pytest.raises(PeerError, match="base_model"):
                await engine.update_weights(adapter(10, 0, base))
            await engine.update_weights(adapter(10, 0, base), base)
            assert engine.base_model == base.ref
            assert completed(await engine.submit(request())).tokens[0] == 10
            await engine.update_weights(adapter(20, 1, base))
            completion = completed(await engine.submit(request()))
            assert (completion.tokens[0], completion.version_spans) == (20, ((0, 1),))
            assert state.requests[-1]["model"] == "policy"

    with served(tmp_path) as (state, url):
        asyncio.run(run(state, url))


def test_open_rollouts_continue_with_the_next_adapter(tmp_path: Path) -> None:
    """vLLM keeps an adapter as a request named it: with `load_inplace` it would read the old directory before each
    token, and one that is gone ends its engine."""
    base = snapshot(7, 0, ref=SnapshotRef("base-0123456789abcdef", 0, 0))

    async def run(state: vllm_standin.Served, url: str) -> None:
        place = ServerPlace(url=url, directory=tmp_path / "models")
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(adapter(10, 0, base), base)
            running = engine.submit(request())
            await until(lambda: state.num_running == 1 and len(state.requests) == 2)
            await engine.update_weights(adapter(20, 1, base))
            completion = completed(await running)
            assert completion.version_spans == ((0, 0), (2, 1))
            assert completion.tokens.tolist() == [10, 11, 22, 23, 24]
            assert completed(await engine.submit(request(max_tokens=2))).tokens.tolist() == [20, 21]
            assert len(state.requests) == 3

    with served(tmp_path, hold_at=2) as (state, url):
        asyncio.run(run(state, url))


def test_requests_that_arrive_during_a_load_use_the_new_weights_only(tmp_path: Path) -> None:
    """It is sampled by the new weights only: under the old salt it would take its prompt's keys and values from the
    cache of the old ones."""

    async def doing(engine: Engine, state: vllm_standin.Served) -> None:
        may_load, post = threading.Event(), state.post

        def slow(path: str, body: Any, is_gone: Any) -> tuple[int, Any]:
            if path == "/collective_rpc":
                may_load.wait(5.0)
            return post(path, body, is_gone)

        state.post = slow  # type: ignore[method-assign]
        loading = asyncio.ensure_future(engine.update_weights(snapshot(20, 1)))
        await until(lambda: state.is_paused)
        plain, stopped = (
            engine.submit(request()),
            engine.submit(replace(request(), stop=stop_rule(plain_tokenizer(), ("zz",)))),
        )
        await asyncio.sleep(0.2)
        may_load.set()
        await loading
        for asked in (plain, stopped):
            assert completed(await asked).version_spans == ((0, 1),)
        assert [body["cache_salt"] for body in state.requests[-2:]] == [f"{RUN_POLICY}-1.1"] * 2

    on_standin(tmp_path, doing)


def test_an_adapter_left_by_an_earlier_worker_is_not_used(tmp_path: Path) -> None:
    """A server of the user's own outlives workers, and one that was started again has lost its adapters."""
    base = snapshot(7, 0, ref=SnapshotRef("base-0123456789abcdef", 0, 0))
    write_model(tmp_path / "old", "adapter_model.safetensors", 5)

    async def run(state: vllm_standin.Served, url: str) -> None:
        place = ServerPlace(url=url, directory=tmp_path / "models")
        left = {"lora_name": "policy", "lora_path": str(tmp_path / "old"), "load_inplace": True}
        assert state.post("/v1/load_lora_adapter", left, None)[0] == 200
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(adapter(10, 0, base), base)
            assert completed(await engine.submit(request())).tokens[0] == 10
            state.adapters.clear()
            state.held.clear()
            await engine.update_weights(adapter(20, 1, base))
            assert completed(await engine.submit(request())).tokens[0] == 20
            assert not any(one.is_read_again for one in state.adapters.values())

    with served(tmp_path) as (state, url):
        asyncio.run(run(state, url))


# ---- a server of the worker's own --------------------------------------------------------------------------------


@pytest.fixture
def python(tmp_path: Path) -> str:
    """What is started in the place of a Python that has vLLM: the stand-in, with the arguments that vLLM would get."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STANDIN} "$@"\n')
    path.chmod(0o700)
    return str(path)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False


def test_a_server_starts_with_the_flags_for_adapters_on_experts(tmp_path: Path, python: str) -> None:
    """vLLM takes PEFT's factors of all experts only when it is started for them, and asked to."""
    base, plain = snapshot(7, 0, ref=SnapshotRef("base-0123456789abcdef", 0, 0)), adapter(10, 0, snapshot(7))
    (tensor,) = plain.tensors.values()
    one = replace(plain, base_model=base.ref, tensors={"base_model.model.mlp.experts.lora_A.weight": tensor})

    async def run() -> None:
        place = ServerPlace(python, directory=tmp_path / "models")
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(one, base)
            assert completed(await engine.submit(request())).tokens[0] == 10

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_costs_what_is_in_it_and_comes_back(
    tmp_path: Path, python: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "RESTART_SECONDS", Backoff(0.01, 0.02))
    monkeypatch.setattr(server_engine, "CHECK_EVERY_SECONDS", 0.1)
    if number == signal.SIGKILL:
        monkeypatch.setattr(vllm, "EXIT_SECONDS", 30.0)  # a loaded machine may need some until the status is known
    pids = tmp_path / "pids"
    arguments = ("--hold-at", "3", "--pids", str(pids))  # a request for more tokens is under way for ever

    async def run() -> None:
        place = ServerPlace(python, "", arguments, tmp_path / "models")
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(snapshot(10, 3))
            (written,) = (tmp_path / "models").iterdir()  # the output layer apart from the embedding
            assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is False
            shapes = tensor_shapes(written / "model.safetensors")
            assert shapes == {"model.embed_tokens.weight": (3,), "lm_head.weight": (3,)}
            running = [engine.submit(request(90)) for _ in range(3)]
            await engine.submit(request(1))
            (pid,) = map(int, pids.read_text().split())
            os.kill(pid, number)
            with monkeypatch.context() as patch:  # only the server that is stopped must answer so soon
                if number == signal.SIGSTOP:
                    patch.setattr(vllm, "CHECK_SECONDS", 3.0)
                failures = await asyncio.gather(*running)
            assert [one.reason for one in failures if isinstance(one, RequestFailure)] == ["engine_failed"] * 3
            reason = r"has ended \(signal 9\)" if number == signal.SIGKILL else r"no answer to /weight_info for \d+ s"
            assert re.search(reason, failures[0].detail)  # type: ignore[union-attr]
            completion = completed(await engine.submit(request(2)))
            assert (completion.tokens[0], completion.version_spans) == (10, ((0, 3),))
            assert not alive(pid)
            await engine.update_weights(snapshot(20, 4))
            assert completed(await engine.submit(request(2))).version_spans == ((0, 4),)
            last = int(pids.read_text().split()[-1])
            assert alive(last)
        await until(lambda: not alive(last))

    asyncio.run(run())


def test_a_server_that_cannot_be_restarted_for_a_while_is_restarted_later(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log cannot be opened, as descriptors or memory may be missing."""
    monkeypatch.setattr(server_engine, "RESTART_SECONDS", Backoff(0.01, 0.02))
    monkeypatch.setattr(server_engine, "CHECK_EVERY_SECONDS", 0.1)
    pids, log = tmp_path / "pids", tmp_path / "models.log"

    async def run() -> None:
        place = ServerPlace(python, "", ("--pids", str(pids)), tmp_path / "models")
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(snapshot(10, 3))
            log.rename(tmp_path / "aside.log")
            log.mkdir()
            os.kill(int(pids.read_text()), signal.SIGKILL)
            await until(lambda: "Is a directory" in caplog.text)
            sampler = LeaseSampler(engine, "w", {}, print, print)
            await until(lambda: "Is a directory" in sampler.doing)  # which `echo2 status` shows
            waiting = engine.submit(request(2))
            log.rmdir()
            assert completed(await asyncio.wait_for(waiting, 60.0)).version_spans == ((0, 3),)
            assert sampler.doing == "waiting"

    asyncio.run(run())


def test_a_server_that_cannot_start_says_why(tmp_path: Path, python: str) -> None:
    async def start(python: str, *arguments: str) -> None:
        place = ServerPlace(python, "", arguments, tmp_path / "models")
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.update_weights(snapshot(10))

    with pytest.raises(UserError, match=r"status 1.*ValueError: no kernel for head_dim 24"):
        asyncio.run(start(python, "--wrong", "dies at start"))
    with pytest.raises(UserError, match=r"answered 500: .*as the test wants.*Its log \S+/models.log says: "):
        asyncio.run(start(python, "--wrong", "refuses /inference/v1/generate"))  # its computing process has died
    with pytest.raises(UserError, match=r"--engine-python /nowhere/python"):
        asyncio.run(start("/nowhere/python"))
    with pytest.raises(UserError, match="No module named"):
        asyncio.run(start(sys.executable))
    with pytest.raises(UserError, match="ECHO2_ENGINE_PYTHON"):
        asyncio.run(start(""))


def test_processes_under_a_guard_end_with_its_parent() -> None:
    command = [sys.executable, "-S", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(120)"]
    child = ChildProcess([sys.executable, "-S", guard.__file__, *command], has_pipes=True, has_lifeline=True)
    with child.pipes[0], child.pipes[1] as output:
        pid = int(output.readline())
        child.end_lifeline()
        assert child.wait(60) == 256 - signal.SIGKILL
        assert not alive(pid)
