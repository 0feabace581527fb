"""Requests from acknowledgement to answer: stores them, orders them, carries them out, and waits for their end.

A request is `held` while an earlier one is missing, `queued` once its turn is fixed, then `done` or `failed`. Requests
that are open when the process dies are resumed by the next process, in the same order and under the same numbers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from echo2.core.background import spawn
from echo2.core.errors import InvariantError, PeerError, UserError, counted
from echo2_service import limits
from echo2_service.backend import TrainWork, UnloadCall
from echo2_service.decide.order import FairQueue, ModelOrder, Released
from echo2_service.front.body_reader import BodyReader, ParsedBodies, ParsedBody, read_stored
from echo2_service.front.curves import Curves
from echo2_service.front.database import OPEN, UNREACHED, Database, Row, models, requests, sessions
from echo2_service.front.request_guard import Caller, for_tenants
from echo2_service.front.usage import ROW_BYTES, Bills
from echo2_service.front.work import Done, Work

log = logging.getLogger(__name__)

#: Kinds whose bodies are training data, of megabytes.
TRAINING = ("forward", "forward_backward")
#: What is read of a request that is carried out, beside its body, and of one that is stopped.
CARRIED = ("id", "tenant", "session", "target", "kind", "number", "operation", "state", "error", "body_bytes")
STOPPED = ("id", "tenant", "state", "kind", "target", "body_bytes")
#: Kinds of requests that may be refused in their turn.
CHECKED = ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights")
FAILED = "The service failed at it; its log says more."
#: Pause before the database is tried again.
AGAIN_SECONDS = 1.0

Used = TypeVar("Used")


@dataclass(slots=True)
class _Lane:
    """The queued requests of one model, as long as it has any. `changed`: one came, or one ended."""

    waiting: deque[str] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Dispatcher:
    """Takes each acknowledged request to its answer. For one event loop."""

    def __init__(
        self,
        database: Database,
        work: Work,
        bills: Bills,
        curves: Curves,
        bodies: BodyReader,
        clock: Callable[[], float],
        ticks: Callable[[], float],
    ) -> None:
        """`clock`: seconds since 1970; `ticks`: seconds that never step, for requests that wait for others."""
        self._database, self._work, self._bodies = database, work, bodies
        self._bills, self._curves = bills, curves
        self._clock, self._ticks = clock, ticks
        self._orders: dict[str, ModelOrder] = {}
        self._lanes: dict[str, _Lane] = {}
        self._samples: dict[str, deque[str]] = {}
        self._fair_queue = FairQueue()
        self._sampling: dict[str, asyncio.Task[None]] = {}
        self._num_sampling = Counter[str]()
        self._num_open, self._open_bytes = Counter[str](), Counter[str]()
        self._parsed_bodies = ParsedBodies()
        self._file_bytes: dict[str, int] = {}  # of the open requests whose training data lie in a file
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Resume the open requests of the previous process."""
        columns = ["id", "tenant", "kind", "state", "operation", "target", "number", "body_bytes"]
        rows = self._database.select(requests, order="arrival", columns=columns, state=OPEN)
        for row in sorted(rows, key=lambda row: (row.state == "held", row.operation or 0)):
            if row.kind in TRAINING and not row.body_bytes:
                file = self._work.storage.data_file(row.tenant, row.id)
                self._file_bytes[row.id] = file.stat().st_size if file.is_file() else 0
            self._count(row.tenant, 1, row.body_bytes + self._file_bytes.get(row.id, 0))
            if row.kind == "sample":
                self._add_sample(row.tenant, row.id)
            elif row.state == "queued":
                self._run_next(row)
            else:
                self._arrive(row.id, row.target, row.number)
        self._start_samples()

    def submit(
        self,
        caller: Caller,
        session: str,
        target: str,
        kind: str,
        number: int | None,
        digest: str,
        body: bytes,
        refusal: str = "",
        parsed_body: ParsedBody = None,
    ) -> str:
        """Store a request and return its id. An identical request gets the same id. A `refusal` is stored in place of
        the body: the request fails with it in its turn. `parsed_body`: the body as it was read; if its data lie in a
        file, that is moved to its place, and the body is not stored.

        Raises:
            PeerError: `rate` if too many requests of the tenant or model are open; `spent`, `disk_quota` if a quota is
                used up.
        """
        again = number is not None and self._database.find(
            requests, columns=["id"], target=target, number=number, kind=kind, digest=digest
        )
        if again:
            return str(again.id)
        if kind != "sample" and self._order(target).num_held >= limits.HELD_MAX:
            raise PeerError(
                "rate", f"{limits.HELD_MAX} requests of this model wait for an earlier one: send that one first."
            )
        self._check_open(caller.tenant, len(body))
        self._bills.check(caller.tenant)
        filed = parsed_body.request if isinstance(parsed_body, TrainWork) and not refusal else ""
        request, body = filed or "req_" + secrets.token_hex(16), b"" if refusal or filed else body
        arrived = self._bodies.arrived(filed)
        file_bytes = arrived.stat().st_size if filed else 0
        if body or filed:
            self._parsed_bodies.add(request, parsed_body, len(body))  # now: its turn may come in this transaction
        try:
            with self._database.transaction():
                self._database.insert(
                    requests,
                    id=request,
                    tenant=caller.tenant,
                    session=session,
                    target=target,
                    kind=kind,
                    number=number,
                    digest=digest,
                    body=body or None,
                    error=refusal or None,
                    state="queued" if kind == "sample" else "held",
                    created=self._clock(),
                )
                self._database.when_stored(partial(self._has_begun, caller.tenant, request, len(body), file_bytes))
                if filed:
                    arrived.rename(self._work.storage.data_file(caller.tenant, request))
                if kind != "sample":
                    self._database.update(models, {"id": target}, used=self._clock())
                    self._arrive(request, target, number)
        except BaseException:
            self._parsed_bodies.drop(request)
            raise
        if kind == "sample":
            self._add_sample(caller.tenant, request)
            self._start_samples()
        return request

    def _has_begun(self, tenant: str, request: str, body_bytes: int, file_bytes: int) -> None:
        if file_bytes:
            self._file_bytes[request] = file_bytes
        self._count(tenant, 1, body_bytes + file_bytes)
        self._work.storage.stored(tenant, body_bytes + ROW_BYTES)
        self._work.storage.written(tenant, file_bytes)

    def _check_open(self, tenant: str, num_bytes: int) -> None:
        self._work.storage.check_refusals(tenant)
        if self._num_open[tenant] >= limits.OPEN_MAX:
            raise PeerError("rate", f"{limits.OPEN_MAX} requests are open; wait for some of them.")
        if self._open_bytes[tenant] + num_bytes > limits.OPEN_BYTES_MAX:
            raise PeerError("rate", f"{self._open_bytes[tenant]} bytes of requests are open; wait for some of them.")

    async def wait(self, request: str, tenant: str, seconds: float) -> Row | None:
        """Return the request once it has ended, or open after `seconds`; None if the tenant has no such request."""
        row = self.find(request, tenant)
        if row is None or row.state not in OPEN:
            return row
        event = self._ended.setdefault(request, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return row
        return self.find(request, tenant)

    def find(self, request: str, tenant: str) -> Row | None:
        """Return what a poll tells of a request; None if the tenant has no such request."""
        columns = ("id", "state", "kind", "target", "error", "category", "answer")  # not the body
        return self._database.find(requests, columns=columns, id=request, tenant=tenant)

    def why_it_waits(self, request: Row) -> str:
        """Return, for people, why an open request waits."""
        missing = self._order(request.target).waits_for(request.id) if request.state == "held" else 0
        if missing:
            return f"request {missing} of this model has not come yet"
        if request.kind == "sample":
            num_waiting = sum(map(len, self._samples.values()))
            return f"{counted(len(self._sampling), 'sample')} under way, {num_waiting} waiting for a turn"
        lane = self._lanes.get(request.target)
        if lane is None or not lane.waiting:
            return "it is at the learner, where tenants take turns"
        return f"{counted(len(lane.waiting), 'request')} of this model before the learner"

    def cancel_sample(self, request: str, tenant: str) -> None:
        """Fail an open sample, and stop it if it runs: it loses its turn and costs nothing."""
        row = self._database.find(requests, columns=STOPPED, id=request, tenant=tenant, kind="sample", state=OPEN)
        if row is not None:
            self._stop(row, "The client cancelled the sample.")

    def end_session(self, session: str, reason: str, **more: Any) -> None:
        """Fail the session's open samples and held requests, and unload its models from memory. `more`: what else is
        stored of the session.
        """
        self._database.update(sessions, {"id": session}, finished=self._clock(), **more)
        for row in self._database.select(requests, columns=STOPPED, session=session, state=OPEN):
            if row.kind == "sample" or row.state == "held":
                self._stop(row, reason)
        for model in self._database.select(models, columns=["id"], session=session):
            self.forget(model.id)
            self._spawn(
                self._work.backend.call(UnloadCall(model.id)), partial(log.warning, "a model stays in memory: %s")
            )

    def forget(self, model: str) -> None:
        """Forget the order of a model's requests, which is read again if there are others, and its next point."""
        self._orders.pop(model, None)
        self._curves.forget(model)

    def expire(self) -> None:
        """Stop waiting for requests that never arrived."""
        for model, order in list(self._orders.items()):
            if not order.num_held:
                continue
            try:
                self._change_order(model, lambda order: order.expire(self._ticks()))
            except UNREACHED:
                raise
            except Exception:  # other models go on
                log.exception("the requests of the model %s that wait for others", model)

    async def close(self) -> None:
        """Stop all work; open requests stay stored."""
        self._fair_queue = FairQueue()  # no other sample begins
        while self._tasks:  # what fails now is to be stored by another task
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _order(self, model: str) -> ModelOrder:
        if model not in self._orders:
            row = self._database.find(models, columns=["next_number"], id=model)
            self._orders[model] = ModelOrder(row.next_number if row is not None else 1)
        return self._orders[model]

    def _arrive(self, request: str, model: str, number: int | None) -> None:
        self._change_order(model, lambda order: order.arrive(request, number, self._ticks()))

    def _change_order(self, model: str, change: Callable[[ModelOrder], list[Released]]) -> None:
        """Fix the turn of the requests that this change releases: number those that go to the back end, and fail the
        others.
        """
        order = self._order(model).copy()
        released = change(order)
        with self._database.transaction():
            self._database.when_stored(partial(self._orders.__setitem__, model, order))
            if released:
                self._database.update(models, {"id": model}, next_number=order.next_number)
            for one in released:
                row = self._database.find(requests, columns=CARRIED, id=one.request)
                if row is not None and row.state == "held":
                    self._fix_turn(row, one.missing)

    def _fix_turn(self, row: Row, missing: int) -> None:
        refusal = f"Request {missing} of this model never came." if missing else row.error or self._refusal(row)
        if refusal:
            self._end(row, "failed", error=refusal, category="user")
            return
        operation = None
        if row.kind != "create_model":
            model = self._database.find(models, id=row.target)
            if model is None:
                raise InvariantError(f"{row.id} is of the model {row.target}, which there is not")
            operation = model.next_operation
            self._database.update(models, {"id": row.target}, next_operation=operation + 1)
        self._database.update(requests, {"id": row.id}, state="queued", operation=operation)
        self._database.when_stored(partial(self._run_next, row))

    def _refusal(self, row: Row) -> str:
        """Return why a request of a model is refused in its turn. Training data were checked when they came."""
        if row.kind not in CHECKED:
            return ""
        parsed_body = self._parsed_bodies.look(row.id)
        if parsed_body is None:
            stored = self._database.find(requests, columns=["body"], id=row.id)
            parsed_body = read_stored(stored.body or b"" if stored is not None else b"", row.kind)
        return self._work.refusal(row, parsed_body)

    async def _take_body(self, row: Row) -> ParsedBody:
        """Return what a request asks for, and keep it no longer; what was not kept is read from the store again."""
        parsed_body = self._parsed_bodies.drop(row.id)
        if parsed_body is not None or row.kind == "create_model":
            return parsed_body
        if row.id in self._file_bytes:
            return await self._bodies.read_file(self._work.storage.data_file(row.tenant, row.id))
        stored = await self._reached(partial(self._database.find, requests, columns=["body"], id=row.id))
        return await self._bodies.read_stored(stored.body or b"" if stored else b"", row.kind)

    def _run_next(self, row: Row) -> None:
        lane = self._lanes.get(row.target)
        if lane is None:
            lane = self._lanes[row.target] = _Lane()
            self._spawn(self._run_model(row.target, lane), partial(self._lane_failed, row.target, lane))
        lane.waiting.append(row.id)
        lane.changed.set()

    async def _run_model(self, model: str, lane: _Lane) -> None:
        """Call the back end in order, until nothing is left to do. The request that creates the model is awaited; the
        others overlap.
        """
        running = set[asyncio.Task[None]]()

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            lane.changed.set()

        while lane.waiting or running:
            if not lane.waiting or len(running) >= limits.OPERATIONS_MAX:
                lane.changed.clear()
                await lane.changed.wait()
                continue
            row = await self._reached(partial(self._database.find, requests, columns=CARRIED, id=lane.waiting[0]))
            if row is None or row.state != "queued":
                lane.waiting.popleft()
                continue
            parsed_body = await self._take_body(row)
            lane.waiting.popleft()
            before = frozenset(running) if row.kind == "optim_step" else frozenset()
            task = self._spawn(self._carry_out(row, parsed_body, before), partial(self._request_failed, row.id))
            running.add(task)
            task.add_done_callback(ended)
            if row.kind == "create_model" or row.operation == 1:
                await asyncio.wait({task})
        del self._lanes[model]

    def _lane_failed(self, model: str, lane: _Lane, error: Exception) -> None:
        """Fail the requests that no machine would carry out any more; others of the model begin anew."""
        log.error("the requests of the model %s", model, exc_info=error)
        del self._lanes[model]
        for request in lane.waiting:
            self._request_failed(request, error)

    def _request_failed(self, request: str, error: Exception) -> None:
        log.error("request %s failed", request, exc_info=error)
        failing = self._reached(partial(self._fail, request))
        self._spawn(failing, partial(log.error, "request %s stays open until a restart: %s", request))

    def _fail(self, request: str) -> None:
        row = self._database.find(requests, columns=STOPPED, id=request, state=OPEN)
        if row is not None:
            self._end(row, "failed", error=FAILED, category="server")

    def _add_sample(self, tenant: str, request: str) -> None:
        self._samples.setdefault(tenant, deque()).append(request)
        self._wait_for_turn(tenant)

    def _wait_for_turn(self, tenant: str) -> None:
        """Let the tenant's samples wait for a turn, if it has any and does not use all that one tenant may."""
        most = limits.SAMPLES_AT_ONCE - limits.SAMPLES_FOR_OTHERS
        if self._samples.get(tenant) and self._num_sampling[tenant] < most:
            self._fair_queue.wait(tenant)
        else:
            self._fair_queue.rest(tenant)

    def _start_samples(self) -> None:
        while len(self._sampling) < limits.SAMPLES_AT_ONCE and (tenant := self._fair_queue.next()) is not None:
            waiting = self._samples[tenant]
            request = waiting.popleft()
            if not waiting:
                del self._samples[tenant]
            self._num_sampling[tenant] += 1
            self._fair_queue.charge(tenant, 1.0)
            self._wait_for_turn(tenant)
            failed = partial(self._request_failed, request)
            task = self._sampling[request] = self._spawn(self._sample(request), failed)
            task.add_done_callback(partial(self._sampled, tenant, request))

    async def _sample(self, request: str) -> None:
        row = await self._reached(partial(self._database.find, requests, columns=CARRIED, id=request))
        if row is not None and row.state == "queued":
            await self._carry_out(row, await self._take_body(row))

    def _sampled(self, tenant: str, request: str, _: asyncio.Task[None]) -> None:
        del self._sampling[request]
        self._num_sampling[tenant] -= 1
        if not self._num_sampling[tenant]:
            del self._num_sampling[tenant]
        self._wait_for_turn(tenant)
        self._start_samples()

    def _stop(self, row: Row, reason: str) -> None:
        self._end(row, "failed", error=reason, category="user")
        if row.id in self._sampling:
            self._sampling[row.id].cancel()  # also at the back end

    async def _carry_out(
        self, row: Row, parsed_body: ParsedBody, before: frozenset[asyncio.Task[None]] = frozenset()
    ) -> None:
        """Carry out a request. Its outcome is stored after those of `before`, which a step's figures count."""
        try:
            done = await self._work.carry_out(row, parsed_body)
            if before:
                await asyncio.wait(before)
        except (UserError, PeerError) as error:
            await self._reached(partial(self._end, row, "failed", error=str(error), category="user"))
        except InvariantError as error:  # of the back end, whose log has more
            log.error("request %s (%s) failed: %s", row.id, row.kind, error)
            await self._reached(partial(self._end, row, "failed", error=str(error), category="server"))
        except Exception:
            log.exception("request %s (%s) failed", row.id, row.kind)
            await self._reached(partial(self._end, row, "failed", error=FAILED, category="server"))
        else:
            await self._reached(partial(self._end, row, "done", done, answer=done.answer))

    def _end(self, row: Row, state: str, done: Done | None = None, **values: Any) -> None:
        """Store the outcome of a request, charge its tokens, and wake its waiters. If it had already ended, only wake
        them.
        """
        if "error" in values:
            values["error"] = for_tenants(values["error"])
        where = {"id": row.id, "state": OPEN}
        with self._database.transaction():
            is_news = self._database.update(requests, where, state=state, body=None, ended=self._clock(), **values)
            answer = values.get("answer") or b""
            if is_news and done is not None:
                self._bills.charge(row.tenant, row.session, row.kind, done.num_tokens)
                if done.trained is not None:
                    self._database.when_stored(partial(self._curves.trained, row.target, done.trained))
                if done.metrics is not None:
                    metrics = self._curves.stepped(row, done.metrics, self._clock())
                    answer = msgspec.json.encode({"type": row.kind, "metrics": metrics})
                    self._database.update(requests, {"id": row.id}, answer=answer)
            self._database.when_stored(partial(self._has_ended, row, bool(is_news), len(answer)))

    def _has_ended(self, row: Row, is_news: bool, answer_bytes: int) -> None:
        self._parsed_bodies.drop(row.id)
        if is_news:
            file_bytes = self._file_bytes.pop(row.id, 0)
            self._count(row.tenant, -1, -row.body_bytes - file_bytes)
            self._work.storage.stored(row.tenant, answer_bytes - row.body_bytes)
            self._work.storage.written(row.tenant, -file_bytes)
            if row.kind == "forward_backward":  # into the journal of the model
                self._work.storage.written(row.tenant, row.body_bytes + file_bytes)
            if file_bytes:
                file = self._work.storage.data_file(row.tenant, row.id)
                self._spawn(asyncio.to_thread(file.unlink, missing_ok=True), partial(log.warning, "%s stays: %s", file))
        event = self._ended.pop(row.id, None)
        if event is not None:
            event.set()

    async def _reached(self, use: Callable[[], Used]) -> Used:
        """Return what `use` of the database gives; try again until the database can be reached."""
        while True:
            try:
                return use()
            except UNREACHED as error:
                log.warning("the database can't be reached, trying again: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)

    def _count(self, tenant: str, change: int, num_bytes: int) -> None:
        for counter, by in ((self._num_open, change), (self._open_bytes, num_bytes)):
            counter[tenant] += by
            if not counter[tenant]:
                del counter[tenant]

    def _spawn(self, work: Coroutine[Any, Any, Used], on_error: Callable[[Exception], object]) -> asyncio.Task[Used]:
        task = spawn(work, on_error)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
