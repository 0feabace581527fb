"""Groups whose attempts several workers sample: kept in the ledger until the last portion is in, then put together."""

from __future__ import annotations

from echo2.buffer import Ledger
from echo2.control import commands as do
from echo2.control.groups import GroupRecord
from echo2.errors import PeerError
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import MESSAGE_BYTES_MAX
from echo2.types import Lease, Portion, RolloutGroup, join_portions, split_names

#: What a joined group needs beyond its portions: the names of all who sampled it.
NAMES_BYTES = 1 << 10


def is_portion(lease: Lease, group_size: int) -> bool:
    """Whether the lease asks for some attempts of its group only."""
    return lease.group.kind == "train" and lease.num_samples < group_size


def share(group: RolloutGroup, group_size: int) -> float:
    """How much of a group this result is."""
    num_samples = len(group.rollouts)
    return 1 if group.group.kind == "eval" or num_samples >= group_size else num_samples / group_size


def shares(record: GroupRecord) -> list[tuple[str, float]]:
    """Who delivered how much of a group so far."""
    names = split_names(record.worker_id)
    return [(name, 1 / max(len(names), record.num_portions)) for name in names]


def take(
    ledger: Ledger, command: do.AcceptDelivery, group: RolloutGroup, payload: bytes, group_size: int
) -> tuple[RolloutGroup, bytes] | None:
    """The group and its stored form, if this delivery completes it; else it is kept."""
    if not command.first_sample and len(group.rollouts) >= group_size:
        return group, payload
    number = group.group.number
    sizes = (len(group.rollouts), command.worker_id, group.oldest_version, group.num_tokens)
    portion = Portion(number, command.first_sample, *sizes)
    if not command.completes:
        ledger.keep_portion(portion, payload)
        return None
    kept = sorted([*ledger.portions(number), (portion, payload)], key=lambda pair: pair[0].first_sample)
    whole = join_portions([_decode(data) for _, data in kept])
    return whole, messages.encode_group(whole).SerializeToString()


def check_size(num_bytes: int, num_samples: int, group_size: int) -> None:
    """A portion may take its share of what a whole group may.

    Raises:
        PeerError: "oversized".
    """
    most = (MESSAGE_BYTES_MAX - NAMES_BYTES) * num_samples // group_size
    if num_bytes > most:
        raise PeerError("oversized", f"{num_samples} of {group_size} attempts have {num_bytes} bytes; {most} allowed")


def _decode(data: bytes) -> RolloutGroup:
    return messages.decode_group(wire.RolloutGroup.FromString(data))
