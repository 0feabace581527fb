"""The example of an environment of one's own whose commands run in a container; and a container that there is not."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echo2
from agent_cases import AGENTS_TOKENIZER, ScriptedEngine, sampled, texts, trained
from container_cases import WITHOUT_IMAGES
from echo2.core.errors import UserError
from echo2.core.types import RolloutGroup
from echo2.engines.engine import RequestFailure
from echo2.sandbox.containers import VARIABLE, find_runtime
from echo2.sandbox.programs import ContainerFault
from echo2.tasks.loopback_model import LoopbackModel
from harness_cases import failure_of, group_of, played

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_shell.py"
ROW = {"text": "one\ntwo\nthree\n", "answer": "3"}


@pytest.fixture(autouse=True)
def unknown_runtime() -> Iterator[None]:
    find_runtime.cache_clear()
    yield
    find_runtime.cache_clear()


def outcome_of(*said: str) -> tuple[RolloutGroup | RequestFailure, ScriptedEngine]:
    """A group whose policy says these, one after the other."""
    spec = importlib.util.spec_from_file_location("own_shell", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    own_shell = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_shell)
    engine = ScriptedEngine(lambda prompt: said[prompt.count("<|im_start|>assistant") - 1])

    async def plays(model: LoopbackModel, rng: Any) -> Any:
        return await own_shell.Shell(ROW, 1).run(model)

    return played(engine, plays, AGENTS_TOKENIZER, 4000), engine


@WITHOUT_IMAGES
@pytest.mark.parametrize(("program", "reward"), [("wc -l", 1.0), ("wc -c", 0.0)])
def test_commands_of_an_own_environment_run_in_a_container(
    runtime: str, program: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, runtime)
    commands = (f"{program} < names.txt > made", "cp made answer.txt; kill -9 -1", "test -e made && cat made")
    outcome, engine = outcome_of(*(f"```bash\n{one}\n```" for one in commands), "Done.")
    group = group_of(outcome)
    assert trained(group) == sampled(engine.heard)
    for rows, own in zip(group.by_rollout, texts(group), strict=True):
        assert [row.reward_parts for row in rows] == [{"environment": reward}]
        assert ("[exit status 0]" in own[0], "3\n[exit status 0]" in own[0]) == (True, bool(reward))


def test_an_image_that_does_not_exist_loses_the_rollout_with_what_the_runtime_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As podman 4.3 says it."""
    (tmp_path / "podman").write_text(
        """#!/bin/sh
case $1 in
  pull) echo 'Error: initializing source docker://debian:stable-slim: reading manifest: unknown' >&2; exit 125;;
  image) exit 1;;
esac
"""
    )
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv(VARIABLE, "podman")
    failure = failure_of(outcome_of("Done.")[0])
    assert failure.reason == "environment_failed"
    assert "`podman pull --quiet` failed with status 125" in failure.detail
    assert "docker://debian:stable-slim" in failure.detail

    async def without_an_image() -> None:
        async with echo2.container():
            pass

    with pytest.raises(UserError, match="podman needs an image"):
        asyncio.run(without_an_image())
    monkeypatch.setenv(VARIABLE, "none")
    find_runtime.cache_clear()
    with pytest.raises(ContainerFault, match="must be one of podman"):
        asyncio.run(without_an_image())
