"""The messages between the head and a reward process, and the reward process's side of them (`sandbox/child.py`).

    setup      {"functions", "timeout_seconds"}, answered {"is_async", "takes_tokens"}
    request    {"groups": [{"task", "rollouts"}, ...]}
    answer     {"groups": [...], "seconds": {function: seconds}}; of functions that are not asynchronous the first
               groups only, where these took `REQUEST_SECONDS`
               for each group {"scores": [[reward, parts], ...]} or {"failed": message, "traceback",
               "may_pass"}, which also stands for the score of a single rollout; and the "seconds" that it took

JSON keeps scores exactly: Python writes floats with all their digits.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echo2.config.values import weighted
from echo2.core.errors import UserError
from echo2.core.types import Message, Rollout, Task
from echo2.reward import sandbox
from echo2.reward.functions import RUN_TEXT
from echo2.reward.score import RewardFailure, Scorer
from echo2.sandbox.child import Handler, failed

#: Time that the groups of one request should take together, before which no group is left unscored.
REQUEST_SECONDS = 0.05


def group_message(
    task: Task, rollouts: Sequence[Rollout], texts: Sequence[str], has_tokens: bool = True
) -> dict[str, Any]:
    """The parts of a group that rewards can see: no logprobs, no versions, and tokens only if a function takes them
    (`has_tokens`). `texts`: those of the rollouts.
    """
    prompt = task.prompt if isinstance(task.prompt, str) else [asdict(message) for message in task.prompt]
    return {
        "task": {"cursor": task.cursor, "prompt": prompt, "columns": task.columns},
        "rollouts": [
            {"text": text, "finish": r.finish, "parts": dict(r.reward_parts)}
            | ({"tokens": r.tokens.tolist()} if has_tokens else {})
            for r, text in zip(rollouts, texts, strict=True)
        ],
    }


def group_of(message: dict[str, Any]) -> tuple[Task, list[Rollout]]:
    """The inverse of `group_message`; fields that were not sent are empty."""
    plain = message["task"]
    prompt = plain["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(Message(**item) for item in prompt)
    rollouts = []
    for one in message["rollouts"]:
        tokens = array("i", one.get("tokens", ()))
        rollout = Rollout(tokens, array("f"), b"", (), one["finish"], one["text"], reward_parts=one["parts"])
        rollouts.append(rollout)
    return Task(plain["cursor"], prompt, plain["columns"]), rollouts


def make_handler(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """Make the handler for `sandbox/child.py`, which scores the groups of a request.

    Raises:
        UserError: the functions cannot be loaded.
    """
    scorer, seconds = Scorer(setup["functions"]), setup["timeout_seconds"]
    for entry in setup["functions"]:
        if (name := weighted(entry)[1]) in RUN_TEXT:
            sandbox.shared().load(name)

    def score(request: dict[str, Any]) -> dict[str, Any]:
        until, groups = time.perf_counter() + REQUEST_SECONDS, list[dict[str, Any]]()
        for group in request["groups"]:
            if groups and time.perf_counter() > until:
                break
            groups.append(score_one(group))
        return {"groups": groups, "seconds": scorer.take_seconds()}

    def score_one(group: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            answer = _scores(scorer.score_each(*group_of(group)))
        except UserError as error:
            answer = _failed(error)
        return answer | {"seconds": time.perf_counter() - began}

    async def score_together(request: dict[str, Any]) -> dict[str, Any]:
        groups = await asyncio.gather(*map(score_one_async, request["groups"]))
        return {"groups": groups, "seconds": scorer.take_seconds()}

    async def score_one_async(group: dict[str, Any]) -> dict[str, Any]:
        task, rollouts = group_of(group)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(seconds):
                answer = _scores(await scorer.score_each_async(task, rollouts))
        except TimeoutError:
            problem = f"The reward functions took longer than {seconds:g} s for task {task.cursor}"
            answer = _failed(RewardFailure(f"{problem}. Make them faster, or raise reward.timeout_seconds."))
        except UserError as error:
            answer = _failed(error)
        return answer | {"seconds": time.perf_counter() - began}

    facts = {"is_async": scorer.is_async, "takes_tokens": scorer.takes_tokens}
    return (score_together if scorer.is_async else score), facts


def _scores(scored: Sequence[Rollout | RewardFailure]) -> dict[str, Any]:
    return {
        "scores": [
            _failed(one) if isinstance(one, RewardFailure) else [one.reward, dict(one.reward_parts)] for one in scored
        ]
    }


def _failed(error: UserError) -> dict[str, Any]:
    return failed(error) | {"may_pass": isinstance(error, RewardFailure) and error.may_pass}
