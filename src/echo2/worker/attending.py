"""Keeps a machine's stream of orders from the head open, and reopens it when it breaks."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable

from echo2.core.errors import LinkError, PeerError, UserError
from echo2.core.retries import Retries
from echo2.core.types import Backoff
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link

log = logging.getLogger(__name__)

#: Pauses before reconnecting.
RECONNECT_SECONDS = Backoff(0.2, 5.0)


async def attended(
    link: Link,
    hello: Callable[[], wire.WorkerHello],
    patience_seconds: float,
    disconnected: Callable[[], None],
    is_leaving: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[wire.Order]:
    """Yield the head's orders, over as many streams as needed. `hello` returns the first message of each stream;
    `disconnected` is called when a stream has ended; no other stream follows if `is_leaving()` then.

    Raises:
        LinkError: the head was away for `patience_seconds`.
        PeerError: the head refused this machine.
        UserError: the run's owner revoked this machine.
    """
    retries = Retries(RECONNECT_SECONDS, patience_seconds)
    while True:
        at_least_seconds = 0.0
        try:
            async for order in link.stream("Attend", hello()):
                retries.succeeded()
                yield order
            reason = "the head ended the stream"
        except LinkError as error:
            reason = str(error)
        except PeerError as error:
            if error.reason == "revoked":
                raise UserError(
                    f"{error.detail} by the run's owner. Ask the owner for a new ticket, and use it with another "
                    "directory: --state DIR."
                ) from error
            if error.reason != "expelled":
                raise
            reason, at_least_seconds = str(error), RECONNECT_SECONDS.most_seconds
        if is_leaving():
            return
        if retries.failed():
            raise LinkError(
                f"No head for {patience_seconds:.0f} s: {reason}. "
                "`echo2 doctor @TICKET` finds what is wrong on the way to it."
            )
        log.info("not connected (%s); trying again", reason)
        disconnected()
        await retries.pause(at_least_seconds)
