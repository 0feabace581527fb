"""Groups whose attempts several workers sample: kept in the ledger until the last portion is in, then put together."""

from __future__ import annotations

from echo2.buffer import Ledger
from echo2.buffer.records import PortionRecord
from echo2.control import commands as do
from echo2.errors import PeerError
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.types import Lease, RolloutGroup, join_portions


def is_portion(lease: Lease, group_size: int) -> bool:
    """Whether the lease asks for some attempts of its group only."""
    return lease.group.kind == "train" and lease.num_samples < group_size


def take(
    ledger: Ledger, command: do.AcceptDelivery, group: RolloutGroup, payload: bytes
) -> tuple[RolloutGroup, bytes] | None:
    """The group and its stored form, if this delivery completes it; else it is kept."""
    number = group.group.number
    sizes = (len(group.rollouts), command.worker_id, group.oldest_version, group.num_tokens)
    portion = PortionRecord(number, command.first_sample, *sizes)
    if not command.completes:
        ledger.keep_portion(portion, payload)
        return None
    kept = ledger.portions(number)
    if not kept:
        return group, payload
    kept = sorted([*kept, (portion, payload)], key=lambda pair: pair[0].first_sample)
    whole = join_portions([_decode(data) for _, data in kept])
    return whole, messages.encode_group(whole).SerializeToString()


def check_siblings(ledger: Ledger, group: RolloutGroup) -> None:
    """A portion is to answer the same prompt as those that are in.

    Raises:
        PeerError: "malformed".
    """
    for _, data in ledger.portions(group.group.number)[:1]:
        if _decode(data).prompt_tokens != group.prompt_tokens:
            raise PeerError("malformed", "its prompt is not that of the other attempts of its group")


def _decode(data: bytes) -> RolloutGroup:
    return messages.decode_group(wire.RolloutGroup.FromString(data))
