"""An `Engine` over a token server: sends requests over HTTP and watches the server's health.

All work runs in an event loop and thread of its own, so that parsing answers never delays a heartbeat, and requests may
come from any event loop. If a server dies or hangs, the requests in it fail. It is restarted with the same weights, and
waiting requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo2.config.values import ServerPlace
from echo2.core.errors import Echo2Error, LinkError, PeerError, UserError
from echo2.core.loop_thread import LoopThread
from echo2.core.retries import Retries
from echo2.core.types import Backoff, Snapshot, SnapshotRef
from echo2.engines.engine import (
    Completion,
    Conversation,
    Engine,
    Outcome,
    RequestFailure,
    SampleRequest,
    derived_seed,
    refuse_request,
)
from echo2.engines.servers.models import ModelDirectories, ServedModel
from echo2.engines.servers.vllm import VllmServer
from echo2.engines.tokenizer import StopRule

log = logging.getLogger(__name__)

#: Seconds between two health checks of a server.
CHECK_EVERY_SECONDS = 5.0
#: Pause before a dead server is restarted: the first value, doubled after each failure up to the second.
RESTART_SECONDS = Backoff(0.5, 60.0)
CLOSED = "The engine is closed."
#: Maximum number of weight versions remembered for requests still running.
LABELS_MAX = 1000


def make_engine(device: str, slots: int, place: ServerPlace) -> Engine:
    """The engine `vllm`."""
    return ServerEngine(VllmServer(place, device, slots), slots, place.directory)


class ServerEngine:
    """An `Engine` over a token server. `directory`: where model directories are written; None: a temporary one."""

    def __init__(self, server: VllmServer, slots: int, directory: Path | None) -> None:
        self._server, self.slots = server, slots
        self._temporary = tempfile.TemporaryDirectory(prefix="echo2-") if directory is None else None
        root = directory or Path(self._temporary.name) / "models"  # type: ignore[union-attr]
        self._directories = ModelDirectories(root, server.unties)
        self._model: ServedModel | None = None
        self._versions: dict[str, int] = {}
        self._open: set[Future[Any]] = set()
        self._reason = ""  # why the server is being restarted
        self._is_closed = self._is_asleep = False
        self._looking: Future[Any] | None = None
        self._up, self._doubted, self._changing = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._settled = asyncio.Event()  # no weights are being loaded
        self._settled.set()
        self._thread = LoopThread("token server")

    @property
    def installed(self) -> SnapshotRef | None:
        model = self._model
        return None if model is None else model.ref

    @property
    def base_model(self) -> SnapshotRef | None:
        model = self._model
        return None if model is None else model.base_model

    @property
    def free_slots(self) -> int:
        return max(0, self.slots - len(self._open))

    @property
    def trouble(self) -> str:
        return self._reason and f"its token server is started again: {self._reason}"

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        model = self._installed()
        return refuse_request(request, model.vocab_size, model.max_positions)

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """See `Engine.submit`. While the server restarts, requests wait."""
        self._installed()
        if self._is_closed:
            raise UserError(CLOSED)
        running = self._thread.start(self._sample(request))
        self._open.add(running)
        running.add_done_callback(self._open.discard)
        return asyncio.wrap_future(running)

    def submit_together(self, requests: Sequence[SampleRequest]) -> list[asyncio.Future[Outcome]]:
        """Raises UserError: no server promises that the last bits of a result depend on these requests only."""
        raise UserError("A token server can't sample a batch alone: set run.deterministic = false, or another engine.")

    async def update_weights(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        """See `Engine.update_weights`. The first call starts the server. If it cannot load new weights, it is restarted
        with the old ones; a server that the worker did not start loads the old ones again."""
        updating = self._thread.start(self._update(snapshot, base))
        try:
            return await asyncio.wrap_future(updating)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise UserError(CLOSED) from error

    async def sleep(self) -> None:
        """See `Engine.sleep`. A server that cannot is ended, and the requests in it fail."""
        await asyncio.wrap_future(self._thread.start(self._sleep()))

    async def wake_up(self) -> None:
        """See `Engine.wake_up`. A server that cannot is started again."""
        await asyncio.wrap_future(self._thread.start(self._wake_up()))

    async def close(self) -> None:
        """See `Engine.close`. Ends the server too, if the worker started it."""
        self._is_closed = True
        await asyncio.to_thread(self._thread.close, self._server.stop)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _installed(self) -> ServedModel:
        if self._model is None:
            raise UserError("The engine has no weights yet: update its weights before sampling.")
        return self._model

    # ---- in the thread of its own ------------------------------------------------------------------------------------

    async def _sample(self, request: SampleRequest) -> Outcome:
        if (failure := self.refusal(request)) is not None:
            return failure
        await self._up.wait()
        try:
            if request.stop is not None:
                return await self._stopped(request, request.stop)
            return await self._ask(request)
        except LinkError as error:
            self._up.clear()  # other requests wait for the next health check
            self._doubted.set()
            return RequestFailure("engine_failed", f"the token server is gone: {self._reason or error}")

    async def _ask(self, request: SampleRequest) -> Completion:
        """Sample by the weights that the server has now. While others come, it would read the prompt in the name of the
        old ones, so from their cache, and draw by the new ones."""
        await self._settled.wait()
        return await self._server.sample(request, self._installed(), self._versions)

    async def _stopped(self, request: SampleRequest, stop: StopRule) -> Completion:
        """Sample up to a stop string. The server has no text: it stops behind each token that may complete a stop
        string, and is asked to go on if none is complete."""
        written, ends = Conversation(), request.stop_tokens | self._installed().end_tokens
        room = min(request.params.max_tokens, self._installed().max_positions - len(request.prompt_tokens))
        while True:
            part = replace(
                request,
                prompt_tokens=request.prompt_tokens + written.tokens,
                seed=derived_seed(request.seed, request.sample, written.turns) if written.turns else request.seed,
                params=replace(request.params, max_tokens=room - len(written.tokens)),
                stop_tokens=request.stop_tokens | stop.tokens,
            )
            written.take(await self._ask(part))
            if written.tokens[-1] in ends or stop.ends(written.tokens):
                return written.completion("stop")
            if len(written.tokens) >= room:
                return written.completion("length")

    async def _update(self, snapshot: Snapshot, base: Snapshot | None) -> float:
        async with self._changing:
            before = self._model
            try:
                model = await asyncio.to_thread(self._directories.write, snapshot, base, before)
            except BaseException:
                self._directories.keep_only(before)  # repeated refusals must not fill the disk
                raise
            self._versions[model.label] = model.ref.version
            while len(self._versions) > LABELS_MAX:
                del self._versions[next(iter(self._versions))]
            if before is None or before.base_model != model.base_model:
                return await self._start(model)
            self._settled.clear()
            try:
                pause_seconds = await self._server.load(model)
                self._model = replace(model, max_positions=before.max_positions)
            except (LinkError, PeerError) as error:
                self._directories.keep_only(before)
                await self._start_again(f"it could not load {model.ref}: {error}")
                raise PeerError("load_failed", f"the token server could not load {model.ref}: {error}") from error
            finally:
                self._settled.set()
            self._directories.keep_only(model)
            return pause_seconds

    async def _start(self, model: ServedModel) -> float:
        """Start the server for the first time, or with another base model."""
        started = time.perf_counter()
        self._up.clear()
        try:
            max_positions = await self._server.start(model)
        except (LinkError, PeerError) as error:
            raise UserError(f"The token server could not be started with {model.ref}: {error}") from error
        self._model = replace(model, max_positions=min(model.max_positions, max_positions))
        self._directories.keep_only(model)
        self._up.set()
        if self._looking is None:
            self._looking = self._thread.start(self._look_after())
        return time.perf_counter() - started

    async def _sleep(self) -> None:
        async with self._changing:
            if self._model is None or self._is_asleep:
                return
            self._is_asleep = True
            self._up.clear()
            try:
                await self._server.sleep()
            except (LinkError, PeerError) as error:
                log.error("the token server does not leave its GPU, and is ended: %s", error)
                await self._server.stop()

    async def _wake_up(self) -> None:
        async with self._changing:
            if not self._is_asleep:
                return
            try:
                await self._server.wake_up()
            except (LinkError, PeerError) as error:
                await self._start_again(_words(error))
            self._is_asleep = False
            self._up.set()

    async def _look_after(self) -> None:
        """Check the server every `CHECK_EVERY_SECONDS`, or at once when a request failed (`_doubted`). Restart it if
        the check fails, for whatever reason: all requests would wait for ever without this task."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_SECONDS):
                    await self._doubted.wait()
            async with self._changing:
                self._doubted.clear()
                if self._is_asleep:
                    continue
                try:
                    await self._server.check(self._installed())
                except Exception as error:
                    await self._start_again(_words(error))
                self._up.set()

    async def _start_again(self, reason: str) -> None:
        """Restart the server until it runs. Requests in it fail at once; those that arrive meanwhile wait."""
        self._up.clear()
        self._reason, retries = reason, Retries(RESTART_SECONDS)
        while True:
            log.error("the token server is started again: %s", reason)
            await retries.pause()
            try:
                await self._server.stop()
                await self._server.start(self._installed())
            except Exception as error:  # also if this machine has no descriptor, memory or room for a while
                self._reason = reason = _words(error)
            else:
                self._reason = ""
                self._up.set()
                return


def _words(error: Exception) -> str:
    if not isinstance(error, (Echo2Error, OSError)):
        log.error("the token server", exc_info=error)
    return str(error) or type(error).__name__
