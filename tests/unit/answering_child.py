"""A process that answers calls of the service, for tests: it answers texts with texts, and obeys some of them."""

from __future__ import annotations

import os

from echo2_service.backend import Answer, Call, TextCall
from echo2_service.calling import serve


def _obey(call: Call, number: int) -> Answer:
    assert isinstance(call, TextCall)
    if call.directory == "die":
        os._exit(3)
    if call.directory == "fail":
        raise RuntimeError("this call fails")
    return Answer(number, texts=[call.directory])


if __name__ == "__main__":
    serve("answering child", _obey)
