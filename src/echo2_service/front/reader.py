"""The process that reads long training data, from file to file, and decodes samples for pages. A parser keeps its
interpreter to itself, for 0.8 s with 26 MB of JSON, so another one reads them. It ends with its parent.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from echo2.core.devices import map_large_blocks
from echo2.core.errors import NoRoomError, PeerError, UserError
from echo2_service.backend import Answer, Call, ReadCall, TextCall
from echo2_service.calling import serve, write_work
from echo2_service.front.data import read_training


@cache
def _tokenizer(directory: str) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    except Exception:  # its library raises no other type
        return None


def _read(call: Call, number: int) -> Answer:
    if isinstance(call, TextCall):
        tokenizer = _tokenizer(call.directory)
        texts = [tokenizer.decode(row.tolist(), skip_special_tokens=False) if tokenizer else "" for row in call.rows]
        return Answer(number, texts=texts)
    assert isinstance(call, ReadCall)
    path = Path(call.work)
    try:
        work = read_training(Path(call.body).read_bytes(), call.is_protobuf, call.forward_only)
    except PeerError as error:
        raise UserError(str(error)) from error  # with its reason
    try:
        return Answer(number, work=write_work(path, work, path.name))
    except OSError as error:
        raise NoRoomError(f"the data of a body cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    map_large_blocks()  # as the front does: what a body took goes back
    serve("reader", _read)
