"""The sampler process of a service: reads calls from stdin, writes answers to stdout, and ends with its parent."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from echo2.core.background import spawn
from echo2.core.child import take_pipes
from echo2.core.errors import Echo2Error, PeerError, UserError
from echo2.core.types import Snapshot, SnapshotRef
from echo2.learner.core import checkpoint
from echo2.weights.format.model_files import read_adapter, read_base_model
from echo2_service.calling import receive
from echo2_service.decide.placing import SLOTS
from echo2_service.frames import Answer, CancelCall, Request, SampleCall, frame
from echo2_service.sampler.samplers import BaseSampler

log = logging.getLogger(__name__)


class SamplerSettings(msgspec.Struct, frozen=True):
    """`bases`: directories of the base models by name."""

    bases: dict[str, str]
    device: str = "auto"


class SampleCalls:
    """Passes each call to the sampler of its base model, and the answer to `tell`. For one event loop."""

    def __init__(self, sampler_of: Callable[[str], Awaitable[BaseSampler]], tell: Callable[[Answer], None]) -> None:
        """`sampler_of` raises UserError if there is no such base model."""
        self._sampler_of, self._tell = sampler_of, tell
        self._under_way: dict[int, asyncio.Task[None]] = {}

    @property
    def num_under_way(self) -> int:
        """Number of calls that have no answer yet."""
        return len(self._under_way)

    def take(self, request: Request) -> None:
        """Begin a sample call, or cancel one."""
        call, number = request.call, request.number
        if isinstance(call, CancelCall):
            if task := self._under_way.get(number):
                task.cancel()
        elif isinstance(call, SampleCall):
            self._under_way[number] = task = spawn(self._answer(number, call), partial(self._failed, number))
            task.add_done_callback(partial(self._ended, number))

    def drop_all(self) -> None:
        """Cancel all calls, because their answers are no longer awaited."""
        for task in self._under_way.values():
            task.cancel()

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._under_way.get(number) is task:
            del self._under_way[number]

    def _failed(self, number: int, error: Exception) -> None:
        """Answer a call whose answer cannot be told: it may be too large."""
        log.error("the answer of a sample", exc_info=error)
        self._tell(Answer(number, fault=f"The samples cannot be sent: {error}", is_ours=True))

    async def _answer(self, number: int, call: SampleCall) -> None:
        self._tell(Answer(number, has_begun=True))
        try:
            sampler = await self._sampler_of(call.base)
            answer = Answer(number, sampled=await sampler.sample(call.snapshot, call.spec))
        except UserError as error:
            answer = Answer(number, fault=str(error))
        except PeerError as error:  # the tenant's weights are not finite, or not an adapter
            answer = Answer(number, fault=error.detail)
        except Exception as error:  # other tenants' work goes on; this caller gets the error
            log.exception("a sample")
            answer = Answer(number, fault=f"{type(error).__name__}: {error}", is_ours=True)
        self._tell(answer)


def published(directory: str, base: SnapshotRef) -> Snapshot:
    """Return the adapter that the learner wrote to a directory, with the base model that it was trained on.

    Raises:
        UserError: the directory holds no adapter.
    """
    trained_over = checkpoint.read_client(Path(directory))["base_model"]
    return read_adapter(Path(directory), base, SnapshotRef(trained_over, 0, 0))


def base_sampler(directory: str, device: str, slots: int = SLOTS) -> BaseSampler:
    """Return a sampler of a base model and its adapters on this disk, which calls name by their directories.

    Raises:
        UserError: the directory holds no model that the compact engine supports.
    """
    base = read_base_model(Path(directory))

    async def read(snapshot: str) -> Snapshot:
        return await asyncio.to_thread(published, snapshot, base.ref)

    return BaseSampler(base, device, read, slots)


async def serve(settings: SamplerSettings) -> None:
    """Answer calls until stdin ends."""
    inbox, outbox = take_pipes()
    samplers = {name: base_sampler(directory, settings.device) for name, directory in settings.bases.items()}

    async def sampler_of(base: str) -> BaseSampler:
        if base not in samplers:
            raise UserError(f"There is no base model {base!r}; there are {', '.join(samplers)}.")
        return samplers[base]

    def tell(answer: Answer) -> None:
        outbox.write(frame(answer))
        outbox.flush()

    calls, loop = SampleCalls(sampler_of, tell), asyncio.get_running_loop()
    log.info("ready: %s", ", ".join(samplers))

    def take(request: Request) -> None:
        loop.call_soon_threadsafe(calls.take, request)

    await asyncio.to_thread(receive, inbox, take)


def main(settings_text: str) -> None:
    """Run the process until stdin ends."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s sampler %(message)s")
    asyncio.run(serve(msgspec.json.decode(settings_text, type=SamplerSettings)))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Echo2Error as error:
        sys.exit(str(error))
