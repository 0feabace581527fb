"""Endpoints that return the id of a request at once, and the endpoint that waits for the request's outcome."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from echo2.core.background import awaited
from echo2.core.errors import PeerError, UserError
from echo2_service.backend import ModelSpec, TrainWork
from echo2_service.front.bodies import (
    FutureBody,
    LoadBody,
    LoraBody,
    ModelBody,
    SampleBody,
    SamplerBody,
    digest_of,
    numbered,
    parse,
)
from echo2_service.front.body_reader import BODIES, BodyReader, ParsedBody, off_loop
from echo2_service.front.data import answer_as_json
from echo2_service.front.database import OPEN, Row, checkpoints, models, requests, samplers, sessions
from echo2_service.front.dispatch import Dispatcher
from echo2_service.front.request_guard import Caller, Handler, WhenRefused, answer, for_tenants, refused
from echo2_service.front.work import Work, sample_spec

#: Seconds for which a poll is held open; the SDKs give up after 45 and poll again at once.
POLL_SECONDS = 30.0
#: LoRA's alpha (an adapter is scaled by alpha / rank); the SDKs send none.
ALPHA = 32
#: Reasons of refusals after which the SDKs send the same request again.
COME_AGAIN = ("rate", "spent", "full")
PROTOBUF = "application/x-protobuf"
WITH_PROTOBUF = {"forward": "train", "forward_backward": "train", "sample": "sample"}


class RequestsApi:
    """Accepts requests and returns their answers."""

    def __init__(self, work: Work, dispatcher: Dispatcher, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._work, self._database, self._dispatcher, self._storage = work, work.database, dispatcher, work.storage
        self._stopping = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether the process is ending."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Answer all polls now, because the process is ending."""
        self._stopping.set()

    async def create_model(self, caller: Caller, request: Request, body: bytes) -> Response:
        fields = parse(ModelBody, body)
        if fields.base_model not in self._work.backend.bases:
            names = ", ".join(self._work.backend.bases)
            raise UserError(f"There is no base model {fields.base_model!r}; there are {names}.")
        spec = _spec(caller.tenant, fields, f"{fields.session_id}:train:{fields.model_seq_id}")
        model = await self._new_model(caller, fields.session_id, fields.model_seq_id, spec, fields.user_metadata)
        return self._submit_first(caller, fields.session_id, model, "create_model", body)

    async def load_weights(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Load a checkpoint into a model, or into a new model with the settings of the checkpoint's model."""
        fields, digest = await self._bodies.read(LoadBody, body)
        if fields.session_id is None or fields.model_seq_id is None:
            return await self._submit(
                caller, fields.model_id or "", "load_weights", fields.seq_id, body, digest, fields
            )
        checkpoint = self._work.checkpoint(fields.path, caller.tenant)
        spec = msgspec.convert({**checkpoint.spec, "owner": caller.tenant}, ModelSpec)
        model = await self._new_model(caller, fields.session_id, fields.model_seq_id, spec, fields.user_metadata)
        return self._submit_first(caller, fields.session_id, model, "load_weights", body, fields)

    async def forward_backward(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Add up gradients; the body is protobuf or JSON."""
        is_protobuf = request.headers.get("content-type", "").startswith(PROTOBUF)
        return await self._train(caller, body, is_protobuf=is_protobuf)

    async def forward(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Compute logprobs only, for the SDKs that send JSON."""
        return await self._train(caller, body, is_protobuf=False, forward_only=True)

    async def _train(self, caller: Caller, body: bytes, is_protobuf: bool, forward_only: bool = False) -> Response:
        async with self._bodies.reading(body, is_protobuf, forward_only) as work:
            kind = "forward" if work.forward_only else "forward_backward"  # they have prices of their own
            return await self._submit(caller, work.model, kind, work.seq, body, work.digest, work)

    def submitting(self, kind: str) -> Handler:
        """Return the handler of a kind of request that is only submitted."""

        async def submit(caller: Caller, request: Request, body: bytes) -> Response:
            fields, digest = await self._bodies.read(BODIES[kind], body)
            return await self._submit(caller, fields.model_id, kind, fields.seq_id, body, digest, fields)

        return submit

    async def create_sampling_session(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Create a sampler of a base model or a checkpoint."""
        fields = parse(SamplerBody, body)
        self.session(caller, fields.session_id)
        self._storage.check_rows(samplers, caller.tenant)
        sampler = f"{fields.session_id}:sample:{fields.sampling_session_seq_id}"
        if self._database.find(samplers, id=sampler) is None:
            self.new_sampler(caller, fields.session_id, sampler, fields.base_model, fields.model_path)
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def sample(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Request samples; each gets an id of its own."""
        fields, digest = await self._bodies.read(SampleBody, body)
        if fields.sampling_session_id is None:
            raise UserError("sampling_session_id is missing: create a sampling session first.")
        sampler = self._database.find(samplers, id=fields.sampling_session_id, tenant=caller.tenant)
        if sampler is None:
            raise PeerError("not_found", f"there is no sampler {fields.sampling_session_id!r}.")
        most = self._work.max_tokens(sampler.base)
        await off_loop(len(body), lambda: sample_spec(fields, most, ""))
        self.session(caller, sampler.session)  # last: it may have ended meanwhile
        self._storage.check(caller.tenant, 1.0, len(body))
        submitted = self._dispatcher.submit(
            caller, sampler.session, sampler.id, "sample", fields.seq_id, digest, body, parsed_body=fields
        )
        ids = [f"{submitted}:{index}" for index in range(fields.num_samples)]
        return answer({"request_id": submitted, "sample_sequence_ids": ids})

    async def retrieve_future(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return the outcome of a request. The poll is held open until the request has ended."""
        fields = parse(FutureBody, body)
        row = await self.ended(fields.request_id, caller.tenant, POLL_SECONDS)
        if row is None:
            raise PeerError("not_found", f"there is no request {fields.request_id!r}.")
        return await self._outcome(row, request.headers)

    async def ended(self, request: str, tenant: str, seconds: float) -> Row | None:
        """Return the request once it has ended, or open after `seconds` or when the process ends; None if the tenant
        has no such request.
        """
        waiting = awaited(self._dispatcher.wait(request, tenant, seconds))
        stopping = awaited(self._stopping.wait())
        try:
            ended, _ = await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                one.result()
            return await waiting if waiting.done() else self._dispatcher.find(request, tenant)
        finally:
            waiting.cancel()
            stopping.cancel()

    async def cancel_future(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Cancel an open sample. Requests that train are not cancelled."""
        self._dispatcher.cancel_sample(parse(FutureBody, body).request_id, caller.tenant)
        return Response(status_code=204)

    def when_refused(self, kind: str) -> WhenRefused:
        """Return what happens to refused requests of a kind that clients number: one that would be refused again uses
        up its number, as a request that fails.
        """

        async def fail(caller: Caller, request: Request, body: bytes, error: PeerError | UserError) -> Response | None:
            if isinstance(error, PeerError) and error.reason in COME_AGAIN:
                return None
            headers = request.headers
            is_protobuf = headers.get("content-type", "").startswith(PROTOBUF)
            is_packed = headers.get("content-encoding", "") == "zstd"
            addressee, digest = await asyncio.to_thread(
                lambda: (numbered(body, is_protobuf, is_packed), digest_of(body))
            )
            if addressee is None:
                return None
            row = self._database.find(models, columns=["session"], id=addressee.model, tenant=caller.tenant)
            if row is None:
                return None
            words = for_tenants(error.detail if isinstance(error, PeerError) else str(error))
            try:
                submitted = self._dispatcher.submit(
                    caller, row.session, addressee.model, kind, addressee.number, digest, b"", words
                )
            except PeerError as busy:
                return refused(busy)
            return answer({"request_id": submitted, "model_id": addressee.model})

        return fail

    def session(self, caller: Caller, session: str) -> Row:
        """Return a live session of the caller.

        Raises:
            PeerError: there is no such session, or it is finished.
        """
        row = self._database.find(sessions, id=session, tenant=caller.tenant)
        if row is None:
            raise PeerError("not_found", f"there is no session {session!r}.")
        if row.finished is not None:
            raise PeerError("gone", f"the session {session} is finished.")
        return row

    async def _outcome(self, row: Row, headers: Mapping[str, str]) -> Response:
        if row.state in OPEN:
            why = self._dispatcher.why_it_waits(row)
            document = {"type": "try_again", "request_id": row.id, "queue_state": "active", "queue_state_reason": why}
            return answer(document, 408)
        if row.state == "failed":
            return answer({"error": row.error, "category": row.category})
        if row.answer is None:
            raise PeerError("gone", f"the answer of {row.id} was kept for a day, and is gone.")
        if row.kind not in WITH_PROTOBUF:
            return Response(row.answer, media_type="application/json")
        if PROTOBUF in headers.get("accept", ""):
            return Response(row.answer, media_type=PROTOBUF)
        return await asyncio.to_thread(lambda: answer(answer_as_json(row.kind, row.answer)))

    async def _new_model(
        self, caller: Caller, session: str, number: int, spec: ModelSpec, labels: Mapping[str, Any] | None
    ) -> str:
        self.session(caller, session)
        model, now = f"{session}:train:{number}", self._work.clock()
        is_there = self._database.find(models, columns=["id"], id=model) is not None
        if not is_there:
            await self._storage.check_measured(caller.tenant)
            is_there = self._database.find(models, columns=["id"], id=model) is not None  # another request's, meanwhile
        if not is_there:
            self.session(caller, session)
            self._storage.check_rows(models, caller.tenant)
            self._database.insert(
                models,
                id=model,
                session=session,
                tenant=caller.tenant,
                spec=msgspec.to_builtins(spec),
                created=now,
                used=now,
                next_number=1,
                next_operation=1,
                labels=labels,
            )
        return model

    def new_sampler(self, caller: Caller, session: str, sampler: str, base: str | None, path: str | None) -> None:
        """Store a sampler of a base model or of a checkpoint.

        Raises:
            UserError: there is no such model or checkpoint.
        """
        directory = None
        if path is not None:
            checkpoint = self._work.checkpoint(path, caller.tenant)
            base, directory = checkpoint.spec["base"], checkpoint.directory
        if base not in self._work.backend.bases:
            raise UserError(f"There is no base model {base!r}; there are {', '.join(self._work.backend.bases)}.")
        self._database.insert(
            samplers, id=sampler, session=session, tenant=caller.tenant, base=base, path=path, directory=directory
        )

    def _submit_first(
        self, caller: Caller, session: str, model: str, kind: str, body: bytes, parsed_body: ParsedBody = None
    ) -> Response:
        """Submit the request that creates a model; a repetition returns the first request's id."""
        again = self._database.find(requests, columns=["id"], target=model, kind=kind, session=session, number=None)
        submitted = (
            again.id
            if again
            else self._dispatcher.submit(caller, session, model, kind, None, "", body, parsed_body=parsed_body)
        )
        return answer({"request_id": submitted, "model_id": model})

    async def _submit(
        self,
        caller: Caller,
        model: str,
        kind: str,
        number: int | None,
        body: bytes,
        digest: str,
        parsed_body: ParsedBody,
    ) -> Response:
        row = self._database.find(models, id=model, tenant=caller.tenant)
        if row is None:
            raise PeerError("not_found", f"there is no model {model[:200]!r}.")
        refusal = await self._no_room(caller.tenant, kind, len(body))
        if isinstance(parsed_body, TrainWork):
            refusal = refusal or parsed_body.error
        submitted = self._dispatcher.submit(
            caller, row.session, model, kind, number, digest, body, refusal, parsed_body
        )
        return answer({"request_id": submitted, "model_id": model})

    async def _no_room(self, tenant: str, kind: str, num_bytes: int) -> str:
        """Return why a request of a model finds no room in the tenant's quota of disk; empty if it does. The refused
        request fails in its turn, and later ones go on.
        """
        try:
            if kind.startswith("save_weights"):
                await self._storage.check_measured(tenant)
                for table in (checkpoints, samplers):
                    self._storage.check_rows(table, tenant)
            elif kind.startswith("forward"):
                self._storage.check(tenant, 1.0, num_bytes)
        except PeerError as error:
            return error.detail
        return ""


def _spec(tenant: str, fields: ModelBody, model: str) -> ModelSpec:
    """Return the spec of a new model. A missing seed is derived from the model's id, which is random: adapters without
    a seed differ, and the request can be repeated.
    """
    lora = fields.lora_config or LoraBody()
    drawn = int.from_bytes(hashlib.sha256(model.encode()).digest()[:7], "big")
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    targets = ("all-linear",)
    if not (lora.train_attn and lora.train_mlp):
        targets = (*(attention if lora.train_attn else ()), *(mlp if lora.train_mlp else ()))
    if not targets:
        raise UserError("lora_config trains neither attention nor MLP; one of them must be trained here.")
    seed = drawn if lora.seed is None else lora.seed
    return ModelSpec(fields.base_model, tenant, lora.rank, ALPHA, seed, targets)
