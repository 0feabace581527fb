"""Training data between their arrival and their turn: read once, in a thread, and kept in memory if there is room."""

from __future__ import annotations

import asyncio

from echo2.core.errors import PeerError
from echo2_service import limits
from echo2_service.front.data import TrainWork, read_json, read_protobuf
from echo2_service.front.database import Database, Row, requests

#: Kinds of requests with training data.
WITH_DATA = ("forward_backward", "forward")


class TrainingData:
    """The data of open requests by id. For one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._read: dict[str, tuple[TrainWork, int]] = {}
        self._num_bytes = 0

    def add(self, request: str, work: TrainWork, num_bytes: int) -> None:
        """Keep the data of a request, whose body has so many bytes, if there is room."""
        if self._num_bytes + num_bytes <= limits.DATA_BYTES_MAX:
            self._read[request] = work, num_bytes
            self._num_bytes += num_bytes

    def drop(self, request: str) -> TrainWork | None:
        """Forget the data of a request, and return them if they were kept."""
        work, num_bytes = self._read.pop(request, (None, 0))
        self._num_bytes -= num_bytes
        return work

    async def take(self, request: Row) -> TrainWork | None:
        """Return the data of a request, and keep them no longer; None if it has none. Those that were not kept are read
        again from the store.
        """
        if request.kind not in WITH_DATA:
            return None
        work = self.drop(request.id)
        if work is not None:
            return work
        row = self._database.find(requests, columns=["body"], id=request.id)
        return await asyncio.to_thread(_read_stored, row.body if row is not None else b"", request.kind)


def _read_stored(body: bytes | None, kind: str) -> TrainWork:
    """Read a stored body, protobuf or JSON, as it begins."""
    try:
        if (body or b"")[:1] == b"{":
            return read_json(body or b"", kind == "forward")
        return read_protobuf(body or b"")[0]
    except PeerError as error:
        return TrainWork("", None, (), (), "", {}, kind == "forward", error.detail)
