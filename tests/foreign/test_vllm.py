"""vLLM itself, on a CPU, as an engine and in a run. `make vllm` installs it; without it all is skipped."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from echo2.config.values import ServerPlace
from echo2.core.errors import PeerError
from echo2.core.types import SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.engine import Completion, SampleRequest
from echo2.engines.hf_engine import CACHE_NAMES
from echo2.engines.registry import make_engine
from echo2.engines.servers import engine as server_engine
from echo2.engines.servers import vllm
from echo2.engines.servers.engine import ServerEngine
from echo2.engines.tokenizer import stop_rule
from echo2.learner.core.model import load_policy
from real_runs import REPOSITORY, Run
from rollout_cases import (
    END,
    VOCAB,
    hf_logits,
    load,
    plain_tokenizer,
    requests,
    run,
    snapshot_of,
    tiny_module,
    tokenizer_files,
)

INSTALLED = REPOSITORY / ".venv-vllm" / ".installed"
PYTHON = os.environ.get("ECHO2_ENGINE_PYTHON", str(INSTALLED.parent / "bin" / "python") if INSTALLED.exists() else "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="there is no .venv-vllm (`make vllm` makes it) and no ECHO2_ENGINE_PYTHON"),
    pytest.mark.timeout(500),
]
#: Head sizes of 16 are none that vLLM's attention on CPUs takes; saved models say their architecture; and what ends a
#: completion is the request's to say.
SIZES = {"head_dim": 32, "max_position_embeddings": 1024, "architectures": ["Qwen3ForCausalLM"], "eos_token_id": None}

MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}


def tiny_mixture() -> Any:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | MIXTURE))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEngine]:
    """One server for the tests below, with the weights of version 0."""
    directory = tmp_path_factory.mktemp("vllm") / "models"
    made: Any = make_engine("vllm", "cpu", 16, ServerPlace(PYTHON, directory=directory))
    load(made, snapshot_of(tiny_module("qwen3", **SIZES)))
    yield made
    asyncio.run(made.close())


def long_requests(count: int, max_tokens: int = 200) -> list[SampleRequest]:
    """Without an end token."""
    prompt = array("i", [5, 9, 11])
    return [SampleRequest(prompt, 7, sample, SamplingParams(max_tokens=max_tokens)) for sample in range(count)]


async def sampled(engine: ServerEngine, is_over: Callable[[list[Any]], bool]) -> list[Any]:
    """Long requests of many lengths, each submitted again whenever it ends: however fast the machine, some are under
    way until it is over."""
    found: list[Any] = []

    async def again_and_again(request: SampleRequest) -> None:
        while not is_over(found):
            found.extend(await asyncio.gather(engine.submit(request), return_exceptions=True))

    await asyncio.gather(*(again_and_again(long_requests(1, 500 + 50 * number)[0]) for number in range(8)))
    return found


@pytest.mark.parametrize(
    "params", [{"temperature": 0.7, "top_k": 9, "top_p": 0.8}, {"top_p": 0.7}, {}, {"temperature": 0.0}]
)
def test_logprobs_are_those_of_transformers_from_scratch(engine: ServerEngine, params: dict[str, Any]) -> None:
    module = tiny_module("qwen3", **SIZES)
    load(engine, snapshot_of(module))
    asked = [one for seed in range(3) for one in requests(seed, 1 + 2 * seed, samples=4, max_tokens=20, **params)]
    asked = [replace(one, stop_tokens=frozenset({END})) for one in asked]
    for request, completion in zip(asked, run(engine, asked), strict=True):
        tokens, prompt = completion.tokens, request.prompt_tokens
        assert (END in tokens) == (completion.finish == "stop")
        logits = hf_logits(module, [*prompt, *tokens])[len(prompt) - 1 : -1] / (request.params.temperature or 1.0)
        for t, token in enumerate(tokens):
            support = range(VOCAB)
            if completion.support_offsets is not None and completion.support_tokens is not None:
                support = completion.support_tokens[completion.support_offsets[t] : completion.support_offsets[t + 1]]
                assert len(support) <= params.get("top_k", VOCAB)
            wanted = logits[t, token] - logits[t, list(support)].logsumexp(0)
            assert completion.logprobs[t] == pytest.approx(float(wanted), abs=1e-4)
        if params.get("temperature", 1.0) == 0.0:
            assert tokens.tolist() == logits.argmax(-1).tolist()


def test_a_stop_string_ends_a_rollout_where_it_is_complete(engine: ServerEngine) -> None:
    """Of two characters, so that the server is asked to go on behind each that may end one."""
    stop = stop_rule(plain_tokenizer(), ("ab", "11", "c"))
    asked = [replace(one, stop=stop) for seed in range(4) for one in requests(seed, samples=6, max_tokens=60)]
    found = run(engine, asked)
    for completion in found:
        length = stop.length(completion.tokens)
        assert (length, completion.finish) in ((len(completion.tokens), "stop"), (None, "length"))
        assert length is not None or len(completion.tokens) == 60
    assert any(len(one.tokens) > 2 and one.finish == "stop" for one in found)


def test_each_token_has_the_version_of_the_weights_that_drew_it(engine: ServerEngine) -> None:
    """Weights come while requests run, and every token is scored under the weights that its span names. Keys and values
    read under older weights stay in the cache, as they do in the engines in the worker: so scores of what comes after
    the swap are compared with those of the other version, and the older its context, the closer they are."""
    modules = [tiny_module("qwen3", seed, **SIZES) for seed in (0, 1)]
    load(engine, snapshot_of(modules[0], 0))

    async def swaps() -> tuple[list[Any], int]:
        """Until one came between two tokens. A server that has drawn all tokens, and still sends them, needs more."""
        running = asyncio.ensure_future(sampled(engine, lambda found: any(len(one.version_spans) > 1 for one in found)))
        version = 0
        while not running.done():
            await engine.submit(requests(0)[0])
            version += 1
            assert await engine.update_weights(snapshot_of(modules[version % 2], version)) > 0
        return await running, version

    found, last = asyncio.run(swaps())
    num_likelier = num_after = 0
    for completion in found:
        starts = [*completion.version_spans, (len(completion.tokens), None)]
        tokens = [5, 9, 11, *completion.tokens]
        scores = [hf_logits(module, tokens).log_softmax(-1) for module in modules]
        for (start, version), (end, _) in itertools.pairwise(starts):
            assert version in range(last + 1)
            for t in range(start, end):
                own, other = (
                    abs(float(scores[v][t + 2, tokens[t + 3]]) - completion.logprobs[t])
                    for v in (version % 2, 1 - version % 2)
                )
                if start:
                    num_likelier, num_after = num_likelier + (own < other), num_after + 1
                else:
                    assert own < 1e-3
    assert num_likelier / num_after > 0.6
    fresh = run(engine, requests(2))
    scores = hf_logits(modules[last % 2], [*requests(2)[0].prompt_tokens, *fresh[0].tokens]).log_softmax(-1)
    wanted = [float(scores[4 + t, token]) for t, token in enumerate(fresh[0].tokens)]
    assert np.allclose(fresh[0].logprobs, wanted, atol=1e-4)  # the prompt was not taken from the old weights' cache


def test_an_aborted_request_leaves_its_slot(engine: ServerEngine) -> None:
    async def abort() -> None:
        first = engine.submit(long_requests(1)[0])
        await asyncio.sleep(0.1)
        first.cancel()
        assert isinstance(await engine.submit(requests(1)[0]), Completion)
        assert engine.free_slots == engine.slots

    asyncio.run(abort())


def broken(snapshot: Snapshot, version: int) -> Snapshot:
    """Another architecture than the server has, and the same by its configuration."""
    tensors = {
        name: TensorBytes(t.dtype, t.shape, bytes(t.read(0, t.num_bytes))) for name, t in snapshot.tensors.items()
    }
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = replace(tensors[name], data=np.full(tensors[name].shape, np.nan, np.float32).tobytes())
    return replace(snapshot, ref=replace(snapshot.ref, version=version), tensors=tensors)


def test_a_refused_snapshot_leaves_the_old_weights_serving(engine: ServerEngine) -> None:
    good = snapshot_of(tiny_module("qwen3", **SIZES), 5)
    load(engine, good)
    before = run(engine, requests(0, temperature=0.0))
    with pytest.raises(PeerError, match="NaN"):
        load(engine, broken(good, 6))
    after = run(engine, requests(0, temperature=0.0))
    assert [one.tokens for one in after] == [one.tokens for one in before]
    assert after[0].version_spans == ((0, 5),)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("which", ["APIServer", "EngineCore"])
def test_a_server_that_dies_or_hangs_comes_back_with_its_weights(
    engine: ServerEngine, number: int, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if which == "EngineCore" and number == signal.SIGKILL:
        pytest.skip("as the one that listens: it ends with the other")
    monkeypatch.setattr(vllm, "CHECK_SECONDS", 10.0)
    monkeypatch.setattr(server_engine, "CHECK_EVERY_SECONDS", 1.0)
    load(engine, snapshot_of(tiny_module("qwen3", **SIZES), 8))
    before = run(engine, requests(0, temperature=0.0))

    async def strike() -> list[Any]:
        running = asyncio.ensure_future(
            sampled(engine, lambda found: any(not isinstance(one, Completion) for one in found))
        )
        await engine.submit(requests(1)[0])  # it began after them, so they are under way
        os.kill(server_processes(engine)[which == "EngineCore"], number)
        return await running

    failed = [one for one in asyncio.run(strike()) if not isinstance(one, Completion)]
    assert failed
    assert all(isinstance(one, PeerError) or one.reason == "engine_failed" for one in failed)
    after = run(engine, requests(0, temperature=0.0))
    assert [one.tokens for one in after] == [one.tokens for one in before]
    assert after[0].version_spans == ((0, 8),)


def server_processes(engine: ServerEngine) -> list[int]:
    """The process that listens and the one that computes, as the system lists them."""
    guard: int = engine._server._process.child.pid  # type: ignore[attr-defined]
    return [children(guard)[0], next(pid for pid in children(children(guard)[0]) if b"EngineCore" in command(pid))]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()


@pytest.mark.slow
def test_vllm_serves_a_mixture_and_cannot_swap_its_weights_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the hub's names, a tensor for each expert, as the learner publishes them. If the last line fails, vLLM
    has mended its reload: then `_refuse_mixture` can go."""
    monkeypatch.setattr(vllm, "_refuse_mixture", lambda _: None)
    tiny_mixture().save_pretrained(tmp_path / "hub")
    policy = load_policy(str(tmp_path / "hub"), "float32", "cpu")
    engine: Any = make_engine("vllm", "cpu", 16, ServerPlace(PYTHON, directory=tmp_path / "models"))

    def distance(version: int) -> float:
        """From the learner's logprobs."""
        files = {**policy.files, **tokenizer_files()}
        load(engine, Snapshot(SnapshotRef("policy", 1, version), policy.tensors(), files))
        found = []
        for request, completion in zip(requests(3), run(engine, requests(3)), strict=True):
            logits = hf_logits(policy.module, [*request.prompt_tokens, *completion.tokens])[4:-1].log_softmax(-1)
            wanted = [float(logits[t, token]) for t, token in enumerate(completion.tokens)]
            assert completion.version_spans == ((0, version),)
            found.append(np.abs(np.array(completion.logprobs) - wanted).max())
        return float(max(found))

    try:
        assert "model.layers.0.mlp.experts.3.down_proj.weight" in policy.tensors()
        assert distance(0) < 1e-3
        for weight in policy.module.parameters():
            weight.data += 0.001 * torch.randn_like(weight)
        assert distance(1) > 0.1
    finally:
        asyncio.run(engine.close())


#: Small embeddings: no token is nearly certain, whatever the adapters are.
SOFT = {**SIZES, "initializer_range": 0.1}


def adapter_of(version: int, base: Snapshot) -> tuple[Snapshot, Any]:
    """A random adapter over the tiny model, and that model with the adapter's product added."""
    rank, alpha, targets, size = 4, 8, ("q_proj", "v_proj", "down_proj"), 0.3
    merged, tensors = tiny_module("qwen3", **SOFT), {}
    torch.manual_seed(version)
    for name, linear in merged.named_modules():
        if name.endswith(targets):
            a, b = torch.randn(rank, linear.in_features) * size, torch.randn(linear.out_features, rank) * size
            for part, tensor in (("lora_A", a), ("lora_B", b)):
                key = f"base_model.model.{name}.{part}.weight"
                tensors[key] = TensorBytes("F32", tuple(tensor.shape), tensor.numpy().tobytes())
            linear.weight.data += alpha / rank * b @ a
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    files = {**base.files, "adapter_config.json": json.dumps(config).encode()}
    return Snapshot(SnapshotRef("policy", 1, version), tensors, files, base.ref), merged


@pytest.mark.slow
def test_adapters_are_loaded_hot_over_their_base(tmp_path: Path) -> None:
    """Logprobs are those of the base model with the adapter's product added, before and after another one has come."""
    base = replace(snapshot_of(tiny_module("qwen3", **SOFT)), ref=SnapshotRef("base-0123456789abcdef", 0, 0))
    engine: Any = make_engine("vllm", "cpu", 16, ServerPlace(PYTHON, directory=tmp_path / "models"))
    try:
        for version in (1, 2):
            snapshot, merged = adapter_of(version, base)
            asyncio.run(engine.update_weights(snapshot, base if version == 1 else None))
            for request, completion in zip(requests(3), run(engine, requests(3)), strict=True):
                logits = hf_logits(merged, [*request.prompt_tokens, *completion.tokens])[4:-1].log_softmax(-1)
                wanted = [float(logits[t, token]) for t, token in enumerate(completion.tokens)]
                assert completion.version_spans == ((0, version),)
                assert np.allclose(completion.logprobs, wanted, atol=1e-3)
    finally:
        asyncio.run(engine.close())


@pytest.mark.slow
def test_open_rollouts_continue_with_the_next_adapter(tmp_path: Path) -> None:
    """Every token has the logprob of the adapter that its span names, over what the adapters before it have read. No
    request fails: the server lives."""
    base = replace(snapshot_of(tiny_module("qwen3", **SOFT)), ref=SnapshotRef("base-0123456789abcdef", 0, 0))
    adapters = {version: adapter_of(version, base) for version in range(1, 6)}
    merged = {version: module for version, (_, module) in adapters.items()}
    engine: Any = make_engine("vllm", "cpu", 16, ServerPlace(PYTHON, directory=tmp_path / "models"))

    async def swaps() -> list[Any]:
        running = []
        for version, (snapshot, _) in adapters.items():
            await engine.update_weights(snapshot, base if version == 1 else None)
            running += [engine.submit(request) for request in long_requests(1, 900)]
            await engine.submit(requests(version)[0])
        return await asyncio.gather(*running)

    try:
        found = asyncio.run(swaps())
    finally:
        asyncio.run(engine.close())
    for completion in found:
        starts, versions = zip(*completion.version_spans, strict=True)
        assert np.allclose(completion.logprobs, in_turn(merged, completion, versions), atol=1e-3)
        if len(starts) > 1:
            late = in_turn(merged, completion, (versions[0], *versions[:-1]))
            assert np.abs(np.array(completion.logprobs) - late)[starts[1] :].mean() > 0.1
    assert max(len(completion.version_spans) for completion in found) > 2


def in_turn(modules: Mapping[int, Any], completion: Completion, versions: Sequence[int]) -> list[float]:
    """The logprobs of a completion of `long_requests` whose spans were drawn by these versions, each over the keys and
    values of those before it. The last token of a span is read by the next one."""
    prompt = [5, 9, 11]
    tokens = [*prompt, *completion.tokens]
    ends = [start for start, _ in completion.version_spans[1:]] + [len(completion.tokens)]
    takes = inspect.signature(modules[versions[0]].forward).parameters
    cache, read, rows = {next(name for name in CACHE_NAMES if name in takes): DynamicCache()}, 0, []
    for version, end in zip(versions, ends, strict=True):
        stop = len(prompt) + end - 1
        with torch.no_grad():
            logits = modules[version](torch.tensor([tokens[read:stop]]), use_cache=True, **cache).logits
        read = stop
        rows.append(logits[0].log_softmax(-1))
    scores = torch.cat(rows)[len(prompt) - 1 :]
    return [float(scores[t, token]) for t, token in enumerate(completion.tokens)]


@pytest.mark.slow
def test_a_run_with_vllm_survives_the_kill_of_its_server(
    tmp_path: Path, sort_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason is in the status; nothing is lost or doubled, and sampler and learner agree. On-policy, where no
    rollout keeps a cache of older weights."""
    monkeypatch.setenv("ECHO2_ENGINE_PYTHON", PYTHON)
    settings = ("--workers.engine", "vllm", "--workers.count", "1", "--run.max_steps", "8")
    settings += ("--schedule.max_staleness", "0")
    started = Run(tmp_path / "run", sort_model, *settings, "--schedule.lease_seconds", "60").start()
    wait(lambda: started.status().get("version", -1) >= 2, 240)
    (listening,) = [
        pid
        for pid in processes()
        if str(tmp_path).encode() in command(pid) and b"--uds" in command(pid) and b"guard.py" not in command(pid)
    ]
    os.kill(listening, signal.SIGKILL)
    summary = started.finish(200)
    assert summary["groups"]["trained"] == 8 * 16
    audit = started.command("audit")
    assert (audit["lost"], audit["doubled"]) == (0, 0)
    same_version = [
        row["mismatch/abs_log_ratio/lag_0"] for row in started.rows() if "mismatch/abs_log_ratio/lag_0" in row
    ]
    # With the first weights, after reloads, and after the restart.
    assert len(same_version) == 8
    assert max(same_version) < 1e-5
    failed = [one for one in started.status().get("failures", []) if one["kind"] == "engine_failed"]
    assert all("token server is gone" in one["message"] for one in failed)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and command_or_none(path)]


def command_or_none(path: Path) -> bool:
    try:
        return bool((path / "cmdline").read_bytes())
    except OSError:
        return False


def wait(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
