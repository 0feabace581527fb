"""The commands that the origin's state machine can give to its driver.

A payload's distinct chunks, numbered 0.. in stream order, are dealt to `len(sources)` stripes: chunk i is of stripe
i % len(sources). A route names the source of each stripe; "" is the origin.
"""

from __future__ import annotations

from collections.abc import Mapping

from echo2.control.machine import Command as Command  # part of this module's vocabulary, too
from echo2.types import PayloadId

ORIGIN = ""


class SetRoutes(Command):
    """Tell this worker the source of each stripe from now on. `addresses`: of those sources that the worker dials
    itself; the other sources dial the worker (`DialPeer`).
    """

    worker_id: str
    payload: PayloadId
    sources: tuple[str, ...]
    addresses: Mapping[str, str]


class DialPeer(Command):
    """Tell this worker, which can't be dialled, to dial a peer that takes chunks from it."""

    worker_id: str
    peer_id: str
    address: str


class NameSuspect(Command):
    """A peer sent wrong bytes: warn the operator. No member takes chunks from this peer any more."""

    worker_id: str
    accused_by: str
