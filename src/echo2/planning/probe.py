"""`echo2 probe`: this machine's rollouts per second, with the run's own model, prompts and engine.

It does what a worker does, without a head: whole batches, which the head would score. A first batch warms up and does
not count. What the network and other machines cost is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from echo2 import config as configuration
from echo2.control.seeds import group_seed
from echo2.errors import UserError
from echo2.rollout import generate
from echo2.rollout.engine import Engine, RequestFailure
from echo2.rollout.engines import make_engine
from echo2.rollout.tokenizer import encode_prompt, load_tokenizer
from echo2.tasks.base import TaskStream
from echo2.tasks.environment_process import open_world
from echo2.tasks.load import load_tasks
from echo2.types import Assignment, GroupRef, Lease, RolloutGroup, Snapshot, SnapshotRef

if TYPE_CHECKING:
    from echo2.rollout.tokenizer import Tokenizer

#: Batches that count, at least, however long they take.
MIN_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """`rollouts_per_second` over all counted batches; `standard_error`: of that mean, from batch to batch; `spread`:
    standard deviation of the logarithm of a group's duration.
    """

    rollouts_per_second: float
    standard_error: float
    spread: float
    tokens_per_second: float
    groups_per_batch: int
    num_batches: int
    num_rollouts: int
    seconds: float


def run(options: argparse.Namespace) -> int:
    """Measure and print an offer.

    Raises:
        UserError: no such model or tasks; nothing could be sampled.
    """
    if not (options.seconds > 0 and math.isfinite(options.seconds)):
        raise UserError(f"--seconds {options.seconds} must be above 0.")
    measured = measure(_config(options), options.seconds)
    if options.json:
        print(json.dumps({"name": options.name, "price_usd_per_hour": options.price_usd_per_hour, **asdict(measured)}))
    else:
        print(as_offer(options.name, options.price_usd_per_hour, measured))
    return 0


def as_offer(name: str, price_usd_per_hour: float, measured: Measured) -> str:
    """An entry for the offers file."""
    error = measured.standard_error / measured.rollouts_per_second
    return "\n".join(
        (
            f"# {measured.num_rollouts} rollouts in {measured.seconds:.1f} s, {measured.num_batches} batches, "
            f"{measured.tokens_per_second:.0f} tokens/s; the rate is good to {error:.0%} (one standard error)",
            "[[offers]]",
            f"name = {json.dumps(name)}",
            f"price_usd_per_hour = {price_usd_per_hour:g}" + ("" if price_usd_per_hour else "  # put in yours"),
            f"rollouts_per_second = {measured.rollouts_per_second:.4g}",
            f"spread = {measured.spread:.2f}",
            f"groups_per_batch = {measured.groups_per_batch}",
            "count = 1",
        )
    )


def _config(options: argparse.Namespace) -> configuration.Config:
    """The run's configuration; for a model directory, the built-in task with it."""
    if options.target.is_dir() and not (options.target / "metrics.jsonl").exists():
        dotted = {
            "model.path": str(options.target),
            "tasks.source": "digit_sorting",
            "reward.functions": '["exact_match"]',
            **options.overrides,
        }
        raw: dict[str, dict[str, object]] = {}
        for name, value in dotted.items():
            section, _, key = name.partition(".")
            raw.setdefault(section, {})[key] = configuration.parse_flag(name, value)
        config = configuration.build(raw, str(options.target))
    else:
        target = options.target / "config.json" if options.target.is_dir() else options.target
        config = configuration.load(target, options.overrides)
    return replace(config, workers=replace(config.workers, engine=options.engine)) if options.engine else config


def measure(config: configuration.Config, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Sample batches for so long, in this process.

    Raises:
        UserError: as `run`.
    """
    return measure_engine(config, *_load(config), seconds, clock)


def measure_engine(
    config: configuration.Config, engine: Engine, tokenizer: Tokenizer, seconds: float, clock: Callable[[], float]
) -> Measured:
    """As `measure`, with an engine that has its weights."""
    probe = _Probe(config, engine, tokenizer, clock)
    probe.batch()
    probe.forget()
    started = clock()
    while len(probe.batches) < MIN_BATCHES or clock() - started < seconds:
        probe.batch()
    rates = [count / took for count, took in probe.batches]
    num_rollouts, took = sum(count for count, _ in probe.batches), sum(took for _, took in probe.batches)
    return Measured(
        rollouts_per_second=num_rollouts / took,
        standard_error=statistics.stdev(rates) / math.sqrt(len(rates)),
        spread=statistics.pstdev(math.log(one) for one in probe.group_seconds),
        tokens_per_second=probe.num_tokens / took,
        groups_per_batch=config.sampling.groups_per_batch,
        num_batches=len(probe.batches),
        num_rollouts=num_rollouts,
        seconds=took,
    )


def _load(config: configuration.Config) -> tuple[Engine, Tokenizer]:
    from echo2.learner.model import DTYPES, load_policy  # here: nothing else of planning needs torch

    policy = load_policy(config.model.path, config.model.dtype, config.workers.device)
    snapshot = Snapshot(SnapshotRef(1, 0), policy.tensors(DTYPES[config.model.snapshot_dtype]), policy.files)
    engine = make_engine(config.workers.engine, config.workers.device, "between")
    engine.load_snapshot(snapshot)
    return engine, load_tokenizer({name: bytes(data) for name, data in snapshot.files.items()})


class _Probe:
    """`batches`: (rollouts, seconds) of each counted batch."""

    def __init__(
        self, config: configuration.Config, engine: Engine, tokenizer: Tokenizer, clock: Callable[[], float]
    ) -> None:
        tasks = load_tasks(config.tasks.source, config.tasks.params, config.run.seed)
        self._config, self._engine, self._tokenizer, self._clock = config, engine, tokenizer, clock
        self._stream = TaskStream(tasks, config.run.seed, config.tasks.shuffle)
        environment = config.tasks.environment
        self._worlds = {environment: open_world(environment)} if environment else {}
        self._next = 0
        self.forget()

    def forget(self) -> None:
        self.batches: list[tuple[int, float]] = []
        self.group_seconds: list[float] = []
        self.num_tokens = 0

    def batch(self) -> None:
        """One batch of groups, as a worker would be leased them."""
        numbers = range(self._next, self._next + self._config.sampling.groups_per_batch)
        self._next = numbers.stop
        assignments = [self._assignment(number) for number in numbers]
        failures: list[str] = []
        count, started = 0, self._clock()

        def sampled(group: RolloutGroup, _lease: Lease) -> None:
            nonlocal count
            count += len(group.rollouts)
            self.num_tokens += group.num_tokens
            self.group_seconds.append(max(1e-9, self._clock() - started))

        def failed(_lease: Lease, failure: RequestFailure) -> None:
            failures.append(failure.detail)

        generate.sample_groups(
            self._engine,
            self._tokenizer,
            assignments,
            1,
            "probe",
            sampled,
            failed,
            clock=self._clock,
            worlds=self._worlds,
        )
        if count == 0:
            raise UserError(f"Nothing could be sampled: {failures[-1] if failures else 'no group came back'}.")
        self.batches.append((count, max(1e-9, self._clock() - started)))

    def _assignment(self, number: int) -> Assignment:
        group = GroupRef("train", number)
        seed = group_seed(self._config.run.seed, group)
        lease = Lease(number, group, 0, number, self._config.sampling.group_size, 0, 0, 0.0, 0.0, seed)
        turns = (self._config.tasks.environment, self._config.sampling.max_turns)
        task = self._stream.task(number)
        prompt = encode_prompt(task, self._tokenizer)
        return generate.assignment_of(lease, task, prompt, self._config.sampling_params, *turns)
