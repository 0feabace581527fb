"""Logged rollouts: a task with the column `logged_rollouts` is replayed and not sampled.

Text is tokenised here, once, with the end token behind it. A logged token has no policy version. It counts as one of
the version that this worker holds, which is what the bookkeeping of leases needs; the group is marked `logged`, and no
metric takes that version for an age. What corrects for the difference between who made the log and who is trained is
the loss, by the behaviour logprobs:

    logged for each token        taken as they are
    not logged                   log of how often the log goes on with this token where it has come this far
    logged for the whole answer  the same, scaled so that they add up to what was logged
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from echo2.errors import UserError
from echo2.rollout.engine import Engine, RequestFailure, SampleRequest
from echo2.rollout.lockstep import Lockstep
from echo2.rollout.tokenizer import Tokenizer
from echo2.types import LOGGED_ROLLOUTS, Assignment, FinishReason, Rollout

#: The least probability that a logged token may have: smaller ones would be no choice but a misprint. As the wire's.
LEAST_LOGPROB = -100.0


def read_log(engine: Engine | Lockstep, tokenizer: Tokenizer, assignment: Assignment) -> list[Rollout] | RequestFailure:
    """The group of a task that carries its rollouts. Tokenises long texts: not for the event loop.

    Raises:
        UserError: the engine has no weights.
    """
    if engine.installed is None:
        raise UserError("The engine has no weights yet: update its weights before sampling.")
    column, lease = assignment.columns[LOGGED_ROLLOUTS], assignment.lease
    version, max_tokens = engine.installed.version, assignment.params.max_tokens
    try:
        rollouts = logged_rollouts(column, lease.num_samples, max_tokens, tokenizer, version)
    except UserError as error:
        return RequestFailure("log_unfit", str(error))
    return _refusal(engine, assignment, rollouts) or rollouts


def logged_rollouts(
    column: Any, num_samples: int, max_tokens: int, tokenizer: Tokenizer, version: int
) -> list[Rollout]:
    """The rollouts of a task's column, in the log's order: rewards go by place. They count as of this version.

    Raises:
        UserError: they are not what is asked for, or not what `tasks/logs.py` writes.
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
        tree = _Tree(column.get("answers") or {}, tokenizer)
        rollouts = [_rollout(entry, tree, tokenizer, version) for entry in logged]
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:  # of a class of one's own
        raise UserError(f"The column {LOGGED_ROLLOUTS!r} is not what `tasks/logs.py` writes: {error!r}.") from error
    longest = max(len(rollout.tokens) for rollout in rollouts)
    if longest > max_tokens:
        raise UserError(
            f"A logged rollout has {longest} tokens; sampling.max_tokens is {max_tokens}. Raise it, "
            "or leave the rollout out of the log."
        )
    return rollouts


def without_rewards(column: Any) -> Any:
    """The column as far as it takes to read it."""
    if not isinstance(column, Mapping) or not isinstance(column.get("rollouts"), list):
        return column  # no log: whoever reads it says so
    logged = [
        {name: value for name, value in one.items() if name != "reward"} if isinstance(one, Mapping) else one
        for one in column["rollouts"]
    ]
    return {**column, "rollouts": logged}


def _refusal(engine: Engine | Lockstep, assignment: Assignment, rollouts: Sequence[Rollout]) -> RequestFailure | None:
    """Why the model cannot read these rollouts: too long for its context, or no tokens of its own."""
    for rollout in rollouts:
        read = SampleRequest(assignment.prompt_tokens + rollout.tokens[:-1], 0, 0, assignment.params)
        if (failure := engine.refusal(read)) is not None:
            return replace(failure, detail=f"a logged rollout: {failure.detail}")
    return None


class _Tree:
    """How often the log goes on with each token, wherever it has come: counts of the prefixes of all its answers."""

    def __init__(self, answers: Mapping[str, int], tokenizer: Tokenizer) -> None:
        self._seen: Counter[tuple[int, ...]] = Counter()
        for text, count in answers.items():
            tokens = tuple(answer_tokens(text, tokenizer))
            for length in range(len(tokens) + 1):
                self._seen[tokens[:length]] += count

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The logprob of each token given those before it; zeros if the log was not counted."""
        path = [tuple(tokens[:length]) for length in range(len(tokens) + 1)]
        if not self._seen[path[-1]]:
            return [0.0] * len(tokens)
        counts = [self._seen[prefix] for prefix in path]
        return [math.log(after / before) for before, after in pairwise(counts)]


def answer_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a whole answer, the end token behind them where the tokenizer has one.

    Raises:
        UserError: there are none.
    """
    end = tokenizer.eos_token_id
    tokens = [*tokenizer.encode(text, add_special_tokens=False), *([] if end is None else [end])]
    if not tokens:
        raise UserError("A logged answer is empty, and the tokenizer has no end token.")
    return tokens


def _rollout(entry: Mapping[str, Any], tree: _Tree, tokenizer: Tokenizer, version: int) -> Rollout:
    finish: FinishReason = "stop"
    if "tokens" in entry:
        tokens, logprobs = list(entry["tokens"]), [float(value) for value in entry["logprobs"]]
        finish = "stop" if tokens[-1] == tokenizer.eos_token_id else "length"
        if max(tokens) >= len(tokenizer):
            raise UserError(f"The log has token {max(tokens)}; this model's tokenizer has {len(tokenizer)}.")
    else:
        tokens = answer_tokens(entry["completion"], tokenizer)
        logprobs = tree.logprobs(tokens)
        if "logprob" in entry:
            logprobs = _scaled(logprobs, float(entry["logprob"]))
    if not isinstance(entry.get("completion", ""), str):
        raise UserError(f"A logged completion must be text, got {entry['completion']!r}.")
    return Rollout(
        tokens=array("i", tokens),
        logprobs=array("f", [max(LEAST_LOGPROB, value) for value in logprobs]),
        loss_mask=b"\x01" * len(tokens),
        version_spans=((0, version),),
        finish=finish,
        text=entry.get("completion") or tokenizer.decode(tokens, skip_special_tokens=True),
    )


def _scaled(logprobs: list[float], total: float) -> list[float]:
    """The same shares, scaled to add up to `total`; equal shares if there was no visible choice."""
    found = math.fsum(logprobs)
    return [value * (total / found) for value in logprobs] if found else [total / len(logprobs)] * len(logprobs)
