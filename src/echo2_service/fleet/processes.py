"""The back end: a learner process, a sampler process, and machines that sample. No torch in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from echo2.core.disk import allocated_bytes
from echo2.core.errors import InvariantError, UserError
from echo2.engines.model_values import read_context
from echo2.weights.format.model_files import find_model, model_files
from echo2_service.backend import AdamSettings, BaseInfo, ClientDatum, ModelSpec, SampleOutput, SampleSpec, TrainOutput
from echo2_service.calling import AnsweringProcess
from echo2_service.fleet.machines import OwnProcess, Samplers
from echo2_service.frames import (
    CreateModelCall,
    DeleteCall,
    ForwardBackwardCall,
    LoadStateCall,
    OptimStepCall,
    PublishCall,
    SaveStateCall,
    UnloadCall,
)


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
        settings = {"bases": directories, "root": str(self._models), "device": device}
        text = msgspec.json.encode(settings).decode()
        self.learner = AnsweringProcess("echo2_service.learner.process", text, root / "learner.log")
        self.sampler = AnsweringProcess("echo2_service.sampler.process", text, root / "sampler.log")
        self.samplers = Samplers(OwnProcess(self.sampler))

    @property
    def bases(self) -> Mapping[str, BaseInfo]:
        """See `Backend.bases`."""
        return self._bases

    async def create_model(self, model: str, spec: ModelSpec) -> None:
        """See `Backend.create_model`."""
        await self.learner.call(CreateModelCall(model, spec))

    async def forward_backward(
        self,
        model: str,
        operation: int,
        data: Sequence[ClientDatum],
        loss: str,
        params: Mapping[str, float],
        forward_only: bool = False,
    ) -> TrainOutput:
        """See `Backend.forward_backward`."""
        call = ForwardBackwardCall(model, operation, list(data), loss, dict(params), forward_only)
        answer = await self.learner.call(call)
        if answer.trained is None:
            raise InvariantError(f"{model}: operation {operation} was another one before")
        return answer.trained

    async def optim_step(self, model: str, operation: int, adam: AdamSettings) -> dict[str, float]:
        """See `Backend.optim_step`."""
        answer = await self.learner.call(OptimStepCall(model, operation, adam))
        if answer.metrics is None:
            raise InvariantError(f"{model}: operation {operation} was another one before")
        return answer.metrics

    async def save_state(self, model: str, operation: int, directory: Path) -> None:
        """See `Backend.save_state`."""
        await self.learner.call(SaveStateCall(model, operation, str(directory)))

    async def load_state(self, model: str, operation: int, directory: Path, with_optimizer: bool) -> None:
        """See `Backend.load_state`."""
        await self.learner.call(LoadStateCall(model, operation, str(directory), with_optimizer))

    async def publish(self, model: str, operation: int, directory: Path) -> None:
        """See `Backend.publish`."""
        await self.learner.call(PublishCall(model, operation, str(directory)))

    async def unload(self, model: str) -> None:
        """See `Backend.unload`."""
        await self.learner.call(UnloadCall(model))

    async def delete(self, model: str) -> None:
        """See `Backend.delete`."""
        await self.learner.call(DeleteCall(model))

    def num_bytes(self, model: str) -> int:
        """See `Backend.num_bytes`."""
        return allocated_bytes(self._models / model)

    async def sample(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        """See `Backend.sample`."""
        return await self.samplers.sample(base, snapshot, spec)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self.learner.close()
        await self.sampler.close()


def _context(directory: Path) -> int:
    context = read_context(model_files(directory))
    if context is None:
        raise UserError(
            f"{directory}/config.json has max_position_embeddings = {context!r}: give the context's length."
        )
    return context
