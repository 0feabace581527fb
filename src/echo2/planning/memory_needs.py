"""Forecasts the memory of a run's learner and workers, by part, and refuses what cannot fit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.table import Table

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.values import FORMS, LLAMACPP_FORMS
from echo2.core.errors import UserError
from echo2.core.printable import size
from echo2.core.types import Hardware
from echo2.learner.core.fitting import LearnerMemoryNeed, MemoryNeed, learner_need, row_tokens, worker_need
from echo2.learner.decide.memory import BYTES_PER_VALUE, GB, USABLE
from echo2.learner.decide.model_shape import ModelShape
from echo2.worker.decide.home import SLOTS_MIN, EngineCandidate, SamplingNeed, need_of, slots_in

#: Settings that are changed together, at most, to make a run fit.
CHANGES_MAX = 2
#: The message if learner and workers do not fit beside each other on the only GPU.
TURNS = "learner and workers take turns on the GPU: a step takes the seconds of both, and those of moving their tensors"
#: Parts smaller than this share of the total are not shown.
SHOWN = 0.01


class Needs(NamedTuple):
    """Of the learner, of a worker, and of a stranger's, or of one that checks strangers."""

    learner: LearnerMemoryNeed
    worker: MemoryNeed
    stranger: MemoryNeed | None = None


class DoesNotFitError(UserError):
    """A process, the learner or a worker, needs more memory than its machine has."""


def learner_that_fits(config: Config, shape: ModelShape, hardware: Hardware) -> LearnerMemoryNeed:
    """Return the memory that the learner needs on this hardware.

    Raises:
        UserError: the learner does not fit.
    """
    need = learner_need(config, shape, hardware)
    _check_fits("The learner", need, _learner_remedies(config))
    return need


def worker_that_fits(config: Config, shape: ModelShape, hardware: Hardware, which: str = "A worker") -> MemoryNeed:
    """Return the memory that a worker needs on this hardware.

    Raises:
        UserError: the worker does not fit.
    """
    need = worker_need(config, shape, hardware)
    rounded = "" if config.model.snapshot_dtype == "bfloat16" else 'model.snapshot_dtype = "bfloat16", '
    remedies = f"Set {rounded}a lower sampling.groups_per_batch or sampling.max_tokens, or take larger machines."
    _check_fits(which, need, remedies)
    return need


def _check_fits(what: str, need: MemoryNeed, remedies: str) -> None:
    """Raise if the memory does not suffice.

    Raises:
        DoesNotFitError: names the memory needed, its largest parts, the memory available, and the remedies.
    """
    if need.total <= need.available:
        return
    largest = sorted(need.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {num_bytes / GB:.1f}" for name, num_bytes in largest)
    raise DoesNotFitError(
        f"{what} needs {need.total / GB:.1f} GB ({parts}, ...), and {need.place} has {max(0, need.available) / GB:.1f} "
        f"GB for it. {remedies}"
    )


def _learner_remedies(config: Config) -> str:
    fewer = "" if config.learner.tokens_per_microbatch == "auto" else "a lower learner.tokens_per_microbatch, "
    local = "fewer local workers (workers.count), " if config.workers.count else ""
    adapter = ""
    if not config.lora.rank:
        ranks = 2 * config.learner.ranks
        adapter = f"learner.ranks = {ranks} (the model in shares), lora.rank = 16 (an adapter over a frozen model), "
    if config.learner.quantised == "none" and config.learner.ranks == 1:
        what = '"base" (the frozen model in 4 bits)' if config.lora.rank else '"moments" (AdamW\'s, in 8 bits)'
        adapter = f"learner.quantised = {what}, {adapter}"
    return f"Set {adapter}{fewer}{local}a lower sampling.max_tokens, or take a larger machine."


def sampling_need(config: Config, shape: ModelShape) -> SamplingNeed:
    """Return what the run asks of a worker that rounds."""
    sampling = config.sampling
    width = BYTES_PER_VALUE[config.model.snapshot_dtype]
    slots = sampling.groups_per_batch * sampling.group_size
    return SamplingNeed(shape, slots, row_tokens(config, shape), width, bool(config.lora.rank))


def rollouts_held(sampling: SamplingNeed, form: str, memory_gb: float) -> int:
    """Return how many rollouts at once a worker has room for with weights in a form, at most as many as the run asks
    for, as the worker itself decides it; 0: too few."""
    return slots_in(sampling, EngineCandidate("", form, int(USABLE * memory_gb * GB)))


def _check_form_fits(config: Config, shape: ModelShape, offer: Offer) -> None:
    """Raise DoesNotFitError if a worker on this offer has no room for the fewest rollouts in its form."""
    sampling = sampling_need(config, shape)
    parts = dict(need_of(sampling, offer.form, min(SLOTS_MIN, sampling.slots)))
    need = MemoryNeed(parts, int(USABLE * offer.memory_gb * GB), "the machine")
    remedies = "Name a form with fewer bits, set a lower sampling.max_tokens, or take larger machines."
    _check_fits(f"A worker on {offer.name!r} with form = {offer.form!r}", need, remedies)


def _form_that_fits(config: Config, shape: ModelShape, offer: Offer) -> str:
    """Return which form of llama.cpp would fit this offer, in words; empty: none."""
    sampling = sampling_need(config, shape)
    for form in (FORMS[engine] for engine in LLAMACPP_FORMS):
        if rollouts := rollouts_held(sampling, form, offer.memory_gb):
            return f', form = "{form}" would hold {rollouts} rollouts at once'
    return ""


def offers_that_fit(
    config: Config, shape: ModelShape, offers: Sequence[Offer]
) -> tuple[tuple[Offer, ...], dict[str, str]]:
    """Return the offers whose machines can hold a worker, as far as is known, and of each other the reason.

    Raises:
        DoesNotFitError: none can.
    """
    fitting, left_out, reasons = [], dict[str, DoesNotFitError](), dict[str, str]()
    for offer in offers:
        if offer.memory_gb:
            machine = Hardware(int(offer.memory_gb * GB), (int(offer.memory_gb * GB),))
            try:
                if offer.form:
                    _check_form_fits(config, shape, offer)
                else:
                    worker_that_fits(config, shape, machine, f"A worker on {offer.name!r}")
            except DoesNotFitError as error:
                left_out[offer.name], instead = error, "" if offer.form else _form_that_fits(config, shape, offer)
                reasons[offer.name] = str(error).partition(")")[0] + ")" + instead
                continue
        fitting.append(offer)
    if not fitting:
        raise next(iter(left_out.values()))
    return tuple(fitting), reasons


def worker_savings(config: Config) -> Iterator[tuple[dict[str, Any], Config]]:
    """Yield changes of settings with which a worker needs less, none first, and the configuration with them."""
    return _combined(
        config,
        ("sampling.groups_per_batch", _halves(config.sampling.groups_per_batch)),
        ("model.snapshot_dtype", ["bfloat16"] if config.model.snapshot_dtype != "bfloat16" else []),
        ("sampling.max_tokens", _halves(config.sampling.max_tokens)),
    )


def learner_savings(config: Config) -> Iterator[tuple[dict[str, Any], Config]]:
    """Yield changes of settings with which the learner needs less, none first, and the configuration with them."""
    return _combined(
        config,
        ("learner.tokens_per_microbatch", ["auto"] if config.learner.tokens_per_microbatch != "auto" else []),
        ("workers.count", [0] if config.workers.count else []),
        ("learner.quantised", ["moments", "base"] if config.learner.quantised == "none" else []),
        ("learner.ranks", [config.learner.ranks << power for power in (1, 2, 3)]),
        ("lora.rank", [16] if not config.lora.rank else []),
        ("sampling.max_tokens", _halves(config.sampling.max_tokens)),
    )


def _combined(config: Config, *axes: tuple[str, list[Any]]) -> Iterator[tuple[dict[str, Any], Config]]:
    yield {}, config
    for number in range(1, CHANGES_MAX + 1):
        for chosen in itertools.combinations(axes, number):
            names = [name for name, _ in chosen]
            for values in itertools.product(*(values for _, values in chosen)):
                settings = dict(zip(names, values, strict=True))
                with contextlib.suppress(UserError):  # they do not go together
                    yield settings, changed(config, settings)


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, by section and name.

    Raises:
        UserError: they do not go together.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, field = name.split(".")
        sections.setdefault(section, {})[field] = value
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def largest_model(need: MemoryNeed) -> str:
    """Say how large a model would fit, if all parts shrank alike."""
    return f"a model of {max(0.0, need.available / need.total):.0%} of its size would fit"


def _halves(value: int) -> list[int]:
    """Half, a quarter, a sixteenth ... of a value: each way to save memory is tried together with others."""
    return [value >> power for power in (1, 2, 4, 8) if value >> power]


def needs_as_dict(needs: Needs) -> dict[str, Any]:
    """Return the needs as plain values, in bytes, for `--json`."""
    learner, workers = needs.learner, {"worker": needs.worker, "stranger": needs.stranger}
    return {
        "learner": {
            "parts": learner.parts,
            "bytes": learner.total,
            "available": learner.available,
            "tokens_per_microbatch": learner.microbatch.tokens,
            "checkpointing": learner.microbatch.checkpointing,
            "offloaded": learner.microbatch.offloaded,
            "host_bytes": learner.host,
            "in_turns": learner.microbatch.in_turns,
        },
        **{name: {"parts": one.parts, "bytes": one.total} for name, one in workers.items() if one is not None},
    }


def needs_table(needs: Needs) -> Table:
    """Return the needs as a table for people."""
    learner, worker, stranger = needs
    table = Table(title="Memory", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    how = "computed again" if learner.microbatch.checkpointing else "kept"
    cut = f"micro-batches of {learner.microbatch.tokens} tokens, activations {how}"
    table.add_row("learner", f"[bold]{size(learner.total)}[/bold] of {size(learner.available)}: {_by_part(learner)}")
    table.add_row("", cut)
    if offloaded := learner.microbatch.offloaded:
        table.add_row("", f"{offloaded} in the machine's memory ({size(learner.host)} there): slower, the same result")
    if learner.microbatch.in_turns:
        table.add_row("", TURNS)
    table.add_row("worker", f"[bold]{size(worker.total)}[/bold]: {_by_part(worker)}")
    if stranger is not None and stranger.total > worker.total:
        why = "has both old and new weights while rollouts began with the old ones; with less it waits for these"
        table.add_row("stranger", f"[bold]{size(stranger.total)}[/bold]: it {why}")
    return table


def _by_part(need: MemoryNeed) -> str:
    parts = sorted(need.parts.items(), key=lambda part: -part[1])
    shown = [(name, num_bytes) for name, num_bytes in parts if num_bytes >= SHOWN * need.total]
    return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in shown)
