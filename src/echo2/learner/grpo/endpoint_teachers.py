"""The teachers of a run that are endpoints (`learner/link/teacher_endpoint.py`), asked from a thread of their own: the
training thread is busy.

A row is asked about when its group's rewards begin to be computed, of which the head tells, or when the group arrives.
So the answers come while rewards are computed and while the learner waits for other groups, or trains the step before.
In a step it is asked about once, however often the step comes to it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from echo2.core.background import close_all
from echo2.core.loop_thread import LoopThread
from echo2.engines.tokenizer import Tokenizer
from echo2.learner.link.teacher_endpoint import TeacherAnswer, TeacherEndpoint

#: What is asked: for which step, the teacher's name, the prompt that it reads, and the tokens after that with their
#: mask.
Question = tuple[int, str, "array[int]", "array[int]", bytes]


class EndpointTeachers:
    """`teachers`: endpoints by name. They begin to be greeted, with the policy's tokenizer. All methods are for any one
    thread at a time; `ask` is for any thread.
    """

    def __init__(self, teachers: Mapping[str, TeacherEndpoint], tokenizer: Tokenizer) -> None:
        self._teachers = teachers
        self._clocks = {name: _WorkClock() for name in teachers}
        self._answers: dict[tuple[int, str, bytes, bytes, bytes], Future[TeacherAnswer]] = {}
        self._guard = threading.Lock()
        self._thread = LoopThread("teachers")
        self._greeted = {name: self._thread.start(one.greet(tokenizer)) for name, one in teachers.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._teachers

    def max_positions(self, name: str) -> int | None:
        """Return how many tokens a teacher reads; None: any number, or it was not greeted yet."""
        return self._teachers[name].max_positions

    def ask(self, question: Question) -> Future[TeacherAnswer]:
        """Return what a teacher says of a row, now or later."""
        step, name, prompt, tokens, loss_mask = question
        key = step, name, prompt.tobytes(), tokens.tobytes(), loss_mask
        with self._guard:
            if key not in self._answers:
                self._answers[key] = self._thread.start(self._answer(name, prompt, tokens, loss_mask))
            return self._answers[key]

    def waits_for(self, questions: Iterable[Question], seconds: float) -> str:
        """Wait so long at most until all are answered, and all teachers greeted. Return why they are not yet, for
        people; empty: they are.

        Raises:
            UserError: a teacher can't teach the policy, or failed.
        """
        works: list[Future[Any]] = [*self._greeted.values(), *map(self.ask, questions)]
        done, waiting = wait(works, seconds)
        for work in done:
            work.result()
        if not waiting:
            return ""
        troubles = [one.trouble for one in self._teachers.values() if one.trouble]
        return troubles[0] if troubles else f"waiting for the teacher ({len(waiting)} of {len(works)} answers)"

    @property
    def num_rows(self) -> int:
        """How many rows are remembered."""
        return len(self._answers)

    def take_seconds(self, name: str) -> float:
        """Return for how long a teacher has had something to answer since the last call."""
        return self._clocks[name].take()

    def forget(self, step: int) -> None:
        """Forget the answers of a step, and of those before: it is over."""
        with self._guard:
            for key in [key for key in self._answers if key[0] <= step]:
                self._answers.pop(key).cancel()

    def close(self) -> None:
        """End what is under way, and close the connections."""
        self._thread.close(partial(close_all, *(teacher.close for teacher in self._teachers.values())))

    async def _answer(self, name: str, prompt: array[int], tokens: array[int], loss_mask: bytes) -> TeacherAnswer:
        await asyncio.shield(asyncio.wrap_future(self._greeted[name]))
        with self._clocks[name]:
            return await self._teachers[name].ask(prompt, tokens, loss_mask)


class _WorkClock:
    """Measures for how long at least one of several things is under way."""

    def __init__(self) -> None:
        self._num, self._since, self._seconds = 0, 0.0, 0.0
        self._guard = threading.Lock()

    def __enter__(self) -> None:
        self._change(1)

    def __exit__(self, *_: object) -> None:
        self._change(-1)

    def take(self) -> float:
        """Return the seconds since the last call."""
        self._change(0)
        with self._guard:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _change(self, by: int) -> None:
        with self._guard:
            now = time.monotonic()
            if self._num:
                self._seconds += now - self._since
            self._num, self._since = self._num + by, now
