"""Models, adapters, checkpoints and ranks that do not fit together: one clear error from the command as it is typed.

A base model that differs by a byte is in `test_lora_real.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echo2 import config as configuration
from echo2.weights.format.model_files import model_files
from real_runs import REPOSITORY, Run

pytestmark = pytest.mark.timeout(600)
FEW = ("--run.max_steps=1", "--workers.count=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--lora.rank=-1"], "--lora.rank -1: expected `int` >= 0"),
        (["--lora.rank=0", "--lora.alpha=8"], "lora.rank = 0 trains the whole model: set lora.rank, or leave out"),
        (["--lora.rank=4", '--lora.targets=["nothing"]'], "lora.targets has 'nothing', and no linear layer of the"),
        (["--lora.rank=4", "--lora.targets=[]"], "lora.targets is empty: name linear layers"),
        (["--learner.ranks=65"], "learner.ranks = 65: a step has 64 rollouts"),
    ],
)
def test_settings_that_fit_no_model(sort_model: Path, tmp_path: Path, settings: list[str], words: str) -> None:
    assert words in Run(tmp_path / "run", sort_model, *settings).start().refused()


def other_size(model: Path, to: Path) -> Path:
    """A model of the same family, with more columns."""
    code = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
config.hidden_size *= 2
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[2])
"""
    subprocess.run([sys.executable, "-c", code, str(model), str(to)], check=True, capture_output=True)
    for name, data in model_files(model).items():
        if name != "config.json":
            (to / name).write_bytes(data)
    return to


@pytest.mark.slow
def test_an_adapter_of_another_base_model_and_one_of_another_size(sort_model: Path, tmp_path: Path) -> None:
    """The first names its base model, as ours do; the second a hub id, which says nothing of its bytes."""
    trained = Run(tmp_path / "trained", sort_model, *FEW, "--lora.rank=4")
    trained.start().finish()
    checkpoint = trained.out / "checkpoints" / "step_1"
    other = other_size(sort_model, tmp_path / "other")
    settings = (*FEW, "--lora.rank=4", f"--lora.path={checkpoint}")
    error = Run(tmp_path / "byte", other, *settings).start().refused()
    assert f"lora.path: {checkpoint} is an adapter over base-" in error
    assert "Name another adapter, or set model.path to the model that it was trained on" in error
    text = json.loads((checkpoint / "adapter_config.json").read_text())
    (checkpoint / "adapter_config.json").write_text(json.dumps(text | {"base_model_name_or_path": "some/model"}))
    error = Run(tmp_path / "size", other, *settings).start().refused()
    assert f"lora.path: {checkpoint} is an adapter of another model" in error


@pytest.mark.slow
def test_a_checkpoint_of_another_size(sort_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(sort_model, model)
    run = Run(tmp_path / "run", model, "--workers.count=1")
    run.start("--run.max_steps=1").finish()
    shutil.copytree(other_size(sort_model, tmp_path / "other"), model, dirs_exist_ok=True)
    error = run.start("--resume", "--run.max_steps=2").refused()
    assert "step_1 is a checkpoint of another model: its " in error
    assert "Set model.path back, or start another --out." in error


@pytest.mark.slow
def test_more_ranks_than_rows_under_torchrun(tmp_path: Path) -> None:
    """Four ranks, and no weight of the model has more than three rows."""
    code = """
import sys
from transformers import Qwen3Config, Qwen3ForCausalLM
sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 2)
heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1)
Qwen3ForCausalLM(Qwen3Config(vocab_size=3, max_position_embeddings=16, **sizes, **heads)).save_pretrained(sys.argv[1])
"""
    model, run = tmp_path / "model", tmp_path / "run"
    subprocess.run([sys.executable, "-c", code, str(model)], check=True, capture_output=True)
    run.mkdir()
    config = configuration.build({"model": {"path": str(model)}}, "test")
    (run / "config.json").write_text(configuration.to_json(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*torchrun, "-m", "echo2", "learner", str(run), "--ticket=none"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode, done.stderr
    assert len(errors) == 1, done.stderr
    assert "learner.ranks = 4: this model can be cut into 3 parts at most" in errors[0]
