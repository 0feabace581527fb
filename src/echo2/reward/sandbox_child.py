"""The sandboxed scoring process (`python -m echo2.reward.sandbox_child`): only its forks run scorers on completions.

Each group is scored in a fork that has given up its rights (`sandbox/confinement.py`) and answers with one number a
completion; this process reads the numbers and never a completion. A completion on which the scorer hangs, dies or
raises scores 0: an answer that a scorer cannot read is wrong. After a hang or a death, the next completion gets a new
fork. Those that need long wait until the others are scored, and all of a group that hang or die share one budget of
time.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import psutil

from echo2.core.child import take_pipes
from echo2.core.errors import UserError
from echo2.reward import expressions, text_scorers
from echo2.reward.text_scorers import Score
from echo2.sandbox import confinement, pipes

# Seconds that a fork computes: a right answer is not wrong because others compute, too.
QUICK_SECONDS = 0.5  # limit for one completion while others of its group wait
COMPLETION_SECONDS = 5.0  # its limit when it is tried again after them
LOST_SECONDS = 10.0  # for the completions of a group that hang or die, together; then all that have no score yet get 0
CONFINE_SECONDS = 30.0
BUSY_FACTOR = 4.0  # so many seconds pass at most for each that a fork may compute: one that only waits ends, too
TOO_HARD = f"cannot read its column in {COMPLETION_SECONDS:g} s, or not within the memory of the sandbox"
UNREADABLE_COLUMN = "finds no mathematics that math-verify can read in the column 'answer'"

_NUMBER = struct.Struct("<d")
_READY = -1.0  # the first number of a fork, sent once it is confined
_UNREADABLE = -2.0  # instead of a score: the task's own column is at fault


def main() -> None:
    """Answer one request after the other until standard input ends."""
    logging.disable()  # math-verify warns of its missing time limit
    inbox, outbox = take_pipes()
    unconfined = confinement.missing()  # also for its imports, which a confined fork could not do
    while (message := pipes.read(inbox)) is not None:
        outbox.write(pipes.encode(_answer(message, unconfined)))
        outbox.flush()


def _answer(message: dict[str, Any], unconfined: str) -> dict[str, Any]:
    try:
        if unconfined:
            raise UserError(f"needs a sandbox, which this machine cannot provide: {unconfined}")
        if "texts" not in message:
            text_scorers.load(message["scorer"])
            return {}
        scorer = text_scorers.make_scorer(message["scorer"], message["column"])
        return {"scores": _scores(scorer, message["texts"])}
    except UserError as error:
        return {"failed": str(error)}
    except text_scorers.UnreadableColumn:
        return {"failed": f"{UNREADABLE_COLUMN}: {message['column']!r}"}
    except (ImportError, KeyError, TypeError, ValueError, SyntaxError) as error:
        return {"failed": f"cannot read its column: {type(error).__name__}: {error}"}


def _scores(scorer: Score, texts: Sequence[str]) -> list[float]:
    scores: list[float | None] = [None] * len(texts)
    lost = 0.0
    for seconds in (QUICK_SECONDS, COMPLETION_SECONDS):
        waiting = deque(place for place, score in enumerate(scores) if score is None)
        while waiting and lost < LOST_SECONDS:
            limit = min(seconds, LOST_SECONDS - lost)
            some_scores, is_dead, last_seconds = _scores_of_a_fork(scorer, [texts[place] for place in waiting], limit)
            for score in some_scores:
                scores[waiting.popleft()] = score
            if waiting:
                lost += last_seconds
                place = waiting.popleft()
                scores[place] = 0.0 if is_dead else None
    return [score or 0.0 for score in scores]


def _scores_of_a_fork(scorer: Score, texts: Sequence[str], limit: float) -> tuple[list[float], bool, float]:
    """Score texts in one fork. Return the scores of all texts, or those up to the text that ended the fork; whether it
    killed the fork (or else took longer than `limit`); and the seconds that this text took.
    """
    from_fork, to_parent = os.pipe()
    here = os.getpid()
    fork = os.fork()
    if fork == 0:
        _score_confined(scorer, texts, to_parent, here)
    os.close(to_parent)
    try:
        if _number(from_fork, CONFINE_SECONDS) != _READY:
            raise UserError("cannot run: the kernel refused the sandbox for its process; see the log")
        stopwatch = _Stopwatch(fork)
        number = _number(from_fork, 0.0) if stopwatch.waits_for(from_fork, COMPLETION_SECONDS) else None
        if number in (None, _UNREADABLE):
            raise UserError(TOO_HARD) if number is None else text_scorers.UnreadableColumn
        scores: list[float] = []
        while len(scores) < len(texts):
            stopwatch = _Stopwatch(fork)
            if not stopwatch.waits_for(from_fork, limit):
                return scores, False, stopwatch.seconds
            if (number := _number(from_fork, 0.0)) is None:
                return scores, True, stopwatch.seconds
            scores.append(number if 0.0 <= number <= 1.0 else 0.0)
        return scores, False, 0.0
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        os.close(from_fork)


class _Stopwatch:
    """The seconds that a fork computes from now on, or a part of those that pass, if that is more."""

    def __init__(self, fork: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._process, self._clock = psutil.Process(fork), clock
        self._computed, self._began = self._computing(), clock()

    @property
    def seconds(self) -> float:
        return max(self._computing() - self._computed, (self._clock() - self._began) / BUSY_FACTOR)

    def _computing(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def waits_for(self, pipe: int, limit: float) -> bool:
        """Return whether the fork sends something, or ends, before the limit."""
        while not select.select([pipe], [], [], seconds_left := max(0.0, limit - self.seconds))[0]:
            if not seconds_left:
                return False
        return True


def _number(pipe: int, seconds: float) -> float | None:
    """Read the next number; None if the fork sends none in time, or has ended."""
    if not select.select([pipe], [], [], seconds)[0]:
        return None
    data = os.read(pipe, _NUMBER.size)  # a fork writes 8 bytes at once
    return float(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else None


def _score_confined(scorer: Score, texts: Sequence[str], to_parent: int, parent: int) -> NoReturn:
    """Score the texts, in the fork. Never returns or raises: the calling code is the loop of the parent process."""
    try:
        confinement.confine(to_parent, parent)
        expressions.forbid_code()
        os.write(to_parent, _NUMBER.pack(_READY))
        for text in ("", *texts):  # the first reads the task's column, which no completion should pay for
            try:
                score = scorer(text)
            except text_scorers.UnreadableColumn:
                score = _UNREADABLE
            except Exception:
                # Some generators parse the answer without a guard (prime_factorization raises ValueError on a word).
                # Their own code made the entry, so an answer that they cannot read is wrong.
                score = 0.0
            os.write(to_parent, _NUMBER.pack(score if math.isfinite(score) else 0.0))
    except Exception:
        traceback.print_exc()  # reaches the parent's log if confinement failed; a confined fork has no log
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
