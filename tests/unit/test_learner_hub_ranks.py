"""Hub checkpoints on a learner of two processes, family by family, whole and by an adapter: snapshots and checkpoints
are those of a single process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echo2.config.sections import LoraConfig
from echo2.learner.core.adapters import load_trained
from echo2.learner.core.mesh import Mesh, Place, join
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.evaluate import copy_model
from hub_models import FAMILIES, MIXTURES, hub_model
from learner_cases import config_of
from test_learner_ranks import digests, in_processes, train

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


def client_of(where: Path, case: str, mesh: Mesh) -> GrpoClient:
    """`case`: a family that `where` has, behind it "+lora" for an adapter, on experts, too, where there are some."""
    family, _, adapter = case.partition("+")
    config = config_of(lr=3e-3, tokens_per_microbatch=80, snapshot_dtype="bfloat16")
    targets = ["all-linear", "experts"] if family in MIXTURES else ["all-linear"]
    lora = LoraConfig(rank=2, targets=targets) if adapter else LoraConfig()
    config = replace(config, model=replace(config.model, path=str(where / family)), lora=lora)
    return GrpoClient(load_trained(config, "cpu", mesh), config, mesh=mesh)


def cases_in(where: Path) -> list[str]:
    families = [family for family in FAMILIES if (where / family).is_dir()]
    return [*families, *(f"{family}+lora" for family in families if family != "gpt2")]


def two_ranks(directory: str, rank: int) -> None:
    """What each of the two processes does; the first writes down what it found."""
    where, found = Path(directory), dict[str, Any]()
    mesh = join(Place(rank, 2, rank, (where / "store").as_uri()), torch.device("cpu"))
    for case in cases_in(where):
        client = client_of(where, case, mesh)
        found[case] = {"first": digests(client, mesh)}
        client.save_state(where / f"{case}_first").result()
        found[case]["norm"] = train(client, range(1))[0]["norm"]
        client.save_state(where / f"{case}_trained").result()
        client.load_state(where / f"{case}_of_one")
        found[case]["loaded"] = digests(client, mesh)
    if rank == 0:
        (where / "found.json").write_text(json.dumps(found))
    mesh.leave()


def test_two_ranks_send_save_and_load_what_one_does(tmp_path: Path) -> None:
    for family in FAMILIES:
        try:
            hub_model(tmp_path / family, family)
        except (ImportError, ValueError, KeyError, AttributeError):
            continue  # the installed transformers does not have it; test_engines_hub_families.py says so
    expected = dict[str, Any]()
    for case in cases_in(tmp_path):
        client = client_of(tmp_path, case, Mesh())
        expected[case] = {
            "first": digests(client),
            "norm": pytest.approx(train(client, range(1))[0]["norm"], rel=1e-4),
        }
        client.save_state(tmp_path / f"{case}_of_one").result()
        expected[case]["loaded"] = digests(client)
    found = in_processes(two_ranks, 2, tmp_path)
    assert found.keys() == expected.keys()
    assert {case: one for case, one in found.items() if one != expected[case]} == {}
    for case in expected:
        one = client_of(tmp_path, case, Mesh())
        one.load_state(tmp_path / f"{case}_of_one")
        again = client_of(tmp_path, case, Mesh())
        again.load_state(tmp_path / f"{case}_trained")
        for name, tensor in again.policy.state().items():
            torch.testing.assert_close(tensor, one.policy.state()[name], rtol=0, atol=1e-3, msg=f"{case} {name}")
        if "+" not in case:
            copy_model(tmp_path / f"{case}_first", tmp_path / f"{case}_joined")
            stored = load_file(tmp_path / case / "model.safetensors")
            joined = load_file(tmp_path / f"{case}_joined" / "model.safetensors")
            assert joined.keys() == stored.keys()
            assert all(torch.equal(joined[name], tensor) for name, tensor in stored.items())
