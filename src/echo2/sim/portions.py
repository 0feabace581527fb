"""The simulated head's way to put a group together that several workers sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from echo2.buffer import Ledger
from echo2.control import commands as do
from echo2.control import events as ev
from echo2.errors import InvariantError
from echo2.types import Portion, joined_names


def take(
    ledger: Ledger, command: do.AcceptDelivery, event: ev.GroupDelivered, payload: bytes, group_size: int
) -> tuple[Portion, bytes] | None:
    """The group, if this delivery completes it; else it is kept (as `runtime/portions.py`)."""
    number = event.group.number
    what = (command.first_sample, event.num_samples, event.worker_id, event.oldest_version, event.num_tokens)
    portion = Portion(number, *what)
    if not command.completes:
        ledger.keep_portion(portion, payload)
        return None
    if event.num_samples == group_size:
        return portion, payload
    return join(group_size, [*ledger.portions(number), (portion, payload)])


def join(group_size: int, parts: Sequence[tuple[Portion, bytes]]) -> tuple[Portion, bytes]:
    """A group from its portions; each attempt must be there once."""
    parts = sorted(parts, key=lambda part: part[0].first_sample)
    attempts = [n for one, _ in parts for n in range(one.first_sample, one.first_sample + one.num_samples)]
    number, versions = parts[0][0].number, [one.oldest_version for one, _ in parts]
    if attempts != list(range(group_size)):
        raise InvariantError(f"group {number} is complete with attempts {attempts} of {group_size}")
    names = joined_names(*(one.worker_id for one, _ in parts))
    whole = Portion(number, 0, group_size, names, min(versions), sum(one.num_tokens for one, _ in parts))
    return whole, hashlib.sha256(b"".join(payload for _, payload in parts)).digest()
