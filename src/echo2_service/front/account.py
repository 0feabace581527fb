"""What a tenant sees of its account: bill, keys, runs with their curves, samples, and why its requests wait. Programs
ask for it with a key, as the tenant's page does. Nothing can be changed here.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sql
from starlette.requests import Request
from starlette.responses import Response

from echo2.core.errors import PeerError
from echo2.core.printable import printable
from echo2_service import tinker_pb2 as pb
from echo2_service.front.body_reader import BodyReader
from echo2_service.front.curves import Curves
from echo2_service.front.database import OPEN, Database, Row, keys, models, requests, samplers, sessions
from echo2_service.front.dispatch import Dispatcher
from echo2_service.front.request_guard import Caller, answer
from echo2_service.front.usage import Bills
from echo2_service.front.work import Work

#: So many of the newest keys, runs and sampling requests, of the longest waits, and sequences of each request.
KEYS_TOLD, RUNS_TOLD, WAITS_TOLD, SAMPLES_TOLD, SEQUENCES_TOLD = 100, 50, 20, 20, 4
#: Tokens of a sequence that are decoded, and characters of its text.
TOKENS_READ, TEXT_CHARS = 256, 1000
#: Longer answers are not read for a page.
ANSWER_BYTES_READ = 1 << 20
#: Seconds after which a tenant's disk is measured again for a page.
MEASURED_SECONDS = 60.0
KEY_COLUMNS = ("id", "scopes", "per_minute", "created", "expires", "revoked")
FINISH = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}


class Account:
    """Endpoints of what a tenant has and does."""

    def __init__(self, work: Work, dispatcher: Dispatcher, bills: Bills, curves: Curves, bodies: BodyReader) -> None:
        self._work, self._database, self._storage = work, work.database, work.storage
        self._dispatcher, self._bills, self._curves, self._bodies = dispatcher, bills, curves, bodies
        self._measured: dict[str, float] = {}
        # Of each tenant one page of samples at a time: their answers have megabytes.
        self._reading = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._decoding = asyncio.Lock()  # one page at a time: the process that decodes reads all tenants' training data

    async def show(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return bill, keys, newest runs, and waits."""
        tenant, now = caller.tenant, self._work.clock()
        if abs(now - self._measured.get(tenant, -math.inf)) >= MEASURED_SECONDS:
            self._measured[tenant] = now
            await self._storage.measure(tenant)
        rows = self._database.select(keys, "-created", KEYS_TOLD, columns=KEY_COLUMNS, tenant=tenant)
        return answer(
            {
                "tenant": tenant,
                "key": caller.key,
                "scopes": sorted(caller.scopes),
                "time": now,
                "bill": {**self._bills.of(tenant), "disk_gb": self._storage.num_bytes(tenant) / 1e9},
                "notes": list(self._notes(tenant)),
                "keys": [dict(row._mapping) for row in rows],
                "num_runs": self._database.count(models, tenant=tenant),
                "runs": self._runs(tenant),
                **self._waits(tenant),
            }
        )

    async def curve(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return the points of a run, a column for each figure."""
        model = request.path_params["model"]
        if self._database.find(models, columns=["id"], id=model, tenant=caller.tenant) is None:
            raise PeerError("not_found", f"there is no model {model[:200]!r}.")
        return answer({"name": model, **self._curves.of(model)})

    async def samples(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return what the newest requests for samples gave, with the text of its beginning."""
        async with self._reading[caller.tenant]:
            newest = await asyncio.to_thread(_read_samples, self._database.beside(), caller.tenant)
            await self._add_texts(newest)
        return answer({"samples": newest})

    async def _add_texts(self, samples: Sequence[dict[str, Any]]) -> None:
        bases = self._work.backend.bases
        for base in {one["base"] for one in samples} & bases.keys():
            sequences = [sequence for one in samples if one["base"] == base for sequence in one["sequences"]]
            async with self._decoding:
                texts = await self._bodies.texts(
                    bases[base].directory, [array("i", each["tokens"]) for each in sequences]
                )
            for sequence, text in zip(sequences, texts, strict=True):
                sequence["text"] = printable(text, TEXT_CHARS)

    def _notes(self, tenant: str) -> Iterator[str]:
        """Yield why new requests are refused."""
        for check in (self._bills.check, self._storage.check):
            try:
                check(tenant)
            except PeerError as error:
                yield error.detail

    def _runs(self, tenant: str) -> list[dict[str, Any]]:
        rows = self._database.select(models, "-used", RUNS_TOLD, tenant=tenant)
        of = tuple({row.session for row in rows})
        live = {row.id for row in self._database.select(sessions, columns=["id"], id=of, finished=None)}
        newest = self._curves.newest([row.id for row in rows])
        return [
            {
                "id": row.id,
                "base": row.spec["base"],
                "rank": row.spec["rank"],
                "labels": row.labels or {},
                "created": row.created,
                "used": row.used,
                "is_live": row.session in live,
                **newest.get(row.id, {"step": 0}),
            }
            for row in rows
        ]

    def _waits(self, tenant: str) -> dict[str, Any]:
        """Return the number of open requests, and of each model or sampler and kind the one that waits longest."""
        figures = {"num": sql.func.count(), "first": sql.func.min(requests.c.arrival)}
        open_ones = self._database.grouped(requests, ("target", "kind"), figures, tenant=tenant, state=OPEN)
        waits = sorted(open_ones, key=lambda row: int(row.first))[:WAITS_TOLD]
        columns = ("arrival", "id", "state", "kind", "target", "created")
        rows = self._database.select(requests, "arrival", columns=columns, arrival=tuple(row.first for row in waits))
        nums = {row.first: row.num for row in waits}
        shown = [
            {
                "who": row.target,
                "kind": row.kind,
                "num": nums[row.arrival],
                "since": row.created,
                "why": self._dispatcher.why_it_waits(row),
            }
            for row in rows
        ]
        return {"num_open": sum(row.num for row in open_ones), "waits": shown}


def _read_samples(database: Database, tenant: str) -> list[dict[str, Any]]:
    """Return what the newest requests for samples gave, without texts. Runs in a thread."""
    columns = ("id", "target", "ended", "answer_bytes")
    where: dict[str, Any] = {"tenant": tenant, "kind": "sample", "state": "done"}
    rows = database.select(requests, "-arrival", SAMPLES_TOLD, columns=columns, **where)
    of = {row.id: row for row in database.select(samplers, tenant=tenant, id=tuple({row.target for row in rows}))}
    samples = []
    for row in rows:
        is_read = 0 < row.answer_bytes <= ANSWER_BYTES_READ
        answered_row = database.find(requests, columns=["answer"], id=row.id) if is_read else None
        data = None if answered_row is None else answered_row.answer
        samples.append(_sample(row, of.get(row.target), *(_sequences(data) if data else (0, []))))
    return samples


def _sequences(data: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Return how many sequences an answer has, and the first of them."""
    message = pb.SampleResponse.FromString(data)
    sequences = []
    for sequence in message.sequences[:SEQUENCES_TOLD]:
        tokens, logprobs = np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4")
        mean = float(logprobs.mean()) if len(logprobs) else 0.0
        finish = FINISH.get(sequence.stop_reason, "")
        shown = {"num_tokens": len(tokens), "tokens": tokens[:TOKENS_READ].tolist(), "text": ""}
        sequences.append({**shown, "finish": finish, "logprob": mean})
    return len(message.sequences), sequences


def _sample(row: Row, sampler: Row | None, count: int, sequences: list[dict[str, Any]]) -> dict[str, Any]:
    base, path = ("", None) if sampler is None else (sampler.base, sampler.path)
    facts = {"id": row.id, "at": row.ended, "base": base, "path": path, "num_bytes": row.answer_bytes}
    return {**facts, "num_sequences": count, "sequences": sequences}
