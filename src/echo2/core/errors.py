"""Errors. The type says whose fault the error is.

* `UserError`: the user's mistake (a config key, a dataset row, a reward function, a full disk). It says what was wrong,
  the value, and what to do. The command line prints it as one line and exits with status 2.
  Its subclass `NoRoomError` means a full disk; a run waits for free space.
* `PeerError`: a stranger on the wire misbehaved (malformed, oversized, late, unauthenticated). It carries a
  short `reason` that is counted and shown; it never stops a run.
* `InvariantError`: a bug in echo2. The message describes what led to it.

Expected outcomes (a stale group, a duplicate result, an expired lease) are values with reasons, not exceptions.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class Echo2Error(Exception):
    """Base of everything raised on purpose by this package. A process that it ends has `exit_status`."""

    exit_status = 1


class UserError(Echo2Error, ValueError):
    """The user's mistake; the message says what was wrong, the value, and what to do."""

    exit_status = 2


class NoRoomError(UserError):
    """A disk is full. Recorded data is safe, and the caller may wait for free space and continue."""

    exit_status = 3


#: Free space would help.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_failed(error: OSError, message: str) -> UserError:
    """Return the error to raise when a file could not be written: `NoRoomError` if free space would help."""
    return (NoRoomError if error.errno in NO_ROOM else UserError)(message)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return "1 group", "2 groups". `plural`: where it is not the noun with an "s"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " Did you mean ...?" for the end of a `UserError` about an unknown word; empty if none is similar."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""


class PeerError(Echo2Error):
    """A peer broke the protocol.

    `reason` is one short word that is counted in the ledger and shown to people (for example ``malformed``).
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class LinkError(Echo2Error):
    """The other end is unreachable, closed the connection or missed a deadline; trying again may help."""


class InvariantError(Echo2Error, AssertionError):
    """A bug in echo2: an invariant is violated."""
