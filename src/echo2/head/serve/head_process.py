"""`echo2 head DIR`: opens the run, listens for workers and the learner, and serves until the run is over."""

from __future__ import annotations

import asyncio
import gc
import json
import logging

from echo2.config.rundir import STOP_WORDS, RunDir, claimed, write_atomically
from echo2.core import logs
from echo2.core.background import spawn
from echo2.core.disk import DiskWatch, checkpoint_bytes
from echo2.core.errors import InvariantError, NoRoomError, UserError
from echo2.head.decide import events as ev
from echo2.head.serve import report as head_report
from echo2.head.serve.effects import HeadEffects
from echo2.head.serve.head import Head
from echo2.head.serve.service import Service
from echo2.head.store.contents import restore
from echo2.head.store.mirror import Mirror
from echo2.head.strangers.tickets import OwnTickets, own_files
from echo2.transport.gates import GatedServer
from echo2.transport.identity import RunIdentity
from echo2.transport.sockets import is_out_of_descriptors

log = logging.getLogger(__name__)

#: Interval at which the head looks after its run, and status.json is written: less often where that would take more
#: than this share of a processor, as it does with thousands of workers. It gets no older than the third: by its share
#: half a second of work, as for 6,500 workers on a busy machine, is done once in 50 s. At 60 a head counts as silent.
STATUS_SECONDS, STATUS_SHARE, STATUS_SECONDS_MAX = 0.5, 0.01, 10.0
#: Containers made, less those freed, at which Python looks for garbage in cycles. By its own 700, calls under way and
#: rows of status.json pass for lasting ones, and soon all that the head holds of its fleet is looked through again.
GARBAGE_MIN = 20_000
#: Time for the workers and the learner to receive the message that the run is over.
CLOSING_SECONDS = 1.0


async def run_head(rundir: RunDir) -> None:
    """Serve the run in this directory until it is finished or told to stop.

    Raises:
        NoRoomError: the disk is full; another head can continue the run when there is room.
        UserError: the run can't continue (failing rewards, port in use, another head here, ...).
        InvariantError: a bug of echo2 stopped the run.
    """
    with claimed(rundir.path, "head"):
        await _serve(rundir)


async def _serve(rundir: RunDir) -> None:
    config = rundir.read_config()
    rundir.outcome.unlink(missing_ok=True)  # the outcome of an earlier head
    mirror = None
    if config.head.store:
        mirror = await asyncio.to_thread(Mirror.open, rundir, *config.head.store_place)
        if mirror.has_caught_up:
            await asyncio.to_thread(restore, rundir, mirror.objects, rundir.path)
    identity = RunIdentity.create_or_load(rundir.identity)
    head = await Head.open(rundir, config, identity, HeadEffects, mirror)  # fails before any sampling if it can't go on
    host, port = config.head.address
    port = port or head.ledger.get_meta("port", 0)
    service = Service(head)
    server = GatedServer(host, port, identity, service.handlers(), head.ending.fail)
    bound = await server.start()
    gc.collect()
    gc.freeze()  # modules and libraries live as long as the process: exclude them from later collections
    gc.set_threshold(GARBAGE_MIN)
    head.ledger.set_meta("port", bound)
    address = config.head.advertised(bound)
    tickets = OwnTickets(identity, own_files(rundir), address)
    tickets.keep()
    if head.contents is not None:
        head.contents.keep_files()
    sending = spawn(mirror.run(head.ending.fail), head.ending.fail) if mirror is not None else None
    loop = asyncio.get_running_loop()
    for number, words in STOP_WORDS.items():
        loop.add_signal_handler(number, head.ending.request_stop, words)
    log.info("listening on %s", address)
    head.machines.start()
    head.spawn(_keep_reporting(head, service, identity, tickets))
    await head.ending.over.wait()
    assert head.ending.outcome is not None
    log.info("the run is over: %s", head.ending.outcome)
    if head.ending.outcome[0] != "no_room":  # "no_room" ends this head only; the run waits for disk space
        await head.machines.close()
        _write_end(head, head.ending.outcome)
    await head.close()
    if mirror is not None and sending is not None:
        kind, reason = head.ending.outcome
        await mirror.close("" if kind in ("no_room", "bug") else reason)  # then another machine may do better
        sending.cancel()
    await asyncio.sleep(CLOSING_SECONDS)
    await server.stop()
    await head.distribution.close()
    kind, reason = head.ending.outcome
    if kind == "finished" or reason in STOP_WORDS.values():
        return
    if kind == "no_room":
        raise NoRoomError(reason)
    raise UserError(reason) if kind in ("stopped", "user_error") else InvariantError(reason)


async def _keep_reporting(head: Head, service: Service, identity: RunIdentity, tickets: OwnTickets) -> None:
    """Consumes: the planner's tables; the revocations of `echo2 revoke`. Produces: status.json; expulsions;
    replacements of the owner's tickets that no longer admit a machine. Waits for: the clock.
    """
    disk, status_at = DiskWatch(head.rundir.path), 0.0
    while True:
        try:
            if head.contents is not None:
                head.contents.keep_files()
            disk.look(head.books.broadcast_times.snapshot_bytes, checkpoint_bytes(head.rundir.checkpoints))
            pause(head, disk.reason or (head.mirror.trouble if head.mirror is not None else ""))
            service.expel(identity.revoked())
            tickets.keep()
            head_report.check_budget(head)
            if (now := head.clock.now()) >= status_at:
                status_at = now + status_pause_seconds(await head_report.write_status_in_turns(head))
            for name in ("reward.log", "machines.log"):  # of child processes; the supervisor cuts the head's own log
                logs.cut_log(head.rundir.logs / name)
        except UserError as error:
            if is_out_of_descriptors(error):
                log.warning("%s", error)
            else:
                head.ending.fail(error)
        await asyncio.sleep(STATUS_SECONDS)


def status_pause_seconds(processor_seconds: float) -> float:
    """Return how long status.json stays as it is, if so much work went into it."""
    return min(processor_seconds / STATUS_SHARE, STATUS_SECONDS_MAX)


def pause(head: Head, reason: str) -> None:
    """Pause the run while there is a reason; without one, it goes on."""
    if bool(reason) != (head.planner.health.paused is not None):
        log.warning("%s", f"paused: {reason}" if reason else "what paused the run is over: going on")
        head.events.dispatch(ev.DiskFull(reason) if reason else ev.DiskFreed())


def _write_end(head: Head, outcome: tuple[str, str]) -> None:
    try:
        head_report.write_status(head)
        write_atomically(head.rundir.summary, json.dumps(head_report.summary(head)))
        write_atomically(head.rundir.outcome, json.dumps(dict(zip(("kind", "reason"), outcome, strict=True))))
    except UserError:
        log.exception("the run's end could not be written")
