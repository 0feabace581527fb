"""The service's HTTP application: routes to endpoints, and the periodic cleanup."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Route

from echo2.background import spawn
from echo2.service.access import Doorkeeper
from echo2.service.accounts_api import AccountsApi
from echo2.service.backend import Backend
from echo2.service.bills import Bills
from echo2.service.cleaning import ARRIVING, Cleaning
from echo2.service.database import Database
from echo2.service.dispatch import Dispatcher
from echo2.service.entrance import Entrance
from echo2.service.requests_api import RequestsApi
from echo2.service.settings import Quotas
from echo2.service.storage import Storage
from echo2.service.unserved import UNSERVED, refusing
from echo2.service.work import Work

log = logging.getLogger(__name__)

#: Seconds between cleanups.
SWEEP_SECONDS = 10.0
ROOT = "/api/v1/"
NO_QUOTAS = Quotas()


class Front:
    """The application `app` over a database and a back end. `directory`: holds the checkpoints."""

    def __init__(
        self,
        database: Database,
        backend: Backend,
        directory: Path,
        clock: Callable[[], float],
        quotas: Quotas = NO_QUOTAS,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds since 1970, which may step; `ticks`: seconds that never do."""
        shutil.rmtree(directory / ARRIVING, ignore_errors=True)
        (directory / ARRIVING).mkdir(parents=True)
        self.database, self.clock = database, clock
        self.work = Work(database, backend, Storage(database, backend, directory, quotas), clock)
        self.bills = Bills(database, quotas)
        self.dispatcher = Dispatcher(database, self.work, self.bills, clock, ticks)
        self.cleaning = Cleaning(self.work, self.dispatcher, ticks)
        self.requests = RequestsApi(self.work, self.dispatcher)
        self.accounts = AccountsApi(self.work, self.dispatcher, self.bills, self.cleaning)
        self.entrance = Entrance(Doorkeeper(database, clock, ticks))
        self.app = Starlette(routes=self._routes(), lifespan=self._lifespan)

    def _routes(self) -> list[Route]:
        enter, training, accounts = self.entrance, self.requests, self.accounts
        checkpoint = "training_runs/{model}/checkpoints/{checkpoint:path}"
        posts = {
            "client/config": enter(accounts.config),
            "client/dynamic_config": enter(accounts.dynamic_config),
            "create_session": enter(accounts.create_session),
            "session_heartbeat": enter(accounts.heartbeat),
            "sessions/{session}/finish": enter(accounts.finish_session),
            "telemetry": enter(accounts.telemetry),
            "create_model": enter(training.create_model, "train"),
            "get_info": enter(accounts.get_info),
            "unload_model": enter(accounts.unload_model, "train"),
            "weights_info": enter(accounts.weights_info),
            "create_sampling_session": enter(training.create_sampling_session, "sample"),
            "asample": enter(training.sample, "sample"),
            "retrieve_future": enter(training.retrieve_future),
            "cancel_future": enter(training.cancel_future, "sample"),
            "copy_weights": enter(accounts.copy_weights, "train"),
            "adapters": enter(accounts.bring_adapter, "train", "ADAPTER_BYTES_MAX"),
            checkpoint + "/publish": enter(accounts.publish, "train"),
        }
        posts |= {
            kind: enter(handler, "train", limit, training.when_refused(kind))
            for kind, handler, limit in (
                ("forward_backward", training.forward_backward, "BODY_BYTES_MAX"),
                ("forward", training.forward, "BODY_BYTES_MAX"),
                ("optim_step", training.optim_step, "SMALL_BODY_BYTES_MAX"),
                ("save_weights", training.save_weights, "SMALL_BODY_BYTES_MAX"),
                ("save_weights_for_sampler", training.save_weights_for_sampler, "SMALL_BODY_BYTES_MAX"),
                ("load_weights", training.load_weights, "SMALL_BODY_BYTES_MAX"),
            )
        }
        gets = {
            "get_server_capabilities": enter(accounts.capabilities),
            "healthz": accounts.health,
            "samplers/{sampler}": enter(accounts.show_sampler),
            "sessions": enter(accounts.list_sessions),
            "sessions/{session}": enter(accounts.show_session),
            "training_runs": enter(accounts.list_runs),
            "training_runs/{model}": enter(accounts.show_run),
            "training_runs/{model}/checkpoints": enter(accounts.list_run_checkpoints),
            "checkpoints": enter(accounts.list_checkpoints),
            checkpoint + "/archive": enter(accounts.archive),
            "archives/{token}": accounts.fetch_archive,
            "usage": enter(accounts.show_usage),
            "estimate": enter(accounts.estimate),
        }
        routes = [
            Route(ROOT + path, enter(refusing(words), when_refused=training.when_refused(path)), methods=[verb])
            for (verb, path), words in UNSERVED.items()
        ]
        routes += [Route(ROOT + path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route(ROOT + path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
        routes.append(Route(f"{ROOT}{checkpoint}/publish", enter(accounts.unpublish, "train"), methods=["DELETE"]))
        routes.append(Route(f"{ROOT}{checkpoint}/ttl", enter(accounts.set_ttl, "train"), methods=["PUT"]))
        routes.append(Route(ROOT + checkpoint, enter(accounts.delete_checkpoint, "train"), methods=["DELETE"]))
        return routes

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.dispatcher.start()
        sweeper = spawn(self._sweep(), self._sweeping_ended)
        yield
        sweeper.cancel()
        await asyncio.gather(sweeper, return_exceptions=True)
        await self.dispatcher.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.sweep()

    def _sweeping_ended(self, error: Exception) -> None:
        log.error("nothing is cleaned up any more: restart the service", exc_info=error)

    async def sweep(self) -> None:
        """End silent sessions and waits for missing requests; delete expired checkpoints, old answers and files."""
        await self.cleaning.sweep(self.clock())
