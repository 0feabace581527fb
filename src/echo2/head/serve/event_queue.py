"""Passes events to the driver, those that wait at the same moment together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from echo2.core.clock import Clock
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.ledger.books import Failures
from echo2.head.ledger.driver import Driver
from echo2.head.ledger.eventlog import EventLog
from echo2.head.serve.shutdown import RunEnd


class EventQueue:
    """All state changes of the run go through `tell` or `dispatch`. `log`: the file of events and commands."""

    def __init__(self, driver: Driver, log: EventLog, failures: Failures, end: RunEnd, clock: Clock) -> None:
        self._driver, self._failures, self._end, self._clock = driver, failures, end, clock
        self.log = log
        self._alive: dict[str, None] = {}
        self._waiting: list[tuple[ev.Event, asyncio.Future[list[do.Command]]]] = []

    def tell(self, event: ev.Event) -> asyncio.Future[list[do.Command]]:
        """Queue an event, to be handled together with other pending events. Return the planner's future answer: no
        commands once the run is over.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._handle_waiting)
        answer: asyncio.Future[list[do.Command]] = loop.create_future()
        self._waiting.append((event, answer))
        return answer

    def dispatch(self, event: ev.Event) -> list[do.Command]:
        """Let the driver handle an event at once. Return the planner's commands: none once the run is over.

        Raises:
            UserError: the ledger or the log can't be written.
            InvariantError: a command contradicts the ledger.
        """
        answer = self.tell(event)
        self._handle_waiting()
        return answer.result()

    def seen(self, worker_id: str) -> None:
        """Record that a worker is alive without news. The planner is told of all such workers together, every half
        heartbeat.
        """
        if not self._alive:
            seconds = self._driver.planner.options.heartbeat_seconds / 2
            asyncio.get_running_loop().call_later(seconds, self._tell_alive)
        self._alive[worker_id] = None

    def _tell_alive(self) -> None:
        alive, self._alive = self._alive, {}
        self.tell(ev.WorkersHeard(tuple(alive)))

    def _handle_waiting(self) -> None:
        """Handle all waiting events in one transaction and one write of the log."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        events = [event for event, _ in waiting]
        try:
            answers = self._handle(events) if self._end.outcome is None else [[] for _ in events]
        except Exception as error:
            self._end.fail(error)
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()  # marks it as retrieved: callers of `tell` may ignore the answer
            return
        for (_, answer), commands in zip(waiting, answers, strict=True):
            if not answer.done():
                answer.set_result(commands)

    def _handle(self, events: Sequence[ev.Event]) -> list[list[do.Command]]:
        try:
            answers = self._driver.handle_all(events, self._clock.now())
        finally:
            self.log.flush()
        for event, commands in zip(events, answers, strict=True):
            self._failures.see(event, commands)
        return answers
