"""The stream of orders to a worker: orders one by one, and all waiting leases in one message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from echo2.control.head import events as ev
from echo2.errors import UserError
from echo2.rollout.generate import assignment_of
from echo2.runtime.head.head import Head
from echo2.runtime.head.presence import Presence
from echo2.sandbox.plugins import traceback_of
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.types import Lease


async def orders(head: Head, presence: Presence) -> AsyncIterator[wire.Order]:
    """Yield the orders in the worker's outbox, until None ends it."""
    while (item := await presence.outbox.get()) is not None:
        if isinstance(item, wire.Order):
            yield item
            continue
        if item is presence.unsent:
            presence.unsent = None  # leases granted from now on go into another message
        batch = await _batch(head, item)
        if batch.leases:
            yield wire.Order(leases=batch)


async def _batch(head: Head, leases: Sequence[Lease]) -> wire.LeaseBatch:
    """Return the message with these leases. Groups whose task is unfit are reported to the planner and left out."""
    batch = wire.LeaseBatch()
    for lease in leases:
        try:
            batch.leases.append(await _assignment(head, lease))
        except UserError as error:
            head.tell(ev.GroupUnfit(lease.group, "bad_task", str(error), traceback=traceback_of(error)))
    return batch


async def _assignment(head: Head, lease: Lease) -> wire.Lease:
    config, kind = head.config, lease.group.kind
    task = await head.tasks.task(lease.group, lease.cursor)
    params = config.sampling_params if kind == "train" else config.eval_params
    turns = (config.tasks.environment, config.sampling.max_turns)
    return messages.encode_assignment(assignment_of(lease, task, head.reader.prompt(kind, task), params, *turns))
