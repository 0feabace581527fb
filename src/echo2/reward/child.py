"""The reward process itself (`python -m echo2.reward.child`): reads groups from its stdin, writes scores to its stdout.

The user's code may print, read its stdin and hang; none of it may disturb the frames. So the two pipes are moved to
other descriptors first, and the frames are read by a thread of their own, which ends the process when the head is gone.
"""

from __future__ import annotations

import faulthandler
import queue
import sys
import threading
from typing import Any, BinaryIO

from echo2 import pipes
from echo2.errors import UserError
from echo2.reward import frames
from echo2.reward.score import RewardFailure, Scorer

MAX_WAITING_GROUPS = 2  # read ahead; the others wait in the pipe


def main() -> None:
    inbox, outbox = pipes.take()
    faulthandler.enable()  # a crash in the user's native code leaves its Python line in the log
    groups: queue.Queue[dict[str, Any]] = queue.Queue(MAX_WAITING_GROUPS)
    threading.Thread(target=pipes.receive, args=(inbox, groups), daemon=True, name="frames").start()
    setup = groups.get()
    try:
        scorer = Scorer(setup["specs"], setup["weights"])
    except UserError as error:
        _send(outbox, {"failed": str(error)})
        return
    _send(outbox, {"ready": True})
    while True:
        _send(outbox, _score(scorer, groups.get()))


def _score(scorer: Scorer, message: dict[str, Any]) -> dict[str, Any]:
    task, rollouts = frames.group_of(message)
    try:
        scored = scorer.score(task, rollouts)
    except RewardFailure as failure:
        return {"failed": str(failure)}
    return {"scores": [[rollout.reward, dict(rollout.reward_parts)] for rollout in scored]}


def _send(outbox: BinaryIO, message: dict[str, Any]) -> None:
    sys.stdout.flush()  # what the user's code printed reaches the log before the head acts on the answer
    outbox.write(pipes.encode(message))
    outbox.flush()


if __name__ == "__main__":
    main()
