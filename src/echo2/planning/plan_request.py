"""What an `echo2 plan` command asks for: its configuration, and the inputs of its plan with the origin of each."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from echo2 import config as configuration
from echo2.config.offers import Offer, load_offers
from echo2.core.devices import this_machine
from echo2.core.documents import read_tables
from echo2.core.errors import UserError, counted
from echo2.core.printable import duration, size
from echo2.core.types import Hardware
from echo2.engines.registry import chosen
from echo2.head.fleet.decide.forecast import ScoringDelays
from echo2.head.fleet.machines import scaled_offers
from echo2.learner.core.fitting import SnapshotSize, known_config, machine_with, model_shape, snapshot_size, worker_need
from echo2.learner.decide.memory import GB
from echo2.planning.first_plan import Basis, Estimated, FirstPlan, usual_delta_share
from echo2.planning.gpus import several
from echo2.planning.market import MachineFilter, known_prices, market_offers
from echo2.planning.memory_needs import Needs, learner_that_fits, offers_that_fit
from echo2.planning.plan import LATE_SHARE
from echo2.planning.plan_inputs import BroadcastInputs, PastRun, PlanInputs
from echo2.reward.reward_processes import groups_at_once
from echo2.reward.score import Scorer

DEFAULT_UPLINK_MBPS = 1000.0
#: `--offers` for the prices of today; without it, those that are here.
MARKET = Path("market")
#: Flags that take a number: those in seconds may be 0, the others must be positive.
SECONDS = ("train_seconds", "reward_seconds", "broadcast_seconds")
POSITIVE = ("answer_tokens", "snapshot_bytes", "uplink_mbps", "learner_memory_gb")


def configured(options: argparse.Namespace) -> configuration.Config:
    """Return the configuration. Where it does not set `learner.ranks`, there are as many as `--learner` names GPUs."""
    tables, where = read_tables(options.config, "the config file"), str(options.config)
    configuration.check_keys(tables, where)
    ranks = {}
    if options.learner is not None and "ranks" not in tables.get("learner", {}):
        ranks = {"learner.ranks": str(several(options.learner, "--learner")[0])}
    return configuration.build(tables, where, {**ranks, **options.overrides})


def ready(
    config: configuration.Config, options: argparse.Namespace, past: PastRun | None
) -> tuple[PlanInputs, list[Basis], Estimated, Needs | None]:
    """Return the inputs of the plan, with those offers that hold a worker, and the needs of memory.

    Raises:
        DoesNotFitError: the learner does not fit, or a worker fits no offer.
        UserError: an input is missing.
    """
    first = FirstPlan(config, options.learner, options.answer_tokens)
    inputs, sources, estimated = gather(config, options, past, first)
    shape = model_shape(config.model.path)
    if shape is None:
        return inputs, sources, estimated, None
    hardware = learner_machine(config, options.learner_memory_gb or first.learner_memory_gb)
    offers, left_out = offers_that_fit(config, shape, inputs.offers)
    if left_out:
        sources.append(
            Basis("without", ", ".join(left_out), next(iter(left_out.values())), {one: one for one in left_out})
        )
    workers = (worker_need(config, shape, hardware, keeps_both) for keeps_both in (False, True))
    needs = Needs(learner_that_fits(config, shape, hardware), *workers)
    return replace(inputs, offers=offers), sources, estimated, needs


def learner_machine(config: configuration.Config, memory_gb: float | None) -> Hardware:
    """Return the learner's machine, whose GPUs have so much memory each; None: it is this one."""
    return this_machine() if memory_gb is None else machine_with(int(memory_gb * GB), config.learner.ranks)


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
    listed = _offers(config, options, sources)
    offers, estimates = first.offers(listed)
    sources += estimates
    engine = chosen(config, known_config(config.model.path), ())
    sources.append(Basis("engine", engine.name, engine.why))
    schedule, sampling = config.schedule, config.sampling
    is_bound = pace_seconds > train_seconds  # by rewards: they are delayed because they wait for each other
    delays = None
    if past is not None and past.delays and not is_bound:
        delays = ScoringDelays(past.delays)
        late = f"{duration(delays.at(0.5))} after delivery, one of ten more than {duration(delays.at(LATE_SHARE))}"
        sources.append(Basis("rewards known", late, f"{counted(len(past.delays), 'group')} of {options.source}"))
    inputs = PlanInputs(
        delays=delays,
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
    return inputs, sources, Estimated(trains, frozenset(one.name for one in listed if one.rollouts_per_second is None))


def _offers(config: configuration.Config, options: argparse.Namespace, sources: list[Basis]) -> tuple[Offer, ...]:
    """Return the offers with rates for this run's model, as far as they are known."""
    written, origin = offered(options)
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


def offered(options: argparse.Namespace) -> tuple[list[Offer], str]:
    """Return the machines on offer, and where they are from: a file, or the market where there is none.

    Raises:
        UserError: the file is not readable, or no machine of the market is left.
    """
    path = options.offers
    if path is not None and path != MARKET:
        return load_offers(path), str(path)
    prices, origin = known_prices()
    gpus, providers = (tuple(filter(None, (names or "").split(","))) for names in (options.gpus, options.providers))
    memory_gb = options.memory_gb or 0.0
    machine_filter = MachineFilter(options.region or "", options.spot, gpus, options.each, memory_gb, providers)
    return market_offers(prices, machine_filter), origin


def are_estimated(options: argparse.Namespace) -> bool:
    """Whether the rate of an offer is estimated."""
    return any(one.rollouts_per_second is None for one in offered(options)[0])


def _train_seconds(options: argparse.Namespace, past: PastRun | None, first: FirstPlan, sources: list[Basis]) -> float:
    if options.train_seconds is not None:
        sources.append(Basis("T_train", duration(options.train_seconds), "--train-seconds"))
        return float(options.train_seconds)
    if past is None:
        seconds, basis = first.train_seconds()
        sources.append(basis)
        return seconds
    origin = f"median of {counted(past.num_steps, 'step')} of {options.source}"
    sources.append(Basis("T_train", duration(past.train_seconds), origin))
    if past.teacher_wait_seconds is not None:
        why = "waited in a step for a teacher that computes elsewhere, as in that run; not in T_train"
        sources.append(Basis("teacher", duration(past.teacher_wait_seconds), why))
    return past.train_seconds


def _reward_seconds(
    config: configuration.Config, options: argparse.Namespace, past: PastRun | None, sources: list[Basis]
) -> float:
    """Return the seconds of one step's rewards if the head is a machine like this one; no step is shorter."""
    measured = past.reward_seconds if past is not None else None
    each = options.reward_seconds if options.reward_seconds is not None else measured
    paced, at_once = _judge(config, each is None, past, sources)
    if each is None:
        return paced
    at_once = min(at_once, groups_at_once(Scorer(config.reward.functions).is_async))
    seconds = float(each) * config.schedule.groups_per_step / at_once
    origin = "--reward-seconds" if options.reward_seconds is not None else f"time/reward of {options.source}"
    value = f"{duration(each)} a group, {at_once} at once: {duration(seconds)} a step"
    sources.append(Basis("rewards", value, origin))
    return max(seconds, paced)


def _judge(
    config: configuration.Config, is_untimed: bool, past: PastRun | None, sources: list[Basis]
) -> tuple[float, float]:
    """Return the seconds of a step by the judge's limit of requests a minute, and how many groups it scores at once."""
    judge = config.reward.judge_config
    if judge is None:
        return 0.0, math.inf
    size = config.sampling.group_size
    a_step = judge.num_requests(size) * config.schedule.groups_per_step
    paced = 60.0 * a_step / judge.requests_per_minute if judge.requests_per_minute else 0.0
    need = [f"{a_step} requests a step", f"{duration(paced)} by requests_per_minute" if paced else ""]
    uncounted = ["tokens_per_minute"] if judge.tokens_per_minute else []
    if past is not None and past.judge_usd is not None:
        run_usd = past.judge_usd * config.run.max_steps
        need.append(f"${past.judge_usd:.4g} a step and ${run_usd:.2f} for {config.run.max_steps} steps beside the bill")
    elif any(judge.usd_per_mtok):
        uncounted.append("its dollars (a run with --from DIR has them)")
    if is_untimed:
        uncounted.append("how long it takes (--reward-seconds)")
    origin = f"not counted: {' and '.join(uncounted)}" if uncounted else f"{judge.model} at {judge.base_url}"
    sources.append(Basis("judge", ", ".join(filter(None, need)), origin))
    return paced, judge.groups_at_once(size)


def _broadcast(
    config: configuration.Config,
    options: argparse.Namespace,
    past: PastRun | None,
    first: FirstPlan,
    sources: list[Basis],
) -> BroadcastInputs:
    flag_seconds = options.broadcast_seconds
    if flag_seconds is not None:
        sources.append(Basis("T_bcast", duration(flag_seconds), "--broadcast-seconds"))
    try:
        weights = _weights(config, options, past, first, sources)
    except UserError:
        if flag_seconds is None:
            raise
        return BroadcastInputs(seconds=flag_seconds)
    if flag_seconds is not None:
        return replace(weights, seconds=flag_seconds)
    least = 0.0
    if past is not None and past.broadcast_seconds is not None:
        least = past.broadcast_seconds
        sources.append(Basis("T_bcast, at least", duration(least), f"measured in {options.source}"))
    uplink = options.uplink_mbps or DEFAULT_UPLINK_MBPS
    source = "--uplink-mbps" if options.uplink_mbps else "assumed; --uplink-mbps"
    sources.append(Basis("head's uplink", f"{uplink:.4g} Mbit/s", source))
    return replace(weights, head_up_bps=uplink * 1e6, at_least_seconds=least)


def _weights(
    config: configuration.Config,
    options: argparse.Namespace,
    past: PastRun | None,
    first: FirstPlan,
    sources: list[Basis],
) -> BroadcastInputs:
    """Return the sizes of what travels for a version.

    Raises:
        UserError: they are not known.
    """
    snapshot = _snapshot_size(config, options, first)
    full = snapshot.num_bytes
    origin = "--snapshot-bytes" if options.snapshot_bytes else f"{config.model.path}, {config.model.snapshot_dtype}"
    if snapshot.base_bytes:
        origin = f"the adapter alone; the model under it, {size(snapshot.base_bytes)}, travels once; {origin}"
    sources.append(Basis("snapshot", size(full), origin))
    delta = None
    if past is not None and past.delta_ratio is not None and past.delta_ratio < 1:
        delta = full * past.delta_ratio
        sources.append(Basis("delta", size(delta), f"{past.delta_ratio:.2%} of a snapshot in {options.source}"))
    elif past is None and options.learner is not None and (share := usual_delta_share(config)) is not None:
        delta = full * share
        sources.append(Basis("delta", size(delta), f"{share:.0%} of a snapshot, as is usual"))
    return BroadcastInputs(full, delta, base_bytes=snapshot.base_bytes)


def _snapshot_size(config: configuration.Config, options: argparse.Namespace, first: FirstPlan) -> SnapshotSize:
    if options.snapshot_bytes:
        return SnapshotSize(options.snapshot_bytes)
    try:
        return snapshot_size(config)
    except UserError as error:  # no files of weights here
        try:
            return first.snapshot_size()
        except UserError:
            raise error from None
