"""Makes an engine by its name. The names stand in `config/values.py`, each with a module that has a function
`make_engine(device, slots)` (a token server: `make_server(place, device, slots)`).
"""

from __future__ import annotations

from importlib import import_module

from echo2.config.values import ENGINES, SERVERS, ServerPlace, refuse_unknown_engine
from echo2.engines.decode_loop import DEFAULT_SLOTS
from echo2.engines.engine import Engine
from echo2.engines.servers.engine import ServerEngine

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
    engine: Engine = module.make_engine(device, slots)
    return engine
