"""`echo2 plan`: plans, and prints the plan as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo2.config import Config
from echo2.config.rundir import RunDir
from echo2.core.errors import UserError
from echo2.core.printable import duration, size
from echo2.head.ledger.costs import check_costs
from echo2.head.strangers.decide.checks import CHECK_SHARE
from echo2.planning import here
from echo2.planning.chosen_learner import with_learner
from echo2.planning.disk_and_network import DiskAndNetwork, PlannedFleet, disk_and_network_table, kept_and_sent
from echo2.planning.first_plan import Basis, Range, answer_tokens, open_range, range_in_words
from echo2.planning.market import refresh
from echo2.planning.memory_needs import DoesNotFitError, Needs, needs_as_dict, needs_table
from echo2.planning.plan import NoPlanError, Plan, by_staleness, left_out, make_plan
from echo2.planning.plan_inputs import PastRun, PlanInputs, read_past_run
from echo2.planning.plan_request import MARKET, configured, ready
from echo2.planning.renting import rent_commands
from echo2.planning.simulate import rehearse
from echo2.planning.ways_out import way_out, way_out_here

#: Inputs that have a row of the plan's table.
ROWS = ("learner", "judge")


@dataclass(frozen=True, slots=True)
class _Decided:
    """A plan with all that it was made from. `needs`: of memory; None if the model's shape is unknown. `open`: what the
    plan may become once its estimates are measured; None if there are none.
    """

    plan: Plan
    inputs: PlanInputs
    sources: list[Basis]
    needs: Needs | None
    open: Range | None


def run(options: argparse.Namespace) -> int:
    """Plan and print.

    Raises:
        UserError: no plan exists, and the message has the nearest that does; or an input is missing.
    """
    if options.here is not None:
        try:
            return _here(options)
        except UserError as error:
            raise _with_way_out(options, None, error) from error
    if options.offers is None and Path("offers.toml").is_file():
        options.offers = Path("offers.toml")
    if options.offers == MARKET and (reason := refresh()):
        print(reason, file=sys.stderr)
    filled, past, chosen = options, None, None
    try:
        past = read_past_run(options.source) if options.source is not None else None
        if options.config is None:
            options.config = _config_of(options.source)
        filled, chosen = with_learner(options, past)
        config = configured(filled)
        inputs, sources, estimated, needs = ready(config, filled, past)
        plan = make_plan(inputs)
    except UserError as error:
        raise _with_way_out(filled if isinstance(error, NoPlanError) else options, past, error) from error
    sources += [chosen] if chosen else []
    taken = _disk_and_network(config, plan, inputs, sources, answer_tokens(config, options.answer_tokens))
    decision = _Decided(plan, inputs, sources, needs, open_range(inputs, plan, estimated))
    if options.rent:
        print(rent_commands(inputs.offers, plan.machines))
        return 0
    rehearsal = rehearse(plan, inputs) if options.rehearse else None
    if options.json:
        rests = {one.name: [one.value, one.origin] for one in decision.sources}
        memory = needs_as_dict(decision.needs) if decision.needs else None
        rehearsed, left_open = rehearsal and rehearsal.to_dict(), decision.open and asdict(decision.open)
        more = {"inputs": rests, "rehearsal": rehearsed, "memory": memory, "range": left_open}
        print(json.dumps({**plan.to_dict(), **more, **(taken.to_dict() if taken else {})}))
        return 0
    console = Console()
    show(decision, config.learner.ranks, by_staleness(inputs), console)
    unknown = f"Memory: unknown, because {config.model.path!r} is neither a directory here nor in the hub's cache."
    console.print(needs_table(decision.needs) if decision.needs else unknown, highlight=False)
    unknown = "Disk and network: unknown without the size of a snapshot. Give --snapshot-bytes."
    console.print(disk_and_network_table(taken) if taken else unknown, highlight=False)
    if rehearsal is not None:
        console.print(
            f"Rehearsed: {rehearsal.steps} simulated steps, idle {rehearsal.steady_idle_ratio:.1%} once under way, "
            f"{rehearsal.idle_ratio:.1%} with the cold start; staleness mean {rehearsal.mean_staleness:.2f}, max "
            f"{rehearsal.max_staleness}; ${rehearsal.usd_per_step:.4g} a step once under way, "
            f"${(rehearsal.usd + rehearsal.learner_usd) / rehearsal.steps:.4g} with the cold start.",
            highlight=False,
        )
    return 0


def _with_way_out(options: argparse.Namespace, past: PastRun | None, error: UserError) -> UserError:
    return UserError(f"{error} {way_out(options, past, error)}".rstrip())


def _config_of(source: Path | None) -> Path:
    """Return the configuration of a run's directory. Raises UserError if there is none."""
    if source is None or not RunDir(source).config.is_file():
        lack = f"{source} has no config.json" if source else "No configuration was given"
        raise UserError(f"{lack}: name the run's configuration file, or --from DIR, a run's directory; or both.")
    return RunDir(source).config


def _disk_and_network(
    config: Config, plan: Plan, inputs: PlanInputs, sources: list[Basis], tokens: float
) -> DiskAndNetwork | None:
    """Return what the planned run keeps and sends."""
    if not inputs.broadcast.full_bytes:
        return None
    engine = next(one.value for one in sources if one.name == "engine")
    joins = inputs.joins(plan.machines, plan.prediction.run_seconds / 3600)
    fleet = PlannedFleet(sum(plan.machines.values()), joins, plan.publish_every, plan.max_staleness, engine)
    return kept_and_sent(config, inputs.broadcast, fleet, tokens)


def _here(options: argparse.Namespace) -> int:
    """Forecast the run on this machine, and print that."""
    if options.config is None:
        raise UserError("--here needs the run's configuration file: echo2 plan CONFIG --here.")
    for flag in ("offers", "learner", "source", "train_seconds", "budget"):
        if getattr(options, flag) is not None:
            name = "--from" if flag == "source" else f"--{flag.replace('_', '-')}"
            raise UserError(f"--here forecasts the run on this machine alone, without {name}. Leave one of them out.")
    config = configured(options)
    probed = here.read_probe(options.here, config) if options.here != Path() else None
    try:
        forecast = here.forecast_here(config, probed, options.answer_tokens)
    except DoesNotFitError as error:
        raise UserError(f"{error}{way_out_here(options, config)}") from error
    here.show(forecast, options.json)
    return 0


# ---- for people ------------------------------------------------------------------------------------------------------


def show(decision: _Decided, ranks: int, choices: list[Plan], console: Console) -> None:
    """Print the plan as two short tables, and the origin of its inputs."""
    plan, inputs, sources = decision.plan, decision.inputs, decision.sources
    table = Table(title="Plan", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_row("machines", ", ".join(f"[bold]{n} x {name}[/bold]" for name, n in plan.machines.items()))
    for one in (one for one in sources if one.name in ROWS):
        table.add_row(one.name, f"{one.value}; {one.origin}")
    settings = f"schedule.max_staleness {plan.max_staleness}, publish_every {plan.publish_every}"
    settings += f", learner.ranks {ranks}" if ranks > 1 else ""
    table.add_row("settings", f"[bold]{settings}[/bold]")
    mean = plan.prediction.mean_staleness
    table.add_row("staleness", f"mean {mean:.2f}, bound {plan.max_staleness}   {_histogram(plan)}")
    trains = 1.0 - inputs.waits_for_rewards
    idle, cold = (1 - trains * (1 - one) for one in (plan.prediction.steady_idle_ratio, plan.prediction.idle_ratio))
    table.add_row("learner idle", f"{idle:.1%} once under way, {cold:.1%} with the cold start")
    if inputs.waits_for_rewards:
        rate = inputs.groups_per_step * inputs.group_size / inputs.train_seconds
        fact = f"your reward functions score {rate:.4g} rollouts/s at most, and more machines would not help:"
        table.add_row("", f"[bold]{fact}[/bold] make them faster, or `async def` where they wait for a service")
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
    if decision.open is not None:
        table.add_row("once measured", range_in_words(decision.open))
    workers_usd = plan.usd_per_step - inputs.usd_per_step(0.0, plan.prediction.step_seconds)
    checks = check_costs(CHECK_SHARE * inputs.groups_per_step / 2, workers_usd / inputs.groups_per_step)
    fact = f"checks cost ${checks['checks_usd']:.2g} a step if they sample half of it; a cheat in every group is paid"
    table.add_row("strangers", f"{fact} ${checks['cheat_usd']:.2g} on average before it is found")
    if words := left_out(inputs.outrun(plan.max_staleness, plan.publish_every), plan.machines):
        table.add_row("left out", words)
    table.add_row("set by", f"the pace by the {plan.binds}, the number of machines by the {plan.fleet_set_by}")
    console.print(table, highlight=False)
    if len(choices) > 1:
        console.print(_choices(choices), highlight=False)
    few = inputs.deciding(plan.machines)
    rests = "; ".join(f"{one.name} {one.of(few)} ({one.origin})" for one in sources if one.name not in ROWS)
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
