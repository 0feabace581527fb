"""LoRA adapters over a base model that an engine holds once: PEFT's own logprobs, swaps, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import json
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from echo2.core.errors import InvariantError, PeerError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    TensorBytes,
)
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.torch_engine import TorchDecoder
from echo2.rollouts.generate import sample_group
from echo2.rollouts.verification import check_group
from echo2.weights.format.adapter_files import RANK_MAX
from engine_builders import BUILDERS
from rollout_cases import (
    FAMILIES,
    VOCAB,
    Hooked,
    load,
    plain_tokenizer,
    requests,
    run,
    snapshot_of,
    tiny_module,
    tokenizer_files,
)
from seeds import pairs

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it

BASE = SnapshotRef("base-" + "0" * 16, 0, 0)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = [5, 6, 7, 8, 9, 10]
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def base_of(module: Any) -> Snapshot:
    return replace(snapshot_of(module), ref=BASE)


def adapted(
    module: Any, version: int = 0, seed: int = 0, policy: str = RUN_POLICY, **config: Any
) -> tuple[Any, Snapshot]:
    """The module with an adapter as PEFT makes it, both halves random, and the adapter as the learner sends it."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    wanted = {"r": 4, "lora_alpha": 12, "target_modules": ALL, "task_type": "CAUSAL_LM"} | config
    torch.manual_seed(seed)
    whole = get_peft_model(copy.deepcopy(module), LoraConfig(**wanted)).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    state = get_peft_model_state_dict(whole)
    tensors = {name: TensorBytes("F32", tuple(one.shape), one.numpy().tobytes()) for name, one in state.items()}
    said = {key: sorted(v) if isinstance(v, set) else v for key, v in whole.peft_config["default"].to_dict().items()}
    files = {"config.json": module.config.to_json_string(use_diff=False).encode(), **tokenizer_files()}
    files["adapter_config.json"] = json.dumps(said).encode()
    return whole, Snapshot(SnapshotRef(policy, 1, version), tensors, files, BASE)


def logprobs(decoder: TorchDecoder, prompt: list[int]) -> torch.Tensor:
    _, model, _ = decoder._policy()
    with torch.inference_mode():
        cache = model.prefill([array("i", prompt[:3])])
        return torch.stack([model.step(cache, torch.tensor([token]))[0] for token in prompt[3:]]).log_softmax(-1)


def expected(whole: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return whole(torch.tensor([prompt])).logits[0, 3:].float().log_softmax(-1)


@pytest.mark.parametrize("engine", BUILDERS)
@pytest.mark.parametrize(
    ("family", "config"),
    pairs(FAMILIES, ({}, {"target_modules": ["v_proj", "down_proj"], "r": 1}, {"use_rslora": True, "r": 8})),
)
def test_an_adapter_gives_the_logprobs_of_peft(engine: str, family: str, config: dict[str, Any]) -> None:
    module = tiny_module(family)
    whole, snapshot = adapted(module, **config)
    decoder = TorchDecoder(BUILDERS[engine], "cpu")
    decoder.load(snapshot, base_of(module))
    assert decoder.base_model == BASE
    assert (expected(whole, PROMPT) - expected(module, PROMPT)).abs().max() > 0.1, "the adapter does something"
    assert (logprobs(decoder, PROMPT) - expected(whole, PROMPT)).abs().max() < 1e-4


@pytest.mark.parametrize("engine", BUILDERS)
def test_adapters_take_turns_over_one_base_model_and_a_whole_model_ends_it(engine: str) -> None:
    module = tiny_module("qwen3")
    decoder = TorchDecoder(BUILDERS[engine], "cpu")
    pairs = [adapted(module, seed=seed, policy=name, target_modules=ALL[seed:]) for seed, name in enumerate("abc")]
    decoder.load(pairs[0][1], base_of(module))
    places = decoder._policy()[1].places
    for whole, snapshot in [*pairs, *pairs]:
        assert decoder.load(snapshot) == 0.0
        assert (logprobs(decoder, PROMPT) - expected(whole, PROMPT)).abs().max() < 1e-4
        assert decoder._policy()[1].places is places, "the base model is there once"
    decoder.load(snapshot_of(module, 3))
    assert decoder.base_model is None
    assert (logprobs(decoder, PROMPT) - expected(module, PROMPT)).abs().max() < 1e-4
    with pytest.raises(InvariantError, match="the engine holds None"):
        decoder.load(pairs[0][1])


@pytest.mark.parametrize("engine", BUILDERS)
def test_open_rows_continue_with_the_next_adapter(engine: str) -> None:
    module = tiny_module("qwen3")
    decoder = TorchDecoder(BUILDERS[engine], "cpu")
    adapters = [adapted(module, version, seed=version)[1] for version in range(3)]
    decoder.load(adapters[0], base_of(module))
    loop = DecodeLoop(Hooked(decoder, lambda step: decoder.load(adapters[min(step, 2)])))  # type: ignore[arg-type]
    for completion in run(loop, requests(0, max_tokens=30)):
        assert {version for _, version in completion.version_spans} <= {0, 1, 2}
    assert loop.installed == adapters[2].ref


@pytest.mark.parametrize("engine", BUILDERS)
def test_rows_that_name_an_adapter_keep_it_and_the_base_model_is_there_once(engine: str) -> None:
    module = tiny_module("qwen3")
    decoder = TorchDecoder(BUILDERS[engine], "cpu")
    adapters = [adapted(module, version, seed=version)[1] for version in range(2)]
    decoder.load(adapters[0], base_of(module))
    places = decoder._policy()[1].places
    asked = [replace(one, version=0) for one in requests(0, max_tokens=30)]
    alone = run(DecodeLoop(decoder), asked)

    async def beside() -> list[Any]:
        reached, loop = asyncio.Event(), asyncio.get_running_loop()
        hook = Hooked(decoder, lambda step: step != 3 or loop.call_soon_threadsafe(reached.set))
        engine = DecodeLoop(hook)  # type: ignore[arg-type]
        futures = [engine.submit(one) for one in asked]
        await reached.wait()
        await engine.update_weights(adapters[1])
        newer = [engine.submit(replace(one, version=1)) for one in asked]
        assert engine._decoder._policy()[1].places is places  # type: ignore[attr-defined]
        return [await asyncio.gather(*part) for part in (futures, newer)]

    older, newer = asyncio.run(beside())
    assert older == alone
    assert {one.version_spans for one in newer} == {((0, 1),)}


@pytest.mark.parametrize("engine", BUILDERS)
def test_a_swap_of_adapters_is_replayed_by_the_check(engine: str) -> None:
    module = tiny_module("qwen3")
    decoder = TorchDecoder(BUILDERS[engine], "cpu")
    adapters = [adapted(module, version, seed=version)[1] for version in range(2)]
    decoder.load(adapters[0], base_of(module))
    loop = DecodeLoop(Hooked(decoder, lambda step: step != 6 or decoder.load(adapters[1])))  # type: ignore[arg-type]
    lease = Lease(1, GroupRef(RUN_POLICY, "train", 0), 0, 0, 8, 0, None, 60.0, 60.0, 5)
    asked = Assignment(lease, array("i", PROMPT), SamplingParams(max_tokens=24))
    group = asyncio.run(sample_group(loop, plain_tokenizer(), asked, "worker"))
    assert isinstance(group, RolloutGroup)
    assert {((0, 0), (5, 1))} <= {rollout.version_spans for rollout in group.rollouts}
    verdict = asyncio.run(check_group(loop, adapters[0].ref, asked, group))
    assert (verdict.fault, verdict.num_skipped) == ("", 0)
    assert verdict.worst_interval < 1e-4
    moved = tuple(replace(one, version_spans=one.version_spans[:1]) for one in group.rollouts)
    assert asyncio.run(check_group(loop, adapters[0].ref, asked, replace(group, rollouts=moved))).fault != ""


def test_an_adapter_in_bfloat16_over_a_base_model_in_bfloat16_is_near() -> None:
    module = tiny_module("qwen3").to(torch.bfloat16)
    tensors = {
        name: TensorBytes("BF16", tuple(one.shape), one.view(torch.int16).numpy().tobytes())
        for name, one in module.state_dict().items()
        if name != "lm_head.weight"
    }
    base = Snapshot(BASE, tensors, snapshot_of(tiny_module("qwen3")).files)
    whole, snapshot = adapted(module)
    for build in BUILDERS.values():
        decoder = TorchDecoder(build, "cpu")
        decoder.load(snapshot, base)
        assert (logprobs(decoder, PROMPT) - expected(whole, PROMPT)).abs().max() < 0.3


def changed(snapshot: Snapshot, **config: Any) -> Snapshot:
    values = json.loads(snapshot.files["adapter_config.json"]) | config
    return replace(snapshot, files={**snapshot.files, "adapter_config.json": json.dumps(values).encode()})


def tensor(snapshot: Snapshot, name: str, one: TensorBytes) -> Snapshot:
    return replace(snapshot, tensors={**snapshot.tensors, name: one})


F32 = TensorBytes("F32", (4, 32), bytes(4 * 4 * 32))
REFUSED: dict[str, Any] = {
    "another rank": lambda one: changed(one, r=8),
    "rank 0": lambda one: changed(one, r=0),
    "an absurd rank": lambda one: changed(one, r=RANK_MAX + 1),
    "a rank that is none": lambda one: changed(one, r=True),
    "alpha": lambda one: changed(one, lora_alpha="12"),
    "an absurd alpha": lambda one: changed(one, lora_alpha=10**400),
    "an alpha that is none": lambda one: changed(one, lora_alpha=float("nan")),
    "dora": lambda one: changed(one, use_dora=True),
    "ranks of its own": lambda one: changed(one, rank_pattern={"q_proj": 2}),
    "a bias": lambda one: changed(one, bias="all"),
    "another kind": lambda one: changed(one, peft_type="IA3"),
    "no configuration": lambda one: replace(one, files={}),
    "no tensors": lambda one: replace(one, tensors={}),
    "half a pair": lambda one: replace(one, tensors={k: v for k, v in one.tensors.items() if k != NAME}),
    "another model's shape": lambda one: tensor(one, NAME, replace(F32, shape=(4, 31), data=bytes(4 * 4 * 31))),
    "another model's layer": lambda one: tensor(one, NAME.replace("layers.0", "layers.7"), F32),
    "not a linear map": lambda one: tensor(one, NAME.replace("q_proj", "q_norm"), F32),
    "whole numbers": lambda one: tensor(one, NAME, replace(F32, dtype="I32")),
    "not finite": lambda one: tensor(one, NAME, replace(F32, data=b"\xff" * len(F32.data))),
}


@pytest.mark.parametrize(("why", "engine"), pairs(REFUSED, BUILDERS))
def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(engine: str, why: str) -> None:
    module = tiny_module("qwen3")
    whole, good = adapted(module)
    decoder = TorchDecoder(BUILDERS[engine], "cpu")
    with pytest.raises(PeerError):
        decoder.load(REFUSED[why](good), base_of(module))
    assert decoder.base_model is None
    decoder.load(good, base_of(module))
    with pytest.raises(PeerError):
        decoder.load(replace(REFUSED[why](good), ref=SnapshotRef(RUN_POLICY, 1, 9)))
    assert decoder.installed == good.ref
    assert (logprobs(decoder, PROMPT) - expected(whole, PROMPT)).abs().max() < 1e-4
    assert max(PROMPT) < VOCAB
    assert load(DecodeLoop(decoder), good) >= 0.0
