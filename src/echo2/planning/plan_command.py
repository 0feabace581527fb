"""`echo2 plan`: reads flags and files, and prints a plan as a table or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo2 import config as configuration
from echo2.config.offers import Offer, load_offers
from echo2.core.devices import this_machine
from echo2.core.documents import read_tables
from echo2.core.errors import UserError
from echo2.core.printable import duration, size
from echo2.engines.registry import chosen
from echo2.head.fleet.machines import scaled_offers
from echo2.head.ledger.costs import check_costs
from echo2.head.strangers.decide.checks import CHECK_SHARE
from echo2.learner.core.fitting import SnapshotSize, machine_with, model_config, model_shape, snapshot_size, worker_need
from echo2.learner.decide.memory import GB
from echo2.planning.estimates import GPUS, several
from echo2.planning.first_plan import (
    Basis,
    Estimated,
    FirstPlan,
    Range,
    open_range,
    told_range,
    usual_delta_share,
)
from echo2.planning.market import Wanted, known_prices, market_offers, refresh, rent_commands
from echo2.planning.memory_needs import (
    DoesNotFitError,
    Needs,
    learner_that_fits,
    needs_as_dict,
    needs_table,
    offers_that_fit,
    settings_that_save_memory,
)
from echo2.planning.plan import NoPlanError, Plan, SearchLimit, by_staleness, make_plan
from echo2.planning.plan_inputs import BroadcastInputs, PastRun, PlanInputs, read_past_run
from echo2.planning.remedies import Remedy, remedies
from echo2.planning.simulate import rehearse
from echo2.reward.reward_processes import groups_at_once
from echo2.reward.score import Scorer

DEFAULT_UPLINK_MBPS = 1000.0
AT_ONCE = "sampling.groups_per_batch"
#: Forecasts for a way out of a refusal, and ways to save memory that are planned, and looked at.
WAYS_OUT, FITTING_MAX, READY_MAX = 16, 2, 64
#: `--offers` for the prices of today; without it, those that are here.
MARKET = Path("market")
#: Flags that take a number: those in seconds may be 0, the others must be positive.
SECONDS = ("train_seconds", "reward_seconds", "broadcast_seconds")
POSITIVE = ("answer_tokens", "snapshot_bytes", "uplink_mbps", "learner_memory_gb")


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
    config = _configured(options)
    if options.offers is None and Path("offers.toml").is_file():
        options.offers = Path("offers.toml")
    if options.offers == MARKET and (reason := refresh()):
        print(reason, file=sys.stderr)
    past = read_past_run(options.source) if options.source is not None else None
    try:
        found = _decide(config, options, past)
    except (NoPlanError, DoesNotFitError) as error:
        raise UserError(f"{error} {_way_out(options, past, error)}".strip()) from error
    plan, inputs = found.plan, found.inputs
    if options.rent:
        print(rent_commands(inputs.offers, plan.machines))
        return 0
    rehearsal = rehearse(plan, inputs) if options.rehearse else None
    if options.json:
        rests = {one.name: [one.value, one.origin] for one in found.sources}
        memory = needs_as_dict(*found.needs) if found.needs else None
        rehearsed, left_open = rehearsal and rehearsal.to_dict(), found.open and asdict(found.open)
        told = {"inputs": rests, "rehearsal": rehearsed, "memory": memory, "range": left_open}
        print(json.dumps({**plan.to_dict(), **told}))
        return 0
    console = Console()
    show(found, config.learner.ranks, by_staleness(inputs), console)
    unknown = f"Memory: unknown, because {config.model.path!r} is neither a directory here nor in the hub's cache."
    console.print(needs_table(*found.needs) if found.needs else unknown, highlight=False)
    if rehearsal is not None:
        console.print(
            f"Rehearsed: {rehearsal.steps} simulated steps, idle {rehearsal.steady_idle_ratio:.1%} once under way, "
            f"{rehearsal.idle_ratio:.1%} with the cold start; staleness mean {rehearsal.mean_staleness:.2f}, max "
            f"{rehearsal.max_staleness}; ${rehearsal.usd_per_step:.4g} a step once under way, "
            f"${(rehearsal.usd + rehearsal.learner_usd) / rehearsal.steps:.4g} with the cold start.",
            highlight=False,
        )
    return 0


def _configured(options: argparse.Namespace) -> configuration.Config:
    """Return the configuration. Where it does not set `learner.ranks`, there are as many as `--learner` names GPUs."""
    tables, where = read_tables(options.config, "the config file"), str(options.config)
    configuration.check_keys(tables, where)
    ranks = {}
    if options.learner is not None and "ranks" not in tables.get("learner", {}):
        ranks = {"learner.ranks": str(several(options.learner, "--learner")[0])}
    return configuration.build(tables, where, {**ranks, **options.overrides})


def _decide(config: configuration.Config, options: argparse.Namespace, past: PastRun | None) -> _Decided:
    """Return the plan.

    Raises:
        NoPlanError: no plan exists.
        DoesNotFitError: the learner does not fit, or a worker fits no offer.
        UserError: an input is missing.
    """
    inputs, sources, estimated, needs = _ready(config, options, past)
    plan = make_plan(inputs)
    return _Decided(plan, inputs, sources, needs, open_range(inputs, plan, estimated))


def _ready(
    config: configuration.Config, options: argparse.Namespace, past: PastRun | None
) -> tuple[PlanInputs, list[Basis], Estimated, Needs | None]:
    """Return the inputs of the plan, with those offers that hold a worker, and the needs of memory.

    Raises: as `_decide`.
    """
    first = FirstPlan(config, options.learner, options.answer_tokens)
    inputs, sources, estimated = gather(config, options, past, first)
    shape = model_shape(config.model.path)
    if shape is None:
        return inputs, sources, estimated, None
    given = options.learner_memory_gb or first.learner_memory_gb
    share = None if given is None else int(given * GB)
    hardware = this_machine() if share is None else machine_with(share, config.learner.ranks)
    offers, left_out = offers_that_fit(config, shape, inputs.offers)
    if left_out:
        sources.append(Basis("without", ", ".join(left_out), next(iter(left_out.values()))))
    needs = learner_that_fits(config, shape, hardware), worker_need(config, shape, hardware)
    return replace(inputs, offers=offers), sources, estimated, needs


def gather(
    config: configuration.Config, options: argparse.Namespace, past: PastRun | None, first: FirstPlan
) -> tuple[PlanInputs, list[Basis], Estimated]:
    """Return the inputs of the plan, the origin of each, and what is estimated.

    Raises:
        UserError: a required input is neither given nor measured, and can't be estimated; a number is out of bounds.
    """
    for flag in (*SECONDS, *POSITIVE):
        value = getattr(options, flag)
        if value is not None and not (math.isfinite(value) and (value > 0 or (flag in SECONDS and value == 0))):
            raise UserError(f"--{flag.replace('_', '-')} {value} must be a positive number.")
    sources: list[Basis] = []
    train_seconds = _train_seconds(options, past, first, sources)
    pace_seconds = max(train_seconds, _reward_seconds(config, options, past, sources))
    broadcast = _broadcast(config, options, past, first, sources)
    known = _offers(config, options, sources)
    offers, estimates = first.offers(known)
    sources += estimates
    engine = chosen(config, model_config(config.model.path), ())
    sources.append(Basis("engine", engine.name, engine.why))
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
        max_idle=options.max_idle,
        budget_usd=options.budget,
    )
    trains = past is None and options.train_seconds is None
    return inputs, sources, Estimated(trains, frozenset(one.name for one in known if one.rollouts_per_second is None))


def _offers(config: configuration.Config, options: argparse.Namespace, sources: list[Basis]) -> tuple[Offer, ...]:
    """Return the offers with rates for this run's model, as far as they are known."""
    written, origin = _offered(options)
    offers = tuple(scaled_offers(config, written))
    sources.append(Basis("machines", f"{sum(offer.count for offer in offers)} on offer", origin))
    scaled = [
        one for one, as_is in zip(offers, written, strict=True) if one.rollouts_per_second != as_is.rollouts_per_second
    ]
    if scaled:
        rates = ", ".join(f"{offer.name} {offer.rollouts_per_second:.3g}/s" for offer in scaled)
        sources.append(Basis("rates", rates, "guessed from another model; `echo2 probe` measures them"))
    if others := [offer.name for offer in offers if offer.parameters]:
        why = f"the size of {config.model.path!r} is not known here"
        sources.append(Basis("rates", f"those of {', '.join(others)} are for another model", why))
    return offers


def _offered(options: argparse.Namespace) -> tuple[list[Offer], str]:
    """Return the machines on offer, and where they are from: a file, or the market where there is none."""
    path = options.offers
    if path is not None and path != MARKET:
        return load_offers(path), str(path)
    prices, origin = known_prices()
    gpus = tuple(filter(None, (options.gpus or "").split(",")))
    return market_offers(prices, Wanted(options.region or "", options.spot, gpus, options.each)), origin


def _are_estimated(options: argparse.Namespace) -> bool:
    return any(one.rollouts_per_second is None for one in _offered(options)[0])


def _train_seconds(options: argparse.Namespace, past: PastRun | None, first: FirstPlan, sources: list[Basis]) -> float:
    if options.train_seconds is not None:
        sources.append(Basis("T_train", duration(options.train_seconds), "--train-seconds"))
        return float(options.train_seconds)
    if past is None:
        seconds, basis = first.train_seconds()
        sources.append(basis)
        return seconds
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
    config: configuration.Config,
    options: argparse.Namespace,
    past: PastRun | None,
    first: FirstPlan,
    sources: list[Basis],
) -> BroadcastInputs:
    if options.broadcast_seconds is not None:
        sources.append(Basis("T_bcast", duration(options.broadcast_seconds), "--broadcast-seconds"))
        return BroadcastInputs(seconds=options.broadcast_seconds)
    found = _snapshot_size(config, options, first)
    full = found.num_bytes
    origin = "--snapshot-bytes" if options.snapshot_bytes else f"{config.model.path}, {config.model.snapshot_dtype}"
    if found.base_bytes:
        origin = f"the adapter alone; the model under it, {size(found.base_bytes)}, travels once; {origin}"
    sources.append(Basis("snapshot", size(full), origin))
    delta = None
    if past is not None and past.delta_ratio is not None and past.delta_ratio < 1:
        delta = full * past.delta_ratio
        sources.append(Basis("delta", size(delta), f"{past.delta_ratio:.2%} of a snapshot in {options.source}"))
    elif past is None and options.learner is not None and (share := usual_delta_share(config)) is not None:
        delta = full * share
        sources.append(Basis("delta", size(delta), f"{share:.0%} of a snapshot, as is usual"))
    least = 0.0
    if past is not None and past.broadcast_seconds is not None:
        least = past.broadcast_seconds
        sources.append(Basis("T_bcast, at least", duration(least), f"measured in {options.source}"))
    uplink = options.uplink_mbps or DEFAULT_UPLINK_MBPS
    given = "--uplink-mbps" if options.uplink_mbps else "assumed; --uplink-mbps"
    sources.append(Basis("head's uplink", f"{uplink:.4g} Mbit/s", given))
    return BroadcastInputs(full, delta, uplink * 1e6, at_least_seconds=least)


def _snapshot_size(config: configuration.Config, options: argparse.Namespace, first: FirstPlan) -> SnapshotSize:
    if options.snapshot_bytes:
        return SnapshotSize(options.snapshot_bytes)
    try:
        return snapshot_size(config)
    except UserError:  # no files of weights here
        if options.learner is None:
            raise
        return first.snapshot_size()


# ---- where there is no plan ------------------------------------------------------------------------------------------


def _way_out(options: argparse.Namespace, past: PastRun | None, error: NoPlanError | DoesNotFitError) -> str:
    """Return the nearest plans that exist, the first as the command that prints it; "" if none was found."""
    limit = SearchLimit(WAYS_OUT)
    if isinstance(error, NoPlanError):
        more = next(_more_at_once(options, past, limit), None)
        if more is not None:
            command = _command(options, {f"--{AT_ONCE}": more[0]})
            return f"A plan that works, with more rollouts at once: `{command}` ({_in_short(more[1])})."
        return _told(options, {}, remedies(error, _are_estimated(options)))
    for changes, inputs in itertools.islice(_fitting(options, past), FITTING_MAX):
        try:
            plan = make_plan(inputs, limit)
        except NoPlanError as refusal:
            if found := remedies(refusal, _are_estimated(options)):
                return _told(options, changes, found)
        else:
            return f"A plan that works: `{_command(options, changes)}` ({_in_short(plan)})."
    return ""


def _fitting(options: argparse.Namespace, past: PastRun | None) -> Iterator[tuple[dict[str, str], PlanInputs]]:
    """Yield flags with which learner and workers fit into memory, and the inputs with them: larger machines for the
    learner, or settings.
    """
    count, name, card = several(options.learner, "--learner") if options.learner else (1, "", None)
    memory = options.learner_memory_gb or max(1, round(this_machine().memory_bytes / GB))
    larger = [{"--learner-memory-gb": f"{memory * 2**power:g}"} for power in range(1, 7)]
    if card is not None:
        names = [other for other, one in GPUS.items() if one.memory_gb > card.memory_gb]
        larger = [{"--learner": f"{count}x{other}"} for other in reversed(names)]
    saving = settings_that_save_memory(_configured(options))
    market = [{"--offers": str(MARKET)}] if options.offers not in (None, MARKET) else []
    for settings in itertools.chain(market, itertools.islice(saving, READY_MAX), larger):
        changes = {flag if flag.startswith("--") else f"--{flag}": value for flag, value in settings.items()}
        if name and "learner.ranks" in settings:
            changes["--learner"] = f"{settings['learner.ranks']}x{name}"
        with contextlib.suppress(UserError):
            yield changes, _ready(*_with(options, changes), past)[0]


def _with(options: argparse.Namespace, changes: dict[str, str]) -> tuple[configuration.Config, argparse.Namespace]:
    """Return configuration and flags with these changes, as the command line would give them."""
    settings = {flag[2:]: value for flag, value in changes.items() if "." in flag}
    asked = argparse.Namespace(**{**vars(options), "overrides": {**options.overrides, **settings}})
    if "--offers" in changes:
        asked.offers = Path(changes["--offers"])
    if "--learner" in changes:
        asked.learner = changes["--learner"]
    if "--learner-memory-gb" in changes:
        asked.learner_memory_gb = float(changes["--learner-memory-gb"])
    return _configured(asked), asked


def _more_at_once(options: argparse.Namespace, past: PastRun | None, limit: SearchLimit) -> Iterator[tuple[str, Plan]]:
    """Yield plans in which workers of estimated rates sample more groups at once, with that setting's value."""
    if not _are_estimated(options):
        return
    now = _configured(options).sampling.groups_per_batch
    for power in range(1, 7):
        value = str(now << power)
        try:
            yield value, make_plan(_ready(*_with(options, {f"--{AT_ONCE}": value}), past)[0], limit)
        except UserError:
            continue


def _told(options: argparse.Namespace, changes: dict[str, str], found: list[Remedy]) -> str:
    if not found:
        return ""
    edits, others = _edits(found[0], options.offers), []
    for one in found[1:]:
        flags = [f"{flag} {value}" if value else f"no {flag}" for flag, value in _flags(one, options).items()]
        others.append(" and ".join([*flags, *_edits(one, options.offers)]))
    first = f"`{_command(options, {**changes, **_flags(found[0], options)})}` ({_in_short(found[0].plan)})"
    before = f"with {' and '.join(edits)}: " if edits else ""
    return f"A plan that works: {before}{first}." + (f" Or: {'; or '.join(others)}." if others else "")


def _flags(remedy: Remedy, options: argparse.Namespace) -> dict[str, str]:
    """Machines of the market are counted by a flag, and those of a file there."""
    more = {"--each": str(max(remedy.counts.values()))} if remedy.counts and options.offers in (None, MARKET) else {}
    return {**remedy.flags, **more}


def _edits(remedy: Remedy, offers: Path | None) -> list[str]:
    counts = {} if offers in (None, MARKET) else remedy.counts
    return [f"count = {count} for {name!r} in {offers}" for name, count in counts.items()]


def _in_short(plan: Plan) -> str:
    machines = ", ".join(f"{count} x {name}" for name, count in plan.machines.items())
    return f"{machines}; ${plan.usd_per_step:.3g} a step, the learner waits {plan.prediction.steady_idle_ratio:.1%}"


def _command(options: argparse.Namespace, changes: dict[str, str]) -> str:
    """Return the command that was given, with these flags changed; an empty value takes a flag away."""
    words = [word for word in options.given if word not in ("--json", "--rehearse")]
    for flag, value in changes.items():
        for at in reversed([at for at, word in enumerate(words) if word.partition("=")[0] == flag]):
            del words[at : at + (1 if "=" in words[at] else 2)]
        words += [flag, value] if value else []
    return shlex.join(["echo2", *words])


# ---- for people ------------------------------------------------------------------------------------------------------


def show(found: _Decided, ranks: int, choices: list[Plan], console: Console) -> None:
    """Print the plan as two short tables, and the origin of its inputs."""
    plan, inputs, sources = found.plan, found.inputs, found.sources
    table = Table(title="Plan", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_row("machines", ", ".join(f"[bold]{n} x {name}[/bold]" for name, n in plan.machines.items()))
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
    if found.open is not None:
        table.add_row("once measured", told_range(found.open))
    workers_usd = plan.usd_per_step - inputs.usd_per_step(0.0, plan.prediction.step_seconds)
    checks = check_costs(CHECK_SHARE * inputs.groups_per_step / 2, workers_usd / inputs.groups_per_step)
    told = f"checks cost ${checks['checks_usd']:.2g} a step if they sample half of it; a cheat in every group is paid"
    table.add_row("strangers", f"{told} ${checks['cheat_usd']:.2g} on average before it is found")
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
