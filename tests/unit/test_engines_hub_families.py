"""Checkpoints as the hub has them, family by family: trained whole and by an adapter, sent to engines, exported, and
equal in plain transformers, where the class that config.json names loads them."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from echo2.config import Config, to_json
from echo2.config.rundir import RunDir
from echo2.config.sections import LoraConfig
from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef
from echo2.engines import compact
from echo2.engines.hf_engine import make_engine
from echo2.engines.hub_layout import text_module
from echo2.engines.model_values import MODEL_TYPES, read_architecture
from echo2.engines.registry import in_worker
from echo2.engines.routing import routing_of
from echo2.learner.core.adapters import Adapter, check_trained, load_trained
from echo2.learner.core.fitting import model_shape
from echo2.learner.core.model import Policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.export import export
from house import REPOSITORY
from hub_models import FAMILIES, MIXTURES, hub_model
from learner_cases import config_of, random_group
from rollout_cases import requests, run, tokenizer_files

#: One family of each kind: experts, a nested hybrid, a router's bias, a sliding window beside a tower.
QUICK = ("qwen3_moe", "qwen3_5", "glm4_moe", "gemma3")
TABLE = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in FAMILIES]
#: gpt-oss' experts are transposed, have biases, and mix gate and upper values.
QUICK_MIXTURES = ("qwen3_moe", "gpt_oss")
EXPERTS = [pytest.param(name, marks=() if name in QUICK_MIXTURES else pytest.mark.slow, id=name) for name in MIXTURES]
#: Families without layers that can have adapters, and what is said.
NO_LORA = {"gpt2": "a gpt2 has no linear layers of torch's kind"}
NO_ADAPTER = LoraConfig()
TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def made(tmp_path: Path, family: str) -> Path:
    try:
        return hub_model(tmp_path / "hub", family)
    except (ImportError, ValueError, KeyError, AttributeError) as error:
        pytest.skip(f"the installed transformers cannot make a {family}: {error!r}")


def config_for(path: Path, lora: LoraConfig = NO_ADAPTER) -> Config:
    config = config_of(lr=1e-2, groups_per_step=4)
    return replace(config, model=replace(config.model, path=str(path)), lora=lora)


def trained(policy: Policy, config: Config) -> GrpoClient:
    """After one step."""
    client, rng = GrpoClient(policy, config), random.Random(5)
    client.forward_backward([random_group(rng, number) for number in range(4)])
    assert client.optim_step().num_updates == 1
    return client


def logits(policy: Policy) -> Tensor:
    with torch.no_grad(), policy.engaged():
        found: Tensor = policy.module(input_ids=TEXT, use_cache=False).logits
    return found


def plain(directory: Path) -> Any:
    """The model in plain transformers, by the class that config.json names; nothing may be missing or left over."""
    import transformers

    named = json.loads((directory / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, named).from_pretrained(directory, output_loading_info=True)
    assert {key: found for key, found in report.items() if found} == {}
    return model.eval()


def plain_logits(directory: Path) -> Tensor:
    with torch.no_grad():
        found: Tensor = plain(directory)(input_ids=TEXT).logits
    return found


def saved(path: Path, client: GrpoClient) -> RunDir:
    rundir = RunDir(path)
    rundir.path.mkdir()
    rundir.config.write_text(to_json(client.config))
    client.save_state(rundir.checkpoints / "step_1").result()
    return rundir


def sampled_as_the_learner_computes(policy: Policy, *snapshots: Snapshot) -> None:
    """Tokens of the engine `transformers`, and of `compact` where it knows the family, have the logprobs that the
    learner gives."""
    model_type = json.loads(bytes(snapshots[0].files["config.json"]))["model_type"]
    engines = [make_engine, *([compact.make_engine] if model_type in MODEL_TYPES else [])]
    for make in engines:
        engine = make("cpu", 3)
        asyncio.run(engine.update_weights(*snapshots))
        asked = [one for seed, length in enumerate((2, 9)) for one in requests(seed, length, 2, max_tokens=5)]
        for request, completion in zip(asked, run(engine, asked), strict=True):
            tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens]])
            with torch.no_grad(), policy.engaged():
                logprobs_TV = policy.module(tokens, use_cache=False).logits[0].log_softmax(-1)
            start = len(request.prompt_tokens) - 1
            expected = [float(logprobs_TV[start + at, token]) for at, token in enumerate(completion.tokens)]
            assert list(completion.logprobs) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("family", TABLE)
def test_whole_models(family: str, tmp_path: Path) -> None:
    hub = made(tmp_path, family)
    config, stored = config_for(hub), load_file(hub / "model.safetensors")
    check_trained(config)
    policy = load_trained(config, "cpu")
    torch.testing.assert_close(logits(policy), plain_logits(hub), rtol=0, atol=2e-5)
    client = trained(policy, config)
    rundir = saved(tmp_path / "run", client)

    export(rundir.path, 1, tmp_path / "export")
    torch.testing.assert_close(plain_logits(tmp_path / "export"), logits(policy), rtol=0, atol=2e-5)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert {name: tensor.shape for name, tensor in exported.items()} == {n: t.shape for n, t in stored.items()}
    others = policy.layout.others
    assert all(torch.equal(exported[name], stored[name]) == (name in others) for name in others)
    assert any(not torch.equal(exported[name], stored[name]) for name in stored)

    again = GrpoClient(load_trained(config, "cpu"), config)
    again.load_state(rundir.checkpoints / "step_1")
    assert all(torch.equal(tensor, policy.state()[name]) for name, tensor in again.policy.state().items())

    files = {**policy.files, **tokenizer_files()}
    half = policy.tensors(torch.bfloat16)
    kept = {name for name, tensor in half.items() if tensor.dtype == "F32"}
    assert {name for name in stored if "e_score" in name or "expert_bias" in name} <= kept
    export(rundir.path, 1, tmp_path / "half", dtype="bfloat16")
    rounded = load_file(tmp_path / "half" / "model.safetensors")
    assert {name for name, tensor in rounded.items() if tensor.dtype == torch.float32} == kept - others
    assert all(torch.equal(rounded[name], exported[name]) for name in kept - others)
    plain_logits(tmp_path / "half")
    engine = make_engine("cpu", 3)
    asyncio.run(engine.update_weights(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), half, files)))
    assert all(completion.tokens for completion in run(engine, requests(0, 5, 2, max_tokens=4)))
    sampled_as_the_learner_computes(policy, Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(), files))


@pytest.mark.parametrize("family", TABLE)
def test_adapters(family: str, tmp_path: Path) -> None:
    hub = made(tmp_path, family)
    config = config_for(hub, LoraConfig(rank=2))
    if family in NO_LORA:
        for refused in (check_trained, lambda config: load_trained(config, "cpu")):
            with pytest.raises(UserError, match=rf"{NO_LORA[family]}.*lora\.rank = 0"):
                refused(config)
        return
    policy = is_learned_and_goes_everywhere(config, tmp_path)
    half = load_trained(replace(config, model=replace(config.model, snapshot_dtype="bfloat16")), "cpu")
    assert isinstance(half, Adapter)
    wide = {name for name, tensor in half.base.snapshot.tensors.items() if tensor.dtype == "F32"}
    assert wide == policy.base.policy.layout.float32_names


@pytest.mark.parametrize("family", EXPERTS)
def test_adapters_on_experts(family: str, tmp_path: Path) -> None:
    hub = made(tmp_path, family)
    policy = is_learned_and_goes_everywhere(config_for(hub, LoraConfig(rank=2, targets=["experts"])), tmp_path)
    state, shape = policy.state(), model_shape(str(hub))
    assert all(".experts." in name for name in state)
    assert shape is not None
    assert sum(tensor.numel() for tensor in state.values()) == 2 * sum(layer.stacked for layer in shape.layers)


def is_learned_and_goes_everywhere(config: Config, tmp_path: Path) -> Adapter:
    """Plain transformers computes what the learner does with an adapter that is merged, and with one that PEFT loads;
    so do engines."""
    from peft import PeftModel

    hub = Path(config.model.path)
    check_trained(config)
    policy = load_trained(config, "cpu")
    assert isinstance(policy, Adapter)
    before = logits(policy)
    torch.testing.assert_close(before, plain_logits(hub), rtol=0, atol=2e-5)
    rundir = saved(tmp_path / "run", trained(policy, config))
    assert (logits(policy) - before).abs().max() > 1e-3
    export(rundir.path, 1, tmp_path / "whole", is_merged=True)
    torch.testing.assert_close(plain_logits(tmp_path / "whole"), logits(policy), rtol=0, atol=5e-5)
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == load_file(hub / "model.safetensors").keys()

    export(rundir.path, 1, tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(plain(hub), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=TEXT).logits, logits(policy), rtol=0, atol=2e-5)

    base = policy.base.snapshot
    base = replace(base, files={**base.files, **tokenizer_files()})
    snapshot = Snapshot(
        SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(), {**policy.files, **tokenizer_files()}, base.ref
    )
    sampled_as_the_learner_computes(policy, snapshot, base)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_compact_takes_a_family_or_names_another(family: str, tmp_path: Path) -> None:
    import transformers

    values = json.loads(transformers.AutoConfig.for_model(family, **FAMILIES[family]).to_json_string())
    if family in MODEL_TYPES:
        read_architecture(values)
    else:
        with pytest.raises(UserError, match=r'workers\.engine = "auto" or "transformers"'):
            read_architecture(values)


def test_the_page_lists_what_is_tested_of_each_family() -> None:
    import transformers

    page = (REPOSITORY / "docs" / "engines.md").read_text()
    table = page.partition("## Model families")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if "| `" in line]
    told = {family: cells for family, _, *cells in rows[1:]}
    assert list(told) == list(FAMILIES)
    assert len(told) == len(rows) - 1
    for family, cells in told.items():
        config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
        expected = [in_worker(json.loads(config.to_json_string())).name, "yes"]
        expected += ["refused" if family in NO_LORA else "yes", "yes" if family in MIXTURES else "no experts"]
        routing = routing_of(text_module(config, torch.float32))
        expected += ["yes, all weights" if family in NO_LORA else "yes", "" if routing is None else "yes"]
        assert (family, cells) == (family, expected)
