"""The run's checkpoints: written in the background, durable before the head is told. The newest few, every Nth, and the
best evaluated one are kept.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from echo2.errors import NoRoomError
from echo2.learner import checkpoint
from echo2.learner.grpo.client import GrpoClient
from echo2.learner.publication import NO_ROOM_SECONDS
from echo2.learner.session import HeadSession
from echo2.learner.state import Saving

log = logging.getLogger(__name__)

#: Total time that a stopping learner waits for disk space.
LAST_ROOM_SECONDS = 60.0


class Checkpoints:
    """Writes one checkpoint at a time, in the background: `begin` starts it, and `finish` waits for its end."""

    def __init__(self, root: Path, client: GrpoClient, head: HeadSession) -> None:
        self._root = root
        self._keep, self._keep_every = client.config.learner.keep_checkpoints, client.config.learner.keep_every
        self._client = client
        self._head = head
        self._writing: Saving | None = None
        self._cursor = 0
        self._give_up_at: float | None = None

    def begin(self, cursor: int) -> None:
        """Begin to write the checkpoint of the current version; the step must have ended."""
        directory = checkpoint.step_directory(self._root, self._client.version)
        self._cursor = cursor
        self._writing = self._client.save_state(directory, self._head.lineage, cursor)

    def finish(self, tells_head: bool = True) -> None:
        """Wait until the checkpoint under way is durable, if there is one. On a full disk, wait for space: without the
        checkpoint, all steps since the previous one would be trained again. A stopping learner gives the checkpoint up
        after `LAST_ROOM_SECONDS`.

        Raises:
            UserError: the checkpoint can't be written to its directory.
            LinkError: the head was away for too long.
        """
        while self._writing is not None:
            try:
                self._writing.result()
                self._writing = None
            except NoRoomError as error:
                if (self._head.stop_reason or not tells_head) and self._has_waited():
                    log.error(
                        "version %d has no checkpoint; resuming goes on before it: %s", self._client.version, error
                    )
                    self._writing = None
                    return
                self._head.doing = f"waiting for room: {error}"
                log.warning("waiting for room: %s", error)
                time.sleep(NO_ROOM_SECONDS)
                self.begin(self._cursor)
            else:
                if tells_head:
                    self._report()

    def save_last(self, cursor: int) -> None:
        """Save the current version, unless that is done, without telling the head, which is going away."""
        self._head.doing = f"saving version {self._client.version}, the last one"
        self.finish(tells_head=False)
        if not checkpoint.is_whole(checkpoint.step_directory(self._root, self._client.version)):
            self.begin(cursor)
            self.finish(tells_head=False)

    def _has_waited(self) -> bool:
        """Whether a stopping learner has waited long enough for disk space."""
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + LAST_ROOM_SECONDS
        return now >= self._give_up_at

    def report_again(self) -> None:
        """Tell the head which checkpoints exist: the last report may have been lost."""
        if self._client.version in checkpoint.versions(self._root):
            self._report()

    def _report(self) -> None:
        """Report the checkpoints, then prune them. Only the head knows the best one, so nothing is deleted before it
        answers.
        """
        whole, every = checkpoint.versions(self._root), self._keep_every
        best = self._head.report_checkpoint(self._client.version, whole[: self._keep][-1], whole)
        checkpoint.prune(self._root, self._keep, [v for v in whole if v in best or (every and v % every == 0)])
