"""Samples a batch of rollouts together and alone, turn by turn, as `run.deterministic` requires.

How an engine rounds depends on the shapes it computes with. In lockstep these depend on the rollouts alone: a turn
starts when every rollout that is not over has asked for one.
"""

from __future__ import annotations

import asyncio
from functools import partial

from echo2.rollout.engine import Engine, Outcome, RequestFailure, SampleRequest
from echo2.types import SnapshotRef


class Lockstep:
    """As much of an `Engine` as a rollout needs, for so many rollouts. Each calls `leave` once when it is over."""

    def __init__(self, engine: Engine, num_rollouts: int) -> None:
        self._engine, self._num_left = engine, num_rollouts
        self._asked: list[tuple[SampleRequest, asyncio.Future[Outcome]]] = []

    @property
    def installed(self) -> SnapshotRef | None:
        """See `Engine.installed`."""
        return self._engine.installed

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        """See `Engine.refusal`."""
        return self._engine.refusal(request)

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """See `Engine.submit`. Aborting one request leaves the others in the shapes they have."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._asked.append((request, future))
        self._start()
        return future

    def leave(self) -> None:
        """A rollout is over, or given up: the others wait for it no more."""
        self._num_left -= 1
        self._asked = [(request, future) for request, future in self._asked if not future.cancelled()]
        self._start()

    def _start(self) -> None:
        """Start one batch of the engine when no rollout is missing. It is aborted when nobody waits for any of it."""
        if not self._asked or len(self._asked) < self._num_left:
            return
        asked, self._asked = self._asked, []
        asked.sort(key=lambda each: (each[0].seed, each[0].sample))  # not in the order in which environments answer
        submitted = self._engine.submit_together([request for request, _ in asked])
        num_awaited = len(asked)

        def answered(_: asyncio.Future[Outcome]) -> None:
            nonlocal num_awaited
            num_awaited -= 1
            if num_awaited == 0:
                for future in submitted:
                    future.cancel()

        for (_, future), engines in zip(asked, submitted, strict=True):
            future.add_done_callback(answered)
            engines.add_done_callback(partial(_pass_on, future))


def _pass_on(to: asyncio.Future[Outcome], done: asyncio.Future[Outcome]) -> None:
    """Give the engine's answer to the rollout, if it still waits."""
    if to.done():
        return
    if done.cancelled():
        to.cancel()
    elif (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
