"""Makes an engine by its name. The names stand in `config/values.py`, each with a module that has a function
`make_engine(device, slots)` (a token server: `make_server(place, device, slots)`).
"""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module

from echo2.config.values import AUTO, ENGINES, FORMS, SERVERS, ServerPlace, refuse_unknown_engine
from echo2.core.errors import LinkError, UserError
from echo2.core.types import Snapshot
from echo2.engines.decode_loop import DEFAULT_SLOTS
from echo2.engines.engine import Engine
from echo2.engines.servers.engine import ServerEngine

log = logging.getLogger(__name__)

#: The default: the server runs in this Python, with temporary files.
NO_PLACE = ServerPlace()


def make_engine(name: str, device: str = "auto", slots: int = DEFAULT_SLOTS, place: ServerPlace = NO_PLACE) -> Engine:
    """Make the engine `name` on `device` (cpu | cuda | cuda:0 ... | auto), which decodes up to `slots` rollouts at a
    time. `place`: where a token server is. An engine's module is imported only here, since torch takes a second to
    import and transformers' models take three more.

    Raises:
        UserError: there is no such engine or device.
    """
    refuse_unknown_engine(name)
    module = import_module(ENGINES[name])
    if name in SERVERS:
        return ServerEngine(module.make_server(place, device, slots), slots, place.directory)
    form = [FORMS[name]] if name in FORMS else []
    engine: Engine = module.make_engine(device, slots, *form)
    return engine


async def load_or_replace(
    engine: Engine, snapshot: Snapshot, base: Snapshot | None, device: str
) -> tuple[Engine, float]:
    """Give a token server that nobody named its first weights. If it does not start, the engine `auto` takes its place.
    Return the engine with these weights, and the seconds that generation paused.

    Raises: as `Engine.update_weights`.
    """
    try:
        return engine, await engine.update_weights(snapshot, base)
    except (LinkError, UserError) as error:
        log.warning("no token server, although it is installed here: %s The engine %s takes its place", error, AUTO)
    await engine.close()
    other = await asyncio.to_thread(make_engine, AUTO, device, engine.slots)
    try:
        return other, await other.update_weights(snapshot, base)
    except BaseException:
        await other.close()
        raise
