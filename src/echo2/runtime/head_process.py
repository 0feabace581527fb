"""`echo2 head DIR`: opens the run, listens, and lives until the run is over."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys

from echo2.errors import InvariantError, UserError
from echo2.runtime import head_report
from echo2.runtime.head import Head
from echo2.runtime.rundir import RunDir, claimed, write_atomically
from echo2.runtime.service import Service
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity, Ticket

log = logging.getLogger(__name__)

#: Seconds between two writings of status.json.
STATUS_SECONDS = 0.5
#: Seconds that workers and learner have to hear that the run is over.
FAREWELL_SECONDS = 1.0
TOLD_TO_STOP = "the head was told to stop"
TICKET_USES = 10_000
TICKET_HOURS = 24 * 90.0


async def run_head(rundir: RunDir) -> None:
    """Serve the run in this directory until it is finished or told to stop.

    Raises:
        UserError: the run can't go on (failing rewards, full disk, port in use, another head here, ...).
        InvariantError: a bug of ours stopped it.
    """
    with claimed(rundir.path, "head"):
        await _serve(rundir)


def forbid_torch() -> None:
    """For the whole process: it would take seconds and hundreds of megabytes. `transformers` reads tokenizers without
    it, and says so on each start unless it is told not to.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's own way to stop an import
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


async def _serve(rundir: RunDir) -> None:
    config = rundir.read_config()
    rundir.outcome.unlink(missing_ok=True)  # that of an earlier head
    identity = RunIdentity.create_or_load(rundir.identity)
    head = Head(rundir, config, identity)
    port = config.head.port or head.ledger.get_meta("port", 0)
    service = Service(head)
    server = GrpcServer(config.head.host, port, identity, service.handlers(), head.fail)
    await head.reward.start()  # a reward file that does not load is found before anything is sampled
    await head.start()  # before anybody can call: what the ledger holds comes first
    bound = await server.start()
    head.ledger.set_meta("port", bound)
    address = f"{config.head.advertise or config.head.host}:{bound}"
    for path, role in ((rundir.ticket, "worker"), (rundir.learner_ticket, "learner")):
        if not path.exists() or Ticket.parse(f"@{path}").address != address:
            ticket = identity.make_ticket(role, address, TICKET_USES, TICKET_HOURS, is_own=True)
            write_atomically(path, ticket, mode=0o600)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, head.end, "stopped", TOLD_TO_STOP)
    log.info("listening on %s", address)
    head.machines.start()
    head.spawn(_keep_reporting(head, service, identity))
    await head.over.wait()
    assert head.outcome is not None
    log.info("the run is over: %s", head.outcome)
    await head.machines.close()
    _write_end(head)
    await head.close()
    await asyncio.sleep(FAREWELL_SECONDS)
    await server.stop()
    await head.distribution.close()
    kind, reason = head.outcome
    if kind == "finished" or reason == TOLD_TO_STOP:
        return
    raise UserError(reason) if kind in ("stopped", "user_error") else InvariantError(reason)


async def _keep_reporting(head: Head, service: Service, identity: RunIdentity) -> None:
    """Consumes: the planner's tables; what `echo2 revoke` wrote. Produces: status.json; expulsions. Waits for: the
    clock.
    """
    while True:
        try:
            service.expel(identity.revoked())
            head.check_budget()
            head_report.write_status(head)
        except UserError as error:
            head.fail(error)
        await asyncio.sleep(STATUS_SECONDS)


def _write_end(head: Head) -> None:
    try:
        head_report.write_status(head)
        write_atomically(head.rundir.summary, json.dumps(head_report.summary(head)))
        write_atomically(head.rundir.outcome, json.dumps({"kind": head.outcome[0], "reason": head.outcome[1]}))  # type: ignore[index]
    except UserError:
        log.exception("the run's end could not be written")
