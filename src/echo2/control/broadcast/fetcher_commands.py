"""The commands that a worker's fetcher can give to its driver."""

from __future__ import annotations

from echo2.control.broadcast.origin_events import Tally
from echo2.control.machine import Command as Command  # part of this module's vocabulary, too
from echo2.control.machine import WakeAt as WakeAt
from echo2.types import PayloadId


class RequestChunks(Command):
    """Ask this source for these chunks, in this order, in addition to earlier requests. The source sends each chunk as
    soon as it has it."""

    source: str
    payload: PayloadId
    chunks: tuple[bytes, ...]


class CancelRequests(Command):
    """Cancel all open requests to this source."""

    source: str


class ReportSource(Command):
    """Tell the origin that this worker gave up this source for this payload."""

    payload: PayloadId
    source: str
    failure: str


class PayloadWhole(Command):
    """Every chunk is stored: tell the worker, and send the origin the tally of each source."""

    payload: PayloadId
    tallies: tuple[Tally, ...]


class PayloadGone(Command):
    """The origin no longer has this payload."""

    payload: PayloadId
