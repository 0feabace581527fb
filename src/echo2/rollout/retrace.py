"""Repeats a rollout with its environment: other words are refused, and the rewards are those of the repetition.
Environments are deterministic, so this is possible.

The policy's turns are taken from the rollout's tokens by the rules of `turns.py`; whether they were honestly sampled is
not looked at here. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from echo2.errors import PeerError
from echo2.rollout.tokenizer import Tokenizer, decoded, reply_tokens
from echo2.rollout.turns import check_sum
from echo2.types import Reply, Rollout


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What ends a turn and a rollout. `ends`: tokens that end a turn; `stop`: the character that does (empty: none);
    `context`: tokens that the model can read (0: not known, and then a rollout may end after any turn).
    """

    tokenizer: Tokenizer
    ends: frozenset[int]
    stop: str
    is_chat: bool
    max_turns: int
    max_tokens: int
    context: int


async def retrace(
    rules: TurnRules,
    turn_tokens: int,
    prompt_tokens: int,
    rollout: Rollout,
    step: Callable[[str], Awaitable[Reply]],
) -> float:
    """The reward of a rollout, by asking the environment again with `step`. `turn_tokens`: the longest turn (0: any);
    `prompt_tokens`: how many the prompt has.

    Raises:
        PeerError: "malformed", the environment says something else, or the rollout did not end where it was over.
        UserError: the environment fails.
    """
    tokens, mask = rollout.tokens, rollout.loss_mask
    reward, turns, start = 0.0, 0, 0
    while True:
        end = _turn_end(rules, turn_tokens, prompt_tokens, rollout, start)
        action = decoded(rules.tokenizer, tokens[start:end])
        reply = await step(action.partition(rules.stop)[0] if rules.stop else action)
        reward, turns = reward + reply.reward, turns + 1
        check_sum(reward)
        if reply.done:
            _require(end == len(tokens), f"it goes on after turn {turns}, with which it was over")
            _require(rollout.finish == "stop", "it was over, and is said to be cut off")
            return reward
        said = reply_tokens(rules.tokenizer, rules.is_chat, reply.text, tokens[end - 1])
        is_cut = turns >= rules.max_turns or end + len(said) >= rules.max_tokens
        if end == len(tokens):
            is_full = not rules.context or prompt_tokens + end + len(said) >= rules.context
            _require(is_cut or is_full, f"it ends after turn {turns}, where it was not over")
            _require(rollout.finish == "length", "it was cut off, and is said to be over")
            return reward
        _require(not is_cut, f"it goes on after turn {turns}, where it was cut off")
        start = end + len(said)
        is_same = tokens[end:start] == said and not any(mask[end:start])
        _require(is_same and mask[start : start + 1] == b"\x01", f"the environment did not say this after turn {turns}")


def _turn_end(rules: TurnRules, turn_tokens: int, prompt_tokens: int, rollout: Rollout, start: int) -> int:
    """Where the turn ends that begins at `start`: behind an end token, at its longest, or before the next words of the
    environment's. It may say nothing, and then only the first two tell one turn from the next.
    """
    room = rules.max_tokens - start
    longest = min(room, turn_tokens or room, rules.context - prompt_tokens - start if rules.context else room)
    stretch = rollout.loss_mask.find(b"\x00", start)
    last = min(start + max(1, longest), len(rollout.tokens) if stretch < 0 else stretch)
    return next((at + 1 for at in range(start, last) if rollout.tokens[at] in rules.ends), last)


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PeerError("malformed", f"a rollout in an environment: {complaint}")
