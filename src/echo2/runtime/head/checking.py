"""Sends strangers' groups to the owner's machines for checking, and collects the verdicts. `control/head/checks.py`
chooses the groups and acts on the verdicts.
"""

from __future__ import annotations

from echo2.config.engines import STREAM_ENGINES
from echo2.control.head import commands as do
from echo2.control.head import events as ev
from echo2.control.seeds import group_seed
from echo2.errors import InvariantError, PeerError, UserError
from echo2.printable import printable
from echo2.rollout.generate import assignment_of
from echo2.runtime.head.head import Head
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.types import GroupRef, Lease

#: Maximum characters of a verdict, which the ticket's history stores.
FAULT_CHARS_MAX = 300


async def send_check(head: Head, command: do.CheckGroup) -> None:
    """Send a group to the checking worker: its assignment, and the rollouts that were delivered."""
    try:
        data = head.ledger.rollouts(command.group.number)
    except InvariantError:  # a checkpoint covers the group, so its rollouts are deleted
        head.tell(ev.GroupChecked(command.worker_id, command.group, missed="its rollouts are not kept any more"))
        return
    config, group = head.config, messages.parse_group(data)
    if group.logged:
        head.tell(ev.GroupChecked(command.worker_id, command.group, missed="it comes from a log; nobody drew it"))
        return
    seconds = head.options.lease_seconds
    seed, size = group_seed(head.options.seed, group.group), len(group.rollouts)
    lease = Lease(0, group.group, group.step, group.cursor, size, 0, None, 0.0, seconds, seed)
    try:
        task = await head.tasks.task(group.group, group.cursor)
    except UserError as error:
        head.tell(ev.GroupChecked(command.worker_id, command.group, missed=str(error)))
        return
    turns = (config.tasks.environment, config.sampling.max_turns)
    assignment = assignment_of(lease, task, group.prompt_tokens, config.sampling_params, *turns)
    check = wire.Check(
        lease=messages.encode_assignment(assignment),
        group=data,
        ref=messages.encode_ref(command.ref),
        is_from_stream=command.is_from_stream,
    )
    head.order(command.worker_id, wire.Order(check=check))


async def report_check(head: Head, peer: Peer, report: wire.CheckReport) -> wire.Empty:
    """Pass a verdict to the planner, which knows whether it was requested."""
    group = GroupRef(messages.policy_id(report.policy), "train", messages.whole_number("number", report.number))
    if group.policy != head.options.policy:
        raise PeerError("malformed", f"a verdict on {group}; this run's policy is {head.options.policy}")
    await head.tell(
        ev.GroupChecked(
            peer.peer_id,
            group,
            messages.whole_number("num_tokens", report.num_tokens),
            printable(report.fault, FAULT_CHARS_MAX),
            printable(report.missed, FAULT_CHARS_MAX),
            messages.whole_number("num_skipped", report.num_skipped),
            messages.finite("surprise", report.surprise),
            messages.finite("variance", report.variance),
        )
    )
    return wire.Empty()


def draws_from_stream(head: Head, engine: str) -> bool:
    """Whether the worker's engine draws tokens with the head's random numbers."""
    return (head.config.workers.engine if engine == "auto" else engine) in STREAM_ENGINES
