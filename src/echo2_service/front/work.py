"""Carries out acknowledged requests by calls of the back end."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import shutil
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from echo2.core.disk import num_bytes
from echo2.core.errors import InvariantError, PeerError, UserError
from echo2_service import limits
from echo2_service.backend import (
    AdamSettings,
    Backend,
    CreateModelCall,
    ForwardBackwardCall,
    LoadStateCall,
    ModelSpec,
    Operation,
    OptimStepCall,
    PublishCall,
    SampleSpec,
    SaveStateCall,
    TrainWork,
)
from echo2_service.front.bodies import AdamBody, LoadBody, OptimBody, SampleBody, SaveBody, prompt_tokens
from echo2_service.front.body_reader import ParsedBody, off_loop
from echo2_service.front.curves import Trained, trained
from echo2_service.front.data import check_scores, read_targets, sample_answer, train_answer
from echo2_service.front.database import Database, Row, checkpoints, models, samplers, sessions
from echo2_service.front.usage import Storage

T = TypeVar("T")
SCHEMES = ("tinker://", "logits://")
KINDS = ("weights", "sampler_weights")


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a request: its answer, the number of tokens to charge, what was trained, and the metrics of an
    optimizer step, which its answer is to tell.
    """

    answer: bytes = b""
    num_tokens: int = 0
    trained: Trained | None = None
    metrics: Mapping[str, float] | None = None


class Work:
    """Carries out requests. `storage`: holds checkpoints and published adapters."""

    def __init__(self, database: Database, backend: Backend, storage: Storage, clock: Callable[[], float]) -> None:
        self.database, self.backend, self.clock = database, backend, clock
        self.storage = storage
        self._carriers: Mapping[str, Callable[[Row, Any], Any]] = {
            "create_model": self._create_model,
            "forward": self._train,
            "forward_backward": self._train,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
            "load_weights": self._load,
            "sample": self._sample,
        }

    async def carry_out(self, request: Row, parsed_body: ParsedBody) -> Done:
        """Carry out a request. `parsed_body`: what it asks for. The back end is called before this waits, samples
        aside.

        Raises:
            UserError, PeerError: the request can't be carried out. InvariantError: see `Backend`.
        """
        if isinstance(parsed_body, PeerError):
            raise parsed_body
        done: Done = await self._carriers[request.kind](request, parsed_body)
        return done

    def refusal(self, request: Row, parsed_body: ParsedBody) -> str:
        """Return why a model's request is not passed to the back end; empty if it is passed."""
        try:
            if isinstance(parsed_body, PeerError):
                raise parsed_body
            if isinstance(parsed_body, OptimBody):
                adam_settings(parsed_body.adam_params)
            elif isinstance(parsed_body, SaveBody):
                self._check_name(request, parsed_body)
            elif isinstance(parsed_body, LoadBody):
                self.checkpoint(parsed_body.path, request.tenant)
        except (UserError, PeerError) as error:
            return str(error)
        return ""

    def open_session(self, tenant: str, labels: Mapping[str, Any] | None) -> str:
        """Begin a session, and return its id, with which the ids of its models and samplers begin.

        Raises:
            PeerError: the tenant has too many.
        """
        self.storage.check_rows(sessions, tenant)
        session, now = secrets.token_hex(16), self.clock()
        self.database.insert(sessions, id=session, tenant=tenant, created=now, seen=now, labels=labels)
        return session

    def checkpoint(self, path: str, tenant: str) -> Row:
        """Return the checkpoint at a path, if it is this tenant's or public.

        Raises:
            UserError: there is no such checkpoint.
        """
        model, kind, name = path_parts(path)
        row = self.database.find(checkpoints, model=model, kind=kind, name=name)
        is_expired = row is not None and row.expires is not None and row.expires <= self.clock()
        if row is None or is_expired or (row.tenant != tenant and not row.public):
            raise UserError(f"There is no checkpoint {path[:200]!r}.")
        return row

    def max_tokens(self, base: str) -> int:
        """Return the context of a base model.

        Raises:
            UserError: the service has it no more; samplers outlive a restart.
        """
        if base not in self.backend.bases:
            names = ", ".join(self.backend.bases)
            raise UserError(f"The base model {base!r} is not served any more; there are {names}.")
        return self.backend.bases[base].max_tokens

    def _check_name(self, request: Row, body: SaveBody) -> None:
        kind = _checkpoint_kind(request.kind)
        existing = body.path and self.database.find(checkpoints, model=body.model_id, kind=kind, name=body.path)
        if existing and not body.overwrite:
            raise UserError(f"The model has a checkpoint {body.path!r} already. Choose another name, or overwrite.")

    async def _create_model(self, request: Row, _: None) -> Done:
        await self.backend.call(CreateModelCall(request.target, self._spec(request.target)))
        return _json(type="create_model", model_id=request.target)

    def _spec(self, model: str) -> ModelSpec:
        row = self.database.find(models, id=model)
        if row is None:
            raise UserError(f"The model {model} is gone.")
        return msgspec.convert(row.spec, ModelSpec)

    async def _train(self, request: Row, work: TrainWork) -> Done:
        if work.error:
            raise UserError(work.error)
        file = str(self.storage.data_file(request.tenant, request.id)) if work.request else ""
        call = ForwardBackwardCall(
            request.target, request.operation, work.data, work.loss, work.params, work.forward_only, file
        )
        output = _of(call, (await self.backend.call(call)).trained)
        answer, counts = await asyncio.to_thread(train_answer, output, work.widths), trained(work, output.metrics)
        return Done(answer, counts.num_tokens, None if work.forward_only else counts)

    async def _optim_step(self, request: Row, body: OptimBody) -> Done:
        call = OptimStepCall(request.target, request.operation, adam_settings(body.adam_params))
        return Done(metrics=_of(call, (await self.backend.call(call)).metrics))

    async def _save(self, request: Row, body: SaveBody) -> Done:
        """Save to a directory named after the request; the user's name for it is only in the database."""
        directory = self.storage.directory(request.tenant) / request.id
        save = SaveStateCall if request.kind == "save_weights" else PublishCall
        await self.backend.call(save(request.target, request.operation, str(directory)))
        await self._check_disk(request.tenant, directory)
        if body.path is None and request.kind == "save_weights_for_sampler":
            return self._new_sampler(request, body, directory)
        kind, name = _checkpoint_kind(request.kind), body.path or f"{request.number or request.operation:06d}"
        size, now = num_bytes(directory), self.clock()
        where = {"model": request.target, "kind": kind, "name": name}
        with self.database.transaction():
            self.database.delete(checkpoints, **where)
            self.database.insert(
                checkpoints,
                id="chk_" + request.id.removeprefix("req_"),
                model=request.target,
                tenant=request.tenant,
                kind=kind,
                name=name,
                directory=str(directory),
                spec=msgspec.to_builtins(self._spec(request.target)),
                created=now,
                size=size,
                expires=self.storage.expiry(request.tenant, now, body.ttl_seconds),
                public=False,
                labels=body.user_metadata,
            )
        return _json(type=request.kind, path=f"tinker://{request.target}/{kind}/{name}")

    async def _check_disk(self, tenant: str, saved: Path) -> None:
        """Delete what was saved if it is more than the tenant's quota allows."""
        try:
            await self.storage.check_measured(tenant)
        except PeerError:
            await asyncio.to_thread(shutil.rmtree, saved, ignore_errors=True)
            await self.storage.measure(tenant)
            raise

    def _new_sampler(self, request: Row, body: SaveBody, directory: Path) -> Done:
        number = request.number if body.sampling_session_seq_id is None else body.sampling_session_seq_id
        sampler, is_inflight = f"{request.session}:sample:{number}", body.kind == "inflight"
        with self.database.transaction():
            if is_inflight:
                self.database.update(models, {"id": request.target}, inflight=str(directory))
            if self.database.find(samplers, id=sampler) is None:
                self.database.insert(
                    samplers,
                    id=sampler,
                    session=request.session,
                    tenant=request.tenant,
                    base=self._spec(request.target).base,
                    model=request.target if is_inflight else None,
                    directory=str(directory),
                )
        return _json(type=request.kind, sampling_session_id=sampler)

    async def _load(self, request: Row, body: LoadBody) -> Done:
        checkpoint = self.checkpoint(body.path, request.tenant)
        if body.session_id is not None:
            await self.backend.call(CreateModelCall(request.target, self._spec(request.target)))
        with_optimizer = body.optimizer and checkpoint.kind == "weights"
        await self.backend.call(LoadStateCall(request.target, request.operation, checkpoint.directory, with_optimizer))
        return _json(type="load_weights", path=body.path, model_id=request.target)

    async def _sample(self, request: Row, body: SampleBody) -> Done:
        sampler = self.database.find(samplers, id=request.target)
        if sampler is None:
            raise UserError("The sampler is gone.")
        most = self.max_tokens(sampler.base)
        spec = await off_loop(request.body_bytes, lambda: sample_spec(body, most, request.id))
        spec = replace(spec, owner=request.tenant)
        directory = sampler.directory
        if sampler.model is not None:  # now: the weights in flight may have changed meanwhile
            model = self.database.find(models, id=sampler.model)
            directory = model.inflight if model is not None else directory
        output = await self.backend.sample(sampler.base, Path(directory) if directory else None, spec)
        num_tokens = len(spec.prompt) + sum(len(sequence.tokens) for sequence in output.sequences)
        return Done(sample_answer(output, body), num_tokens)


def path_parts(path: str) -> tuple[str, str, str]:
    """Return model, kind and name of the checkpoint at a path.

    Raises:
        UserError: it is no such path.
    """
    scheme = next((prefix for prefix in SCHEMES if path.startswith(prefix)), "")
    parts = path.removeprefix(scheme).split("/")
    if not scheme or len(parts) != 3 or parts[1] not in KINDS:
        raise UserError(f"{path[:200]!r} is not a path of a checkpoint: tinker://MODEL/weights/NAME.")
    return parts[0], parts[1], parts[2]


def adam_settings(body: AdamBody) -> AdamSettings:
    """Convert a client's settings of AdamW.

    Raises:
        UserError: a setting is out of bounds.
    """
    settings = msgspec.structs.asdict(body)
    bounds = {"beta1": 1.0, "beta2": 1.0}
    for name, value in settings.items():
        if not math.isfinite(value) or value < 0.0 or value >= bounds.get(name, math.inf):
            raise UserError(f"adam_params.{name} = {value!r}: expected from 0 to below {bounds.get(name, 'infinity')}.")
    return AdamSettings(
        body.learning_rate, body.beta1, body.beta2, body.eps, body.weight_decay, grad_clip=body.grad_clip_norm
    )


def sample_spec(body: SampleBody, max_tokens: int, request: str) -> SampleSpec:
    """Convert a sample request. A missing seed is derived from the request's id, so that a repetition samples the same.

    Raises:
        UserError: the prompt is empty or fills the context, or the requested scores are malformed or too many.
    """
    prompt, params = prompt_tokens(body.prompt), body.sampling_params
    room = max_tokens - len(prompt)
    if not prompt or room < 1 or min(prompt) < 0:
        raise UserError(f"The prompt has {len(prompt)} tokens; from 1 to {max_tokens - 1} are taken, none below 0.")
    targets = body.target_prompt_logprobs
    places, tokens = (array("i"), array("i")) if targets is None else read_targets(targets, len(prompt))
    drawn = int.from_bytes(hashlib.sha256(request.encode()).digest()[:7], "big")
    spec = SampleSpec(
        array("i", prompt),
        num_samples=body.num_samples,
        max_tokens=min(room, params.max_tokens or room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        seed=drawn if params.seed is None else params.seed % 2**63,
        ends_with_model=params.stop is None or body.ends_with_model,
        prompt_logprobs=bool(body.prompt_logprobs),
        top_prompt_logprobs=body.topk_prompt_logprobs,
        top_sample_logprobs=body.topk_sample_logprobs,
        target_places=places,
        target_tokens=tokens,
        num_alternatives=body.prompt_alt_tokens_k,
    )
    check_scores(spec)
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [stop for stop in stops if isinstance(stop, str)]
    if len(stops) > limits.STOPS_MAX or not all(1 <= len(text) <= limits.STOP_CHARS_MAX for text in texts):
        raise UserError(
            f"stop has {len(stops)} entries, with texts of {min(map(len, texts), default=0)} to "
            f"{max(map(len, texts), default=0)} characters; {limits.STOPS_MAX} entries are taken, and texts of 1 to "
            f"{limits.STOP_CHARS_MAX} characters."
        )
    ends = tuple(stop for stop in stops if isinstance(stop, int))
    return replace(spec, stop_tokens=ends, stop_strings=tuple(texts))


def _of(call: Operation, part: T | None) -> T:
    """Return what the answer to a call has of its kind."""
    if part is None:
        raise InvariantError(f"{call.model}: operation {call.operation} was another one before")
    return part


def _checkpoint_kind(request_kind: str) -> str:
    return "weights" if request_kind == "save_weights" else "sampler_weights"


def _json(**values: Any) -> Done:
    return Done(msgspec.json.encode(values))
