"""The base of all state machines: `handle(event, now) -> list[Command]`. Timers are commands and return as events.

Every subclass of `Event` and `Command` becomes a frozen dataclass through its base class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import dataclass_transform


@dataclass_transform(frozen_default=True)
class Event:
    """Base class of all events."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Tick(Event):
    """The timer set by `WakeAt` fired."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Command:
    """Base class of all commands. `cause`: the number of the event that led to it; `reason`: text for the operator."""

    cause: int
    reason: str

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class WakeAt(Command):
    """Send a `Tick` at this time (a later `WakeAt` replaces an earlier one)."""

    at: float


class StateMachine:
    """Base class of the machines: the number of the current event, the commands it caused so far, and one timer."""

    def __init__(self) -> None:
        self.num_events = 0
        self.out: list[Command] = []
        self._wake_at: float | None = None

    def begin(self, event: Event) -> None:
        """Start handling the next event."""
        self.num_events += 1
        self.out = []
        if isinstance(event, Tick):
            self._wake_at = None

    def emit(self, kind: type[Command], reason: str, **fields: object) -> None:
        """Add a command caused by the current event."""
        self.out.append(kind(cause=self.num_events, reason=reason, **fields))

    def wake_at(self, at: float, reason: str) -> None:
        """Ask for a `Tick` at this time, unless an earlier or equal one is already set."""
        if self._wake_at is None or at < self._wake_at:
            self._wake_at = at
            self.out.append(WakeAt(cause=self.num_events, reason=reason, at=at))
