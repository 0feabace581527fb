"""Logged rollouts: a task with the column `logged_rollouts` is replayed and not sampled.

Text is tokenised here, once, and the end token is appended. A logged token has no policy version. It is given the
version that this worker holds, because leases need one; the group is marked `logged`, so no metric computes staleness
from it. The loss corrects for the difference between the policy that wrote the log and the policy that is trained. It
uses the behaviour logprobs:

    logged for each token        used as they are
    not logged                   log of the share of logged answers with the same prefix that go on with this token
    logged for the whole answer  the same, scaled so that they add up to the logged value
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from echo2.core.errors import UserError
from echo2.core.types import LOGGED_ROLLOUTS, Assignment, FinishReason, Rollout
from echo2.engines.engine import RequestFailure, SampleRequest
from echo2.engines.tokenizer import Tokenizer, answer_ids, end_token, is_known
from echo2.rollouts.turns import Sampler
from echo2.transport.limits import LOGPROB_MIN


def read_log(engine: Sampler, tokenizer: Tokenizer, assignment: Assignment) -> list[Rollout] | RequestFailure:
    """Return the rollouts that a task carries. Tokenises long texts: do not call it in the event loop.

    Raises:
        UserError: the engine has no weights.
    """
    if engine.installed is None:
        raise UserError("The engine has no weights yet: update its weights before sampling.")
    column, lease, is_chat = assignment.columns[LOGGED_ROLLOUTS], assignment.lease, assignment.is_chat
    version, max_tokens = engine.installed.version, assignment.params.max_tokens
    try:
        rollouts = logged_rollouts(column, lease.num_samples, max_tokens, tokenizer, version, is_chat)
    except UserError as error:
        return RequestFailure("log_unfit", str(error))
    return _refusal(engine, assignment, rollouts) or rollouts


def logged_rollouts(
    column: Any, num_samples: int, max_tokens: int, tokenizer: Tokenizer, version: int, is_chat: bool
) -> list[Rollout]:
    """Return the rollouts in a task's column as of this version, in the log's order: rewards are matched by position.
    `is_chat`: the task's prompt is chat messages.

    Raises:
        UserError: their number or length does not fit, or the column is not in the format of `tasks/logs.py`.
    """
    if not isinstance(column, Mapping) or not isinstance(column.get("rollouts"), list):
        raise UserError(
            f"The column {LOGGED_ROLLOUTS!r} is reserved for logs: {{'rollouts': [...], 'answers': {{...}}}}."
        )
    logged = column["rollouts"]
    if len(logged) != num_samples:
        raise UserError(
            f"The row has {len(logged)} logged rollouts, and {num_samples} are asked for. Set "
            "tasks.params.rollouts to sampling.group_size. (A log cannot be evaluated on.)"
        )
    try:
        tree = _Tree(column.get("answers") or {}, tokenizer, is_chat)
        rollouts = [_rollout(entry, tree, tokenizer, version, is_chat) for entry in logged]
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:  # from a user's own class
        raise UserError(f"The column {LOGGED_ROLLOUTS!r} is not what `tasks/logs.py` writes: {error!r}.") from error
    longest = max(len(rollout.tokens) for rollout in rollouts)
    if longest > max_tokens:
        raise UserError(
            f"A logged rollout has {longest} tokens; sampling.max_tokens is {max_tokens}. Raise it, "
            "or leave the rollout out of the log."
        )
    return rollouts


def without_rewards(column: Any) -> Any:
    """Return the column without the rewards of its rollouts, which a sampler does not need."""
    if not isinstance(column, Mapping) or not isinstance(column.get("rollouts"), list):
        return column  # not a log: `logged_rollouts` reports it
    logged = [
        {name: value for name, value in one.items() if name != "reward"} if isinstance(one, Mapping) else one
        for one in column["rollouts"]
    ]
    return {**column, "rollouts": logged}


def _refusal(engine: Sampler, assignment: Assignment, rollouts: Sequence[Rollout]) -> RequestFailure | None:
    """Return why the model cannot read these rollouts (context too short, or unknown tokens), or None."""
    for rollout in rollouts:
        read = SampleRequest(assignment.prompt_tokens + rollout.tokens[:-1], 0, 0, assignment.params)
        if (failure := engine.refusal(read)) is not None:
            return replace(failure, detail=f"a logged rollout: {failure.detail}")
    return None


class _Tree:
    """Counts of the prefixes of all logged answers: how often the log goes on with each token after each prefix."""

    def __init__(self, answers: Mapping[str, int], tokenizer: Tokenizer, is_chat: bool) -> None:
        self._prefix_counts: Counter[tuple[int, ...]] = Counter()
        for text, count in answers.items():
            tokens = tuple(answer_tokens(text, tokenizer, is_chat))
            for length in range(len(tokens) + 1):
                self._prefix_counts[tokens[:length]] += count

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprob of each token given the tokens before it; zeros if this answer was not counted."""
        path = [tuple(tokens[:length]) for length in range(len(tokens) + 1)]
        if not self._prefix_counts[path[-1]]:
            return [0.0] * len(tokens)
        counts = [self._prefix_counts[prefix] for prefix in path]
        return [math.log(after / before) for before, after in pairwise(counts)]


def _ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer of the policy."""
    end = tokenizer.eos_token_id
    return tokenizer.model_ends or (() if end is None else (end,))


def answer_tokens(text: str, tokenizer: Tokenizer, is_chat: bool) -> list[int]:
    """Return the tokens of a whole answer, followed by the end token that the policy is to write, if there is one: in a
    chat another one than the tokenizer's may end a turn.

    Raises:
        UserError: the answer has no tokens.
    """
    end = end_token(tokenizer, _ends(tokenizer), is_chat)
    tokens = [*answer_ids(tokenizer, is_chat, text), *([] if end is None else [end])]
    if not tokens:
        raise UserError("A logged answer is empty, and the tokenizer has no end token.")
    return tokens


def _rollout(entry: Mapping[str, Any], tree: _Tree, tokenizer: Tokenizer, version: int, is_chat: bool) -> Rollout:
    finish: FinishReason = "stop"
    if "tokens" in entry:
        tokens, logprobs = list(entry["tokens"]), [float(value) for value in entry["logprobs"]]
        finish = "stop" if tokens[-1] in _ends(tokenizer) else "length"
        if unknown := [token for token in tokens if not is_known(tokenizer, token)]:
            raise UserError(f"The log has token {unknown[0]}, which this model's tokenizer does not have.")
    else:
        tokens = answer_tokens(entry["completion"], tokenizer, is_chat)
        logprobs = tree.logprobs(tokens)
        if "logprob" in entry:
            logprobs = _scaled(logprobs, float(entry["logprob"]))
    if not isinstance(entry.get("completion", ""), str):
        raise UserError(f"A logged completion must be text, got {entry['completion']!r}.")
    return Rollout(
        tokens=array("i", tokens),
        logprobs=array("f", [max(LOGPROB_MIN, value) for value in logprobs]),
        loss_mask=b"\x01" * len(tokens),
        version_spans=((0, version),),
        finish=finish,
        text=entry.get("completion") or tokenizer.decode(tokens, skip_special_tokens=True),
    )


def _scaled(logprobs: list[float], total: float) -> list[float]:
    """Scale the logprobs so that they add up to `total`; if all are 0, spread `total` evenly."""
    current_total = math.fsum(logprobs)
    return (
        [value * (total / current_total) for value in logprobs]
        if current_total
        else [total / len(logprobs)] * len(logprobs)
    )
