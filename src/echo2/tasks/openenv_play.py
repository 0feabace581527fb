"""Plays rollouts in an OpenEnv environment, in the Python that has OpenEnv's client (`harness_process.py`).

The environment is a server that runs by itself. Each rollout opens a session there: `reset` with the task's columns as
far as they are named `reset`, then the policy writes an action and reads an observation, until it is done. The rewards
of the steps add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from echo2.tasks.loopback_model import LoopbackModel, OutOfRoomError

if TYPE_CHECKING:
    from echo2.tasks.harness_process import Play


def make_play(base_url: str) -> Play:
    """What plays one rollout at this server. Columns of a row: `prompt_text` (what the policy reads first, before the
    observation), `reset` (arguments of the environment's), `action` (the field of the action that the policy's text is;
    empty: its text is the action as JSON), `observation` (the field that the policy reads; empty: all of it, as JSON).
    """
    from openenv import GenericEnvClient

    async def play(columns: Mapping[str, Any], seed: int, model: LoopbackModel) -> float:
        total = 0.0
        async with GenericEnvClient(base_url=base_url) as client:
            result = await client.reset(**columns.get("reset", {}))
            said = str(columns.get("prompt_text", "")) + _words(result.observation, columns)
            talk: list[dict[str, Any]] = [{"role": "user", "content": said}]
            while not result.done:
                try:
                    message = await model.chat(talk)
                except OutOfRoomError:
                    break
                action = _action(message["content"], columns)
                if action is None:
                    break
                result = await client.step(action)
                total += float(result.reward or 0.0)
                talk += [message, {"role": "user", "content": _words(result.observation, columns)}]
        return total

    return play


def _words(observation: Any, columns: Mapping[str, Any]) -> str:
    name = columns.get("observation", "")
    found = observation.get(name) if name and isinstance(observation, dict) else observation
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _action(text: str, columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """None: what the policy wrote is no action, and the rollout is over."""
    if name := columns.get("action", ""):
        return {name: text.strip()}
    try:
        action = json.loads(text)
    except ValueError:
        return None
    return action if isinstance(action, dict) else None
