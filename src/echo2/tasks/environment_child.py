"""The process of an environment itself (`python -m echo2.tasks.environment_child`): one request, one answer.

worker -> child    {"spec"}, once; then {"begin": columns, "seed"}, {"step": number, "action"} or {"end": number}
child -> worker    {"stop"}; {"number", "turn_tokens"}, {"text", "reward", "done"}, {}; or {"failed": message}
"""

from __future__ import annotations

import faulthandler
import queue
import sys
import threading
from dataclasses import asdict
from typing import Any

from echo2 import pipes
from echo2.errors import UserError
from echo2.tasks.environments import LocalWorld

MAX_WAITING_REQUESTS = 2  # the worker sends one at a time


def main() -> None:
    inbox, outbox = pipes.take()
    faulthandler.enable()  # a crash in the user's native code leaves its Python line in the log
    requests: queue.Queue[dict[str, Any]] = queue.Queue(MAX_WAITING_REQUESTS)
    threading.Thread(target=pipes.receive, args=(inbox, requests), daemon=True, name="frames").start()
    world: LocalWorld | None = None
    while True:
        request = requests.get()
        try:
            if world is None:
                world = LocalWorld(request["spec"])
                answer: dict[str, Any] = {"stop": world.stop}
            else:
                answer = _answer(world, request)
        except UserError as failure:
            answer = {"failed": str(failure)}
        sys.stdout.flush()  # what the user's code printed reaches the log before the worker acts on the answer
        outbox.write(pipes.encode(answer))
        outbox.flush()


def _answer(world: LocalWorld, request: dict[str, Any]) -> dict[str, Any]:
    if "begin" in request:
        number = world.begin(request["begin"], request["seed"])
        return {"number": number, "turn_tokens": world.turn_tokens(number)}
    if "step" in request:
        return asdict(world.step(request["step"], request["action"]))
    world.end(request["end"])
    return {}


if __name__ == "__main__":
    main()
