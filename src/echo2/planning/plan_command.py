"""`echo2 plan`: reads flags and files, and prints a plan as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo2 import config as configuration
from echo2.config.offers import load_offers
from echo2.control.capacity.fitting import LearnerMemoryNeed, MemoryNeed
from echo2.control.capacity.memory import GB
from echo2.control.head.checks import CHECK_SHARE
from echo2.devices import this_machine
from echo2.errors import UserError
from echo2.planning.check_costs import check_costs
from echo2.planning.memory_needs import memory_needs, model_shape, needs_as_dict, needs_table
from echo2.planning.past_run import PastRun, read_past_run
from echo2.planning.plan import BroadcastInputs, Plan, PlanInputs, by_staleness, make_plan
from echo2.planning.rehearsal import rehearse
from echo2.planning.snapshot_size import snapshot_bytes
from echo2.planning.units import duration, size
from echo2.reward.process import groups_at_once
from echo2.reward.score import Scorer
from echo2.types import Hardware

DEFAULT_UPLINK_MBPS = 1000.0
#: Flags that take a number: those in seconds may be 0, the others must be positive.
SECONDS = ("train_seconds", "reward_seconds", "broadcast_seconds", "reload_seconds")
POSITIVE = ("snapshot_bytes", "delta_bytes", "uplink_mbps", "learner_memory_gb")


@dataclass(frozen=True, slots=True)
class Basis:
    """The value of an input and its origin, for the reader of the plan."""

    name: str
    value: str
    origin: str


def run(options: argparse.Namespace) -> int:
    """Plan and print.

    Raises:
        UserError: no plan exists, or an input is missing.
    """
    config = configuration.load(options.config, options.overrides)
    past = read_past_run(options.source) if options.source is not None else None
    inputs, sources = gather(config, options, past)
    needs = _memory(config, options)
    plan = make_plan(inputs)
    rehearsal = rehearse(plan, inputs) if options.rehearse else None
    if options.json:
        rests = {one.name: [one.value, one.origin] for one in sources}
        memory = needs_as_dict(*needs) if needs else None
        told = {"inputs": rests, "rehearsal": rehearsal and rehearsal.to_dict(), "memory": memory}
        print(json.dumps({**plan.to_dict(), **told}))
        return 0
    console = Console()
    show(plan, by_staleness(inputs), inputs, sources, console)
    unknown = f"Memory: unknown, because {config.model.path!r} is neither a directory here nor in the hub's cache."
    console.print(needs_table(*needs) if needs else unknown, highlight=False)
    if rehearsal is not None:
        console.print(
            f"Rehearsed: {rehearsal.steps} simulated steps, idle {rehearsal.steady_idle_ratio:.1%} once under way, "
            f"{rehearsal.idle_ratio:.1%} with the cold start; staleness mean {rehearsal.mean_staleness:.2f}, max "
            f"{rehearsal.max_staleness}; ${rehearsal.usd_per_step:.4g} a step once under way, "
            f"${(rehearsal.usd + rehearsal.learner_usd) / rehearsal.steps:.4g} with the cold start.",
            highlight=False,
        )
    return 0


def _memory(config: configuration.Config, options: argparse.Namespace) -> tuple[LearnerMemoryNeed, MemoryNeed] | None:
    """Return the memory needs of learner and workers; None if the model's shape is unknown.

    Raises:
        UserError: the learner or a worker does not fit.
    """
    shape, given = model_shape(config.model.path), options.learner_memory_gb
    if shape is None:
        return None
    hardware = this_machine() if given is None else Hardware(int(given * GB), (int(given * GB),) * config.learner.ranks)
    return memory_needs(config, shape, hardware, load_offers(options.offers))


def gather(
    config: configuration.Config, options: argparse.Namespace, past: PastRun | None
) -> tuple[PlanInputs, list[Basis]]:
    """Return the inputs of the plan and the origin of each.

    Raises:
        UserError: a required input is neither given nor measured; a given number is out of bounds.
    """
    for flag in (*SECONDS, *POSITIVE):
        value = getattr(options, flag)
        if value is not None and not (math.isfinite(value) and (value > 0 or (flag in SECONDS and value == 0))):
            raise UserError(f"--{flag.replace('_', '-')} {value} must be a positive number.")
    sources: list[Basis] = []
    train_seconds = _train_seconds(options, past, sources)
    pace_seconds = max(train_seconds, _reward_seconds(config, options, past, sources))
    broadcast = _broadcast(config, options, past, sources)
    offers = tuple(load_offers(options.offers))
    sources.append(Basis("machines", f"{sum(offer.count for offer in offers)} on offer", str(options.offers)))
    schedule, sampling = config.schedule, config.sampling
    inputs = PlanInputs(
        groups_per_step=schedule.groups_per_step,
        group_size=sampling.group_size,
        steps=config.run.max_steps,
        max_staleness=schedule.max_staleness,
        train_seconds=pace_seconds,
        waits_for_rewards=1.0 - train_seconds / pace_seconds if pace_seconds else 0.0,
        offers=offers,
        broadcast=broadcast,
        learner_usd_per_hour=config.learner.price_usd_per_hour,
        groups_per_batch=sampling.groups_per_batch,
        publish_every=options.publish_every,
        generate_during_broadcast=not options.pause_during_broadcast,
        max_idle=options.max_idle,
        budget_usd=options.budget,
    )
    return inputs, sources


def _train_seconds(options: argparse.Namespace, past: PastRun | None, sources: list[Basis]) -> float:
    if options.train_seconds is not None:
        sources.append(Basis("T_train", duration(options.train_seconds), "--train-seconds"))
        return float(options.train_seconds)
    if past is None:
        raise UserError(
            "The learner's seconds for a step are not known. Measure them: `echo2 run CONFIG --run.max_steps 5 --out "
            "DIR`, then `echo2 plan CONFIG --from DIR`; or give --train-seconds."
        )
    sources.append(
        Basis("T_train", duration(past.train_seconds), f"median of {past.num_steps} steps of {options.source}")
    )
    return past.train_seconds


def _reward_seconds(
    config: configuration.Config, options: argparse.Namespace, past: PastRun | None, sources: list[Basis]
) -> float:
    """Return the seconds of one step's rewards if the head is a machine like this one; no step is shorter."""
    measured = past.reward_seconds if past is not None else None
    each = options.reward_seconds if options.reward_seconds is not None else measured
    if each is None:
        return 0.0
    at_once = groups_at_once(Scorer(config.reward.functions).is_async)
    seconds = float(each) * config.schedule.groups_per_step / at_once
    origin = "--reward-seconds" if options.reward_seconds is not None else f"time/reward of {options.source}"
    value = f"{duration(each)} a group, {at_once} at once: {duration(seconds)} a step"
    sources.append(Basis("rewards", value, origin))
    return seconds


def _broadcast(
    config: configuration.Config, options: argparse.Namespace, past: PastRun | None, sources: list[Basis]
) -> BroadcastInputs:
    reload_seconds = options.reload_seconds or 0.0
    if options.broadcast_seconds is not None:
        sources.append(Basis("T_bcast", duration(options.broadcast_seconds), "--broadcast-seconds"))
        return BroadcastInputs(seconds=options.broadcast_seconds, reload_seconds=reload_seconds)
    full = options.snapshot_bytes or snapshot_bytes(Path(config.model.path), config.model.snapshot_dtype)
    origin = "--snapshot-bytes" if options.snapshot_bytes else f"{config.model.path}, {config.model.snapshot_dtype}"
    sources.append(Basis("snapshot", size(full), origin))
    delta = options.delta_bytes
    if delta is not None:
        sources.append(Basis("delta", size(delta), "--delta-bytes"))
    elif past is not None and past.delta_ratio is not None and past.delta_ratio < 1:
        delta = full * past.delta_ratio
        sources.append(Basis("delta", size(delta), f"{past.delta_ratio:.2%} of a snapshot in {options.source}"))
    least = 0.0
    if past is not None and past.broadcast_seconds is not None:
        least = past.broadcast_seconds
        sources.append(Basis("T_bcast, at least", duration(least), f"measured in {options.source}"))
    uplink = options.uplink_mbps or DEFAULT_UPLINK_MBPS
    given = "--uplink-mbps" if options.uplink_mbps else "assumed; --uplink-mbps"
    sources.append(Basis("head's uplink", f"{uplink:.4g} Mbit/s", given))
    return BroadcastInputs(full, delta, uplink * 1e6, reload_seconds=reload_seconds, at_least_seconds=least)


# ---- for people ------------------------------------------------------------------------------------------------------


def show(plan: Plan, choices: list[Plan], inputs: PlanInputs, sources: list[Basis], console: Console) -> None:
    """Print the plan as two short tables, and the origin of its inputs."""
    table = Table(title="Plan", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_row("machines", ", ".join(f"[bold]{n} x {name}[/bold]" for name, n in plan.machines.items()))
    table.add_row(
        "settings", f"[bold]schedule.max_staleness {plan.max_staleness}, publish_every {plan.publish_every}[/bold]"
    )
    auto = "none: no number keeps the bound" if plan.auto_publish_every is None else str(plan.auto_publish_every)
    table.add_row("", f'publish_every = "auto" is {auto} here, with max_staleness {plan.max_staleness}')
    mean = plan.prediction.mean_staleness
    table.add_row("staleness", f"mean {mean:.2f}, bound {plan.max_staleness}   {_histogram(plan)}")
    trains = 1.0 - inputs.waits_for_rewards
    idle, cold = (1 - trains * (1 - one) for one in (plan.prediction.steady_idle_ratio, plan.prediction.idle_ratio))
    table.add_row("learner idle", f"{idle:.1%} once under way, {cold:.1%} with the cold start")
    if inputs.waits_for_rewards:
        rate = inputs.groups_per_step * inputs.group_size / inputs.train_seconds
        told = f"your reward functions score {rate:.4g} rollouts/s at most, and more machines would not help:"
        table.add_row("", f"[bold]{told}[/bold] make them faster, or `async def` where they wait for a service")
    table.add_row(
        "rate", f"{plan.rate:.4g} rollouts/s, {plan.needed_rate:.4g} needed, {plan.rate / plan.needed_rate:.2f} x"
    )
    travels = f"T_bcast {duration(plan.broadcast_seconds)}"
    table.add_row("broadcast", travels + (f" for {size(plan.broadcast_bytes)}" if plan.broadcast_bytes else ""))
    table.add_row("step", f"{duration(plan.prediction.step_seconds)}, run {duration(plan.prediction.run_seconds)}")
    share = f"; the learner alone ${plan.floor_usd_per_step:.4g}" if plan.floor_usd_per_step else ""
    table.add_row(
        "cost", f"[bold]${plan.usd_per_step:.4g} a step, ${plan.usd:.2f} for {inputs.steps} steps[/bold]{share}"
    )
    workers_usd = plan.usd_per_step - inputs.usd_per_step(0.0, plan.prediction.step_seconds)
    checks = check_costs(CHECK_SHARE * inputs.groups_per_step / 2, workers_usd / inputs.groups_per_step)
    told = f"checks cost ${checks.checks_usd:.2g} a step if they sample half of it; a cheat in every group is paid"
    table.add_row("strangers", f"{told} ${checks.cheat_usd:.2g} on average before it is found")
    table.add_row("set by", f"the pace by the {plan.binds}, the number of machines by the {plan.fleet_set_by}")
    console.print(table, highlight=False)
    if len(choices) > 1:
        console.print(_choices(choices), highlight=False)
    rests = "; ".join(f"{one.name} {one.value} ({one.origin})" for one in sources)
    console.print(f"[dim]Rests on: {rests}.[/dim]", highlight=False)


def _choices(plans: list[Plan]) -> Table:
    table = Table(title="What fresher data cost", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("S", "kappa", "machines", "$/step", "mean staleness", "idle"):
        table.add_column(heading, justify="left" if heading == "machines" else "right")
    for plan in plans:
        machines = ", ".join(f"{n} x {name}" for name, n in plan.machines.items())
        mean, idle = plan.prediction.mean_staleness, plan.prediction.steady_idle_ratio
        figures = (f"{plan.usd_per_step:.4g}", f"{mean:.2f}", f"{idle:.1%}")
        table.add_row(str(plan.max_staleness), str(plan.publish_every), machines, *figures)
    return table


def _histogram(plan: Plan) -> str:
    shares = plan.prediction.staleness
    return "  ".join(f"{age}: {share:.0%}" for age, share in shares.items() if share >= 0.005)
