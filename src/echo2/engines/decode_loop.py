"""Continuous batching for engines in this process: one decode thread; requests join and leave between two tokens.

`DecodeLoop` is the engine as the event loop sees it: futures, queue, slots. A `Decoder` runs on the thread: it knows
the model and makes no scheduling decisions. The thread exists only while there are requests. No torch here.

Requests that name a version end with its weights: each set of weights then has a decoder of its own, and while rows of
two versions run, each token costs a step of both.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from echo2.core.errors import UserError
from echo2.core.loop_thread import call_in
from echo2.core.types import Snapshot, SnapshotRef
from echo2.engines.engine import (
    Completion,
    Outcome,
    OutOfMemoryError,
    Prefill,
    PrefillRequest,
    RequestFailure,
    SampleRequest,
)

#: Slots of an engine whose caller names no number.
DEFAULT_SLOTS = 64
#: Waiting requests join when this share of the slots is free, or when all of them fit. Joining copies the cache, which
#: costs about a third of a step, and prefills the prompts, which is faster for many at once.
JOIN_SHARE = 0.15
#: Minimum number of tokens (per row) between two joins, for the same reason.
JOIN_EVERY_TOKENS = 4
#: Seconds without requests after which the thread ends.
LINGER_SECONDS = 5.0


class Decoder(Protocol):
    """Decodes rows of tokens with one policy. `step` and `clear` are called by the decode thread, the other methods by
    any thread at any time."""

    @property
    def installed(self) -> SnapshotRef | None:
        """The snapshot of the policy."""

    @property
    def base_model(self) -> SnapshotRef | None:
        """As `Engine.base_model`."""

    @property
    def held_refs(self) -> tuple[SnapshotRef, ...]:
        """As `PrefillEngine.held_refs`: the installed snapshot, and the one before it if it is kept."""

    @property
    def can_join(self) -> bool:
        """Whether rows may be added while others run."""

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        """As `Engine.refusal`."""

    def load(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        """Check the new policy and install it in place of the old one; the next step uses it. Returns the seconds for
        which no step could run meanwhile.

        Raises:
            PeerError, UserError, OutOfMemoryError: as `Engine.update_weights`.
        """

    def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        """Add the rows `added`, by number, drop the rows `dropped`, and sample one token for each row. Returns the rows
        that ended with this token."""

    def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        """As `PrefillEngine.prefill`, but blocking. After the first call, an update keeps the previous weights too if
        the new ones were loaded beside them."""

    def clear(self) -> None:
        """Drop all rows."""

    def successor(self) -> Decoder:
        """Return a decoder with the same weights and no rows. Its `load` leaves these weights to this one, and raises
        OutOfMemoryError where there is no room for both."""

    def sleep(self) -> None:
        """Put all tensors away, from the device into the machine's memory; no other method is called until
        `wake_up`. Rows stay."""

    def wake_up(self) -> None:
        """Put the tensors back on the device."""


@dataclass(slots=True)
class _Ticket:
    """A request and its future. `unit`: the number of its batch (`submit_together`); 0: it runs with any others.
    `decoder`: the one that it runs in; None: the newest at its start."""

    request: SampleRequest
    unit: int
    future: asyncio.Future[Outcome]
    loop: asyncio.AbstractEventLoop
    decoder: Decoder | None


class DecodeLoop:
    """An `Engine` around a `Decoder`."""

    def __init__(self, decoder: Decoder, slots: int = DEFAULT_SLOTS) -> None:
        if slots < 1:
            raise UserError(f"slots = {slots}: give at least 1.")
        self._decoder, self.slots = decoder, slots
        self._before: Decoder | None = None  # with the weights before, for requests of their version
        self._keeps_weights = self._lacks_room = False
        self._changed = threading.Condition()
        self._queue: deque[_Ticket] = deque()
        self._running: dict[int, _Ticket] = {}
        self._numbers, self._units = itertools.count(1), itertools.count(1)
        self._tokens_since_join = 0
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_asleep = self._is_at_work = False

    @property
    def installed(self) -> SnapshotRef | None:
        return self._decoder.installed

    @property
    def base_model(self) -> SnapshotRef | None:
        return self._decoder.base_model

    @property
    def held_refs(self) -> tuple[SnapshotRef, ...]:
        return self._decoder.held_refs

    @property
    def free_slots(self) -> int:
        with self._changed:
            return max(0, self.slots - len(self._running) - len(self._queue))

    @property
    def trouble(self) -> str:
        return ""

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        return self._decoder.refusal(request)

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        return self._submit([request], 0)[0]

    def submit_together(self, requests: Sequence[SampleRequest]) -> list[asyncio.Future[Outcome]]:
        """See `Engine.submit_together`. Prompts are prefilled in full: kept caches would change the shapes."""
        return self._submit([replace(request, in_turns=False) for request in requests], next(self._units))

    def _submit(self, requests: Sequence[SampleRequest], unit: int) -> list[asyncio.Future[Outcome]]:
        if self._decoder.installed is None:
            raise UserError("The engine has no weights yet: update its weights before sampling.")
        loop = asyncio.get_running_loop()
        tickets = [_Ticket(request, unit, loop.create_future(), loop, None) for request in requests]
        for ticket in tickets:
            failure = self._decoder.refusal(ticket.request)
            if (version := ticket.request.version) is not None:
                self._keeps_weights, ticket.decoder = True, self._of_version(version)
                if ticket.decoder is None:
                    failure = RequestFailure("snapshot_gone", f"version {version} is not held any more")
            if failure is not None:
                ticket.future.set_result(failure)
        with self._changed:
            self._check_open()
            self._queue.extend(ticket for ticket in tickets if not ticket.future.done())
        loop.call_soon(self._wake)  # deferred: all requests of this iteration of the event loop join together
        return [ticket.future for ticket in tickets]

    def _of_version(self, version: int) -> Decoder | None:
        """Return the decoder with the weights of this version, the newer of two."""
        for decoder in (self._decoder, self._before):
            if decoder is not None and (ref := decoder.installed) is not None and ref.version == version:
                return decoder
        return None

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None and self._queue and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    async def update_weights(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        """See `Engine.update_weights`. The new policy is read in a thread of its own, beside the decode thread."""
        self._check_open()
        is_sampling, started = self.free_slots < self.slots, time.perf_counter()
        pause_seconds = await asyncio.to_thread(self._load, snapshot, base)
        return pause_seconds if is_sampling else time.perf_counter() - started

    def _load(self, snapshot: Snapshot, base: Snapshot | None) -> float:
        if not self._keeps_weights or self._lacks_room:
            return self._decoder.load(snapshot, base)
        self._before = None  # freed first: there is no room for three sets of weights
        newer = self._decoder.successor()
        try:
            pause_seconds = newer.load(snapshot, base)
        except OutOfMemoryError:
            self._lacks_room = True  # the caller must wait until no request needs the old weights
            raise
        with self._changed:
            self._before, self._decoder = self._decoder, newer
        return pause_seconds

    async def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        return await asyncio.to_thread(self._decoder.prefill, ref, requests)

    async def sleep(self) -> None:
        """See `Engine.sleep`. Waits for the token that is being sampled."""
        await asyncio.to_thread(self._sleep)

    def _sleep(self) -> None:
        with self._changed:
            if self._is_asleep:
                return
            self._is_asleep = True
            self._changed.wait_for(lambda: not self._is_at_work)
        try:
            for decoder in self._decoders():
                decoder.sleep()
        except BaseException:
            self._go_on()
            raise

    async def wake_up(self) -> None:
        if self._is_asleep:
            for decoder in self._decoders():
                await asyncio.to_thread(decoder.wake_up)
            self._go_on()

    def _decoders(self) -> list[Decoder]:
        return [self._decoder] if self._before is None else [self._before, self._decoder]

    def _go_on(self) -> None:
        with self._changed:
            self._is_asleep = False
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("The engine is closed.")

    async def close(self) -> None:
        """See `Engine.close`. Waits for the token that is being sampled."""
        with self._changed:
            self._is_closed, thread = True, self._thread
            tickets = [] if thread is not None else list(self._queue)  # else the thread's last act
            if thread is None:
                self._queue.clear()
            self._changed.notify_all()
        _settle([(ticket, None) for ticket in tickets])  # they may be of another event loop
        if thread is not None:
            await asyncio.to_thread(thread.join)

    # ---- the decode thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._has_work():
            try:
                self._token()
            except Exception as error:  # raised by the futures of the running requests
                with self._changed:
                    failed = list(self._running.values())
                    self._running.clear()
                _settle([(ticket, error) for ticket in failed])
                self._clear()
            finally:
                with self._changed:
                    self._is_at_work = False
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        """Wait for requests, and for the device; False ends the thread."""
        with self._changed:
            while not self._changed.wait_for(self._can_go_on, LINGER_SECONDS) and self._is_asleep:
                pass
            if (self._queue or self._running) and not self._is_closed:
                self._is_at_work = True
                return True
            tickets = [*self._running.values(), *self._queue]
            self._running.clear()
            self._queue.clear()
            self._clear()  # before another thread can start on it
            self._thread = None
        _settle([(ticket, None) for ticket in tickets])
        return False

    def _clear(self) -> None:
        for decoder in self._decoders():
            decoder.clear()

    def _can_go_on(self) -> bool:
        return self._is_closed or (not self._is_asleep and bool(self._queue or self._running))

    def _token(self) -> None:
        """Drop aborted requests, add waiting ones, then sample one token for each row."""
        with self._changed:
            dropped = {number: ticket for number, ticket in self._running.items() if ticket.future.cancelled()}
            for number in dropped:
                del self._running[number]
            added = {next(self._numbers): ticket for ticket in self._joining()}
            for ticket in added.values():
                ticket.decoder = ticket.decoder or self._decoder
            self._running |= added
            rows = {**dropped, **self._running}
        if not rows:
            return
        self._tokens_since_join = 0 if added else self._tokens_since_join + 1
        ended: list[tuple[int, Completion]] = []
        for decoder in {id(ticket.decoder): ticket.decoder for ticket in rows.values()}.values():
            if decoder is not None:
                requests = {number: ticket.request for number, ticket in added.items() if ticket.decoder is decoder}
                ended += decoder.step(requests, [number for number, one in dropped.items() if one.decoder is decoder])
        with self._changed:
            settled = [(self._running.pop(number), completion) for number, completion in ended]
        _settle(settled)

    def _joining(self) -> list[_Ticket]:
        """Take the requests that join now from the queue. A batch of `submit_together` joins as a whole, and only when
        nothing else runs."""
        while self._queue and self._queue[0].future.cancelled():
            self._queue.popleft()
        if not self._queue:
            return []
        unit, free = self._queue[0].unit, self.slots - len(self._running)
        if unit or any(ticket.unit for ticket in self._running.values()):
            return [] if self._running else self._take(unit, len(self._queue))
        if not self._running:
            return self._take(0, free)
        waiting = sum(1 for _ in itertools.takewhile(lambda ticket: not ticket.unit, self._queue))
        is_worth_it = free >= min(waiting, max(1.0, JOIN_SHARE * self.slots))
        if free < 1 or not is_worth_it or self._tokens_since_join < JOIN_EVERY_TOKENS or not self._can_join():
            return []
        return self._take(0, free)

    def _can_join(self) -> bool:
        return all(decoder.can_join for decoder in self._decoders())

    def _take(self, unit: int, most: int) -> list[_Ticket]:
        tickets: list[_Ticket] = []
        while self._queue and self._queue[0].unit == unit and len(tickets) < most:
            ticket = self._queue.popleft()
            if not ticket.future.cancelled():
                tickets.append(ticket)
        return tickets


def _settle(settled: Sequence[tuple[_Ticket, Outcome | Exception | None]]) -> None:
    """Set the results of futures (None: cancel) from the decode thread, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Ticket, Outcome | Exception | None]]] = {}
    for ticket, outcome in settled:
        by_loop.setdefault(ticket.loop, []).append((ticket, outcome))
    for loop, of_loop in by_loop.items():
        call_in(loop, _deliver, of_loop)


def _deliver(settled: Sequence[tuple[_Ticket, Outcome | Exception | None]]) -> None:
    for ticket, outcome in settled:
        if ticket.future.done():
            continue  # aborted meanwhile
        if outcome is None:
            ticket.future.cancel()
        elif isinstance(outcome, Exception):
            ticket.future.set_exception(outcome)
        else:
            ticket.future.set_result(outcome)
