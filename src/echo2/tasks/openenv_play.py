"""Plays rollouts in an OpenEnv environment, in the Python that has OpenEnv's client (`harness_process.py`).

The environment is a server that runs independently. Each rollout opens a session there: `reset` with the arguments in
the task's column `reset`; then the policy writes actions and reads observations in turn, until the environment is done.
The rewards of the steps add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from echo2.tasks.loopback_model import LoopbackModel, OutOfRoomError

if TYPE_CHECKING:
    from echo2.tasks.loopback_model import Play


def make_play(base_url: str) -> Play:
    """Return a function that plays one rollout at this server. Columns of a row: `prompt_text` (text before the first
    observation), `reset` (arguments of the environment's `reset`), `action` (the action's field that takes the policy's
    text; empty: the text is the whole action, as JSON), `observation` (the observation's field that the policy reads;
    empty: the whole observation, as JSON).
    """
    from openenv import GenericEnvClient

    async def play(columns: Mapping[str, Any], seed: int, model: LoopbackModel) -> float:
        total = 0.0
        async with GenericEnvClient(base_url=base_url) as client:
            result = await client.reset(**columns.get("reset", {}))
            prompt = str(columns.get("prompt_text", "")) + _words(result.observation, columns)
            talk: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
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
    content = observation.get(name) if name and isinstance(observation, dict) else observation
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _action(text: str, columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the action in the policy's text. None: the text is not an action, and the rollout is over."""
    if name := columns.get("action", ""):
        return {name: text.strip()}
    try:
        action = json.loads(text)
    except ValueError:
        return None
    return action if isinstance(action, dict) else None
