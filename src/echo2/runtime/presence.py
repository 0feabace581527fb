"""What the head holds in memory of who is connected and of what is being judged."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from echo2.transport import wire_pb2 as wire
from echo2.types import RolloutGroup, SnapshotRef


@dataclass(slots=True)
class Presence:
    """What the head knows of an attending worker beyond what the planner needs."""

    outbox: asyncio.Queue[wire.Order | None]
    host: str
    pid: int
    engine: str
    device: str
    report: wire.WorkerReport
    installed: SnapshotRef | None = None
    reported_at: float = -math.inf


@dataclass(slots=True)
class LearnerPresence:
    """The connected learner and the stream of the step it waits for."""

    host: str
    pid: int
    device: str
    doing: str = ""
    feed: asyncio.Queue[wire.RolloutGroup | wire.StepDone] | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """A delivery that the planner is judging: decoded and checked, and as it is stored."""

    group: RolloutGroup
    payload: bytes
