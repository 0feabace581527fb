"""`echo2 head DIR`: opens the run, listens, and lives until the run is over."""

from __future__ import annotations

import asyncio
import json
import logging
import signal

from echo2.errors import UserError
from echo2.reward.functions import BUILT_IN
from echo2.runtime import head_report
from echo2.runtime.head import Head
from echo2.runtime.rundir import RunDir, write_atomically
from echo2.runtime.service import Service
from echo2.transport.grpc_link import GrpcServer
from echo2.transport.identity import RunIdentity, Ticket

log = logging.getLogger(__name__)

#: Seconds between two writings of status.json.
STATUS_SECONDS = 0.5
#: Seconds that workers and learner have to hear that the run is over.
FAREWELL_SECONDS = 1.0
TICKET_USES = 10_000
TICKET_HOURS = 24 * 90.0


async def run_head(rundir: RunDir) -> int:
    """Serve the run in this directory until it ends. Returns the exit status: 0 finished, 2 the user's mistake, 1 a bug."""
    config = rundir.read_config()
    head = Head(rundir, config)
    identity = RunIdentity.create_or_load(rundir.identity)
    port = config.head.port or head.ledger.get_meta("port", 0)
    server = GrpcServer(config.head.host, port, identity, Service(head).handlers(), head.fail)
    bound = await server.start()
    head.ledger.set_meta("port", bound)
    address = f"{config.head.advertise or config.head.host}:{bound}"
    for path, role in ((rundir.ticket, "worker"), (rundir.learner_ticket, "learner")):
        if not path.exists() or Ticket.parse(f"@{path}").address != address:
            write_atomically(path, identity.make_ticket(role, address, TICKET_USES, TICKET_HOURS), mode=0o600)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, head.end, "stopped", "the head was told to stop")
    if set(config.reward.functions) - set(BUILT_IN):
        await head.reward.start()  # a reward file that does not load is found before anything is sampled
    head.start()
    log.info("listening on %s", address)
    reporter = asyncio.create_task(_keep_reporting(head))
    await head.over.wait()
    reporter.cancel()
    assert head.outcome is not None
    log.info("the run is over: %s", head.outcome)
    _write_end(head)
    await head.close()
    await asyncio.sleep(FAREWELL_SECONDS)
    await server.stop()
    return {"finished": 0, "stopped": 0 if head.outcome[1] == "the head was told to stop" else 2, "user_error": 2}.get(
        head.outcome[0], 1
    )


async def _keep_reporting(head: Head) -> None:
    """Consumes: the planner's tables. Produces: status.json. Waits for: the clock."""
    while True:
        try:
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
