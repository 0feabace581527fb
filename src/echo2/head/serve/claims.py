"""Limits the claims of strangers: the owner of their machine, their price, the leases they hold, their process id.

A stranger joined by a ticket that is not for machines of the run's owner. `head/strangers/decide/strangers.py` decides
how the head reacts to its conduct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.values import AUTO, FORMS, ROUNDING_ENGINES, SERVERS, STREAM_ENGINES
from echo2.core.errors import PeerError
from echo2.core.printable import printable
from echo2.head.decide import events as ev
from echo2.head.fleet.decide.workers import possible_claims
from echo2.head.serve.head import Head
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import PRICE_MAX_USD_PER_HOUR

#: Largest process id on Linux; other systems stay below it.
PID_MAX = 2**22


def check_not_expelled(head: Head, worker_id: str) -> None:
    """Raise PeerError("expelled") while this worker is expelled."""
    now = head.clock.now()
    penalty = head.planner.penalties.expulsion(worker_id, now)
    if penalty is not None:
        seconds = penalty.expelled_until - now
        raise PeerError("expelled", f"{worker_id} may come back in {seconds:.0f} s: {penalty.expelled_for}")


def delivers(head: Head, worker_id: str) -> None:
    """Record that a worker that delivers is alive. A stranger must attend, because its engine is not known before: it
    delivers again when it does.

    Raises:
        PeerError: the worker is expelled, or is a stranger that does not attend.
    """
    check_not_expelled(head, worker_id)
    if worker_id in head.connections.workers:
        head.events.seen(worker_id)
    elif not head.identity.member(worker_id).is_own:
        raise PeerError("unknown_worker", f"{worker_id} does not attend; attend first")


def known(head: Head, joined: ev.WorkerJoined, engine: str) -> ev.WorkerJoined:
    """Return the event with the stranger's ticket ("" for the owner's machines), a stranger's first price, and only
    those claimed leases that may be its own. `engine`: as the worker names it.

    Raises:
        PeerError: the worker is expelled, asks for more than this run pays strangers, or has an engine that nobody can
            check.
    """
    check_not_expelled(head, joined.worker_id)
    member = head.identity.member(joined.worker_id)
    if not member.is_own:
        known_as = head.books.costs.machines.get(joined.worker_id)  # its first price stays: each price opens an account
        joined = replace(joined, price_usd_per_hour=known_as.price_usd_per_hour) if known_as else joined
        try:
            check_price(joined.price_usd_per_hour, most_paid(head.config, head.machines.offers))
            check_engine(head.config, joined.draws, engine)
            check_form(head.config, joined.form)
        except PeerError as error:
            head.books.turn_away(joined.worker_id, error.detail)
            raise
        head.books.turn_away(joined.worker_id, "")
    before = head.planner.fleet.get(joined.worker_id)
    is_changed = before is not None and before.form != joined.form  # of two rounded policies it could send the better
    lease_ids = () if is_changed else possible_claims(head.planner, joined.worker_id, joined.held_leases)
    return replace(joined, ticket="" if member.is_own else member.ticket_id, held_leases=lease_ids)


def most_paid(config: Config, offers: Mapping[str, Offer]) -> float:
    """Return the maximum dollars per hour that a stranger may ask for: with a budget, the highest price of a worker in
    the configuration, and at most the price that would spend the budget in an hour. Without a budget, prices are only
    recorded.
    """
    if not config.fleet.budget_usd:
        return PRICE_MAX_USD_PER_HOUR
    prices = [config.workers.price_usd_per_hour, *(offer.price_usd_per_hour for offer in offers.values())]
    return min(max(prices), config.fleet.budget_usd)


def check_price(price_usd_per_hour: float, most: float) -> None:
    """Raise PeerError("too_dear") if a stranger asks for more than `most`."""
    if price_usd_per_hour > most:
        raise PeerError(
            "too_dear",
            f"it asks ${price_usd_per_hour:g} an hour, and this run pays strangers ${most:g} at most. Ask for less, or "
            "ask the run's owner to raise workers.price_usd_per_hour, to list such machines as offers, or for a ticket "
            "for own machines",
        )


def check_engine(config: Config, draws: bool, engine: str) -> None:
    """Raise PeerError("unchecked_engine") for a stranger whose engine does not draw from the head's random stream,
    unless the run takes any engine. The best of many tries of such an engine passes every check.
    """
    if not draws and config.workers.require_checks:
        named = f"the run's, {config.workers.engine}" if engine == "auto" else repr(printable(engine, 50))
        raise PeerError(
            "unchecked_engine",
            f"its engine is {named}, which does not draw tokens from the head's random stream, so it cannot be checked "
            "whether it delivers the best of many tries. Start the worker with --engine compact or --engine "
            "transformers, or ask the run's owner to set workers.require_checks = false, or for a ticket for own "
            "machines",
        )


def check_form(config: Config, form: str) -> None:
    """Raise PeerError("form_not_taken") for a stranger that rounds its weights, unless the run takes this form."""
    if form and form not in config.workers.forms:
        accepted_forms = f"only {', '.join(config.workers.forms)}" if config.workers.forms else "no rounded weights"
        raise PeerError(
            "form_not_taken",
            f"it rounds its weights to the form {form}, and this run takes {accepted_forms} from strangers. Start the "
            "worker with --engine compact or --engine transformers, or ask the run's owner to add "
            f"{form!r} to workers.forms, or for a ticket for own machines",
        )


def forms_for(head: Head, peer_id: str) -> Sequence[str]:
    """Return the forms to which a machine may round its weights."""
    if head.config.run.deterministic:
        return ()
    if not head.identity.member(peer_id).is_own:
        return head.config.workers.forms
    return () if _must_draw(head, peer_id) else tuple(FORMS.values())


def with_engine(joined: ev.WorkerJoined, engine: str) -> ev.WorkerJoined:
    """Return the event with what this engine does: the one that the worker will use (`engine_of`)."""
    return replace(
        joined, draws=engine in STREAM_ENGINES, form=FORMS.get(engine, ""), rounds=engine in ROUNDING_ENGINES
    )


def engine_of(head: Head, peer_id: str, hello: wire.WorkerHello) -> tuple[str, str]:
    """Return the engine that the worker will use: the one that its owner named, else the run's. Where the run leaves
    the choice (`engines/registry.py`), a token server of the worker's is taken, if nobody must check it and the worker
    is not needed to check others; then also return its name for the worker.
    """
    config = head.config
    if hello.engine == AUTO == config.workers.engine and not config.run.deterministic:
        server = next((name for name in hello.servers if name in SERVERS), "")
        if server and not (config.workers.require_checks and _must_draw(head, peer_id)):
            return server, server
    return config.workers.engine if hello.engine == AUTO else hello.engine, ""


def _must_draw(head: Head, peer_id: str) -> bool:
    """Whether the worker's engine must draw from the stream: a stranger's, and that of the one machine of the owner's
    which can check strangers who are invited."""
    if not head.identity.member(peer_id).is_own:
        return True
    invited = any(not ticket.terms.is_own and ticket.terms.role == "worker" for ticket in head.identity.tickets())
    others = (worker for worker in head.planner.fleet.own() if worker.worker_id != peer_id and not worker.detached)
    return invited and not any(worker.can_check() for worker in others)


def process_id(pid: int) -> int:
    """Return the process id that a worker reports, or 0 if it is impossible."""
    return pid if 0 < pid <= PID_MAX else 0
