"""Samples a batch of rollouts turn by turn, with nothing else in the engine, as `run.deterministic` requires.

The rounding of an engine depends on the shapes of its computation. In lockstep the shapes depend on these rollouts
only: a turn starts when every unfinished rollout has asked for it.
"""

from __future__ import annotations

import asyncio
from functools import partial

from echo2.rollout.engine import Engine, Outcome, RequestFailure, SampleRequest
from echo2.types import SnapshotRef


class Lockstep:
    """The part of an `Engine` that rollouts need, for `num_rollouts` of them. Call `leave` once for each that ends."""

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
        """See `Engine.submit`. Aborting one request does not change the shapes of the others' computation."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._asked.append((request, future))
        self._start()
        return future

    def leave(self) -> None:
        """A rollout has ended or was given up: the others no longer wait for it."""
        self._num_left -= 1
        self._asked = [(request, future) for request, future in self._asked if not future.cancelled()]
        self._start()

    def _start(self) -> None:
        """Start one batch once every rollout has asked. The batch is aborted when no rollout waits for a result."""
        if not self._asked or len(self._asked) < self._num_left:
            return
        asked, self._asked = self._asked, []
        asked.sort(key=lambda each: (each[0].seed, each[0].sample))  # the order in which rollouts ask must not matter
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
