"""The process that reads long training data in JSON. A parser keeps its interpreter to itself, for 0.8 s with 26 MB of
numbers, so another one reads them; what comes back are arrays. It ends with its parent.
"""

from __future__ import annotations

from echo2_service.backend import Answer, ReadCall, Request
from echo2_service.calling import begin, failed, receive
from echo2_service.front.data import read_json

if __name__ == "__main__":
    inbox, tell = begin("reader")

    def take(request: Request) -> None:
        """Answer one call; its cancellation comes too late, and is no call."""
        call, number = request.call, request.number
        if not isinstance(call, ReadCall):
            return
        tell(Answer(number, has_begun=True))
        try:
            tell(Answer(number, work=read_json(call.body, call.forward_only)))
        except Exception as error:  # later bodies are read
            tell(failed(number, error, f"a body of {len(call.body)} bytes"))

    receive(inbox, take)
