"""The inputs of a plan that nothing has measured: estimates from the model's config.json and from data sheets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.values import FORMS, SELF
from echo2.core.errors import UserError, counted
from echo2.core.printable import duration
from echo2.engines.registry import in_worker
from echo2.learner.core.fitting import (
    SnapshotSize,
    frozen_bytes,
    known_config,
    learner_need,
    machine_with,
    model_shape,
)
from echo2.learner.decide.memory import BYTES_PER_VALUE, GB, form_bytes
from echo2.learner.decide.model_shape import ModelShape
from echo2.planning.estimates import (
    ANSWER_SHARE,
    SPREAD,
    STEP_SECONDS,
    Workload,
    rollouts_per_second,
    teacher_seconds,
    training_seconds,
    training_share,
)
from echo2.planning.gpus import GPUS, Gpu, cards, several
from echo2.planning.memory_needs import rollouts_held, sampling_need
from echo2.planning.plan import NoPlanError, Plan, make_plan
from echo2.planning.plan_inputs import PlanInputs
from echo2.weights.format.adapter_files import EXPERTS
from echo2.weights.format.model_files import hub_refusal
from echo2.worker.decide.home import SLOTS_MIN

#: In bfloat16, at rates from 1e-6 to 2e-5, a step's delta is 1 to 1.5 % (docs/log.md); the first steps change more.
DELTA_SHARE = 0.03
#: Steps of plans beside the one that was asked for: fewer say what a step costs.
STEPS_BESIDE = 32


@dataclass(frozen=True, slots=True)
class Basis:
    """The value of an input and its origin, for the reader of the plan. `by_offer`: the value's parts."""

    name: str
    value: str
    origin: str
    by_offer: Mapping[str, str] = field(default_factory=dict)

    def of(self, deciding: Sequence[str]) -> str:
        """Return the value, of these offers alone if it is of offers."""
        named = [self.by_offer[name] for name in deciding if name in self.by_offer]
        if not (others := len(self.by_offer) - len(named)):
            return self.value
        return ", ".join([*named, f"{counted(others, 'other' if named else 'offer')} (--json)"])


@dataclass(frozen=True, slots=True)
class Estimated:
    """What of a plan's inputs is estimated from data sheets: the step's seconds, and the rates of these offers."""

    trains: bool
    offers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Range:
    """Least and most, over all that the estimates leave open. `has_gaps`: for a part of it there is no plan."""

    machines: tuple[int, int]
    usd_per_step: tuple[float, float]
    has_gaps: bool


class FirstPlan:
    """Estimates for one configuration. `learner`: the learner's GPUs, as in 4xA100-80GB; None: not told.
    `answer_tokens`: mean length of the answers; None: half of the longest.
    """

    def __init__(self, config: Config, learner: str | None, answer_tokens: float | None) -> None:
        """Raises: UserError, the GPU is not known, or there are more or fewer of them than `learner.ranks`."""
        self._config, self._given_tokens = config, answer_tokens
        self._learner: tuple[int, str, Gpu] | None = None
        if learner is not None:
            self._learner = count, _, _ = several(learner, "--learner")
            if count != config.learner.ranks:
                raise UserError(
                    f"--learner {learner} has {count} GPUs and learner.ranks = {config.learner.ranks}: the learner has "
                    f"one process a GPU. Add --learner.ranks {count}."
                )

    @property
    def learner_memory_gb(self) -> float | None:
        """Memory of each of the learner's GPUs; None if they are not told."""
        return None if self._learner is None else self._learner[2].memory_gb

    @property
    def answer_tokens(self) -> float:
        """Mean length of the answers."""
        return answer_tokens(self._config, self._given_tokens)

    def train_seconds(self) -> tuple[float, Basis]:
        """Estimate the seconds of a training step.

        Raises:
            UserError: the learner's GPUs or the model's sizes are not known.
        """
        if self._learner is None:
            raise UserError(
                "The learner's seconds for a step are not known. Name its GPUs, for an estimate: --learner "
                f"{self._config.learner.ranks}xA100-80GB ({', '.join(GPUS)}). Or measure them: `echo2 run CONFIG "
                "--run.max_steps 5 --out DIR`, then `echo2 plan CONFIG --from DIR`; or give --train-seconds."
            )
        config, (count, name, card) = self._config, self._learner
        need = learner_need(config, self._shape, machine_with(int(card.memory_gb * GB), count))
        work = replace(self._work(), checkpointing=need.microbatch.checkpointing)
        rollouts = config.schedule.groups_per_step * config.sampling.group_size
        taught = mean_of_teachers(config, self._shape, lambda one: teacher_seconds(one, work, rollouts, card, count))
        seconds = training_seconds(work, rollouts, card, count) + taught
        tokens = rollouts * (work.prompt_tokens + work.answer_tokens)
        share = training_share(work.shape.hidden, card.tflops, work.is_mixture)
        why = (
            f"estimated within a factor of {SPREAD:g}: {count} x {name} use {share:.0%} of their arithmetic for "
            f"{tokens:.3g} tokens ({self._told_length()}); five steps of a run measure it"
        )
        if taught:
            why += f"; of it {duration(taught)} for the teacher's logprobs"
        if endpoints := config.distill.endpoints:
            why += f"; {', '.join(endpoints.values())} computes elsewhere, and is not in it"
        if need.microbatch.offloaded or config.learner.quantised != "none":
            why += "; what is offloaded or decoded costs more"
        return seconds, Basis("T_train", duration(seconds), why)

    def offers(self, offers: Sequence[Offer]) -> tuple[tuple[Offer, ...], list[Basis]]:
        """Fill in rates and memory of the offers that name a GPU.

        Raises:
            UserError: a GPU, or the model's sizes, are not known.
        """
        sampling, filled, rates = self._config.sampling, list[Offer](), dict[str, str]()
        for offer in offers:
            if offer.form:
                self._check_form(offer)
            if offer.gpu:
                card = cards(offer.gpu, f"offer {offer.name!r}: gpu =")[2]
                offer = replace(offer, memory_gb=offer.memory_gb or card.memory_gb)
                if offer.rollouts_per_second is None:
                    at_once = (offer.groups_per_batch or sampling.groups_per_batch) * sampling.group_size
                    if offer.form:  # an offer without room is left out later
                        need = sampling_need(self._config, self._shape)
                        at_once = min(at_once, rollouts_held(need, offer.form, offer.memory_gb) or SLOTS_MIN)
                    rate = rollouts_per_second(self._work(offer.form), card, at_once)
                    offer = replace(offer, rollouts_per_second=rate)
                    in_form = f" in {offer.form}" if offer.form else ""
                    rates[offer.name] = f"{offer.name} {rate:.3g}/s with {at_once} at once{in_form}"
            filled.append(offer)
        if not rates:
            return tuple(filled), []
        engines = self._work().engine + (" and the engines that round" if any(one.form for one in filled) else "")
        why = (
            f"estimated within a factor of {SPREAD:g} for {engines} ({self._told_length()}); `echo2 probe` "
            "measures them"
        )
        return tuple(filled), [Basis("rates", ", ".join(rates.values()), why, rates)]

    def _check_form(self, offer: Offer) -> None:
        """Raise UserError if the engines that round do not know the model."""
        config = known_config(self._config.model.path)
        if config is not None and (engine := in_worker(config)).name == "transformers":
            raise UserError(
                f"offer {offer.name!r}: form = {offer.form!r}: the engines that round have the models of compact, and "
                f"{engine.why}. Leave form out."
            )

    def snapshot_size(self) -> SnapshotSize:
        """Estimate what a worker receives in a full snapshot.

        Raises:
            UserError: the model's sizes are not known.
        """
        config, shape = self._config, self._shape
        width = BYTES_PER_VALUE[config.model.snapshot_dtype]
        if not config.lora.rank:
            return SnapshotSize(shape.parameters * width)
        trained = shape.adapter_parameters(config.lora.rank, EXPERTS in config.lora.targets)
        return SnapshotSize(trained * width, shape.parameters * frozen_bytes(config, shape))

    def _told_length(self) -> str:
        if self._given_tokens:
            return f"answers of {self._given_tokens:g}, --answer-tokens"
        return f"answers of {self.answer_tokens:g}, half of the longest; --answer-tokens"

    def _work(self, form: str = "") -> Workload:
        config, shape = self._config, self._shape
        engine = config.workers.engine if config.workers.engine in STEP_SECONDS else "vllm"
        width: float = BYTES_PER_VALUE[config.model.snapshot_dtype]
        if form:
            engine = next(name for name, its_form in FORMS.items() if its_form == form)
            width = form_bytes(shape, form) / shape.parameters
        return Workload(
            shape,
            self.answer_tokens,
            bytes_per_weight=width,
            lora=bool(config.lora.rank),
            engine=engine,
        )

    @cached_property
    def _shape(self) -> ModelShape:
        return fetched_shape(self._config.model.path)


def mean_of_teachers(config: Config, policy: ModelShape, seconds: Callable[[ModelShape], float]) -> float:
    """Return the mean of what the run's teachers take; 0 without one. Each row asks one of them; which, only rows say,
    so all count alike. Endpoints compute elsewhere."""
    distill = config.distill
    models = [path for name, path in distill.teachers.items() if name not in distill.endpoints]
    teachers = [policy if path == SELF else fetched_shape(path) for path in models]
    return math.fsum(map(seconds, teachers)) / max(1, len(distill.teachers))


def answer_tokens(config: Config, mean_tokens: float | None) -> float:
    """Return the mean length of the answers: as given, else half of the longest."""
    return mean_tokens or ANSWER_SHARE * config.sampling.max_tokens


def fetched_shape(path: str) -> ModelShape:
    """Return the sizes of a model from its config.json: in a directory, in the hub's cache, here (the examples'), or
    from the hub.

    Raises:
        UserError: there is none, or it has layers of a kind that is not known.
    """
    if known_config(path) is None and (reason := _fetch_config(path)):
        raise UserError(
            f"model.path = {path!r}: {reason} For a plan the model's config.json is enough: put it into a directory, "
            "and name that: --model.path DIR."
        )
    shape = model_shape(path)
    if shape is None:
        raise UserError(
            f"model.path = {path!r}: its layers are of a kind without a forecast. Measure instead: `echo2 run CONFIG "
            "--run.max_steps 5 --out DIR`, then `echo2 plan CONFIG --from DIR`."
        )
    return shape


def _fetch_config(path: str) -> str:
    """Fetch the config.json of a hub id into the hub's cache, and return why it is not there."""
    if Path(path).exists():
        return "there is no config.json in it that can be read."
    if reason := hub_refusal(path):
        return f"there is no such directory, and {reason}"
    try:
        from huggingface_hub import hf_hub_download

        hf_hub_download(path, "config.json")
    except ImportError:
        return "there is no such directory, and a hub id needs `pip install huggingface_hub`."
    except OSError as error:
        return f"the hub did not send its config.json ({error})."
    return "" if known_config(path) is not None else "the hub's config.json cannot be read."


def usual_delta_share(config: Config) -> float | None:
    """Return the share of a snapshot that one step's delta has as a rule; None where deltas save little."""
    return DELTA_SHARE if config.model.snapshot_dtype == "bfloat16" and not config.lora.rank else None


def open_range(inputs: PlanInputs, plan: Plan, estimated: Estimated) -> Range | None:
    """Return what the plan may become once all is measured; None if nothing is estimated."""
    if not estimated.trains and not estimated.offers:
        return None
    plans, has_gaps = [plan], False
    short = replace(inputs, steps=min(inputs.steps, STEPS_BESIDE), budget_usd=None)
    for slower in (1 / SPREAD, SPREAD) if estimated.trains else (1.0,):
        for faster in (1 / SPREAD, SPREAD) if estimated.offers else (1.0,):
            offers = tuple(
                replace(one, rollouts_per_second=one.rollouts_per_second * faster)
                if one.name in estimated.offers and one.rollouts_per_second
                else one
                for one in inputs.offers
            )
            try:
                plans.append(make_plan(replace(short, train_seconds=inputs.train_seconds * slower, offers=offers)))
            except NoPlanError:
                has_gaps = True
    counts, prices = [sum(one.machines.values()) for one in plans], [one.usd_per_step for one in plans]
    return Range((min(counts), max(counts)), (min(prices), max(prices)), has_gaps)


def range_in_words(span: Range) -> str:
    """Return the range in words."""
    gaps = "; in a part of that range the offers are too few" if span.has_gaps else ""
    (fewest, most), (least, highest) = span.machines, span.usd_per_step
    return f"{fewest} to {most} machines, ${least:.3g} to ${highest:.3g} a step{gaps}"
