"""The process of `echo2 serve`: HTTP, keys and the store. The learner and the sampler are separate processes."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

from echo2.config.rundir import claimed
from echo2.core.devices import forbid_torch, require_torch
from echo2.core.errors import UserError
from echo2_service import tiny_model
from echo2_service.fleet.machines import LocalBackend
from echo2_service.fleet.server import FleetServer
from echo2_service.front.app import App
from echo2_service.front.database import Database, keys
from echo2_service.front.http_server import HttpServer, listening
from echo2_service.front.request_guard import SCOPES, ApiKeys
from echo2_service.settings import ServiceSettings, Tariff, load


def serve(config: Path, out: Path, port: int | None) -> int:
    """Serve until the process gets a signal to end. `port`: overrides the file's; 0: any free port.

    Raises:
        UserError: the settings are wrong, or the address is taken.
    """
    settings = load(config)
    require_torch()  # of the learner's and the sampler's processes
    forbid_torch()
    with claimed(out, "serve"):
        database = open_database(out, settings.database)
        first_key(out, database, ApiKeys(database, time.time))
        tariff, at = Tariff(settings.bills, config), settings.port if port is None else port
        asyncio.run(_serve(settings, tariff, out.absolute(), database, at))
    return 0


def open_database(out: Path, url: str = "") -> Database:
    """Open the service's store."""
    return Database(url or f"sqlite:///{out.absolute() / 'service.sqlite'}")


def first_key(out: Path, database: Database, api_keys: ApiKeys) -> None:
    """Write a key with all scopes to DIR/api-key, for the owner of the service, unless there is one."""
    path = out / "api-key"
    if path.exists() and database.count(keys):
        return
    text = api_keys.add_key("owner", SCOPES)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")


def base_directories(bases: dict[str, str], out: Path) -> dict[str, str]:
    """Return the directory or hub id of each base model; an empty path makes the tiny model.

    Raises:
        UserError: a name is not `owner/name`.
    """
    directories = {}
    for name, path in bases.items():
        parts = name.split("/")
        if len(parts) != 2 or not all(part.replace("-", "").replace(".", "").isalnum() for part in parts):
            raise UserError(f"bases: {name!r} must be owner/name, in letters, digits, '-' and '.'.")
        directory = out / "models" / name
        if not path:
            tiny_model.make(directory)
        directories[name] = path or str(directory)
    return directories


async def _serve(settings: ServiceSettings, tariff: Tariff, out: Path, database: Database, port: int) -> None:
    async with AsyncExitStack() as closing:  # in reverse order; each of them closes, whatever becomes of the others
        closing.callback(database.close)
        listener = closing.enter_context(listening(settings.host, port))
        backend = LocalBackend(base_directories(settings.bases, out), out / "backend", settings.device)
        closing.push_async_callback(backend.close)
        fleet = None
        if settings.fleet.listen:
            directories = {name: base.directory for name, base in backend.bases.items()}
            fleet = FleetServer(out, settings.fleet, directories, backend.samplers)
            closing.push_async_callback(fleet.close)
            await fleet.open()
        front = App(database, backend, out / "checkpoints", time.time, tariff, fleet=fleet.status if fleet else None)
        await HttpServer(front.asgi, front.requests.stop).serve([listener])
