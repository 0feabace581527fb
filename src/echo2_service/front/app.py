"""The service's HTTP application: routes to endpoints, the SDKs' endpoints that are not served (with what to do
instead; the SDKs treat the refusal as final), and the periodic cleanup.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from echo2.core.background import Background
from echo2.core.errors import PeerError
from echo2_service.backend import Backend
from echo2_service.front.account import Account
from echo2_service.front.accounts_api import AccountsApi
from echo2_service.front.body_reader import BodyReader
from echo2_service.front.chat_api import ChatApi
from echo2_service.front.cleaning import ARRIVING, Cleaning
from echo2_service.front.curves import Curves
from echo2_service.front.database import Database
from echo2_service.front.dispatch import Dispatcher
from echo2_service.front.overview import NO_FLEET, Fleet, Overview
from echo2_service.front.pages import Pages
from echo2_service.front.request_guard import ApiKeys, Caller, Handler, RequestGuard, refused
from echo2_service.front.requests_api import RequestsApi
from echo2_service.front.usage import Bills, Storage
from echo2_service.front.work import Work
from echo2_service.settings import Quotas, Tariff

log = logging.getLogger(__name__)

_USAGE = "hours are not kept apart; GET /api/v1/usage tells tokens and dollars by kind of request."
_ARCHIVE = "nothing is written outside of the service; fetch GET .../checkpoints/NAME/archive, a PEFT adapter as tar."
_KEYS = "`echo2 keys DIR` on the service's machine lists, adds and revokes keys."
#: What to do instead, by method and path below /api/v1/.
UNSERVED = {
    ("POST", "auth/token"): "API keys are taken as they are: set TINKER_API_KEY to a tml- key.",
    ("GET", "auth/apikey/me"): _KEYS,
    ("DELETE", "auth/apikey/me"): _KEYS,
    ("GET", "audit"): "no audit log is kept.",
    ("GET", "billing/usage/events"): _USAGE,
    ("GET", "billing/usage/checkpoints/current"): "storage costs nothing; GET /api/v1/checkpoints tells sizes.",
    ("POST", "create_custom_loss"): "custom losses run in the client: call forward_backward_custom.",
    ("POST", "join_sampling_session"): "create a sampling session of the same path instead.",
    ("POST", "retrieve_futures"): "ask for one request at a time, by retrieve_future.",
    ("POST", "save_weights_external"): _ARCHIVE,
    ("GET", "training_runs/{model}/checkpoints/{checkpoint:path}/external_weights_urls"): _ARCHIVE,
    ("POST", "sessions/search"): "GET /api/v1/sessions lists your sessions, newest first.",
    ("PUT", "sessions/{session}/project"): "there are no projects; each tenant has keys of its own.",
    ("GET", "sessions/{session}/trace_export"): "traces are not recorded.",
}
#: Seconds between cleanups.
SWEEP_SECONDS = 10.0
ROOT = "/api/v1/"
#: Clients of OpenAI's form have it as their base URL.
OPENAI_ROOT = "/oai/api/v1/"
NO_QUOTAS = Quotas()


def refusing(words: str) -> Handler:
    """Return a handler that refuses with these words."""

    async def refuse(caller: Caller, request: Request, body: bytes) -> Response:
        raise PeerError("unsupported", f"{request.url.path} is not served here: {words}")

    return refuse


class App:
    """The application `asgi` over a database and a back end. `directory`: holds the checkpoints."""

    def __init__(
        self,
        database: Database,
        backend: Backend,
        directory: Path,
        clock: Callable[[], float],
        tariff: Tariff | None = None,
        ticks: Callable[[], float] = time.monotonic,
        fleet: Fleet | None = None,
    ) -> None:
        """`clock`: seconds since 1970, which may step; `ticks`: seconds that never do. `tariff`: None: no prices, no
        quotas. `fleet`: as `FleetServer.status`.
        """
        self.tariff = tariff or Tariff(NO_QUOTAS)
        shutil.rmtree(directory / ARRIVING, ignore_errors=True)
        (directory / ARRIVING).mkdir(parents=True)
        self.database, self.clock = database, clock
        self.work = Work(database, backend, Storage(database, backend, directory, self.tariff), clock)
        self.bills = Bills(database, self.tariff)
        self.bodies = BodyReader(directory / ARRIVING, directory.parent / "reader.log")
        self.curves = Curves(database, self.bills)
        self.dispatcher = Dispatcher(database, self.work, self.bills, self.curves, self.bodies, clock, ticks)
        self.cleaning = Cleaning(self.work, self.dispatcher, ticks)
        self.requests = RequestsApi(self.work, self.dispatcher, self.bodies)
        self.chats = ChatApi(
            self.work, self.dispatcher, self.requests, self.cleaning, directory.parent / "chat_tokens.log"
        )
        self.accounts = AccountsApi(self.work, self.dispatcher, self.bills, self.cleaning)
        self.account = Account(self.work, self.dispatcher, self.bills, self.curves, self.bodies)
        self.overview = Overview(database, self.work.storage, self.tariff, fleet or (lambda: NO_FLEET), clock)
        self.guard = RequestGuard(ApiKeys(database, clock, ticks))
        self.pages = Pages(self.guard)
        self.asgi = Starlette(routes=self._routes(), lifespan=self._lifespan)

    def _routes(self) -> list[Route]:
        enter, training, accounts = self.guard, self.requests, self.accounts
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
            "checkpoints/delete": enter(accounts.delete_checkpoints, "train"),
            "adapters": enter(accounts.bring_adapter, "train", "ADAPTER_BYTES_MAX"),
            checkpoint + "/publish": enter(accounts.publish, "train"),
        }
        numbered: dict[str, tuple[Handler, str]] = {
            "forward_backward": (training.forward_backward, "BODY_BYTES_MAX"),
            "forward": (training.forward, "BODY_BYTES_MAX"),
            "load_weights": (training.load_weights, "SMALL_BODY_BYTES_MAX"),
        }
        for kind in ("optim_step", "save_weights", "save_weights_for_sampler"):
            numbered[kind] = training.submitting(kind), "SMALL_BODY_BYTES_MAX"
        for kind, (handler, limit) in numbered.items():
            posts[kind] = enter(handler, "train", limit, training.when_refused(kind))
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
            "account": enter(self.account.show, to_browser=refused),
            "training_runs/{model}/steps": enter(self.account.curve, to_browser=refused),
            "samples": enter(self.account.samples, to_browser=refused),
            "owner": enter(self.overview.show, "owner", to_browser=refused),
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
        routes += [
            Route(OPENAI_ROOT + path, enter(handler, "sample", "CHAT_BYTES_MAX"), methods=[verb])
            for path, (verb, handler) in self.chats.handlers().items()
        ]
        return routes + self.pages.routes()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as closing:  # each of them closes, whatever becomes of the others
            self.overview.faults.start()
            closing.callback(self.overview.faults.stop)
            closing.push_async_callback(self.chats.close)
            closing.push_async_callback(self.bodies.close)
            closing.push_async_callback(self.dispatcher.close)
            sweeping = Background(self._sweeping_ended)
            closing.push_async_callback(sweeping.close)
            self.dispatcher.start()
            sweeping.spawn(self._sweep())
            yield

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.sweep()

    def _sweeping_ended(self, error: Exception) -> None:
        log.error("nothing is cleaned up any more: restart the service", exc_info=error)

    async def sweep(self) -> None:
        """Read prices and quotas that changed; end silent sessions and waits for missing requests; delete expired
        checkpoints, old answers and files.
        """
        self.tariff.reread()
        await self.cleaning.sweep(self.clock())
