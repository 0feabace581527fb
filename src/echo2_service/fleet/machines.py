"""The back end: a learner process, and the machines that sample: a sampler process beside it, and workers that joined
by ticket. Each sample goes to one of them, and to another one if that machine is lost. No torch in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from echo2.core.background import close_all
from echo2.core.disk import allocated_bytes
from echo2.core.errors import Echo2Error, InvariantError, PeerError, UserError
from echo2.core.printable import printable
from echo2.engines.model_values import read_context
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import LOGPROB_SLACK
from echo2.weights.format.model_files import find_model, model_files
from echo2_service.backend import (
    Answer,
    BaseInfo,
    CancelCall,
    Floats,
    Ints,
    ModelCall,
    Request,
    SampleCall,
    SampleOutput,
    SampleSpec,
)
from echo2_service.calling import AnsweringProcess, ProcessSettings, encode
from echo2_service.decide.placing import LOCAL, Placing
from echo2_service.fleet.payloads import Payloads

log = logging.getLogger(__name__)


class MachineLostError(Echo2Error):
    """The machine is gone or failed at a call, so another machine must take the call."""


class JoinedMachine:
    """A connected worker. `outbox`: the next orders on its stream; None ends the stream."""

    def __init__(self, hello: wire.WorkerHello, payloads: Payloads) -> None:
        self.host, self.device = printable(hello.host), printable(hello.device, 50)
        self.price_usd_per_hour = hello.price_usd_per_hour
        self.doing, self.heard_at = "joining", time.monotonic()
        self.num_sampled = 0
        self.outbox: asyncio.Queue[wire.Order | None] = asyncio.Queue()
        self._payloads = payloads
        self._replies: dict[int, asyncio.Future[Answer]] = {}
        self._is_lost = False

    async def sample(self, number: int, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        """As `Backend.sample`. `number`: unique number of the call.

        Raises:
            UserError: the tenant's mistake. MachineLostError, PeerError: another machine must take the call.
        """
        try:
            base_id, adapter_id = await self._payloads.store(base, snapshot)
        except Echo2Error as error:  # also a full disk: the service's own process needs no payload
            raise MachineLostError(f"nothing can be sent to it: {error}") from error
        if self._is_lost:
            raise MachineLostError("it left")
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(Request(number, SampleCall(base_id, adapter_id, spec)))
        try:
            answer = await reply
        except asyncio.CancelledError:
            self._send(Request(number, CancelCall(number)))
            raise
        finally:
            del self._replies[number]
        if answer.fault:
            raise (MachineLostError if answer.is_ours else UserError)(answer.fault)
        self.num_sampled += spec.num_samples
        return checked(spec, answer.sampled)

    def answered(self, answer: Answer) -> None:
        """Take the machine's answer to a call. An answer that is no longer awaited is ignored."""
        reply = self._replies.get(answer.number)
        if reply is not None and not reply.done() and not answer.has_begun:
            reply.set_result(answer)

    def lose(self) -> None:
        """Give up on the machine: end its stream, and fail its calls so that other machines take them."""
        self._is_lost = True
        self.outbox.put_nowait(None)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(MachineLostError("it left"))

    def _send(self, request: Request) -> None:
        self.outbox.put_nowait(wire.Order(sample=encode(request)))


def checked(spec: SampleSpec, output: SampleOutput | None) -> SampleOutput:
    """Return a machine's answer, if it is a valid answer to this call.

    Raises:
        PeerError: "malformed".
    """
    if output is None or len(output.sequences) != spec.num_samples:
        raise PeerError("malformed", f"not the {spec.num_samples} samples that were asked for")
    for sequence in output.sequences:
        tokens, width = sequence.tokens, spec.top_sample_logprobs
        _check_pair(tokens, sequence.logprobs, len(tokens), 1)
        if len(tokens) > spec.max_tokens or min(tokens, default=0) < 0:
            raise PeerError("malformed", f"{len(tokens)} tokens, or one below 0")
        if not all(math.isfinite(logprob) and logprob <= LOGPROB_SLACK for logprob in sequence.logprobs):
            raise PeerError("malformed", "a logprob that is not finite, or above 0")
        _check_pair(sequence.top_tokens, sequence.top_logprobs, len(tokens), width)
    length = len(spec.prompt)
    _check_pair(output.top_prompt_tokens, output.top_prompt_logprobs, length, spec.top_prompt_logprobs)
    _check_pair(output.alternative_tokens, output.alternative_logprobs, length - 1, spec.num_alternatives)
    for floats, expected in (
        (output.prompt_logprobs, length if spec.wants_scores else 0),
        (output.target_logprobs, len(spec.target_places)),
        (output.alternative_logprobs, (length - 1) * spec.num_alternatives),
    ):
        if floats.typecode != "f" or len(floats) != expected:
            raise PeerError("malformed", f"{len(floats)} logprobs where there should be {expected}")
    return output


def _check_pair(tokens: Ints, logprobs: Floats, rows: int, width_max: int) -> None:
    """Check that all rows have equally many tokens and logprobs; fewer than requested if the vocabulary is small."""
    is_whole = len(tokens) == len(logprobs) and len(tokens) <= rows * width_max and len(tokens) % max(1, rows) == 0
    if (tokens.typecode, logprobs.typecode) != ("i", "f") or not is_whole:
        raise PeerError("malformed", f"{len(tokens)} tokens and {len(logprobs)} logprobs in {rows} rows")


class Samplers:
    """What samples for a service: a process beside it, restarted whenever it dies, and machines that joined."""

    def __init__(self, own: AnsweringProcess) -> None:
        self.placing, self._own = Placing(), own
        self._machines: dict[str, JoinedMachine] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[JoinedMachine | None]] = {}  # None: the own process

    def joined(self, name: str, slots: int, machine: JoinedMachine) -> None:
        """Add a machine of the fleet."""
        self._machines[name] = machine
        self.placing.joined(name, slots)
        self._place()

    def remove(self, name: str) -> None:
        """Remove a machine. Its calls end with `MachineLostError`, and other machines take them."""
        del self._machines[name]
        self.placing.remove(name)

    async def sample(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        number = next(self._numbers)
        self.placing.arrive(number, spec.owner, str(snapshot or base), spec.num_samples)
        try:
            while True:
                placed: asyncio.Future[JoinedMachine | None] = asyncio.get_running_loop().create_future()
                self._waiting[number] = placed
                self._place()
                machine = await placed
                if machine is None:
                    return await self._sample_here(base, snapshot, spec)
                try:
                    return await machine.sample(number, base, snapshot, spec)
                except (MachineLostError, PeerError) as error:
                    log.info("call %d goes to another machine: %s", number, error)
                    self.placing.came_back(number)
        finally:
            del self._waiting[number]
            self.placing.ended(number)
            self._place()

    async def _sample_here(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        answer = await self._own.call(SampleCall(base, "" if snapshot is None else str(snapshot), spec))
        if answer.sampled is None:
            raise InvariantError("the sampler answered nothing")
        return answer.sampled

    def _place(self) -> None:
        for number, name in self.placing.place():
            placed = self._waiting[number]
            if not placed.done():  # else the caller was cancelled, and its call is about to end
                placed.set_result(None if name == LOCAL else self._machines[name])


class LocalBackend:
    """A `Backend`. `root`: directory of models and logs; a later back end with the same root continues from there."""

    def __init__(self, bases: Mapping[str, str], root: Path, device: str = "auto") -> None:
        """`bases`: directories, or hub ids, by the names that clients use.

        Raises:
            UserError: there is no such model, or its config.json does not state the context length.
        """
        directories = {name: str(find_model(path, f"bases.{name}").absolute()) for name, path in bases.items()}
        self._bases = {
            name: BaseInfo(name, directory, _context(Path(directory))) for name, directory in directories.items()
        }
        root.mkdir(parents=True, exist_ok=True)
        self._models = root / "models"
        settings = ProcessSettings(directories, str(self._models), device)
        text = msgspec.json.encode(settings).decode()
        self.learner = AnsweringProcess("echo2_service.learner.call_queue", text, root / "learner.log")
        self.sampler = AnsweringProcess("echo2_service.sampler.sample_calls", text, root / "sampler.log")
        self.samplers = Samplers(self.sampler)

    @property
    def bases(self) -> Mapping[str, BaseInfo]:
        return self._bases

    async def call(self, call: ModelCall) -> Answer:
        return await self.learner.call(call)

    def num_bytes(self, model: str) -> int:
        return allocated_bytes(self._models / model)

    async def sample(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        return await self.samplers.sample(base, snapshot, spec)

    async def close(self) -> None:
        await close_all(self.learner.close, self.sampler.close)


def _context(directory: Path) -> int:
    context = read_context(model_files(directory))
    if context is None:
        raise UserError(
            f"{directory}/config.json has max_position_embeddings = {context!r}: give the context's length."
        )
    return context
