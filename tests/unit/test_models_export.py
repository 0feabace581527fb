"""`echo2 export`: which weights it writes, in which dtype, and what it says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2.cli import main
from echo2.config import Config, to_json
from echo2.config.rundir import RunDir
from echo2.config.sections import LoraConfig
from echo2.engines.home_files import write_gguf, write_mlx
from echo2.learner.core.adapters import load_trained
from echo2.learner.core.model import load_policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.weights.format.model_files import read_base_model
from learner_cases import model_directory
from test_engines_home_files import model, needs_gguf


def run_of(path: Path, rank: int = 0, is_for_home: bool = False) -> RunDir:
    """A run over a tiny model with the checkpoint step_3; `rank`: of its adapter, 0 for none. `is_for_home`: the model
    has a tokenizer, and sizes that fit blocks."""
    base, rundir = model_directory(path / "base"), RunDir(path / "run")
    if is_for_home:
        module, snapshot = model("qwen3", "qwen2", {})
        module.save_pretrained(base)
        for name, data in snapshot.files.items():
            (base / name).write_bytes(data)
    rundir.path.mkdir()
    config = replace(Config(), model=replace(Config().model, path=str(base)), lora=LoraConfig(rank=rank))
    rundir.config.write_text(to_json(config))
    GrpoClient(load_trained(config, "cpu"), config).save_state(rundir.checkpoints / "step_3").result()
    return rundir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return run_of(tmp_path)


def exported(capsys: pytest.CaptureFixture[str], rundir: RunDir, to: Path, *flags: str) -> dict[str, Any]:
    """What `echo2 export --json` says."""
    assert main(["export", str(rundir.path), "--to", str(to), "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], rundir: RunDir, to: Path, *flags: str) -> str:
    assert main(["export", str(rundir.path), "--to", str(to), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_export_copies_the_stored_weights_and_reports_it(
    rundir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "model"
    said = exported(capsys, rundir, to)
    assert said == {"path": str(to), "step": 3, "kind": "model", "dtype": "float32", "bytes": size_of(to), "url": ""}
    name = "model.safetensors"
    assert (to / name).read_bytes() == (rundir.checkpoints / "step_3" / name).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_and_the_model_says_to_what(
    rundir: RunDir, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "model"
    assert exported(capsys, rundir, to, "--dtype", dtype)["dtype"] == dtype
    before, after = (load_file(at / "model.safetensors") for at in (rundir.checkpoints / "step_3", to))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], before[key].to(getattr(torch, dtype))) for key in before)
    assert json.loads((to / "config.json").read_text())["dtype"] == dtype
    assert load_policy(str(to), "stored", "cpu").dtype == getattr(torch, dtype)


def test_parts_of_several_ranks_are_rounded_too(
    rundir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = rundir.checkpoints / "step_3"
    whole = load_file(checkpoint / "model.safetensors")
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for key, tensor in whole.items():
        for half, rows in zip(halves, tensor.tensor_split(2), strict=True):
            half[key] = rows.contiguous()
    for rank, half in enumerate(halves):
        save_file(half, checkpoint / f"model.{rank}-of-2.safetensors")
    (checkpoint / "model.safetensors").unlink()
    said = exported(capsys, rundir, tmp_path / "model", "--step", "3", "--dtype", "bfloat16")
    assert said["dtype"] == "bfloat16"
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(after[key], whole[key].bfloat16()) for key in whole)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_and_what_they_are_merged_to_are_rounded_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = run_of(tmp_path, rank=2)
    adapter = exported(capsys, rundir, tmp_path / "adapter", "--dtype", "bfloat16")
    assert (adapter["kind"], adapter["dtype"]) == ("adapter", "bfloat16")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    stored = (rundir.checkpoints / "step_3" / "config.json").read_bytes()
    assert (tmp_path / "adapter" / "config.json").read_bytes() == stored  # it is of the base
    merged = exported(capsys, rundir, tmp_path / "whole", "--merged", "--dtype", "float16")
    assert (merged["kind"], merged["dtype"]) == ("model", "float16")
    base = load_policy(str(tmp_path / "base"), "float32", "cpu").state()
    whole = load_policy(str(tmp_path / "whole"), "stored", "cpu").state()
    assert all(torch.equal(whole[key], base[key].half()) for key in base)  # a new adapter changes nothing
    assert exported(capsys, rundir, tmp_path / "again", "--merged")["dtype"] == "float32"


def test_the_error_names_a_weight_that_does_not_fit_and_no_file_is_left(
    rundir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rundir.checkpoints / "step_3" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][1] = -1e6
    save_file(tensors, path)
    before = sorted(tmp_path.iterdir())
    said = refusal(capsys, rundir, tmp_path / "model", "--step", "3", "--dtype", "float16")
    assert said == (
        "error: model.norm.weight holds -1e+06, and float16 ends at 65504. Choose --dtype bfloat16, or leave --dtype "
        "out.\n"
    )
    assert sorted(tmp_path.iterdir()) == before
    exported(capsys, rundir, tmp_path / "model", "--step", "3", "--dtype", "bfloat16")


def test_leftovers_of_a_killed_export_are_not_exported(
    rundir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / ".model.partial"
    left.mkdir()
    (left / "half.safetensors").write_text("half")
    exported(capsys, rundir, tmp_path / "model")
    assert not (tmp_path / "model" / "half.safetensors").exists()


def test_a_full_disk_ends_an_export_in_one_line_with_the_status_of_a_full_disk(
    rundir: RunDir, full_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--dtype", "bfloat16"]):
        assert main(["export", str(rundir.path), "--to", str(full_disk / "out"), *flags]) == 3
        said = f"error: Cannot write {full_disk / 'out'}: No space left on device. Nothing was exported.\n"
        assert capsys.readouterr().err == said
        assert [one.name for one in full_disk.iterdir()] == ["filler"]


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@needs_gguf
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_is_merged_for_programs_at_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as the export of the merged model, in the forms of the engines."""
    rundir = run_of(tmp_path, rank=2, is_for_home=True)
    path = rundir.checkpoints / "step_3" / "adapter_model.safetensors"
    save_file({name: torch.full_like(tensor, 0.1) for name, tensor in load_file(path).items()}, path)
    exported(capsys, rundir, tmp_path / "whole", "--step", "3", "--merged")
    before = set(tmp_path.iterdir())
    for form, *flags in (("q8_0", "--gguf"), ("f16", "--gguf", "f16"), ("mlx-q4", "--mlx", "4")):
        said = exported(capsys, rundir, to := tmp_path / form, "--step", "3", *flags)
        assert (said["kind"], said["dtype"], said["bytes"]) == ("model", form, size_of(to))
        if form.startswith("mlx"):
            write_mlx(expected := tmp_path / "expected", read_base_model(tmp_path / "whole"), form, "bfloat16")
        else:
            (expected := tmp_path / f"expected-{form}").mkdir()
            write_gguf(expected / f"model-{form}.gguf", read_base_model(tmp_path / "whole"), form)
        assert files_of(to) == files_of(expected)
        before |= {to, expected}
    assert set(tmp_path.iterdir()) == before
    base = tmp_path / "base.gguf"
    write_gguf(base, read_base_model(tmp_path / "base"), "f16")
    assert base.read_bytes() != (tmp_path / "f16" / "model-f16.gguf").read_bytes()


def test_export_names_programs_that_can_run_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rundir, to = run_of(tmp_path, is_for_home=True), tmp_path / "a model"
    assert main(["export", str(rundir.path), "--to", str(to), "--mlx"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"run it: mlx_lm.chat --model '{to}'"


def test_forms_that_cannot_be_written_are_refused_and_nothing_is_left(
    rundir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    said = refusal(capsys, rundir, tmp_path / "model", "--gguf", "--dtype", "bfloat16")
    assert said == (
        "error: --dtype bfloat16 has no effect on a file for llama.cpp: --gguf names its form. Leave it out.\n"
    )
    assert "rows of 16 items" in refusal(capsys, rundir, tmp_path / "model", "--mlx", "4")
    with pytest.raises(SystemExit):
        main(["export", str(rundir.path), "--to", str(tmp_path / "model"), "--mlx", "--gguf"])
    assert "not allowed with argument" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
