"""Endpoints that are answered at once: sessions, capabilities, checkpoints, training runs, bills."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as Asgi

from echo2.core.documents import parse_json
from echo2.core.errors import PeerError, UserError
from echo2.learner.core.checkpoint import STATE_FILE
from echo2.weights.format.adapter_files import ADAPTER_CONFIG
from echo2_service import limits
from echo2_service.backend import ModelSpec, UnloadCall
from echo2_service.front.bodies import (
    AdapterBody,
    CopyBody,
    DeleteBody,
    LabelledBody,
    ModelIdBody,
    SessionIdBody,
    TtlBody,
    parse,
)
from echo2_service.front.cleaning import ARRIVING, DELETED_AT_ONCE, Cleaning
from echo2_service.front.database import DONE, Row, checkpoints, models, samplers, sessions
from echo2_service.front.dispatch import Dispatcher
from echo2_service.front.own_adapters import take_adapter
from echo2_service.front.request_guard import Caller, answer, refused
from echo2_service.front.usage import Bills
from echo2_service.front.work import KINDS, Work, path_parts
from echo2_service.settings import PRICED

#: Seconds for which the URL of an archive is valid; bytes of it that are read at a time.
ARCHIVE_SECONDS = 900.0
PIECE_BYTES = 256 << 10
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler"}
NOTHING = Response(status_code=204)


class PathBody(msgspec.Struct):
    """`weights_info`."""

    tinker_path: str


class AccountsApi:
    """Endpoints that list and change what a tenant has."""

    def __init__(self, work: Work, dispatcher: Dispatcher, bills: Bills, cleaning: Cleaning) -> None:
        self._work, self._database, self._dispatcher, self._bills = work, work.database, dispatcher, bills
        self._storage, self._cleaning = work.storage, cleaning
        self._archives: dict[str, dict[str, tuple[float, Row]]] = {}  # by tenant and token; the oldest first
        self._importing = asyncio.Lock()  # one at a time: an import needs several times the adapter's size in memory
        self._num_imports, self._num_downloads = Counter[str](), Counter[str]()
        # One look of each tenant at all its checkpoints at a time: in a thread, of which there are few.
        self._looking = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def health(self, request: Request) -> Response:
        """Answer that the process is alive; needs no key."""
        return answer({"status": "ok"})

    async def config(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return the SDK's flags: its defaults, except compression, which costs more than it saves on loopback."""
        return answer({"parallel_fwdbwd_chunks": True, "proto_write_fwdbwd": True, "use_pyqwest_transport": False})

    async def dynamic_config(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return the flags that the SDK polls: it is to cancel samples whose results are no longer awaited."""
        return answer({"sample_cancel_enabled": True})

    async def telemetry(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Accept telemetry and discard it."""
        return answer({"status": "accepted"})

    async def capabilities(self, caller: Caller, request: Request, body: bytes) -> Response:
        """List the base models."""
        bases = [
            {"model_name": base.name, "max_context_length": base.max_tokens, "trainable": True, "sampleable": True}
            for base in self._work.backend.bases.values()
        ]
        return answer({"supported_models": bases})

    async def create_session(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Create a session. The ids of its models and samplers begin with the session's id."""
        fields = parse(LabelledBody, body)
        if fields.user_metadata:
            self._storage.check(caller.tenant, 1.0, limits.LABELS_BYTES_MAX)
        session = self._work.open_session(caller.tenant, fields.user_metadata)
        self._cleaning.note_alive(session)
        return answer({"type": "create_session", "session_id": session})

    async def heartbeat(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Record that the client of a session is alive."""
        session = self._own(sessions, parse(SessionIdBody, body).session_id, caller)
        if session.finished is not None:
            raise PeerError("gone", f"the session {session.id} is finished.")
        self._database.update(sessions, {"id": session.id}, seen=self._work.clock())
        self._cleaning.note_alive(session.id)
        return answer({"type": "session_heartbeat"})

    async def finish_session(self, caller: Caller, request: Request, body: bytes) -> Response:
        session = self._own(sessions, request.path_params["session"], caller)
        if session.finished is None:
            self._dispatcher.end_session(session.id, "The session was finished.", seen=DONE)
            await self._cleaning.tidy(caller.tenant, self._work.clock())
        return NOTHING

    async def list_sessions(self, caller: Caller, request: Request, body: bytes) -> Response:
        """List the ids of a tenant's sessions, newest first."""
        limit, offset = _page(request)
        rows = self._database.select(sessions, "-created", limit, offset, columns=["id"], tenant=caller.tenant)
        return answer({"sessions": [row.id for row in rows]})

    async def show_session(self, caller: Caller, request: Request, body: bytes) -> Response:
        """List the models and samplers of a session."""
        session = self._own(sessions, request.path_params["session"], caller)
        find, most = self._database.select, 10 * limits.PAGE_MAX
        made = [find(table, columns=["id"], session=session.id, limit=most) for table in (models, samplers)]
        runs, sampler_ids = ([row.id for row in rows] for rows in made)
        return answer({"training_run_ids": runs, "sampler_ids": sampler_ids, "user_metadata": _labels(session.labels)})

    async def get_info(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return the base model and rank of a model."""
        model = self._own(models, parse(ModelIdBody, body).model_id, caller)
        base = model.spec["base"]
        facts = {"model_name": base, "tokenizer_id": base}
        adapter = {"is_lora": True, "lora_rank": model.spec["rank"], "model_name": base}
        return answer({"type": "get_info", "model_id": model.id, "model_data": facts, **adapter})

    async def unload_model(self, caller: Caller, request: Request, body: bytes) -> Response:
        model = self._own(models, parse(ModelIdBody, body).model_id, caller)
        await self._work.backend.call(UnloadCall(model.id))
        return answer({"type": "unload_model", "model_id": model.id})

    async def show_sampler(self, caller: Caller, request: Request, body: bytes) -> Response:
        row = self._own(samplers, request.path_params["sampler"], caller)
        return answer({"sampler_id": row.id, "base_model": row.base, "model_path": row.path})

    async def weights_info(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return the base model and adapter settings of a checkpoint."""
        spec = self._work.checkpoint(parse(PathBody, body).tinker_path, caller.tenant).spec
        trained = {"train_unembed": False, "train_mlp": _trains(spec, "up_proj"), "train_attn": _trains(spec, "q_proj")}
        return answer({"base_model": spec["base"], "is_lora": True, "lora_rank": spec["rank"], **trained})

    async def list_runs(self, caller: Caller, request: Request, body: bytes) -> Response:
        """List a tenant's models, newest first."""
        limit, offset = _page(request)
        rows = self._database.select(models, "-created", limit, offset, tenant=caller.tenant)
        total = self._database.count(models, tenant=caller.tenant)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return answer({"training_runs": self._runs(rows), "cursor": cursor})

    async def show_run(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return one of a tenant's models."""
        return answer(self._runs([self._own(models, request.path_params["model"], caller)])[0])

    async def list_run_checkpoints(self, caller: Caller, request: Request, body: bytes) -> Response:
        model = self._own(models, request.path_params["model"], caller)
        return await self._listing(request, caller, model=model.id)

    async def list_checkpoints(self, caller: Caller, request: Request, body: bytes) -> Response:
        return await self._listing(request, caller)

    async def delete_checkpoint(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Delete a checkpoint. Its files stay as long as a sampler made from it exists."""
        self._database.delete(checkpoints, id=self._checkpoint(caller, request).id)
        await self._cleaning.tidy(caller.tenant, self._work.clock())
        return NOTHING

    async def delete_checkpoints(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Delete all checkpoints that fit what is given, and return their number."""
        fields, now = parse(DeleteBody, body), self._work.clock()
        paths = None if fields.paths is None else [path_parts(path) for path in fields.paths]
        before = math.inf if fields.older_than_seconds is None else now - fields.older_than_seconds
        of, deleted = (caller.tenant, paths, fields.training_run_id, before, fields.keep_newest or 0), 0
        async with self._looking[caller.tenant]:
            matches = await asyncio.to_thread(self._database.beside().checkpoints_that_fit, *of)
            for begin in range(0, len(matches), DELETED_AT_ONCE):
                ids = tuple(matches[begin : begin + DELETED_AT_ONCE])
                deleted += self._database.delete(checkpoints, id=ids)  # of this tenant alone
                await asyncio.sleep(0)  # others have their turn
        await self._cleaning.tidy(caller.tenant, now)
        return answer({"num_deleted": deleted})

    async def publish(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Let other tenants load a checkpoint."""
        self._database.update(checkpoints, {"id": self._checkpoint(caller, request).id}, public=True)
        return NOTHING

    async def unpublish(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Stop letting other tenants load a checkpoint."""
        self._database.update(checkpoints, {"id": self._checkpoint(caller, request).id}, public=False)
        return NOTHING

    async def set_ttl(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Set how long from now a checkpoint is kept."""
        seconds = parse(TtlBody, body or b"{}").ttl_seconds
        row = self._checkpoint(caller, request)
        expires = self._storage.expiry(caller.tenant, self._work.clock(), seconds, row.created)
        self._database.update(checkpoints, {"id": row.id}, expires=expires)
        return NOTHING

    async def copy_weights(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Copy a checkpoint that the caller may read to one of the caller's own. Both refer to the same files, which
        stay as long as either exists. The same idempotency key gives the same copy."""
        fields = parse(CopyBody, body)
        key = request.headers.get("x-idempotency-key") or secrets.token_hex(16)
        copy = "copy_" + hashlib.sha256(msgspec.json.encode([caller.tenant, key, fields.source_path])).hexdigest()[:32]
        checkpoint = self._database.find(checkpoints, model=copy, tenant=caller.tenant)
        if checkpoint is None:
            await self._storage.check_measured(caller.tenant)
            checkpoint = self._database.find(
                checkpoints, model=copy, tenant=caller.tenant
            )  # another request's, meanwhile
        if checkpoint is None:
            self._storage.check_rows(checkpoints, caller.tenant)
            checkpoint, now = self._work.checkpoint(fields.source_path, caller.tenant), self._work.clock()
            values = {column: getattr(checkpoint, column) for column in ("kind", "name", "directory", "size")}
            values["labels"] = checkpoint.labels if checkpoint.tenant == caller.tenant else None
            values |= {"id": copy.replace("copy", "chk"), "model": copy, "tenant": caller.tenant, "public": False}
            expires = self._storage.expiry(caller.tenant, now, fields.ttl_seconds)
            spec = {**checkpoint.spec, "owner": caller.tenant}
            self._database.insert(checkpoints, **values, spec=spec, created=now, expires=expires)
        return answer({"tinker_path": f"tinker://{copy}/{checkpoint.kind}/{checkpoint.name}"})

    async def bring_adapter(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Import a client's own PEFT adapter, a tar file, as a checkpoint to train and to sample from."""
        fields = parse(AdapterBody, msgspec.json.encode(dict(request.query_params)))
        await self._storage.check_measured(caller.tenant, len(body))
        self._storage.check_rows(checkpoints, caller.tenant)
        base = self._work.backend.bases.get(fields.base_model)
        if base is None:
            names = ", ".join(self._work.backend.bases)
            raise UserError(f"There is no base model {fields.base_model!r}; there are {names}.")
        model = "adapter_" + secrets.token_hex(16)
        arriving = self._storage.folder / ARRIVING / model
        directory = self._storage.directory(caller.tenant) / model
        what = f"{limits.UPLOADS_MAX} of your uploads are being checked"
        with _one_more(self._num_imports, caller.tenant, limits.UPLOADS_MAX, what):
            async with self._importing:
                spec = await asyncio.to_thread(take_adapter, body, base, caller.tenant, arriving)
        self._storage.arriving.add(model)
        try:
            arriving.rename(directory)
            self._insert_adapter(caller.tenant, model, fields.name, directory, spec, len(body))
        finally:
            self._storage.arriving.discard(model)
        await self._storage.measure(caller.tenant)
        return answer({"path": f"tinker://{model}/sampler_weights/{fields.name}"})

    def _insert_adapter(
        self, tenant: str, model: str, name: str, directory: Path, spec: ModelSpec, num_bytes: int
    ) -> None:
        now = self._work.clock()
        self._database.insert(
            checkpoints,
            id="chk_" + model.removeprefix("adapter_"),
            model=model,
            tenant=tenant,
            kind="sampler_weights",
            name=name,
            directory=str(directory),
            spec=msgspec.to_builtins(spec),
            created=now,
            size=num_bytes,
            expires=self._storage.expiry(tenant, now, None),
            public=False,
        )

    async def archive(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Redirect to a temporary URL of the checkpoint as a tar file, which needs no key."""
        row, now = self._checkpoint(caller, request), self._work.clock()
        valid = {token: one for token, one in self._archives.get(caller.tenant, {}).items() if one[0] > now}
        if len(valid) >= limits.ARCHIVES_MAX:
            del valid[next(iter(valid))]
        token = secrets.token_urlsafe(32)
        self._archives[caller.tenant] = {**valid, token: (now + ARCHIVE_SECONDS, row)}
        location = str(request.url.replace(path=f"/api/v1/archives/{token}", query=""))
        expires = datetime.fromtimestamp(now + ARCHIVE_SECONDS, UTC)
        headers = {"Location": location, "Expires": expires.strftime("%a, %d %b %Y %H:%M:%S GMT")}
        return Response(status_code=302, headers=headers)

    async def fetch_archive(self, request: Request) -> Response | ClosingResponse:
        """Return the tar file at a URL from `archive`. It is made while it is sent, so that it takes no disk."""
        token = request.path_params["token"]
        tenant = next((name for name, entries in self._archives.items() if token in entries), "")
        ends, row = self._archives[tenant][token] if tenant else (0.0, None)
        if row is None or ends <= self._work.clock():
            return _no_archive()
        with ExitStack() as stack:
            try:
                what = f"{limits.DOWNLOADS_MAX} of your archives are being sent"
                stack.enter_context(_one_more(self._num_downloads, tenant, limits.DOWNLOADS_MAX, what))
            except PeerError as error:
                return refused(error)
            files = await asyncio.to_thread(_opened, row)
            if not files:
                return _no_archive()
            for *_, file in files:
                stack.enter_context(file)
            headers = {"Content-Disposition": 'attachment; filename="checkpoint.tar"'}
            response = StreamingResponse(_packed(files), headers=headers, media_type="application/x-tar")
            return ClosingResponse(response, stack.pop_all())

    async def show_usage(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return a tenant's bill: requests, tokens and dollars by kind, its quota, and the prices."""
        gb = await self._storage.measure(caller.tenant) / 1e9
        return answer({**self._bills.of(caller.tenant), "disk_gb": gb})

    async def estimate(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return what these numbers of tokens would cost: `?forward_backward=1200000&sample=300000`."""
        if unknown := sorted(request.query_params.keys() - set(PRICED)):
            raise PeerError("malformed", f"{unknown[0][:64]!r} has no price; {', '.join(PRICED)} have.")
        return answer(self._bills.estimate(caller.tenant, {kind: _number(request, kind, "0") for kind in PRICED}))

    def _own(self, table: Any, id: str, caller: Caller) -> Row:
        row = self._database.find(table, id=id, tenant=caller.tenant)
        if row is None:
            raise PeerError("not_found", f"there is no {table.name.removesuffix('s')} {id[:200]!r}.")
        return row

    def _checkpoint(self, caller: Caller, request: Request) -> Row:
        """Find a checkpoint of the caller by `weights/NAME`, `sampler_weights/NAME`, `NAME` or its id."""
        model, named = request.path_params["model"], request.path_params["checkpoint"]
        kind, _, name = named.rpartition("/")
        where: dict[str, Any] = {"model": model, "tenant": caller.tenant}
        where |= {"id": name} if name.startswith("chk_") else {"name": name, "kind": (kind,) if kind else KINDS}
        row = self._database.find(checkpoints, **where)
        if row is None:
            raise PeerError("not_found", f"the model has no checkpoint {named[:200]!r}.")
        return row

    async def _listing(self, request: Request, caller: Caller, **where: Any) -> Response:
        limit, offset = _page(request)
        where, database = {"tenant": caller.tenant, **where}, self._database.beside()
        async with self._looking[caller.tenant]:
            rows = await asyncio.to_thread(database.select, checkpoints, "-created", limit, offset, **where)
        total = self._database.count(checkpoints, **where)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return answer({"checkpoints": [_checkpoint(row) for row in rows], "cursor": cursor})

    def _runs(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Describe models, with the newest checkpoint of each kind."""
        newest = {(row.model, row.kind): _checkpoint(row) for row in self._database.newest([row.id for row in rows])}
        return [
            {
                "training_run_id": row.id,
                "base_model": row.spec["base"],
                "model_owner": row.tenant,
                "is_lora": True,
                "corrupted": False,
                "lora_rank": row.spec["rank"],
                "last_request_time": _time(row.used),
                "last_checkpoint": newest.get((row.id, "weights")),
                "last_sampler_checkpoint": newest.get((row.id, "sampler_weights")),
                "user_metadata": _labels(row.labels),
            }
            for row in rows
        ]


class ClosingResponse:
    """A response that needs resources until it is sent, or its client has gone."""

    def __init__(self, response: Response, needs: ExitStack) -> None:
        self._response, self._needs = response, needs

    async def __call__(self, scope: Asgi, receive: Receive, send: Send) -> None:
        with self._needs:
            await self._response(scope, receive, send)


@contextmanager
def _one_more(under_way: Counter[str], tenant: str, most: int, what: str) -> Iterator[None]:
    """Count one more of a tenant while the block runs.

    Raises:
        PeerError: "rate", the tenant has the most already.
    """
    if under_way[tenant] >= most:
        raise PeerError("rate", f"{what}; wait for one of them.")
    under_way[tenant] += 1
    try:
        yield
    finally:
        under_way[tenant] -= 1
        if not under_way[tenant]:
            del under_way[tenant]


def _no_archive() -> Response:
    return answer({"detail": "there is no such archive, or not any more."}, 404)


def _checkpoint(row: Row) -> dict[str, Any]:
    """Describe a checkpoint, with the field names of both SDKs."""
    path = f"{row.model}/{row.kind}/{row.name}"
    expires = None if row.expires is None else _time(row.expires)
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": CHECKPOINT_TYPES[row.kind],
        "name": row.name,
        "time": _time(row.created),
        "tinker_path": f"tinker://{path}",
        "logits_path": f"logits://{path}",
        "size_bytes": row.size,
        "size": row.size,
        "public": row.public,
        "visibility": "public" if row.public else "private",
        "expires_at": expires,
        "expired_at": expires,
        "user_metadata": _labels(row.labels),
    }


def _labels(labels: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if labels is None else {name: str(value) for name, value in labels.items()}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _trains(spec: Mapping[str, Any], layer: str) -> bool:
    targets: Sequence[str] = spec["targets"]
    return "all-linear" in targets or layer in targets


def _page(request: Request) -> tuple[int, int]:
    """Return `limit` and `offset` of a listing."""
    return min(limits.PAGE_MAX, _number(request, "limit", "100")), _number(request, "offset", "0")


def _number(request: Request, name: str, default: str) -> int:
    text = request.query_params.get(name, default)
    if not text.isdecimal() or len(text) > 15:
        raise PeerError("malformed", f"{name} is {text[:64]!r}; a whole number of 15 digits at most is taken.")
    return int(text)


def _opened(checkpoint: Row) -> list[tuple[str, int, BinaryIO]]:
    """Open the files of a checkpoint, with names and sizes; the checkpoint can then be deleted. Empty if it is gone.

    The adapter names its base model as clients do, because elsewhere the hash of its content says nothing.
    """
    files: list[tuple[str, int, BinaryIO]] = []
    try:
        for path in sorted(Path(checkpoint.directory).iterdir()):
            if path.name == ADAPTER_CONFIG:
                values = parse_json(path.read_bytes()) | {"base_model_name_or_path": checkpoint.spec["base"]}
                text = json.dumps(values, indent=2, sort_keys=True).encode()
                files.append((path.name, len(text), BytesIO(text)))
            elif path.is_file() and path.name != STATE_FILE:  # of the service's own, with the sizes of its own files
                files.append((path.name, path.stat().st_size, path.open("rb")))
    except FileNotFoundError:
        for *_, file in files:
            file.close()
        return []
    return files


def _packed(files: Sequence[tuple[str, int, BinaryIO]]) -> Iterator[bytes]:
    """Yield a tar file of these files piece by piece."""
    for name, size, file in files:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = size, 0o644
        yield entry.tobuf()
        while piece := file.read(PIECE_BYTES):
            yield piece
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
