"""Keeps a machine's stream of orders from the head open, and reopens it when it breaks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable

from echo2.core.errors import LinkError, PeerError, UserError
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link

log = logging.getLogger(__name__)

#: First and longest pause before reconnecting; doubled after each try.
RECONNECT_SECONDS = (0.2, 5.0)


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
    away_since, pause = time.monotonic(), RECONNECT_SECONDS[0]
    while True:
        try:
            async for order in link.stream("Attend", hello()):
                away_since, pause = 0.0, RECONNECT_SECONDS[0]
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
            reason, pause = str(error), RECONNECT_SECONDS[1]
        if is_leaving():
            return
        away_since = away_since or time.monotonic()
        if time.monotonic() - away_since > patience_seconds:
            raise LinkError(
                f"No head for {patience_seconds:.0f} s: {reason}. "
                "`echo2 doctor @TICKET` finds what is wrong on the way to it."
            )
        log.info("not connected (%s); trying again", reason)
        disconnected()
        await asyncio.sleep(pause)
        pause = min(2 * pause, RECONNECT_SECONDS[1])
