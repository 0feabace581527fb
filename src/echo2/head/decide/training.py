"""Where the run stands: the learner's steps and what it waits for; and whether the run goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo2.core.types import Wait


@dataclass(slots=True)
class Training:
    """The learner's position. `version`: number of trained steps; `lineage`: grows each time the learner falls back.
    `wanted_step`: the step whose groups the learner waits for, since `wanted_since`; `has_all`: it has got them all.
    `took_over_at`: when the learner last fell back, or this head replaced an earlier one; -inf if neither happened.
    """

    version: int = 0
    lineage: int = 1
    checkpoint_version: int = -1
    oldest_kept: int = 0
    wanted_step: int | None = None
    wanted_since: float | None = None
    has_all: bool = False
    learner_joined: bool = False
    took_over_at: float = -math.inf

    def join(self) -> None:
        """The learner connected with the current version."""
        self.learner_joined, self.wanted_step = True, None

    def lose(self, now: float) -> None:
        """The learner is gone; from now on the head waits for it."""
        self.learner_joined, self.wanted_step, self.wanted_since = False, None, now

    def fall_back(self, version: int, now: float) -> None:
        """The learner is back at its checkpoint of `version`: the later steps are trained again."""
        self.version, self.lineage, self.took_over_at = version, self.lineage + 1, now
        self.checkpoint_version = min(self.checkpoint_version, version)

    def want(self, step: int, now: float) -> None:
        """The learner asks for the groups of this step."""
        self.wanted_step, self.wanted_since, self.has_all = step, now, False

    def end_step(self) -> None:
        """The learner has all groups of its step."""
        self.has_all, self.wanted_since = True, None

    def train(self) -> None:
        """The learner finished its step."""
        self.version, self.wanted_step = self.version + 1, None

    def save(self, version: int, oldest_kept: int) -> None:
        """A checkpoint is durable. Reports may come twice and out of order; only the newest counts."""
        self.checkpoint_version = max(self.checkpoint_version, version)
        self.oldest_kept = max(self.oldest_kept, oldest_kept)

    def replaces_weights(self, now: float) -> None:
        """A version is published again: workers may still have the earlier weights of that name."""
        self.took_over_at = now

    @property
    def open_step(self) -> int | None:
        """The step whose groups the learner lacks; None if it waits for none."""
        return None if self.has_all else self.wanted_step


@dataclass(slots=True)
class RunHealth:
    """Whether the run goes on. `over`: why it ended; `paused`: what keeps it from leasing and feeding groups; both None
    while it goes on. `num_failed`: groups that failed in a row; `num_failed_at_strangers`: those that only strangers
    failed, and `last_failure` why the last of them was given up.
    """

    over: str | None = None
    paused: Wait | None = None
    num_failed: int = 0
    num_failed_at_strangers: int = 0
    last_failure: str = ""

    def end(self, reason: str) -> bool:
        """End the run. Return False if it had ended before: the first reason counts."""
        is_first = self.over is None
        self.over = reason if is_first else self.over
        return is_first

    def pause(self, wait: Wait | None) -> None:
        """Pause the run because of this wait, or let it go on (None)."""
        self.paused = wait

    def succeed(self) -> None:
        """A group was scored, which ends every row of failures."""
        self.num_failed = self.num_failed_at_strangers = 0

    def fail(self) -> int:
        """The head or machines of the owner failed a group. Return how many in a row."""
        self.num_failed += 1
        return self.num_failed

    def fail_at_strangers(self, why: str) -> None:
        """Only strangers failed a group."""
        self.num_failed_at_strangers, self.last_failure = self.num_failed_at_strangers + 1, why
