"""The process that reads long training data in JSON, and decodes samples for pages. A parser keeps its interpreter to
itself, for 0.8 s with 26 MB of numbers, so another one reads them; what comes back are arrays. It ends with its parent.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from echo2_service.backend import Answer, Call, ReadCall, TextCall
from echo2_service.calling import serve
from echo2_service.front.data import read_json


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
    return Answer(number, work=read_json(call.body, call.forward_only))


if __name__ == "__main__":
    serve("reader", _read)
