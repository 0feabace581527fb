"""A learner of four processes (gloo, on the CPU) of which two share each product, beside one of a single process."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.config import to_json
from echo2.config.sections import LoraConfig
from echo2.errors import UserError
from echo2.learner import checkpoint
from echo2.learner.grpo.client import GrpoClient
from echo2.learner.mesh import Place, join
from echo2.learner.model import load_policy, stored
from echo2.learner.shard_files import file_name, open_tensors
from echo2.learner.tensor_parallel import ProductCut
from echo2.rundir import RunDir
from echo2.runtime.learner.process import run_learner
from learner_cases import VOCAB, config_of, model_directory, tiny_module
from test_learner_ranks import (
    OPTIONS,
    STEPS,
    check_that_each_goes_on,
    digests,
    fresh,
    in_processes,
    train,
    trained_and_resumed,
)

pytestmark = pytest.mark.timeout(900)  # five processes that load torch
RANKS, SHARING = 4, 2
#: Whose plans have other parts: biases, and products whose inputs or outputs every rank has.
OTHERS = ("llama", "qwen2", "olmo2")
PLAIN = replace(OPTIONS, learner=replace(OPTIONS.learner, reference_kl=0.0))


def one_of_four(directory: str, rank: int) -> None:
    """What each process does; the first writes down what it found."""
    where, found = Path(directory), dict[str, Any]()
    mesh = join(
        Place(rank, RANKS, rank, (where / "store").as_uri()), torch.device("cpu"), where, tensor_parallel=SHARING
    )
    model = str(where / "model")
    policy = load_policy(model, "float32", "cpu", mesh)
    client = GrpoClient(policy, replace(OPTIONS, model=replace(OPTIONS.model, path=model)), mesh=mesh)
    own = sum(mesh.own(tensor).numel() for tensor in policy.state().values())
    found["own_parameters"] = [int(data) for data in mesh.gather(str(own).encode())]
    found["tokens_per_call"] = client.tokens_per_call
    found |= trained_and_resumed(client, mesh, where)
    for kind in OTHERS:
        found[kind] = train(
            GrpoClient(load_policy(str(where / kind), "float32", "cpu", mesh), PLAIN, mesh=mesh), range(3)
        )
    if rank == 0:
        (where / "found.json").write_text(json.dumps(found))
    mesh.leave()


def write_model(kind: str, out: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 38, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    biases = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, tie_word_embeddings=False, **sizes, **heads, **biases)
    module = AutoModelForCausalLM.from_config(config)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    module.save_pretrained(out)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where four ranks worked, and what the first wrote down."""
    where = tmp_path_factory.mktemp("tensor_parallel")
    client = GrpoClient(load_policy(str(model_directory(where / "model", heads=(4, 2))), "float32", "cpu"), OPTIONS)
    train(client, range(5))
    client.save_state(where / "of_one", lineage=2, cursor=5).result()
    for kind in OTHERS:
        write_model(kind, where / kind)
    return where, in_processes(one_of_four, RANKS, where)


def test_losses_norms_and_counts_are_those_of_one_process(four: tuple[Path, dict[str, Any]]) -> None:
    where, found = four
    expected = train(fresh(where), range(STEPS))
    for mine, theirs in zip(expected, found["rows"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", OTHERS)
def test_models_with_other_plans_are_those_of_one_process(four: tuple[Path, dict[str, Any]], kind: str) -> None:
    where, found = four
    expected = train(GrpoClient(load_policy(str(where / kind), "float32", "cpu"), PLAIN), range(3))
    for mine, theirs in zip(expected, found[kind], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)


def test_each_rank_has_a_quarter_of_the_model(four: tuple[Path, dict[str, Any]]) -> None:
    where, found = four
    total = sum(tensor.numel() for tensor in fresh(where).policy.state().values())
    assert max(found["own_parameters"]) < 0.27 * total
    assert found["tokens_per_call"] == 2 * fresh(where).tokens_per_call, "two of four ranks run other data"


def test_a_snapshot_has_the_bytes_of_one_process(four: tuple[Path, dict[str, Any]]) -> None:
    where, found = four
    client = fresh(where)
    assert found["first"] == digests(client)
    client.load_state(where / "of_all")
    assert found["last"] == digests(client) != found["first"]


def test_one_process_goes_on_where_four_were_and_four_where_one_was(four: tuple[Path, dict[str, Any]]) -> None:
    check_that_each_goes_on(*four)


@pytest.mark.parametrize("heads", [(4, 1), (3, 3), (5, 5)])
def test_heads_that_cannot_be_shared_are_refused(heads: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=rf"heads \({heads[0]}, {heads[1]} of keys and values\)"):
        ProductCut(tiny_module(heads=heads), 2)


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("gpt2", {}, "has no plan"),
        ("qwen3_moe", {}, "moe_tp_experts, packed_colwise in its plan"),
        ("phi", {"qk_layernorm": True}, "a plan without its layers.0.self_attn.q_layernorm"),
    ],
)
def test_a_model_without_a_plan_that_can_be_followed_is_refused(kind: str, options: dict[str, Any], why: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, vocab_size=64, num_hidden_layers=1, **options)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=f"learner.tensor_parallel = 2: transformers' {kind} .*{why}"):
        ProductCut(module, 2)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"tensor_parallel = 3 does not divide learner\.ranks = 4, .*ranks = 6"):
        config_of(ranks=4, tensor_parallel=3)
    with pytest.raises(UserError, match=r"learner\.tensor_parallel = 2 and lora\.rank = 4: an adapter's"):
        replace(config_of(ranks=2, tensor_parallel=2), lora=LoraConfig(rank=4))
    assert config_of(ranks=16, tensor_parallel=2, groups_per_step=1).learner.ranks == 16


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_any_region_is_read_from_any_parts(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Random rectangles that cover a tensor, some of them empty, in the files of as many ranks."""
    rng, where = random.Random(seed), tmp_path_factory.mktemp("parts")
    whole = torch.arange(rng.randrange(1, 9) * 5).view(-1, 5).float()
    edges = [sorted({0, size, rng.randrange(size + 1)}) for size in whole.shape]
    cells = [(rows, columns) for rows in pairwise(edges[0]) for columns in pairwise(edges[1])] + [((0, 0), (0, 5))]
    rng.shuffle(cells)
    for rank, (rows, columns) in enumerate(cells):
        part = whole[slice(*rows), slice(*columns)].contiguous()
        name = file_name("x.safetensors", rank, len(cells))
        checkpoint.begin_checkpoint(where / "step_0")
        index = checkpoint.write_part(where / "step_0", {}, {name: {"w": stored(part)}}, {"w": [rows[0], columns[0]]})
        assert list(index) == [name]
        (where / ".step_0.partial" / name).rename(where / name)
    with open_tensors(where, "x.safetensors") as tensors:
        assert tensors.shapes == {"w": tuple(whole.shape)}
        assert torch.equal(tensors.read("w"), whole)
        for _ in range(8):
            region = tuple(tuple(sorted(rng.choices(range(size + 1), k=2))) for size in whole.shape)
            found = tensors.read("w", region)
            assert found.is_contiguous()
            assert torch.equal(found, whole[slice(*region[0]), slice(*region[1])])


def test_a_number_of_ranks_that_cannot_be_split_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes under torchrun, of which two split products."""
    rundir = RunDir(tmp_path)
    rundir.config.write_text(to_json(config_of(ranks=2, tensor_parallel=2)))
    for name, value in Place(0, 3, 0, "").environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"tensor_parallel = 2 does not divide the number of ranks, 3"):
        run_learner(rundir, "")
    monkeypatch.setenv("RANK", "1")
    assert run_learner(rundir, "") == UserError.exit_status
