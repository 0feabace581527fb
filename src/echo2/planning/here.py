"""`echo2 plan --here`: forecasts a run on the cores of this machine, as `echo2 run` starts it: a head, a learner, and
`workers.count` workers, with one thread each. What a core does is measured in a second (`engines/processor.py`).
Prompts are read from the tasks. Lengths of answers and a worker's rate are assumed and estimated, or measured: by what
`echo2 probe --json` printed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from echo2.config import Config
from echo2.core.devices import this_machine
from echo2.core.errors import UserError, counted
from echo2.core.printable import duration, size
from echo2.engines.processor import Processor, this_processor
from echo2.engines.tokenizer import encode_prompt, load_tokenizer
from echo2.head.fleet.decide.forecast import OneMachine, Prediction, WorkerKind, forecast
from echo2.head.fleet.decide.formulas import Demand
from echo2.learner.core.fitting import frozen_bytes, num_parameters, snapshot_size
from echo2.learner.decide.memory import BYTES_PER_VALUE
from echo2.learner.decide.model_shape import ModelShape
from echo2.planning import on_cores
from echo2.planning.disk_and_network import DiskAndNetwork, PlannedFleet, disk_and_network_table, kept_and_sent
from echo2.planning.first_plan import Basis, fetched_shape, mean_of_teachers, usual_delta_share
from echo2.planning.first_plan import answer_tokens as mean_answer
from echo2.planning.lengths import SeenLengths
from echo2.planning.memory_needs import Needs, learner_that_fits, needs_as_dict, worker_that_fits
from echo2.planning.on_cores import Lengths
from echo2.planning.plan_inputs import BroadcastInputs
from echo2.tasks.streams import held_out_tasks, training_tasks
from echo2.weights.format.model_files import model_files

#: Prompts that are read for their mean length.
PROMPTS_READ = 64


class Probed(msgspec.Struct):
    """The used part of the JSON that `echo2 probe` prints."""

    num_rollouts: int
    core_seconds: float
    seconds: float
    group_size: int
    groups_per_batch: int
    max_tokens: int
    parameters: int
    lengths: SeenLengths | None = None


@dataclass(frozen=True, slots=True)
class Here:
    """A run on this machine. `train_seconds`: of a step, with its teacher, and `rollouts_per_second`: of a worker, each
    on a core of its own; `prediction`: of all on the machine's cores; `basis`: where the inputs are from;
    `disk_and_network`: what they take.
    """

    train_seconds: float
    rollouts_per_second: float
    prediction: Prediction
    steps: int
    rollouts_per_step: int
    needs: Needs
    lengths: Lengths
    processor: Processor
    basis: tuple[Basis, ...]
    disk_and_network: DiskAndNetwork

    @property
    def step_seconds(self) -> float:
        """Mean over the run, with the cold start."""
        return self.prediction.run_seconds / self.steps

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_seconds": self.step_seconds,
            "steady_step_seconds": self.prediction.step_seconds,
            "run_seconds": self.prediction.run_seconds,
            "train_seconds": self.train_seconds,
            "rollouts_per_second": self.rollouts_per_step / self.step_seconds,
            "worker_rollouts_per_second": self.rollouts_per_second,
            "idle_ratio": self.prediction.idle_ratio,
            "steady_idle_ratio": self.prediction.steady_idle_ratio,
            "memory": needs_as_dict(self.needs),
            "lengths": asdict(self.lengths),
            "processor": asdict(self.processor),
            **self.disk_and_network.to_dict(),
            "inputs": {one.name: [one.value, one.origin] for one in self.basis},
        }


def read_probe(path: Path, config: Config) -> Probed:
    """Read what `echo2 probe --json` printed for this configuration.

    Raises:
        UserError: there is no such file, it is no such output, or it is of another run.
    """
    make = "Make it with `echo2 probe CONFIG --json > FILE`."
    try:
        probed = msgspec.json.decode(path.read_bytes(), type=Probed)
    except OSError as error:
        raise UserError(f"--here {path}: {error.strerror}. {make}") from error
    except msgspec.MsgspecError as error:
        raise UserError(f"--here {path} is not what `echo2 probe --json` prints: {error}. {make}") from error
    if not (probed.num_rollouts > 0 and probed.core_seconds > 0.0 and probed.seconds > 0.0):
        raise UserError(
            f"--here {path} counts {probed.num_rollouts} rollouts in {probed.seconds} s, {probed.core_seconds} s of a "
            f"core. {make}"
        )
    sampling = config.sampling
    for name, own in (
        ("group_size", sampling.group_size),
        ("groups_per_batch", sampling.groups_per_batch),
        ("max_tokens", sampling.max_tokens),
    ):
        if getattr(probed, name) != own:
            raise UserError(
                f"--here {path} was measured with sampling.{name} = {getattr(probed, name)}, and the run has {own}. "
                "Probe this configuration again."
            )
    own_size = num_parameters(config.model.path)
    if own_size and probed.parameters and probed.parameters != own_size:
        raise UserError(
            f"--here {path} was measured with a model of {probed.parameters} parameters, and {config.model.path!r} has "
            f"{own_size}. Probe this configuration again."
        )
    return probed


def forecast_here(config: Config, probed: Probed | None = None, answer_tokens: float | None = None) -> Here:
    """Measure this machine's cores, and forecast the run on them.

    Raises:
        UserError: the model or the tasks are not here, there is a GPU, or memory does not suffice.
    """
    hardware = this_machine()
    if hardware.gpus:
        raise UserError("--here forecasts machines without a GPU. Name this one's: --learner, and its offers' gpu.")
    if not config.workers.count:
        raise UserError("--here forecasts the workers that `echo2 run` starts, and workers.count = 0. Set it to 1.")
    if config.tasks.environment and probed is None:
        raise UserError(
            "--here does not know how long an environment's turns take. Measure them: `echo2 probe CONFIG --json > "
            "probe.json`, then `echo2 plan CONFIG --here probe.json`."
        )
    if what := here_refuses(config):
        raise UserError(
            f"--here has no forecast for {what}. Measure five steps instead: `echo2 run CONFIG --run.max_steps 5 --out "
            "DIR`, then `echo2 status DIR`."
        )
    if not Path(config.model.path).is_dir():
        raise UserError(
            f"--here reads the model's files, and model.path = {config.model.path!r} is not a directory here. Fetch "
            "the model and name its directory: --model.path DIR."
        )
    shape = fetched_shape(config.model.path)
    needs = Needs(learner_that_fits(config, shape, hardware), worker_that_fits(config, shape, hardware))
    processor = this_processor(1 + config.workers.count)
    lengths, flat, basis = _lengths(config, probed, answer_tokens)
    return forecast_on(config, shape, processor, lengths, flat, needs, basis, probed)


def here_refuses(config: Config) -> str:
    """Return the setting for which there is no forecast on cores; "" if there is none."""
    if config.learner.ranks > 1:
        return "learner.ranks above 1"
    return 'learner.quantised = "base"' if config.learner.quantised == "base" else ""


def forecast_on(
    config: Config,
    shape: ModelShape,
    processor: Processor,
    lengths: Lengths,
    flat: float,
    needs: Needs,
    basis: tuple[Basis, ...],
    probed: Probed | None = None,
) -> Here:
    """Forecast the run on the cores of such a machine. `flat`: share of groups that teach nothing."""
    groups, group_size, at_once = config.schedule.groups_per_step, config.sampling.group_size, _at_once(config)
    train, taught = _learner_seconds(config, shape, processor, lengths, flat)
    width = frozen_bytes(config, shape) if config.lora.rank else BYTES_PER_VALUE[config.model.snapshot_dtype]

    def batch_seconds(of: float) -> float:
        return on_cores.batch_seconds(shape, lengths, of, group_size, width, processor)

    full = batch_seconds(at_once)
    fixed_share = max(0.0, (full - at_once * (full - batch_seconds(at_once / 2)) * 2 / at_once) / full)
    rate, origin = at_once * group_size / full, "estimated"
    if probed is not None:
        # Turns of an environment take time in which the engine does not compute.
        rate = probed.num_rollouts / (probed.seconds if config.tasks.environment else probed.core_seconds)
        origin = f"measured with {counted(probed.num_rollouts, 'rollout')}"
    snapshot, share = snapshot_size(config), usual_delta_share(config)
    full = snapshot.num_bytes
    weights = BroadcastInputs(full, None if share is None else share * full, base_bytes=snapshot.base_bytes)
    schedule = config.schedule
    demand = Demand(
        groups,
        group_size,
        schedule.publish_every,
        schedule.max_staleness,
        train + taught,
        on_cores.broadcast_seconds(full, weights.num_bytes(schedule.publish_every)),
    )
    together = max(1, int(needs.learner.microbatch.tokens / (lengths.prompt + group_size * lengths.trained)))
    held_out = held_out_tasks(config.eval, config.run.seed)
    machine = OneMachine(
        processor.cores,
        on_cores.first_broadcast_seconds(full + snapshot.base_bytes),
        -(-groups // together),
        0 if held_out is None else -(-len(held_out) * config.eval.samples // group_size),
        config.eval.every,
    )
    kind = WorkerKind(rate, config.workers.count, at_once, fixed_share=fixed_share)
    prediction = forecast(demand, [kind], config.run.max_steps, machine=machine)
    more = [Basis("a worker's rate", f"{rate:.3g} rollouts/s", origin)]
    if taught:
        more.append(Basis("the teacher's logprobs", duration(taught), "a forward pass in each step (time/teacher)"))
    count = config.workers.count
    fleet = PlannedFleet(count, count, schedule.publish_every, schedule.max_staleness)
    disk_and_network = kept_and_sent(config, weights, fleet, lengths.answer)
    return Here(
        train + taught,
        rate,
        prediction,
        config.run.max_steps,
        groups * group_size,
        needs,
        lengths,
        processor,
        (*basis, *more),
        disk_and_network,
    )


def _learner_seconds(
    config: Config, shape: ModelShape, processor: Processor, lengths: Lengths, flat: float
) -> tuple[float, float]:
    """Return the seconds of a core in which a step is trained, and in which teachers score its tokens."""
    groups, size = config.schedule.groups_per_step, config.sampling.group_size

    def scoring_seconds(teacher: ModelShape) -> float:
        return on_cores.scoring_seconds(teacher, lengths, groups, size, processor)

    # With a teacher, groups of equal rewards have advantages, too.
    trained = groups if config.distill.teachers else (1.0 - flat) * groups
    seconds = on_cores.training_seconds(shape, lengths, trained, size, processor, config.lora.rank)
    return seconds, mean_of_teachers(config, shape, scoring_seconds)


def _at_once(config: Config) -> int:
    return min(config.sampling.groups_per_batch, config.schedule.groups_per_step * (1 + config.schedule.max_staleness))


def _lengths(
    config: Config, probed: Probed | None, answer_tokens: float | None
) -> tuple[Lengths, float, tuple[Basis, ...]]:
    """Return the mean lengths over the run, the share of groups that teach nothing, and where both are from."""
    most = config.sampling.max_tokens
    if probed is not None and probed.lengths is not None:
        measured = probed.lengths
        answer = (measured.answer + measured.preferred) / 2 if answer_tokens is None else answer_tokens
        trained = (
            (measured.trained + measured.preferred_trained) / 2 * answer / ((measured.answer + measured.preferred) / 2)
        )
        source = (
            f"{measured.answer:.3g} tokens now and {measured.preferred:.3g} of those that training prefers; the "
            f"learner runs {measured.trained:.3g} and {measured.preferred_trained:.3g} of them"
        )
        lengths = Lengths(measured.prompt, answer, trained, max(measured.longest, answer))
        return lengths, measured.flat, (Basis("answers", f"{answer:.3g} tokens", source),)
    prompt, answer = _prompt_tokens(config), mean_answer(config, answer_tokens)
    origin = "--answer-tokens" if answer_tokens else f"half of sampling.max_tokens = {most}; `echo2 probe` measures"
    basis = (
        Basis("prompts", f"{prompt:.3g} tokens", f"the first {PROMPTS_READ} of {config.tasks.source}"),
        Basis("answers", f"{answer:.3g} tokens", origin),
    )
    return Lengths(prompt, answer, max(0.0, answer - 1.0), min(most, 2 * answer)), 0.0, basis


def _prompt_tokens(config: Config) -> float:
    """Return the mean length of the first prompts.

    Raises:
        UserError: the model is not a directory, or a task is wrong.
    """
    tokenizer = load_tokenizer(model_files(Path(config.model.path)), config.model.chat_template_args)
    tasks = training_tasks(config.tasks, config.run.seed)
    count = min(PROMPTS_READ, len(tasks))
    return sum(len(encode_prompt(tasks.task(cursor), tokenizer)) for cursor in range(count)) / count


def show(run_forecast: Here, is_json: bool) -> None:
    """Print the forecast, for people or as JSON."""
    if is_json:
        print(json.dumps(run_forecast.to_dict()))
        return
    table = Table(title="This machine", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    step, whole = run_forecast.step_seconds, run_forecast.prediction
    table.add_row("step", f"[bold]{duration(step)}[/bold], run {duration(whole.run_seconds)}")
    table.add_row("", f"{duration(run_forecast.train_seconds)} of a core for training")
    made = run_forecast.rollouts_per_step / step
    table.add_row(
        "rollouts", f"{made:.3g}/s; a worker makes {run_forecast.rollouts_per_second:.3g}/s on a core of its own"
    )
    table.add_row("learner idle", f"{whole.steady_idle_ratio:.1%} once under way, {whole.idle_ratio:.1%} of the run")
    learner, worker = run_forecast.needs.learner, run_forecast.needs.worker
    table.add_row("memory", f"learner {size(learner.total)}, each worker {size(worker.total)}")
    console = Console()
    console.print(table, highlight=False)
    console.print(disk_and_network_table(run_forecast.disk_and_network), highlight=False)
    rests = "; ".join(f"{one.name} {one.value} ({one.origin})" for one in run_forecast.basis)
    console.print(f"[dim]Rests on: {run_forecast.processor} (measured); {rests}.[/dim]", highlight=False)
