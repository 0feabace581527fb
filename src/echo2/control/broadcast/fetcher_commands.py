"""The commands that a worker's fetcher can give to its driver."""

from __future__ import annotations

from echo2.control.broadcast.origin_events import Tally
from echo2.control.machine import Command as Command  # part of this module's vocabulary, too
from echo2.control.machine import WakeAt as WakeAt
from echo2.types import PayloadId


class RequestChunks(Command):
    """Ask this source for these chunks, in this order, in addition to what it was asked for before. It sends each as
    soon as it has it."""

    source: str
    payload: PayloadId
    chunks: tuple[bytes, ...]


class CancelRequests(Command):
    """End everything that is under way from this source."""

    source: str


class ReportSource(Command):
    """Tell the origin that this source was given up for this payload."""

    payload: PayloadId
    source: str
    failure: str


class PayloadWhole(Command):
    """Every chunk is stored: tell the relay, and the origin with what each source gave."""

    payload: PayloadId
    tallies: tuple[Tally, ...]


class PayloadGone(Command):
    """Not even the origin has it any more."""

    payload: PayloadId
