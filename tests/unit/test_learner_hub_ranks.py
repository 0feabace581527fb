"""Hub checkpoints on a learner of two processes: snapshots and checkpoints are those of a single process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echo2.config import Config
from echo2.learner.core.mesh import Mesh, Place, join
from echo2.learner.core.model import load_policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.evaluate import copy_model
from hub_models import hub_model
from learner_cases import config_of
from test_learner_ranks import digests, in_processes, train

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
#: Experts beside a tower, and a router whose bias stays in float32.
FAMILIES = ("qwen3_5_moe", "glm4_moe")


def client_of(model: Path, mesh: Mesh, dtype: str = "bfloat16") -> GrpoClient:
    config: Config = config_of(lr=3e-3, tokens_per_microbatch=80, snapshot_dtype=dtype)
    config = replace(config, model=replace(config.model, path=str(model)))
    return GrpoClient(load_policy(str(model), "float32", "cpu", mesh), config, mesh=mesh)


def two_ranks(directory: str, rank: int) -> None:
    """What each of the two processes does; the first writes down what it found."""
    where, found = Path(directory), dict[str, Any]()
    mesh = join(Place(rank, 2, rank, (where / "store").as_uri()), torch.device("cpu"))
    for family in FAMILIES:
        client = client_of(where / family, mesh)
        found[family] = {"first": digests(client, mesh)}
        client.save_state(where / f"{family}_first").result()
        found[family]["norm"] = train(client, range(1))[0]["norm"]
        client.save_state(where / f"{family}_trained").result()
        client.load_state(where / f"{family}_of_one")
        found[family]["loaded"] = digests(client, mesh)
    if rank == 0:
        (where / "found.json").write_text(json.dumps(found))
    mesh.leave()


def test_two_ranks_send_save_and_load_what_one_does(tmp_path: Path) -> None:
    expected = dict[str, Any]()
    for family in FAMILIES:
        hub_model(tmp_path / family, family)
        client = client_of(tmp_path / family, Mesh())
        expected[family] = {
            "first": digests(client),
            "norm": pytest.approx(train(client, range(1))[0]["norm"], rel=1e-4),
        }
        client.save_state(tmp_path / f"{family}_of_one").result()
        expected[family]["loaded"] = digests(client)
    assert in_processes(two_ranks, 2, tmp_path) == expected
    for family in FAMILIES:
        stored = load_file(tmp_path / family / "model.safetensors")
        copy_model(tmp_path / f"{family}_first", tmp_path / f"{family}_joined")
        joined = load_file(tmp_path / f"{family}_joined" / "model.safetensors")
        assert joined.keys() == stored.keys()
        assert all(torch.equal(joined[name], tensor) for name, tensor in stored.items())
        again = client_of(tmp_path / family, Mesh())
        again.load_state(tmp_path / f"{family}_trained")
        one = load_file(tmp_path / f"{family}_of_one" / "model.safetensors")
        for name, tensor in again.policy.state().items():
            torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-3)
