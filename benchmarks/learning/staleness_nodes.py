"""The processes of `staleness_time.py --paced`: real sampling and training at the speed of machines elsewhere.

What two cores compute for learner and workers alike, a remote fleet computes beside the learner. Here each process
computes the real thing and then sleeps: a worker until a decoding step has taken `token_seconds`, the learner until
a group's training has taken its share of `train_seconds`, and before a version is sent for `broadcast_seconds`. So
many of them fit on this machine without being in each other's way; tokens, gradients and staleness are real.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paced_run

if TYPE_CHECKING:
    from array import array

    import torch

    from echo2.core.types import RolloutGroup, Snapshot, SnapshotRef
    from echo2.engines.adapter import Adapter
    from echo2.engines.rows import Limits
    from echo2.engines.snapshot_tensors import Places
    from echo2.engines.torch_engine import Cache, Model
    from echo2.learner.grpo.loss_stats import LossStats


@dataclass(frozen=True, slots=True)
class Pace:
    """`train_seconds` of a whole step; `token_seconds` of one decoding step, however many rows it has."""

    workers: int
    token_seconds: float
    train_seconds: float
    broadcast_seconds: float


def run_job(config: str, groups_per_step: int, pace: Pace, directory: Path, flags: Sequence[str]) -> float:
    """One run in `directory`; what share of all cores was busy.

    Raises:
        RuntimeError: a process died, or nothing went on; with its log.
    """
    settings = {**asdict(pace), "groups_per_step": groups_per_step}
    return paced_run.run_paced(directory, config, __file__, pace.workers, settings, flags)


class PacedModel:
    """A policy whose decoding steps take a set time, as long as it computes faster than that."""

    def __init__(self, model: Model, token_seconds: float) -> None:
        self._model, self._token_seconds = model, token_seconds

    @property
    def limits(self) -> Limits:
        return self._model.limits

    @property
    def architecture(self) -> Hashable:
        return self._model.architecture

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def places(self) -> Places:
        return self._model.places

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        return self._model.linears

    def adapted(self, adapter: Adapter) -> PacedModel:
        return PacedModel(self._model.adapted(adapter), self._token_seconds)

    def pack(self) -> None:
        self._model.pack()

    def unpack(self) -> None:
        self._model.unpack()

    def prefill(self, prompts: Sequence[array[int]], known: Sequence[Cache | None] = ()) -> Cache:
        with self._pace():
            return self._model.prefill(prompts, known)

    def step(self, cache: Cache, tokens_B: torch.Tensor) -> torch.Tensor:
        with self._pace():
            return self._model.step(cache, tokens_B)

    def logits(self, sequences: Sequence[array[int]], firsts: Sequence[int], most: int) -> Iterator[torch.Tensor]:
        return self._model.logits(sequences, firsts, most)

    def extend(
        self, cache: Cache | None, tokens: array[int], first: int, most: int
    ) -> tuple[Cache, Iterator[torch.Tensor]]:
        return self._model.extend(cache, tokens, first, most)

    @contextmanager
    def _pace(self) -> Iterator[None]:
        until = time.monotonic() + self._token_seconds
        yield
        time.sleep(max(0.0, until - time.monotonic()))


def run_worker(settings: Mapping[str, Any]) -> None:
    from echo2.engines.compact import build_compact
    from echo2.engines.torch_engine import TorchDecoder
    from echo2.worker.process import WorkerOptions

    def build(snapshot: Snapshot, device: torch.device) -> Model:
        return PacedModel(build_compact(snapshot, device), settings["token_seconds"])

    paced_run.run_worker(settings, lambda: TorchDecoder(build, "cpu"), WorkerOptions(device="cpu"))


def run_learner(settings: Mapping[str, Any]) -> None:
    from echo2.config.rundir import RunDir
    from echo2.learner import process as learner_process
    from echo2.learner.core.publication import BorrowedWeights, Payload, Publisher
    from echo2.learner.grpo.loop import GrpoClient

    group_seconds = settings["train_seconds"] / settings["groups_per_step"]

    @paced_run.in_place_of(learner_process, GrpoClient)
    class PacedTrainer(GrpoClient):
        def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
            until = time.monotonic() + group_seconds * len(groups)
            stats = super().forward_backward(groups)
            time.sleep(max(0.0, until - time.monotonic()))
            return stats

    @paced_run.in_place_of(learner_process, Publisher)
    class PacedPublisher(Publisher):
        def payload(self, ref: SnapshotRef, weights: BorrowedWeights) -> Payload:
            time.sleep(settings["broadcast_seconds"])  # in the thread that publishes: training goes on
            return super().payload(ref, weights)

    learner_process.run_learner(RunDir(Path(settings["run"])), "")


if __name__ == "__main__":
    {"worker": run_worker, "learner": run_learner}[sys.argv[1]](json.loads(sys.argv[2]))
