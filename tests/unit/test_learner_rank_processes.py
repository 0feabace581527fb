"""What ranks do when one of them cannot go on: its process ends before the first has left, or the model computes on
none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo2.config import Config
from echo2.config.sections import LoraConfig
from echo2.core.errors import UserError
from echo2.engines.hub_layout import text_module
from echo2.learner.core.mesh import Place, join
from echo2.learner.grpo.teachers import _loaded as loaded_teacher
from echo2.learner.learner_process import _loaded
from learner_cases import model_directory
from test_engines_rope import tiny_config
from test_learner_ranks import in_processes

WATCH = """
import sys, threading
from echo2.core.child import ChildProcess
from echo2.learner.learner_process import _end_with_rank
for status in (0, 2):
    heard = threading.Event()
    def ended(status):
        _end_with_rank(1, threading.Event(), status)
        heard.set()
    ChildProcess([sys.executable, "-S", "-c", f"raise SystemExit({status})"], on_end=ended)
    heard.wait()
    print("goes on after", status, flush=True)
"""


def test_a_rank_that_was_released_ends_before_the_first_has_left() -> None:
    """The first may take longer: it waits for an encoding, or the head. Any other end ends the learner."""
    ended = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "goes on after 0\n"), ended.stderr


def config_of(path: Path, rank: int) -> Config:
    made = Config()
    return replace(made, model=replace(made.model, path=str(path)), lora=LoraConfig(rank=rank))


def load_on_ranks(directory: str, rank: int) -> None:
    """Load, one after the other, a model that computes, whole and with an adapter, and one that does not, as the policy
    and as a teacher."""
    where, said = Path(directory), dict[str, str]()
    for name, path, adapter_rank in (("whole", "model", 0), ("adapter", "model", 4), ("broken", "broken", 0)):
        mesh = join(Place(rank, 2, rank, (where / f"{name}-ranks").as_uri()), torch.device("cpu"), where)
        try:
            policy = _loaded(config_of(where / path, adapter_rank), "cpu", mesh)
            said[name] = "none" if policy is None else "loaded"
        except UserError as error:
            said[name] = str(error)
            continue
        if policy is None:
            continue
        if name == "whole":
            with pytest.raises(UserError) as refused:
                loaded_teacher(str(where / "broken"), policy, mesh)
            said["teacher"] = str(refused.value)
        mesh.leave()
    (where / f"said-{rank}.json").write_text(json.dumps(said))
    if not rank:
        (where / "found.json").write_text("{}")


@pytest.mark.timeout(900)
def test_a_model_whose_first_pass_fails_is_refused_on_ranks_as_on_one(tmp_path: Path) -> None:
    """By one of them: they would die one after the other at the first step, with a traceback each."""
    model_directory(tmp_path / "model")
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ropes["full_attention"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    text_module(tiny_config("gemma4_text", rope_parameters=ropes), torch.float32).save_pretrained(tmp_path / "broken")
    in_processes(load_on_ranks, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2))
    words = "transformers' Gemma4ForCausalLM cannot compute with what config.json says"
    assert (first["whole"], first["adapter"]) == (second["whole"], second["adapter"]) == ("loaded", "loaded")
    assert words in first["broken"]
    assert second["broken"] == "none", "the first has said it"
    assert first["teacher"].startswith("distill.teacher")
    assert words in first["teacher"]
