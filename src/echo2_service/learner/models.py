"""Models by id: always on disk, in memory while in use, and bitwise the same after any death of the process.

    root/<model>/spec.json    the spec that the model was created with
    root/<model>/step_<n>/    the last checkpoint, after operation n
    root/<model>/journal      the operations since

To load a model into memory, its checkpoint is read and the operations since are carried out again; they give the same
numbers, because they depend on nothing else (`tenants.py`). A model is unloaded when others need the memory, and where
there are many, when it rests.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import shutil
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from echo2.config.sections import LoraConfig
from echo2.core.errors import InvariantError, NoRoomError, UserError
from echo2.learner.core import checkpoint
from echo2.learner.core.datum import Datum
from echo2.learner.core.trainer import AdamParams
from echo2_service import limits
from echo2_service.backend import (
    Answer,
    ClientDatum,
    CreateModelCall,
    DeleteCall,
    ForwardBackwardCall,
    JournalRecord,
    LoadStateCall,
    ModelCall,
    ModelSpec,
    Operation,
    OptimStepCall,
    PublishCall,
    SaveStateCall,
    TrainOutput,
    UnloadCall,
)
from echo2_service.calling import with_data
from echo2_service.learner.journal import Journal
from echo2_service.learner.losses import CLIENT_LOSSES, HIGH, LOW
from echo2_service.learner.tenants import Tenants

log = logging.getLogger(__name__)

#: Seconds of work since the last checkpoint beyond which a new one is written; writing takes 5 to 60 ms (small models).
REDO_SECONDS = 10.0
#: Maximum memory of all loaded adapters, with their gradients and moments.
MEMORY_BYTES = limits.ADAPTER_MEMORY_BYTES
#: A model without a call for so long is unloaded, but for the most recently used ones. Each model that is loaded makes
#: the creation of another one slower, and takes a megabyte at least.
IDLE_SECONDS = 60.0
KEPT_MODELS = 32
#: Models that one call unloads at most, because each of them may write a checkpoint.
UNLOADED_AT_ONCE = 4
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,200}")


@dataclass(frozen=True, slots=True)
class LearnerData:
    """`rows`: for each client datum, as many rows as it has targets per token (`widths`). The rows of a datum have the
    same input tokens, so the learner runs these once where that is cheaper.
    """

    rows: list[Datum]
    widths: list[int]

    def by_client(self, logprobs: Sequence[array[float]]) -> list[array[float]]:
        """Convert logprobs of the rows, 'd' [N], to logprobs of the client's data, 'f' [N * K]."""
        by_datum, start = [], 0
        for width in self.widths:
            rows = logprobs[start : start + width]
            whole = array("f", bytes(4 * width * len(rows[0])))
            for place, row in enumerate(rows):
                whole[place::width] = array("f", row)
            by_datum.append(whole)
            start += width
        return by_datum


def learner_data(data: Sequence[ClientDatum], loss: str) -> LearnerData:
    """Convert the client's data for a loss.

    Raises:
        UserError: there is no datum, or a datum has no tokens or an array that differs in length from its targets.
    """
    if not data:
        raise UserError("There is no data: give at least one datum.")
    rows, widths = [], []
    for place, datum in enumerate(data):
        width = _checked_width(place, datum)
        _check_clips(place, datum, loss)
        weights = _weights(datum, loss)
        for column in range(width):
            at = slice(column, None, width)
            targets = datum.targets[at]
            rows.append(
                Datum(
                    datum.tokens[:1],
                    datum.tokens[1:] + targets[-1:],
                    b"\x01" * len(datum.tokens),
                    None if weights is None else weights[at],
                    None if datum.advantages is None else datum.advantages[at],
                    None if datum.logprobs is None else datum.logprobs[at],
                    targets=targets,
                    clip_low=None if datum.clip_low is None else datum.clip_low[at],
                    clip_high=None if datum.clip_high is None else datum.clip_high[at],
                )
            )
        widths.append(width)
    return LearnerData(rows, widths)


def _checked_width(place: int, datum: ClientDatum) -> int:
    length, num_targets = len(datum.tokens), len(datum.targets)
    if not length or not num_targets or num_targets % length:
        raise UserError(
            f"datum {place} has {length} tokens and {num_targets} targets: give one or more targets for each token."
        )
    for name in ("weights", "advantages", "logprobs", "clip_low", "clip_high"):
        values = getattr(datum, name)
        if values is None:
            continue
        if len(values) != num_targets:
            raise UserError(f"datum {place} has {len(values)} {name} for {num_targets} targets: give as many.")
        if not all(map(math.isfinite, values)):
            raise UserError(f"datum {place} has {name} that are not finite.")
    return num_targets // length


def _check_clips(place: int, datum: ClientDatum, loss: str) -> None:
    """Refuse clip bounds that the loss does not have. An unknown loss is refused later, by its name."""
    params = CLIENT_LOSSES[loss].defaults if loss in CLIENT_LOSSES else (LOW, HIGH)
    for name, values in ((LOW, datum.clip_low), (HIGH, datum.clip_high)):
        if values is not None and name not in params:
            raise UserError(f"datum {place} has {name}, which the loss {loss} does not take.")


def _weights(datum: ClientDatum, loss: str) -> array[float] | None:
    """Return the client's weights, with 0 for padding in the losses with advantages. In gspo without weights, tokens of
    advantage 0 are not part of a sequence's ratio, so their weight is 0, too.
    """
    if loss == "cross_entropy" or datum.advantages is None:
        return datum.weights
    logprobs = datum.logprobs or array("f", bytes(4 * len(datum.targets)))
    weights = array("d", datum.weights or [1.0] * len(datum.targets))
    for at, (target, logprob, advantage) in enumerate(zip(datum.targets, logprobs, datum.advantages, strict=True)):
        is_padding = not target and not logprob
        if not advantage and (is_padding or (loss == "gspo" and datum.weights is None)):
            weights[at] = 0.0
    return weights


#: An operation that yields between its passes, so that other models can run.
Slices = Generator[None, None, Answer]


@dataclass(slots=True)
class _Model:
    """A model in memory. `redo_seconds`: time to repeat the operations since the last checkpoint. `has_gradients`: it
    has gradients, which a checkpoint does not hold. `is_busy`: an operation or the loading is in progress. `used`: when
    it was called last, in ticks.
    """

    spec: ModelSpec
    tenants: Tenants
    journal: Journal
    directory: Path
    used: float
    redo_seconds: float = 0.0
    has_gradients: bool = False
    is_busy: bool = False


class Models:
    """All models of a service. For one thread."""

    def __init__(self, bases: Mapping[str, Tenants], root: Path, ticks: Callable[[], float] = time.monotonic) -> None:
        """`ticks`: seconds that never step."""
        self._bases, self._root, self._ticks = bases, root, ticks
        self._in_memory: OrderedDict[str, _Model] = OrderedDict()  # least recently used first

    def owner(self, call: ModelCall) -> str:
        """Return the owner to whom the call is charged; an unknown model is its own owner."""
        if isinstance(call, CreateModelCall):
            return call.spec.owner
        model = self._in_memory.get(call.model)
        if model is not None:
            return model.spec.owner
        try:
            return self._spec(call.model).owner
        except (UserError, OSError):  # its call says what is wrong
            return call.model

    def carry_out(self, call: ModelCall) -> Slices:
        """Carry out a call and return its answer.

        Raises:
            UserError: the tenant's mistake. If an operation itself fails, the fault is recorded and in the answer.
        """
        self._unload_idle()
        if isinstance(call, CreateModelCall):
            return self._create(call)
        if isinstance(call, UnloadCall):
            self._unload(call.model)
        elif isinstance(call, DeleteCall):
            self._forget(call.model)
            shutil.rmtree(self._directory(call.model), ignore_errors=True)
        else:
            return (yield from self._operate(call))
        return Answer()

    def close(self) -> None:
        """Drop all models from memory without a checkpoint."""
        for name in list(self._in_memory):
            self._forget(name)

    def _create(self, call: CreateModelCall) -> Answer:
        directory = self._directory(call.model)
        if (directory / "spec.json").is_file():
            if self._spec(call.model) != call.spec:
                raise UserError(f"Model {call.model!r} exists already, with other settings: use another id.")
            return Answer()
        self._add(call.model, call.spec)
        partial = directory / "spec.partial"
        try:
            partial.write_bytes(msgspec.json.encode(call.spec))
            partial.replace(directory / "spec.json")
        except BaseException:
            self._forget(call.model)  # the disk is full: it is created by the next call, or by none
            raise
        return Answer()

    def _operate(self, call: Operation) -> Slices:
        model = yield from self._bring(call.model)
        answered = model.journal.answer(call.operation)
        if answered is not None:
            return answered
        model.is_busy = True
        try:
            answer = yield from self._record(model, call)
        except Exception:
            self._forget(call.model)  # its state is unknown; the next operation restores it from disk
            raise
        model.is_busy = False
        return answer

    def _record(self, model: _Model, call: Operation) -> Slices:
        """Carry out an operation, and record it in the journal."""
        is_redone = isinstance(call, OptimStepCall)  # also if it fails: it has cleared the gradients
        try:
            if isinstance(call, ForwardBackwardCall):
                self._check_journal(call.model, model)
                call = with_data(call)
            answer = yield from self._apply(model, call)
            is_redone |= isinstance(call, ForwardBackwardCall) and not call.forward_only
        except NoRoomError:
            raise
        except UserError as error:
            answer = Answer(fault=str(error))
        if is_loaded := isinstance(call, LoadStateCall) and not answer.fault:
            self._save(call.model, model, call.operation)  # the source may be gone at the next restore
        redo = call if is_redone and isinstance(call, ForwardBackwardCall | OptimStepCall) else None
        model.journal.append(JournalRecord(call.operation, redo, answer))
        if is_loaded:
            self._forget_before(model)
        if model.redo_seconds > REDO_SECONDS:
            self._checkpoint(call.model, model)
        return answer

    def _apply(self, model: _Model, call: Operation) -> Slices:
        tenants, name = model.tenants, call.model
        if isinstance(call, ForwardBackwardCall):
            return (yield from self._forward_backward(model, call))
        if isinstance(call, OptimStepCall):
            started, model.has_gradients = time.perf_counter(), False
            adam = call.adam
            betas = (adam.beta1, adam.beta2)
            done = tenants.optim_step(name, AdamParams(adam.lr, betas, adam.eps, adam.weight_decay, adam.grad_clip))
            model.redo_seconds += time.perf_counter() - started
            return Answer(metrics={"grad_norm": done.grad_norm})
        if isinstance(call, SaveStateCall):
            tenants.save(name, Path(call.directory), {})
        elif isinstance(call, PublishCall):
            tenants.publish(name, Path(call.directory))
        else:
            tenants.load(name, Path(call.directory), call.with_optimizer)
            model.has_gradients = False
        return Answer()

    def _forward_backward(self, model: _Model, call: ForwardBackwardCall) -> Slices:
        data = learner_data(call.data, call.loss)
        logprobs: list[array[float]] = []
        total = 0.0
        passes = model.tenants.passes(data.rows)
        gradients = model.tenants.gradients(call.model)
        try:
            for part in passes:
                started = time.perf_counter()
                done = model.tenants.forward_backward(
                    call.model, part, call.loss, call.params, adds_gradients=not call.forward_only
                )
                logprobs, total = logprobs + done.logprobs, total + done.total
                if not call.forward_only:
                    model.redo_seconds += time.perf_counter() - started
                    model.has_gradients = True
                yield
        except BaseException:
            model.tenants.set_gradients(call.model, gradients)
            raise
        return Answer(trained=TrainOutput(data.by_client(logprobs), {"loss:sum": total}))

    def _bring(self, name: str) -> Generator[None, None, _Model]:
        """Return the model, loading it into memory if necessary."""
        model = self._in_memory.get(name)
        if model is not None:
            self._in_memory.move_to_end(name)
            model.used = self._ticks()
            return model
        model = self._add(name, self._spec(name))
        model.is_busy = True
        try:
            yield from self._restore(name, model)
        except BaseException:
            self._forget(name)
            raise
        model.is_busy = False
        return model

    def _restore(self, name: str, model: _Model) -> Generator[None, None, None]:
        state, after = checkpoint.latest(model.directory), 0
        if state is not None:
            after = int(str(model.tenants.load(name, state, with_optimizer=True)["operation"]))
        for record in model.journal.take_to_redo(after):
            assert record.call is not None
            fault = ""
            try:
                yield from self._apply(model, record.call)
            except UserError as error:
                fault = str(error)
            if fault != record.answer.fault:
                raise InvariantError(
                    f"{name}: operation {record.operation} ended differently when it was repeated: {fault}"
                )

    def _add(self, name: str, spec: ModelSpec) -> _Model:
        tenants = self._bases.get(spec.base)
        if tenants is None:
            raise UserError(f"There is no base model {spec.base!r}; there are {', '.join(self._bases)}.")
        directory = self._directory(name)
        tenants.add(name, LoraConfig(spec.rank, spec.alpha, list(spec.targets)), spec.seed)
        if (size := tenants.num_bytes(name)) > limits.ADAPTER_MEMORY_BYTES:
            tenants.remove(name)
            raise UserError(
                f"An adapter of rank {spec.rank} takes {size} bytes with gradients and moments; "
                f"{limits.ADAPTER_MEMORY_BYTES} are allowed. Lower the rank, or train fewer layers."
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            journal = Journal(directory / "journal")
        except Exception:
            tenants.remove(name)
            raise
        model = _Model(spec, tenants, journal, directory, self._ticks())
        self._in_memory[name] = model
        try:
            self._make_room(name)
        except BaseException:
            self._forget(name)  # else its next call would find it here, with the weights of a new one
            raise
        return model

    def _make_room(self, name: str) -> None:
        """Unload the least recently used models until there is room for this one. One for whose checkpoint there is no
        room stays.

        Raises:
            NoRoomError: there is no room for this one either, then. It names no other tenant's model.
        """
        sizes = {each: model.tenants.num_bytes(each) for each, model in self._in_memory.items()}
        excess, problem = sum(sizes.values()) - MEMORY_BYTES, None
        for other in [each for each, model in self._in_memory.items() if each != name and not model.is_busy]:
            if excess <= 0:
                break
            try:
                self._unload(other)
                excess -= sizes[other]
            except (UserError, OSError) as error:
                problem = error
        if problem is not None and excess > 0:
            log.warning("no memory for %s: %s", name, problem)
            raise NoRoomError(
                "There is no memory for this model: models that rest cannot be written to the service's disk at the "
                "moment. Nothing was lost. Try again later."
            ) from problem

    def _unload_idle(self) -> None:
        """Unload some of the models that rest. One with gradients stays: to load it again, its data would be run."""
        since = self._ticks() - IDLE_SECONDS
        longest = itertools.islice(self._in_memory.items(), max(0, len(self._in_memory) - KEPT_MODELS))
        idle = itertools.takewhile(lambda each: each[1].used < since, longest)
        resting = (name for name, model in idle if not (model.is_busy or model.has_gradients))
        for name in list(itertools.islice(resting, UNLOADED_AT_ONCE)):
            try:
                self._unload(name)
            except (UserError, OSError) as error:
                # There is no room for its checkpoint, which is not this caller's affair.
                log.warning("%s stays in memory: %s", name, error)
                self._in_memory[name].used = self._ticks()
                self._in_memory.move_to_end(name)

    def _check_journal(self, name: str, model: _Model) -> None:
        if model.journal.num_bytes > limits.JOURNAL_BYTES_MAX:
            self._checkpoint(name, model)
        if model.has_gradients and model.journal.num_bytes > limits.JOURNAL_BYTES_MAX:
            raise UserError(
                f"The data since the last optim_step have {model.journal.num_bytes} bytes; {limits.JOURNAL_BYTES_MAX} "
                "are kept. Call optim_step before more data."
            )

    def _checkpoint(self, name: str, model: _Model) -> None:
        if not model.has_gradients:
            self._save(name, model, model.journal.last_operation)
            self._forget_before(model)

    def _forget_before(self, model: _Model) -> None:
        """Delete what the newest checkpoint, of the last operation, makes superfluous."""
        model.journal.cover()
        checkpoint.prune(model.directory, keep=1)

    def _save(self, name: str, model: _Model, operation: int) -> None:
        model.tenants.save(name, checkpoint.step_directory(model.directory, operation), {"operation": operation})
        model.redo_seconds = 0.0

    def _unload(self, name: str) -> None:
        model = self._in_memory.get(name)
        if model is not None:
            if model.redo_seconds:
                self._checkpoint(name, model)
            self._forget(name)

    def _forget(self, name: str) -> None:
        model = self._in_memory.pop(name, None)
        if model is not None:
            model.journal.close()
            model.tenants.remove(name)

    def _directory(self, name: str) -> Path:
        if not _MODEL_ID.fullmatch(name):
            raise UserError(f'{name!r} is not a model id: letters, digits and ":._-", 201 at most.')
        return self._root / name

    def _spec(self, name: str) -> ModelSpec:
        try:
            return msgspec.json.decode((self._directory(name) / "spec.json").read_bytes(), type=ModelSpec)
        except FileNotFoundError as error:
            raise UserError(f"There is no model {name!r}.") from error
