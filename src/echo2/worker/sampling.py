"""Samples a worker's leases with its engine, one asyncio task per lease, from its start to its finished group. A
machine of the run's owner also checks strangers' rollouts, between the decoding steps of its own sampling. On a card
that the learner uses, too, the engine has it while the learner does not (`core/decide/card.py`).

Nothing here blocks the event loop: the engine decodes in its own thread, and environments run in processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echo2.config.values import AUTO
from echo2.core.background import close_all, spawn
from echo2.core.decide.card import CARD, LOOK_SECONDS, WISH, Act, worker_act
from echo2.core.errors import PeerError, UserError, counted
from echo2.core.file_lock import FileLock
from echo2.core.types import Assignment, Snapshot, SnapshotRef
from echo2.engines.engine import Engine, RequestFailure
from echo2.engines.registry import in_worker, load_or_replace
from echo2.engines.tokenizer import Tokenizer, load_tokenizer
from echo2.rollouts import generate
from echo2.rollouts.harness import HarnessEnvironment
from echo2.rollouts.turns import Lockstep, OneVersion, Sampler
from echo2.rollouts.verification import PrefillEngine, check_group
from echo2.tasks.environments import EnvironmentProcess
from echo2.tasks.harness_process import HarnessProcess, is_harness
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.weights.format.snapshot_files import read_config
from echo2.worker.decide import messages as ev

log = logging.getLogger(__name__)

#: Maximum characters of an error reported to the head.
ERROR_CHARS = 500


def open_environment(spec: str) -> EnvironmentProcess | HarnessEnvironment:
    """Return the environment or harness of this name. The caller calls `start` and `close`."""
    return HarnessEnvironment(HarnessProcess(spec)) if is_harness(spec) else EnvironmentProcess(spec)


class LeaseSampler:
    """Samples leases with one `engine`, which `load` gives its weights. `dispatch` receives the scheduler's events,
    `fail` the fatal errors. `card`: directory of the locks of a card that the learner uses, too. `name`: of the engine,
    as it was made. `server`: the token server that was chosen by default (empty: none was); if it does not start, the
    engine that `device` has takes its place. `one_version`: what a lease's rollouts begin with draws all of their
    tokens."""

    def __init__(
        self,
        engine: Engine,
        worker_id: str,
        environments: Mapping[str, EnvironmentProcess | HarnessEnvironment],
        dispatch: Callable[[ev.Event], None],
        fail: Callable[[BaseException], None],
        *,
        device: str = AUTO,
        card: str = "",
        name: str = AUTO,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        server: str = "",
        one_version: bool = False,
    ) -> None:
        self._one_version = one_version
        self.engine, self._worker_id, self._dispatch, self._fail = engine, worker_id, dispatch, fail
        self._environments, self._name = environments, name
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._charged_until = 0.0
        self._busy_before = 0.0
        self._busy_since: float | None = None
        self._device, self._template_arguments, self.chosen = device, template_arguments, server
        self.card = WorkerCard(card, lambda: self.engine)
        self.tokenizer: Tokenizer | None = None  # until the first weights are loaded
        self._tokenizer_files: dict[str, bytes] = {}
        self.num_tokens = self.num_groups = 0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one lease was being sampled."""
        return self._busy_before + (0.0 if self._busy_since is None else time.monotonic() - self._busy_since)

    @property
    def engine_name(self) -> str:
        """The engine that samples. Where the model decides ("auto"), it is known with the first weights."""
        return self._name

    @property
    def doing(self) -> str:
        """One line for people: what this worker is doing."""
        if interruption := self.card.doing or self.engine.trouble:
            return interruption
        if not self._tasks:
            return "waiting"
        num_running = self.engine.slots - self.engine.free_slots
        what = f"{counted(num_running, 'rollout')} of {counted(len(self._tasks), 'group')}"
        return f"sampling {what} with {self.engine.installed}"

    async def load(self, snapshot: Snapshot, base_of: Callable[[SnapshotRef], Awaitable[Snapshot]]) -> float:
        """Load a verified snapshot beside the old weights, and swap. Load an adapter's base model first, by `base_of`,
        if the engine has another one. Return the seconds that generation paused.
        """
        files, tokenizer = {name: bytes(data) for name, data in snapshot.files.items()}, self.tokenizer
        if tokenizer is None or files != self._tokenizer_files:
            tokenizer = await asyncio.to_thread(load_tokenizer, files, self._template_arguments)
        base = None
        if snapshot.base_model is not None and snapshot.base_model != self.engine.base_model:
            base = await base_of(snapshot.base_model)
        async with self.card.staying():
            pause = await self._update(snapshot, base)
        self.tokenizer, self._tokenizer_files = tokenizer, files  # only now: the engine may refuse
        return pause

    async def _update(self, snapshot: Snapshot, base: Snapshot | None) -> float:
        if not self.chosen or self.engine.installed is not None:
            pause = await self.engine.update_weights(snapshot, base)
        else:
            engine, pause = await load_or_replace(self.engine, snapshot, base, self._device)
            if engine is not self.engine:
                self.engine, self.chosen, self._name = engine, "", AUTO
        if self._name == AUTO:
            self._name = in_worker(read_config((base or snapshot).files)).name
        return pause

    async def check(self, request: wire.Check) -> wire.CheckReport:
        """Check a group of a stranger while the worker has the card. Raises as `check`."""
        async with self.card.staying():
            return await check(self.engine, request)

    def start(self, assignment: Assignment) -> None:
        self._begin(assignment, None)

    def start_unit(self, assignments: Sequence[Assignment]) -> None:
        lockstep = generate.in_lockstep(self.engine, assignments)
        for assignment in assignments:
            self._begin(assignment, lockstep)

    def abort(self, lease_id: int) -> None:
        """Cancel the rollouts of this lease. Their slots become free at the next token."""
        if (task := self._tasks.get(lease_id)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Abort all leases, and close the environments and the engine. No further events are dispatched: the scheduler
        would give the slots of the aborted rollouts to waiting leases."""
        self._dispatch = lambda event: None
        for task in self._tasks.values():
            task.cancel()
        await close_all(*(one.close for one in self._environments.values()), self.engine.close)

    def _begin(self, assignment: Assignment, lockstep: Lockstep | None) -> None:
        if self._busy_since is None:
            self._busy_since = self._charged_until = time.monotonic()
        lease_id, num_left = assignment.lease.lease_id, assignment.lease.num_samples

        def rollout_ended() -> None:
            nonlocal num_left
            num_left -= 1
            if lockstep is not None:
                lockstep.leave()
            self._dispatch(ev.RolloutEnded(lease_id))

        engine = lockstep or (OneVersion(self.engine) if self._one_version else self.engine)
        task = spawn(self._sample(assignment, engine, rollout_ended), self._fail)
        self._tasks[lease_id] = task

        def ended(done: asyncio.Task[None]) -> None:
            if lockstep is not None and generate.is_sampled(assignment):
                for _ in range(num_left):
                    lockstep.leave()  # for rollouts aborted before they began
            self._ended(lease_id, done)

        task.add_done_callback(ended)

    async def _sample(self, assignment: Assignment, engine: Sampler, on_rollout: Callable[[], None]) -> None:
        """Sample one lease and dispatch its outcome. A group's `generate_seconds` is the time since the previous group,
        so that the groups add up to the busy time."""
        lease_id = assignment.lease.lease_id
        try:
            if assignment.environment and assignment.environment not in self._environments:
                raise PeerError("malformed", f"this worker does not run the environment {assignment.environment!r}")
            if self.tokenizer is None:
                raise PeerError("malformed", "a lease came before any snapshot")
            outcome = await generate.sample_group(
                engine, self.tokenizer, assignment, self._worker_id, self._environments, on_rollout
            )
        except UserError:
            raise
        except Exception as error:  # any error fails only this lease, and is reported to the head
            log.error("lease %d failed", lease_id, exc_info=error)
            self._dispatch(
                ev.LeaseAbandoned(lease_id, "engine_failed", f"{type(error).__name__}: {error}"[:ERROR_CHARS])
            )
            return
        if isinstance(outcome, RequestFailure):
            detail = f"{outcome.detail}\n{outcome.traceback}".rstrip()
            self._dispatch(ev.LeaseAbandoned(lease_id, outcome.reason, detail))
            return
        seconds, self._charged_until = time.monotonic() - self._charged_until, time.monotonic()
        self.num_tokens += outcome.num_tokens
        self.num_groups += 1
        self._dispatch(ev.GroupProduced(lease_id, replace(outcome, generate_seconds=seconds)))

    def _ended(self, lease_id: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(lease_id) is task:
            del self._tasks[lease_id]
        if not self._tasks and self._busy_since is not None:
            self._busy_before, self._busy_since = self.busy_seconds, None


async def check(engine: Any, request: wire.Check) -> wire.CheckReport:
    """Check a group, and return the report for the head.

    Raises:
        PeerError: "oversized" or "malformed": the head's message is not a valid check.
    """
    assignment, group = messages.decode_assignment(request.lease), messages.parse_group(request.group)
    if assignment.lease.group != group.group or assignment.prompt_tokens != group.prompt_tokens:
        raise PeerError("malformed", f"{group.group} is to be checked as {assignment.lease.group}")
    report = wire.CheckReport(policy=group.group.policy, number=group.group.number)
    if not isinstance(engine, PrefillEngine):
        report.missed = "this engine gives no distributions of tokens"
        return report
    try:
        ref = messages.decode_ref(request.ref)
        verdict = await check_group(engine, ref, assignment, group, request.is_from_stream, request.form)
    except PeerError as error:
        report.missed = str(error)
    else:
        report.num_tokens, report.num_skipped = verdict.num_tokens, verdict.num_skipped
        report.fault, report.surprise, report.variance = verdict.fault, verdict.surprise, verdict.variance
    return report


class WorkerCard:
    """Keeps an engine's tensors on the card, but for the learner's turns. `directory`: of the locks; empty: the card is
    not shared. `engine`: returns the worker's."""

    def __init__(self, directory: str, engine: Callable[[], Engine]) -> None:
        self._locks = (FileLock(Path(directory) / WISH), FileLock(Path(directory) / CARD)) if directory else None
        self._engine = engine
        self._is_here, self._moving = asyncio.Event(), asyncio.Lock()
        if self._locks is None:
            self._is_here.set()

    @property
    def doing(self) -> str:
        """One line for people while the learner has the card, else empty."""
        return "" if self._is_here.is_set() else "waiting for the card, which the learner has"

    async def keep(self) -> None:
        if self._locks is None:
            return
        wish, card = self._locks
        while True:
            match worker_act(wish.is_taken(), card.is_held):
                case Act.TAKE if card.take(shared=True):
                    if wish.is_taken():
                        card.give_back()  # the learner came first
                    else:
                        await self._come()
                case Act.LEAVE:
                    await self._leave()
                    card.give_back()
            await asyncio.sleep(LOOK_SECONDS)

    async def _come(self) -> None:
        started = time.monotonic()
        await self._engine().wake_up()
        log.info("the worker has the card: %.2f s to fetch its tensors", time.monotonic() - started)
        self._is_here.set()

    async def _leave(self) -> None:
        async with self._moving:
            self._is_here.clear()
            started = time.monotonic()
            await self._engine().sleep()
            log.info("the learner gets the card: %.2f s to put tensors away", time.monotonic() - started)

    @asynccontextmanager
    async def staying(self) -> AsyncIterator[None]:
        """Wait for the card. Inside, the worker keeps it."""
        while True:
            await self._is_here.wait()
            async with self._moving:
                if self._is_here.is_set():
                    yield
                    return
