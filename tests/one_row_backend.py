"""A back end small enough to check by hand: each model is one row of logits, whatever came before a token.

It keeps the contract of `echo2_service.backend`: operations once and by number, sums of losses, frozen snapshots.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo2.core.disk import allocated_bytes
from echo2.core.errors import UserError
from echo2_service.backend import (
    AdamSettings,
    Answer,
    BaseInfo,
    ClientDatum,
    CreateModelCall,
    DeleteCall,
    ForwardBackwardCall,
    LoadStateCall,
    ModelSpec,
    OptimStepCall,
    PublishCall,
    SampledSequence,
    SampleOutput,
    SampleSpec,
    SaveStateCall,
    TrainOutput,
    UnloadCall,
)
from echo2_service.calling import with_data

VOCABULARY = 16
END = 0


class OneRowBackend:
    """A `Backend`. `gate`: operations and samples wait while it is not set. `calls`: what was called, in order."""

    def __init__(self, directory: Path) -> None:
        self.bases: Mapping[str, BaseInfo] = {"echo2/tiny": BaseInfo("echo2/tiny", str(directory), 128)}
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[tuple[Any, ...]] = []
        self.rows: dict[str, NDArray[np.float64]] = {}
        self.gradients: dict[str, NDArray[np.float64]] = {}
        self.outcomes: dict[tuple[str, int], Any] = {}
        self.unloaded: list[str] = []
        self.deleted: list[str] = []
        self.directory = directory
        self.more_bytes = 0  # beside the row, in what is saved

    async def call(self, call: Any) -> Answer:
        """See `Backend`."""
        match call:
            case CreateModelCall(model, spec):
                await self.create_model(model, spec)
            case ForwardBackwardCall(model, operation, _, loss, params, forward_only):
                data = with_data(call).data
                return Answer(trained=await self.forward_backward(model, operation, data, loss, params, forward_only))
            case OptimStepCall(model, operation, adam):
                return Answer(metrics=await self.optim_step(model, operation, adam))
            case SaveStateCall(model, operation, directory):
                await self.save_state(model, operation, Path(directory))
            case PublishCall(model, operation, directory):
                await self.publish(model, operation, Path(directory))
            case LoadStateCall(model, operation, directory, with_optimizer):
                await self.load_state(model, operation, Path(directory), with_optimizer)
            case UnloadCall(model):
                await self.unload(model)
            case DeleteCall(model):
                await self.delete(model)
        return Answer()

    async def create_model(self, model: str, spec: ModelSpec) -> None:
        """Create a row."""
        self.calls.append(("create_model", model))
        self.rows.setdefault(model, np.zeros(VOCABULARY))
        self.gradients.setdefault(model, np.zeros(VOCABULARY))

    async def forward_backward(
        self,
        model: str,
        operation: int,
        data: Sequence[ClientDatum],
        loss: str,
        params: Mapping[str, float],
        forward_only: bool = False,
    ) -> TrainOutput:
        """Cross entropy; other losses have advantages for weights."""
        self._begin(model, operation, "forward" if forward_only else "forward_backward")
        if loss not in ("cross_entropy", "importance_sampling", "ppo"):
            raise UserError(f"There is no loss {loss!r}.")
        logp = log_softmax(self.rows[model])
        total, rows = 0.0, []
        for datum in data:
            given = datum.weights if loss == "cross_entropy" else datum.advantages
            weights = np.asarray(given if given is not None else np.ones(len(datum.targets)))
            targets = np.asarray(datum.targets)
            if targets.max() >= VOCABULARY:
                raise UserError(f"The token {targets.max()} is outside of the vocabulary.")
            rows.append(array("f", logp[targets].astype("f4").tobytes()))
            total -= float((weights * logp[targets]).sum())
            if not forward_only:
                one_hot = np.bincount(targets, weights, VOCABULARY)
                self.gradients[model] += weights.sum() * np.exp(logp) - one_hot
        await self.gate.wait()
        return TrainOutput(rows, {"loss:sum": total})

    async def optim_step(self, model: str, operation: int, adam: AdamSettings) -> dict[str, float]:
        """Plain gradient descent."""
        self._begin(model, operation, "optim_step")
        norm = float(np.linalg.norm(self.gradients[model]))
        self.rows[model] = self.rows[model] - adam.lr * self.gradients[model]
        self.gradients[model] = np.zeros(VOCABULARY)
        await self.gate.wait()
        return {"grad_norm": norm}

    async def save_state(self, model: str, operation: int, directory: Path) -> None:
        self._begin(model, operation, "save_state")
        self._write(model, directory)

    async def publish(self, model: str, operation: int, directory: Path) -> None:
        self._begin(model, operation, "publish")
        self._write(model, directory)

    async def load_state(self, model: str, operation: int, directory: Path, with_optimizer: bool) -> None:
        self._begin(model, operation, "load_state")
        self.rows[model] = np.load(directory / "row.npy")

    async def unload(self, model: str) -> None:
        self.unloaded.append(model)

    async def delete(self, model: str) -> None:
        self.deleted.append(model)
        shutil.rmtree(self.directory / "models" / model, ignore_errors=True)

    def num_bytes(self, model: str) -> int:
        """See `Backend`."""
        return allocated_bytes(self.directory / "models" / model)

    async def sample(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        """See `Backend`."""
        self.calls.append(("sample", snapshot and snapshot.name, spec.seed))
        row = np.zeros(VOCABULARY) if snapshot is None else np.load(snapshot / "row.npy")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.calls.append(("cancelled", None, spec.seed))
            raise
        logp = log_softmax(row)
        source = random.Random(spec.seed)
        sequences = [self._draw(source, logp, spec) for _ in range(spec.num_samples)]
        prompt = array("f", [float("nan"), *(float(logp[token]) for token in spec.prompt[1:])])
        likely = np.argsort(-logp)[: spec.top_prompt_logprobs].astype("i4")
        return SampleOutput(
            sequences,
            prompt if spec.wants_scores else array("f"),
            array("i", [-1] * len(likely) + likely.tolist() * (len(spec.prompt) - 1)),
            array("f", [float("nan")] * len(likely) + logp[likely].tolist() * (len(spec.prompt) - 1)),
            array("f", [float(logp[token]) for token in spec.target_tokens]),
            array("i", [spec.num_alternatives] * spec.num_alternatives * (len(spec.prompt) - 1)),
            array("f", [0.0] * spec.num_alternatives * (len(spec.prompt) - 1)),
        )

    def _draw(self, source: random.Random, logp: NDArray[np.float64], spec: SampleSpec) -> SampledSequence:
        ends = {*spec.stop_tokens, *([END] if spec.ends_with_model else [])}
        tokens = array("i")
        while len(tokens) < spec.max_tokens and not (tokens and tokens[-1] in ends):
            tokens.append(source.choices(range(VOCABULARY), np.exp(logp).tolist())[0])
        logprobs = array("f", [float(logp[token]) for token in tokens])
        likely = np.argsort(-logp)[: spec.top_sample_logprobs].tolist() * len(tokens)
        tops = array("i", likely), array("f", logp[likely].tolist())
        return SampledSequence(tokens, logprobs, "stop" if tokens[-1] in ends else "length", *tops)

    async def close(self) -> None:
        """See `Backend`."""

    def _begin(self, model: str, operation: int, name: str) -> None:
        self.calls.append((name, model, operation))
        if model not in self.rows:
            raise UserError(f"There is no model {model}.")

    def _write(self, model: str, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        np.save(directory / "row.npy", self.rows[model])
        if self.more_bytes:
            (directory / "more").write_bytes(bytes(self.more_bytes))


def log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of one row."""
    shifted = row - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
