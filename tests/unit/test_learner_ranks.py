"""A learner of two processes (gloo, on the CPU) beside one of a single process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import mixture_cases
from echo2.config.sections import LoraConfig
from echo2.core.errors import UserError
from echo2.core.objects import open_objects
from echo2.core.types import RolloutGroup, Teaching
from echo2.learner.core import checkpoint
from echo2.learner.core.adapters import load_base
from echo2.learner.core.mesh import Mesh, Place, join, place, shares
from echo2.learner.core.model import load_policy, stored
from echo2.learner.core.publication import share_of
from echo2.learner.core.state import file_name, open_tensors
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.evaluate import copy_model
from echo2.weights.format import segments
from learner_cases import TEXTS, config_of, data_of, model_directory, random_group, write_tokenizer
from teacher_standin import teacher_standin

STEPS = 8
pytestmark = pytest.mark.timeout(900)  # three processes that load torch
#: The pull to the reference is a second, frozen policy.
OPTIONS = config_of(lr=3e-3, weight_decay=0.1, tokens_per_microbatch=80, loss="ppo", reference_kl=0.05)


def groups_of(step: int) -> list[list[RolloutGroup]]:
    """Calls of a step: of many passes, of one, of one rollout, so that a rank has fewer than the other, or none."""
    rng = random.Random(step)
    groups = [random_group(rng, number, samples=6, longest=12) for number in range(4)]
    alone = replace(groups[3], rollouts=groups[3].rollouts[:1])
    return [groups[:2], groups[2:3], [alone]]


def train(client: GrpoClient, versions: range) -> list[dict[str, float]]:
    rows = []
    for version in versions:
        for call in groups_of(version):
            client.forward_backward(call)
        done = client.optim_step()
        row = {"norm": done.grad_norm, "tokens": done.num_tokens, "divisor": done.divisor, "lr": done.lr}
        losses = done.losses
        row |= {"loss": losses.loss, "kl": losses.reference_kl, "k3": losses.k3, "ess": losses.ess_ratio}
        row |= {f"lag_{name}": part.tokens for name, part in losses.by_lag.items()}
        rows.append(row | {"counted": losses.tokens, "rollouts": losses.sequences})
    return rows


def digests(client: GrpoClient, mesh: Mesh | None = None) -> list[str]:
    """Of the segments of a snapshot, which are so small here that each rank has some; each rank reads its own."""
    mesh = mesh or Mesh()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "SEGMENT_BYTES", 256)
        lent = client.save_weights_for_sampler()
        lent.release()
        extents = segments.cut_stream(segments.tensor_index(lent.tensors))
    first, step = share_of(mesh.rank, mesh.size)
    reads = list(segments.readers(lent.tensors, extents))[first::step]
    mine = json.dumps([blake3(read()).hexdigest() for read in reads]).encode()
    parts = [json.loads(part) for part in mesh.gather(mine)]
    assert all(parts)
    return [parts[number % step][number // step] for number in range(len(extents))]


def adapted(where: Path, mesh: Mesh | None = None) -> GrpoClient:
    """Of a new adapter over the model; its reference is the model itself."""
    base = load_base(str(where / "model"), "cpu", mesh)
    return GrpoClient(base.adapter(LoraConfig(rank=4), seed=1), OPTIONS, mesh=mesh)


def replayed(where: Path, mesh: Mesh | None = None, is_on: bool = True) -> list[float]:
    """Norms of a mixture's gradients: of groups with routes, of some without, and of too few for every rank."""
    options = config_of(routing_replay=is_on, tokens_per_microbatch=60, lr=1e-3)
    client = GrpoClient(load_policy(str(where / "mixture"), "float32", "cpu", mesh), options, mesh=mesh)
    norms = []
    for seed in range(2):
        first, _, last = mixture_cases.groups_of(seed)
        client.forward_backward([first, mixture_cases.groups_of(seed, with_routes=False)[1]])
        client.forward_backward([replace(last, rollouts=last.rollouts[:1], routes=b"")])
        norms.append(client.optim_step().grad_norm)
    return norms


def taught(where: Path, mesh: Mesh | None = None) -> list[float]:
    """Norms of gradients with teachers, and how far the policy is from them: the model's twin, held and behind an
    endpoint that only the first rank can reach, and the model itself as it is now, from another prompt."""
    twin = load_policy(str(where / "twin"), "float32", "cpu")
    with teacher_standin(twin.module, TEXTS) as standin:
        return taught_by({"twin": str(where / "twin"), "asked": standin.url, "own": "self"}, where, mesh)


def taught_by(teachers: dict[str, str], where: Path, mesh: Mesh | None) -> list[float]:
    """See `taught`."""
    found = []
    if mesh is not None and mesh.rank:
        teachers["asked"] = "http://127.0.0.1:1/v1"
    for form in ({}, {"top_k": 5, "beta": 0.5}):
        options = config_of(lr=3e-3, tokens_per_microbatch=80, teacher=teachers, divergence=form)
        client = GrpoClient(load_policy(str(where / "model"), "float32", "cpu", mesh), options, mesh=mesh)
        for step in range(2):
            for call in groups_of(step):
                hows = Teaching("twin"), Teaching("own", array("i", [9, 8])), Teaching("asked")
                of = [hows[one.group.number % 3] for one in call]
                client.forward_backward([replace(one, teaching=how) for one, how in zip(call, of, strict=True)])
            done = client.optim_step()
            found += [done.grad_norm, *(done.taught[name].log_ratio for name in sorted(done.taught))]
        if client.teachers is not None:
            client.teachers.close()
    return found


def trained_and_resumed(client: GrpoClient, mesh: Mesh, where: Path) -> dict[str, Any]:
    """Train, save, load what one process saved, save that, and train on; what was found on the way."""
    found: dict[str, Any] = {"first": digests(client, mesh), "rows": train(client, range(STEPS))}
    found["last"] = digests(client, mesh)
    client.save_state(where / "of_all", lineage=1, cursor=9).result()
    found["position"] = client.load_state(where / "of_one").version
    found["loaded"] = digests(client, mesh)
    client.save_state(where / "of_one_by_all", lineage=2, cursor=5).result()
    found["resumed_rows"] = train(client, range(5, 7))
    data = [datum for group in groups_of(3)[0] for datum in data_of(group)]
    found["logprobs"] = [list(logp) for logp in client.trainer.forward("the policy", data)]
    return found


def two_ranks(directory: str, rank: int) -> None:
    """What each of the two processes does; the first writes down what it found."""
    where, found = Path(directory), dict[str, Any](is_loaded_before="torch.distributed.fsdp" in sys.modules)
    mesh = join(Place(rank, 2, rank, (where / "store").as_uri()), torch.device("cpu"))
    found["words"] = [mesh.broadcast(b"word" if rank == 0 else b"").decode(), mesh.broadcast().decode()]
    found["gathered"] = [data.decode() for data in mesh.gather(b"x" * rank)] + [str(mesh.gather(b""))]
    with pytest.raises(UserError, match="can be cut into 1 parts at most") as refused:
        mesh.shard(torch.nn.Linear(3, 1))
    found["refused"] = str(refused.value)

    model = str(where / "model")
    policy = load_policy(model, "float32", "cpu", mesh)
    client = GrpoClient(policy, replace(OPTIONS, model=replace(OPTIONS.model, path=model)), mesh=mesh)
    found |= trained_and_resumed(client, mesh, where)

    client = adapted(where, mesh)
    found["adapter_rows"] = train(client, range(3))
    client.save_state(where / "adapter").result()
    found["adapter"] = digests(client, mesh)
    found["routed"] = replayed(where, mesh)
    found["taught"] = taught(where, mesh)
    if rank == 0:
        (where / "found.json").write_text(json.dumps(found))
    mesh.leave()


def in_processes(work: Callable[[str, int], None], num_ranks: int, where: Path) -> dict[str, Any]:
    """Run `work` with the directory and its rank in so many processes; what the first wrote down."""
    code = textwrap.dedent(f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
        from {work.__module__} import {work.__name__}
        {work.__name__}({str(where)!r}, int(sys.argv[1]))
    """)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    errors = [rank.communicate(timeout=1500)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(errors)
    found: dict[str, Any] = json.loads((where / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where two ranks worked, and what the first wrote down."""
    where = tmp_path_factory.mktemp("ranks")
    model = write_tokenizer(model_directory(where / "model"))
    client = GrpoClient(load_policy(str(model), "float32", "cpu"), OPTIONS)
    train(client, range(5))
    client.save_state(where / "of_one", lineage=2, cursor=5).result()
    mixture_cases.mixture().save_pretrained(where / "mixture")
    write_tokenizer(model_directory(where / "twin", seed=7))
    return where, in_processes(two_ranks, 2, where)


def fresh(where: Path) -> GrpoClient:
    return GrpoClient(load_policy(str(where / "model"), "float32", "cpu"), OPTIONS)


def test_losses_norms_and_counts_are_those_of_one_process(pair: tuple[Path, dict[str, Any]]) -> None:
    where, found = pair
    expected = train(fresh(where), range(STEPS))
    for mine, theirs in zip(expected, found["rows"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)
    assert len({row["norm"] for row in expected}) == STEPS


def test_teachers_say_the_same_to_two_ranks(pair: tuple[Path, dict[str, Any]]) -> None:
    where, found = pair
    assert found["taught"] == pytest.approx(expected := taught(where), rel=1e-4)
    assert len(expected) == 16
    assert min(map(abs, expected)) > 0.1


def test_a_snapshot_has_the_bytes_of_one_process(pair: tuple[Path, dict[str, Any]]) -> None:
    where, found = pair
    client = fresh(where)
    assert found["first"] == digests(client)
    client.load_state(where / "of_all")
    assert found["last"] == digests(client) != found["first"]


def test_one_process_goes_on_where_two_were_and_two_where_one_was(pair: tuple[Path, dict[str, Any]]) -> None:
    """The same files, bit for bit, moments too."""
    where, found = pair
    client = fresh(where)
    assert found["position"] == client.load_state(where / "of_one").version == 5
    assert found["loaded"] == digests(client)
    assert checkpoint.is_whole(where / "of_one_by_all")
    back = fresh(where)
    assert back.load_state(where / "of_one_by_all").cursor == 5
    back.save_state(where / "back", lineage=2, cursor=5).result()
    for path in (where / "of_one").iterdir():
        assert (where / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    for mine, theirs in zip(train(client, range(5, 7)), found["resumed_rows"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)
    data = [datum for group in groups_of(3)[0] for datum in data_of(group)]
    logprobs = [list(logp) for logp in client.trainer.forward("the policy", data)]
    for one, two in zip(logprobs, found["logprobs"], strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    names = {path.name for path in (where / "of_one_by_all").iterdir()}
    assert {"model.0-of-2.safetensors", "model.1-of-2.safetensors", "state.json", "chat_template.jinja"} <= names
    assert "model.safetensors" not in names


def test_one_process_goes_on_from_a_store_in_an_empty_directory_where_two_were(
    pair: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    where, found = pair
    objects = open_objects(str(tmp_path / "store"))
    checkpoint.upload(objects, where / "of_one_by_all")
    assert checkpoint.fetch(objects, tmp_path / "empty", STEPS) == 5
    client = fresh(where)
    assert client.load_state(tmp_path / "empty" / "step_5").version == 5
    assert digests(client) == found["loaded"]
    for mine, theirs in zip(train(client, range(5, 7)), found["resumed_rows"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)


def test_a_checkpoint_of_two_ranks_is_exported_as_one_model(pair: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    where, _ = pair
    copy_model(where / "of_one_by_all", tmp_path / "model")
    whole, expected = (load_file(at / "model.safetensors") for at in (tmp_path / "model", where / "of_one"))
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    assert not any("-of-" in path.name for path in (tmp_path / "model").iterdir())
    GrpoClient(load_policy(str(tmp_path / "model"), "float32", "cpu"), OPTIONS)
    (tmp_path / "model.1-of-2.safetensors").write_bytes((where / "of_all" / "model.1-of-2.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"no whole model\.safetensors"):
        copy_model(tmp_path, tmp_path / "torn")


def test_an_adapter_over_a_cut_model_is_that_of_one_process(pair: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    where, found = pair
    client = adapted(where)
    for mine, theirs in zip(train(client, range(3)), found["adapter_rows"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)
    client.save_state(tmp_path / "step_3").result()
    names = {path.name for path in (tmp_path / "step_3").iterdir()}
    assert names == {path.name for path in (where / "adapter").iterdir()}
    mine, theirs = (load_file(at / "adapter_model.safetensors") for at in (tmp_path / "step_3", where / "adapter"))
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], rtol=1e-4, atol=1e-6)
    client.load_state(where / "adapter")
    assert digests(client) == found["adapter"]


def test_ranks_replay_the_routes_that_one_process_replays(pair: tuple[Path, dict[str, Any]]) -> None:
    where, found = pair
    assert found["routed"] == pytest.approx(replayed(where), rel=1e-4)
    assert found["routed"] != pytest.approx(replayed(where, is_on=False), rel=1e-2)


def test_ranks_connect_and_surplus_ones_are_refused(pair: tuple[Path, dict[str, Any]]) -> None:
    _, found = pair
    assert found["words"] == ["word", ""]
    assert found["gathered"] == ["", "x", "[b'', b'']"]
    assert "learner.ranks = 2" in found["refused"]
    with pytest.raises(UserError, match=r"learner\.ranks = 9: a step has 8 rollouts"):
        config_of(ranks=9, groups_per_step=1)


def test_a_location_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() is None
    for name, value in Place(1, 2, 1, "file:///x").environment().items():
        monkeypatch.setenv(name, value)
    assert place() == Place(1, 2, 1, "file:///x")
    monkeypatch.delenv("ECHO2_RENDEZVOUS")
    assert place() == Place(1, 2, 1, "env://")


def test_one_process_needs_no_torch_distributed(pair: tuple[Path, dict[str, Any]]) -> None:
    assert not pair[1]["is_loaded_before"]
    assert Mesh().gather(b"x") == [b"x"]


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_every_datum_is_in_one_share_and_shares_are_about_equal(seed: int, num_ranks: int) -> None:
    rng = random.Random(seed)
    data = [datum for number in range(rng.randrange(5)) for datum in data_of(random_group(rng, number))]
    parts = shares(data, num_ranks)
    assert [datum for part in parts for datum in part] == data
    assert len(parts) == num_ranks
    lengths = [len(datum.prompt_tokens) + datum.num_inputs for datum in data]
    for part in parts:
        size = sum(len(datum.prompt_tokens) + datum.num_inputs for datum in part)
        assert abs(size - sum(lengths) / num_ranks) <= max(lengths, default=0)


@given(st.integers(0, 10**6))
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
