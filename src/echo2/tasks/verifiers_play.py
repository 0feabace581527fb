"""Plays tasks of verifiers v1 tasksets, in the Python that has verifiers (`harness_process.py`, `verifiers_rows.py`).

A taskset's environment is served once in this process, and plays many rollouts at once. Its agents run in this process
too, by a chat loop of ours: verifiers' own start a script for each rollout and fetch its packages. Every agent's calls
go to the policy; where there are several agents, `agent` names the one whose conversation is trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from echo2.errors import UserError
from echo2.tasks.loopback_model import LoopbackModel
from echo2.tasks.verifiers_chat import HARNESS_ID, TOKENS, register

if TYPE_CHECKING:
    from echo2.tasks.harness_process import Play

#: Column of a task that says what to play.
COLUMN = "verifiers"
#: What the prompt of a row says where the taskset's has no text: the agent gets what the environment says.
NO_PROMPT = "-"
#: What the endpoint calls it.
CUT = "context_length_exceeded"


def make_play() -> Play:
    """What plays one rollout of a row of `rows`."""
    register()  # seconds of imports, before a rollout's time runs
    stages: dict[str, asyncio.Task[Any]] = {}
    stack = AsyncExitStack()

    async def play(columns: Mapping[str, Any], seed: int, model: LoopbackModel) -> tuple[float, list[int]]:
        row = columns[COLUMN]
        key = json.dumps([row["taskset"], row["agent"]], sort_keys=True)
        if key not in stages:
            stages[key] = asyncio.ensure_future(_stage(row["taskset"], stack))
        env = await asyncio.shield(stages[key])
        episode = await _episode(env, row["data"], model)
        return _outcome(episode, row["agent"])

    return play


def rows(taskset: Mapping[str, Any], agent: str, most: int) -> Iterator[dict[str, Any]]:
    """The taskset's first tasks as rows of a task source. `taskset`: its `id` and what else it is configured with."""
    env = load_env(taskset)
    for task, _ in zip(env.taskset.load(), range(most), strict=False):
        said = {"taskset": dict(taskset), "agent": agent, "data": task.data.model_dump(mode="json")}
        yield {"prompt": task.data.prompt_text or NO_PROMPT, COLUMN: said}


def load_env(taskset: Mapping[str, Any]) -> Any:
    """The taskset's environment, with every agent in this process.

    Raises:
        UserError: verifiers cannot load it.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type, load_environment

    register()
    try:
        config_type = env_config_type(str(taskset["id"]))
        names = agent_config_fields(config_type.model_construct())
        seat = {"harness": {"id": HARNESS_ID}, "runtime": {"type": "subprocess"}}
        return load_environment(config_type.model_validate({"taskset": dict(taskset), **dict.fromkeys(names, seat)}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"verifiers cannot load the taskset {dict(taskset)}: {error}") from error


async def _stage(taskset: Mapping[str, Any], stack: AsyncExitStack) -> Any:
    """A task of its own: what verifiers serves with is entered and left in one place."""
    env = load_env(taskset)
    await stack.enter_async_context(env.serving())
    return env


async def _episode(env: Any, data: dict[str, Any], model: LoopbackModel) -> Any:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.types import SamplingConfig

    # Its client for training renders messages to tokens itself, and reads sampled ones back as text. The endpoint
    # knows what it sampled, so messages go to it as they are.
    variable = f"ECHO2_ROLLOUT_{uuid4().hex}"
    # The rollout has a limit of its own, and on a busy machine a connection may take long.
    client = EvalClientConfig(base_url=model.base_url, api_key_var=variable, timeout={"connect": None})
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(data), env.config.taskset.task)
    (slot,) = env.slots(task)
    os.environ[variable] = model.api_key  # the one way in which it takes a key
    try:
        return await env.run_slot(slot, ModelContext(model=model.model, client=client, sampling=SamplingConfig()))
    finally:
        del os.environ[variable]


def _outcome(episode: Any, agent: str) -> tuple[float, list[int]]:
    """The trained agent's reward, and its conversation's tokens."""
    traces = [trace for trace in episode.traces if not agent or trace.agent.name == agent]
    if not traces and episode.errors:  # it failed before the agent had said anything
        raise _failure(episode.errors[-1])
    if len(traces) != 1:
        names = ", ".join(str(trace.agent.name) for trace in episode.traces) or "nobody"
        raise UserError(
            f"The episode has {len(traces)} traces of the agent {agent!r} (there are: {names}). Set tasks.params.agent."
        )
    (trace,) = traces
    if errors := [*episode.errors, *trace.errors]:
        if CUT in errors[-1].message and TOKENS in trace.info:
            return 0.0, trace.info[TOKENS]  # for want of room, and the environment cannot go on
        raise _failure(errors[-1])
    if len(trace.branches) != 1:
        raise UserError(f"The trace has {len(trace.branches)} branches, and a rollout is one conversation.")
    return float(trace.reward), trace.info[TOKENS]


def _failure(error: Any) -> UserError:
    return UserError(f"verifiers: {error.type}: {error.message}"[:2000])
