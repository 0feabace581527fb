"""What a fleet for TRL's trainer takes from its arguments, and what it refuses. The rest is foreign/test_trl.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo2 import config as configuration
from echo2.core.errors import Echo2Error, UserError
from echo2.trl import RolloutFleet

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(100)]


def trainer_arguments(**others: Any) -> SimpleNamespace:
    """Those of an AsyncGRPOConfig that are read; two ranks, 32 samples a weight sync."""
    values: dict[str, Any] = {
        "token_budget": 0,
        "max_staleness": 4,
        "repetition_penalty": 1.0,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "world_size": 2,
        "process_index": 0,
        "weight_sync_steps": 2,
        "num_generations": 8,
        "max_steps": -1,
        "num_train_epochs": 2.0,
        "seed": 7,
        "chat_template_kwargs": None,
        "max_completion_length": 99,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
    }
    return SimpleNamespace(**values | others)


def made(tmp_path: Path, *, rows: Any = ROWS, args: Any = None, **settings: Any) -> configuration.Config:
    fleet = RolloutFleet(
        "some/model", rows, "exact_match", args or trainer_arguments(), out=tmp_path / "run", **settings
    )
    assert fleet.run is not None
    return configuration.build(json.loads((fleet.run.rundir.inputs / "run.json").read_text()), "a test")


def test_the_run_follows_the_trainer(tmp_path: Path) -> None:
    config = made(tmp_path, snapshot_dtype="bfloat16")
    assert (config.schedule.groups_per_step, config.schedule.max_staleness, config.schedule.publish_every) == (4, 4, 1)
    assert (config.sampling.group_size, config.sampling.max_tokens, config.sampling.temperature) == (8, 99, 0.9)
    assert (config.run.seed, config.model.snapshot_dtype, config.learner.advantage) == (7, "bfloat16", "grpo")
    assert config.learner.ranks == 2
    assert config.run.max_steps == 2 * 100 / 4 + 2  # epochs * rows / groups, and what the trainer reads ahead


@pytest.mark.parametrize(("max_steps", "asked"), [(1, 3), (10, 7), (11, 8)])
def test_steps_are_weight_syncs(tmp_path: Path, max_steps: int, asked: int) -> None:
    assert made(tmp_path, args=trainer_arguments(max_steps=max_steps)).run.max_steps == asked


def test_rows_without_a_length_have_no_end(tmp_path: Path) -> None:
    assert made(tmp_path, rows=iter(ROWS)).run.max_steps > 100_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_budget": None}, r"token_budget = None.*Set it to 0"),
        ({"token_budget": 4096}, r"token_budget = 4096"),
        ({"max_staleness": 0}, r"max_staleness = 0.*1 or more"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty = 1.1"),
        ({"num_generations": 5}, r"has 32 samples.*not a multiple of args.num_generations = 5"),
    ],
)
def test_a_trainer_that_the_fleet_cannot_serve_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        made(tmp_path, args=trainer_arguments(**change))
    assert not (tmp_path / "run").exists()


def test_a_setting_that_follows_the_trainer_is_not_given_twice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sampling.max_tokens follows args.max_completion_length = 99"):
        made(tmp_path, max_tokens=12)


def test_other_ranks_write_nothing_and_have_no_run(tmp_path: Path) -> None:
    fleet = RolloutFleet("m", ROWS, "exact_match", trainer_arguments(process_index=1), out=tmp_path / "run")
    assert fleet.run is None
    assert not (tmp_path / "run").exists()


def test_weights_without_a_run_have_nowhere_to_go(tmp_path: Path) -> None:
    fleet = RolloutFleet("some/model", ROWS, "exact_match", trainer_arguments(), out=tmp_path / "run")
    with pytest.raises(UserError, match=r"Call init_weight_transfer\(\) first"):
        fleet.send_weights([])
    with pytest.raises(Echo2Error, match="asks for more rollouts"):
        fleet.check_health(300.0)
    fleet.stop()
    fleet.destroy()
