"""`echo2 learner DIR`: the run's GRPO client, from the newest checkpoint on, until the run is over."""

from __future__ import annotations

import logging
import signal

from echo2.errors import UserError
from echo2.learner.grpo import loop
from echo2.learner.grpo.client import GrpoClient
from echo2.learner.head_client import LearnerInfo
from echo2.learner.model import load_policy
from echo2.learner.publication import Publisher
from echo2.learner.session import HeadSession
from echo2.rundir import RunDir, claimed
from echo2.transport.base import Link
from echo2.transport.grpc_link import connect

log = logging.getLogger(__name__)

TOLD_TO_STOP = "the learner was told to stop"
#: Exit status after a signal: the run is not over.
STOPPED_STATUS = 128 + signal.SIGTERM


def run_learner(rundir: RunDir, ticket: str) -> int:
    """Train until the run is over, or a signal comes: then the last completed step is saved. The exit status.

    Raises:
        UserError: the model can't be loaded, the disk is full, the head does not take this learner.
        LinkError: the head stayed away.
    """
    with claimed(rundir.path, "learner"):
        return _train(rundir, ticket)


def _train(rundir: RunDir, ticket: str) -> int:
    config = rundir.read_config()
    if not ticket and not rundir.learner_ticket.is_file():
        raise UserError(f"{rundir.learner_ticket} is missing: start the head first, or give its ticket with --ticket.")
    policy = load_policy(config.model.path, "float32", "auto")
    client = GrpoClient(policy, config)
    resumed = loop.resume(client, rundir.checkpoints)
    log.info("%s at version %d on %s", "resumed" if resumed else "fresh", client.version, policy.device)

    async def connect_head() -> Link:
        link, learner_id = await connect(ticket or f"@{rundir.learner_ticket}", rundir.path / "learner")
        log.info("joined as %s", learner_id)
        return link

    info = LearnerInfo(str(policy.device), policy.vocab_size)
    session = HeadSession(connect_head, client.version, info, Publisher(rundir.path / "learner"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: session.stop(TOLD_TO_STOP))
    try:
        reason = loop.train(client, session, rundir.checkpoints)
        log.info("the run is over: %s", reason)
    finally:
        session.close()
    return STOPPED_STATUS if reason == TOLD_TO_STOP else 0
