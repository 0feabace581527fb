"""What `echo2 plan` proposes where there is no plan: a command that has one, and has been tried; or why none can."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import echo2
from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.rundir import RunDir
from echo2.core.devices import this_machine
from echo2.core.errors import UserError
from echo2.learner.core.fitting import known_models, learner_need, machine_with, model_shape, worker_need
from echo2.learner.decide.memory import GB
from echo2.learner.decide.model_shape import ModelShape
from echo2.planning.chosen_learner import with_learner
from echo2.planning.first_plan import FirstPlan
from echo2.planning.gpus import GPUS, cards, several
from echo2.planning.here import here_refuses
from echo2.planning.market import COUNT
from echo2.planning.memory_needs import (
    DoesNotFitError,
    largest_model,
    learner_savings,
    worker_savings,
)
from echo2.planning.plan import NoPlanError, Plan, SearchLimit, check_inputs, make_plan
from echo2.planning.plan_inputs import PastRun
from echo2.planning.plan_request import MARKET, are_estimated, configured, learner_machine, offered, ready
from echo2.planning.remedies import Remedy, remedies

AT_ONCE = "sampling.groups_per_batch"
#: A machine of which no memory is known is taken to hold any worker, as `offers_that_fit` does.
UNKNOWN_GB = 1e6
#: Cards of one machine, where one of them does not hold a worker.
CARDS = (2, 4, 8)
#: Flags that choose among the machines of the market.
FILTERS = ("--gpus", "--region", "--spot", "--memory-gb", "--providers")
#: What flags are that are not given, where it is not None.
WITHOUT: dict[str, Any] = {"spot": "any", "each": COUNT, "max_idle": 0.02}
#: Forecasts for a way out of a refusal.
WAYS_OUT = 16
#: A plan in which the learner waits for more than this share of the time is not said to work.
IDLE_MAX = 0.5
#: Without `--learner`, its machine may have so many times as much memory.
MEMORY_FACTORS = (2, 4, 8, 16, 32, 64)
#: A change of this name is the configuration file, which is not a flag.
CONFIG = "CONFIG"
#: Stands for the demo's configuration, which is always there.
DEMO = Path(echo2.__file__).parent / "demo" / "sort.toml"
#: Flags of a plan that have a value, and that it can do without.
DISPENSABLE = (
    *("--answer-tokens", "--train-seconds", "--reward-seconds", "--broadcast-seconds", "--snapshot-bytes"),
    *("--uplink-mbps", "--learner-memory-gb", "--max-idle", "--budget", "--each", "--region", "--spot", "--gpus"),
    *("--memory-gb", "--providers", "--from", "--learner"),
)
#: Ranks that are tried where no GPUs are named.
RANKS = (8, 4, 2, 1)
#: So many changes are tried together.
CHANGES_MAX = 3
#: Groups of changes that are tried at most.
TRIES_MAX = 200
#: Billions of weights in a model's name.
_BILLIONS = re.compile(r"(\d+(?:\.\d+)?) ?[Bb](?![a-z])")


def way_out(options: argparse.Namespace, past: PastRun | None, error: UserError) -> str:
    """Return the nearest plans that exist, the first as the command that prints it, or why no machine can hold this
    model; "" if the error is another.
    """
    if isinstance(error, NoPlanError):
        more = next(_more_at_once(options, past), None)
        if more is not None:
            command = _command(options, {f"--{AT_ONCE}": more[0]})
            return f"{_lead(more[1])}, with more rollouts at once: `{command}` ({_in_short(more[1])})."
        return _advice(options, remedies(error, are_estimated(options)))
    is_large = isinstance(error, DoesNotFitError) and options.here is None
    changes = {} if is_large else _valid(options, past)
    if changes is None:
        return ""
    past = past if options.source and "--from" not in changes else None
    try:
        changes = _fitting(options, changes, past)
    except DoesNotFitError as refusal:
        return str(refusal)
    config, changed = _with(options, changes, past)
    inputs = ready(config, changed, past)[0]
    try:
        plan = make_plan(inputs, SearchLimit(WAYS_OUT))
    except NoPlanError as refusal:
        return _advice(changed, remedies(refusal, are_estimated(changed)))
    return f"{_lead(plan, changes)}: `{_command(options, changes)}` ({_in_short(plan)})."


def _valid(options: argparse.Namespace, past: PastRun | None) -> dict[str, str] | None:
    """Return the nearest flags with which all inputs are there; None: no flag mends what was wrong."""
    model = None
    with contextlib.suppress(UserError):
        model = configured(_flagged(options, {"--learner": ""})).model.path if options.config else None
    for changes in _repairs(options, model):
        changed = _flagged(options, changes)
        if past is None if changed.source is not None else str(changed.config) not in changed.argv:
            continue  # that run cannot be read; or it had the configuration
        past_run = None if "--from" in changes else past
        try:
            check_inputs(ready(*_with(options, changes, past_run), past_run)[0])
        except (DoesNotFitError, NoPlanError):  # these are looked at next
            return changes
        except UserError:
            continue
        return changes
    return None


# ---- memory ----------------------------------------------------------------------------------------------------------


def _fitting(options: argparse.Namespace, begun: dict[str, str], past: PastRun | None) -> dict[str, str]:
    """Return flags with which a worker fits an offer or a machine of the market, and the learner into its own.

    Raises:
        DoesNotFitError: there are none.
    """
    config, changed = _with(options, begun, past)
    shape = model_shape(config.model.path)
    if shape is None:
        return begun
    changes = begun | _of_worker(config, changed, shape)
    return changes | _of_learner(*_with(options, changes, past), shape)


def _of_worker(config: Config, options: argparse.Namespace, shape: ModelShape) -> dict[str, str]:
    market = {} if options.offers in (None, MARKET) else {"--offers": str(MARKET)}
    open_to_all = market | {
        flag: "" for flag in FILTERS if getattr(options, flag[2:].replace("-", "_")) not in ("", None, "any")
    }
    memory = list[tuple[dict[str, str], float]]()
    for flags in ({}, *_more_cards(options), market, open_to_all):
        with contextlib.suppress(UserError):  # a filter leaves no machine
            memory.append((flags, max(map(_memory_gb, offered(_flagged(options, flags))[0]))))
    for settings, smaller in worker_savings(config):
        for flags, most in memory:
            need = worker_need(smaller, shape, machine_with(int(most * GB), 1))
            if need.total <= need.available:
                return _as_flags(settings) | flags
    raise DoesNotFitError(
        f"No machine on offer holds a worker, nor does one of the market: even with {_in_words(settings)} it needs "
        f"{need.total / GB:.0f} GB, and the largest has {most:.0f}; {largest_model(need)}."
    )


def _more_cards(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield machines with several of the GPUs of the market that were asked for."""
    if options.offers in (None, MARKET) and options.gpus:
        names = [several(name, "--gpus")[1] for name in options.gpus.split(",") if name]
        yield from ({"--gpus": ",".join(f"{count}x{name}" for name in names)} for count in CARDS)


def way_out_here(options: argparse.Namespace, config: Config) -> str:
    """Return a command with which the run on this machine fits into its memory; "" if none was found. Its probe, if it
    has one, stays that of the run."""
    shape, machine = model_shape(config.model.path), this_machine()
    if shape is None:
        return ""
    for settings, smaller in itertools.chain(learner_savings(config), worker_savings(config)):
        is_other_run = options.here != Path() and any(name.startswith("sampling.") for name in settings)
        if is_other_run or not smaller.workers.count or here_refuses(smaller):
            continue
        needs = learner_need(smaller, shape, machine), worker_need(smaller, shape, machine)
        if all(need.total <= need.available for need in needs):
            return f" A plan that works: `{_command(options, _as_flags(settings))}`."
    return ""


def _memory_gb(offer: Offer) -> float:
    return offer.memory_gb or (cards(offer.gpu, offer.name)[2].memory_gb if offer.gpu else UNKNOWN_GB)


def _of_learner(config: Config, options: argparse.Namespace, shape: ModelShape) -> dict[str, str]:
    for flags, memory_gb in _learners(config, options):
        for settings, smaller in learner_savings(config):
            need = learner_need(smaller, shape, learner_machine(smaller, memory_gb))
            if need.total <= need.available:
                changes = flags | _as_flags(settings)
                if options.learner and "learner.ranks" in settings:
                    name = several(flags.get("--learner", options.learner), "--learner")[1]
                    changes["--learner"] = f"{smaller.learner.ranks}x{name}"
                return changes
    raise DoesNotFitError(
        f"No GPU that is known holds the learner, not even with {_in_words(settings)}: it needs {need.total / GB:.0f} "
        f"GB of {need.available / GB:.0f}; {largest_model(need)}."
    )


def _learners(config: Config, options: argparse.Namespace) -> Iterator[tuple[dict[str, str], float | None]]:
    """Yield the memory of the learner's GPUs as they are, and of larger ones with their flags; None: this machine."""
    memory_gb = options.learner_memory_gb or FirstPlan(config, options.learner, options.answer_tokens).learner_memory_gb
    yield {}, memory_gb
    if options.learner and not options.learner_memory_gb:
        count = several(options.learner, "--learner")[0]
        for name, one in sorted(GPUS.items(), key=lambda item: item[1].memory_gb):
            if one.memory_gb > (memory_gb or 0.0):
                yield {"--learner": f"{count}x{name}"}, one.memory_gb
        return
    begin = memory_gb or this_machine().memory_bytes / GB
    for factor in MEMORY_FACTORS:
        yield {"--learner-memory-gb": f"{begin * factor:.0f}"}, round(begin * factor)


def _as_flags(settings: dict[str, Any]) -> dict[str, str]:
    return {f"--{name}": str(value) for name, value in settings.items()}


def _in_words(settings: dict[str, Any]) -> str:
    return " and ".join(f"{name} = {value}" for name, value in settings.items())


# ---- commands --------------------------------------------------------------------------------------------------------


def _with(
    options: argparse.Namespace, changes: dict[str, str], past: PastRun | None
) -> tuple[Config, argparse.Namespace]:
    """Return configuration and flags with these changes, as the command line would give them."""
    changed = with_learner(_flagged(options, changes), past)[0]
    return configured(changed), changed


def _flagged(options: argparse.Namespace, changes: dict[str, str]) -> argparse.Namespace:
    """Return the flags with these changes, and the words that give them."""
    changed = argparse.Namespace(**vars(options))
    changed.argv = _words(options, changes)
    changed.overrides = dict(options.overrides)
    for flag, value in changes.items():
        if "." in flag:
            changed.overrides.pop(flag[2:], None)
            changed.overrides |= {flag[2:]: value} if value else {}
        elif flag == CONFIG:
            changed.config = Path(value)
        else:
            field = "source" if flag == "--from" else flag[2:].replace("-", "_")
            kind = {"offers": Path, "learner": str, "gpus": str}.get(field, float)
            setattr(changed, field, kind(value) if value else WITHOUT.get(field))
    return changed


def _more_at_once(options: argparse.Namespace, past: PastRun | None) -> Iterator[tuple[str, Plan]]:
    """Yield plans in which workers of estimated rates sample more groups at once, with that setting's value."""
    if not are_estimated(options):
        return
    now, limit = configured(options).sampling.groups_per_batch, SearchLimit(WAYS_OUT)
    for power in range(1, 7):
        value = str(now << power)
        if limit.forecasts <= 0:
            return
        try:
            yield value, make_plan(ready(*_with(options, {f"--{AT_ONCE}": value}, past), past)[0], limit)
        except UserError:
            continue


def _advice(options: argparse.Namespace, choices: list[Remedy]) -> str:
    choices = sorted(choices, key=lambda one: not _is_busy(one.plan))
    edits, others = _edits(choices[0], options.offers), []
    for one in choices[1:]:
        flags = [f"{flag} {value}" if value else f"no {flag}" for flag, value in _flags(one, options).items()]
        others.append(" and ".join([*flags, *_edits(one, options.offers)]))
    first = f"`{_command(options, _flags(choices[0], options))}` ({_in_short(choices[0].plan)})"
    before = f"with {' and '.join(edits)}: " if edits else ""
    return f"{_lead(choices[0].plan)}: {before}{first}." + (f" Or: {'; or '.join(others)}." if others else "")


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


def _is_busy(plan: Plan) -> bool:
    return plan.prediction.steady_idle_ratio <= IDLE_MAX


def _lead(plan: Plan, changes: dict[str, str] | None = None) -> str:
    works = "A plan that works"
    if changes and "--model.path" in changes:
        works += ", for a model whose sizes are known"
    return works if _is_busy(plan) else "In all plans found the learner waits most of the time; the nearest one"


def _command(options: argparse.Namespace, changes: dict[str, str]) -> str:
    """Return the command that was given, with these flags changed; an empty value takes a flag away."""
    return shlex.join(["echo2", *_words(options, changes)])


def _words(options: argparse.Namespace, changes: dict[str, str]) -> list[str]:
    words = [word for word in options.argv if word not in ("--json", "--rehearse")]
    for flag, value in changes.items():
        if flag == CONFIG:
            words = [*(word for word in words if word != str(options.config)), value]
            continue
        for at in reversed([at for at, word in enumerate(words) if word.partition("=")[0] == flag]):
            is_alone = "=" in words[at] or (flag == "--here" and options.here == Path())
            del words[at : at + (1 if is_alone else 2)]
        words += [flag, value] if value else []
    return words


def _repairs(options: argparse.Namespace, model: str | None) -> Iterator[dict[str, str]]:
    """Yield changes with which a refused command may be valid, by flag; "" takes one away: the fewest changes first.
    `model`: the path in the configuration; None: that is not readable."""
    needed = {**_of_config(options), **_of_model(model), **({} if options.here is None else {"--here": ""})}
    if needed:
        yield needed
    set_flags = [word.partition("=")[0] for word in options.argv]
    singles = [*_fewer_ranks(options), *({flag: ""} for flag in DISPENSABLE if flag in set_flags)]
    singles += [{word: ""} for word in set_flags if word.startswith("--") and "." in word]
    singles += [{"--offers": "market"}] if str(options.offers) != "market" else []
    groups = (them for number in range(1, CHANGES_MAX + 1) for them in itertools.combinations(singles, number))
    for group in itertools.islice(groups, TRIES_MAX):
        changes = {flag: value for one in group for flag, value in one.items()}
        if len(changes) == sum(map(len, group)):  # no flag twice
            yield needed | changes


def _of_config(options: argparse.Namespace) -> dict[str, str]:
    if options.config is not None and options.config.exists():
        return {}
    own = RunDir(options.source).config if options.source else DEMO
    return {CONFIG: str(own if own.is_file() else DEMO)}


def _of_model(model: str | None) -> dict[str, str]:
    """Where the model has no sizes that are known, one that has."""
    return {} if model is None or model_shape(model) is not None else {"--model.path": _near(model)}


def _fewer_ranks(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """As many ranks as GPUs, or with fewer of both; without known GPUs, other ranks than the configuration has."""
    try:
        count, name, _ = several(options.learner or "", "--learner")
    except UserError:
        yield from ({"--learner.ranks": str(count)} for count in RANKS)
        return
    yield {"--learner.ranks": str(count)}
    while count > 1:
        count //= 2
        yield {"--learner": f"{count}x{name}", "--learner.ranks": str(count)}


def _near(model: str) -> str:
    """Return the model of known sizes that is nearest by the size in its name."""
    match = _BILLIONS.search(Path(model).name)
    billions = (float(match[1]) if match else 0.0) or 1.0

    def distance(name: str) -> float:
        other = _BILLIONS.search(name)
        return abs(float(other[1]) / billions - 1) if other else 1e9

    return min(known_models(), key=distance)
