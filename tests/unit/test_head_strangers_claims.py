"""What the head lets strangers say of themselves, and what they are paid."""

from __future__ import annotations

import random
from collections.abc import MutableSequence

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from any_values import anything
from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.sections import FleetConfig, WorkersConfig
from echo2.core.errors import PeerError
from echo2.head.ledger.books import Evals
from echo2.head.ledger.costs import CostBook, itemise
from echo2.head.serve.claims import PID_MAX, check_price, most_paid, process_id
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import PRICE_MAX_USD_PER_HOUR
from echo2.views.status import strangers_lines


def config(price: float = 0.0, budget: float = 0.0) -> Config:
    return Config(workers=WorkersConfig(price_usd_per_hour=price), fleet=FleetConfig(budget_usd=budget))


def test_a_stranger_may_ask_the_highest_price_in_the_configuration() -> None:
    offers = {"spot": Offer("spot", 0.6), "dear": Offer("dear", 1.9)}
    assert most_paid(config(0.5, budget=5.0), {}) == 0.5
    assert most_paid(config(0.5, budget=5.0), offers) == 1.9
    assert most_paid(config(budget=5.0), {}) == 0.0


def test_without_a_budget_prices_are_only_written_down() -> None:
    assert most_paid(config(0.5), {}) == PRICE_MAX_USD_PER_HOUR


def test_a_stranger_may_not_ask_a_price_that_spends_the_budget_in_an_hour() -> None:
    assert most_paid(config(8.0, budget=5.0), {}) == 5.0
    with pytest.raises(
        PeerError, match=r"asks \$10000 an hour, and this run pays strangers \$5 at most\. Ask for less"
    ):
        check_price(10_000.0, most_paid(config(8.0, budget=5.0), {}))
    check_price(5.0, 5.0)


def test_strangers_are_paid_for_accepted_results_and_for_no_more_time_than_there_was() -> None:
    book = CostBook()
    book.joined("s", 3600.0, 0.0, is_own=False)  # a dollar a second
    book.joined("own", 3600.0, 0.0)
    book.wasted("s", "malformed", 50.0, 100.0)
    book.wasted_lease("s", "expired", 60.0)
    assert book.cum_usd(100.0) == pytest.approx(100.0)  # the own machine's
    book.useful("s", 1e7, 110.0)
    book.useful("s", 1e7, 120.0)
    assert book.machines["s"].usd(1000.0) == pytest.approx(120.0)
    again = CostBook(book.to_plain(1000.0))
    assert again.machines["s"].usd(5000.0) == pytest.approx(120.0)
    (bill,) = [bill for bill in itemise(again.to_plain(5000.0)) if bill.name == "s"]
    assert bill.by_cause == {"useful": pytest.approx(120.0)}
    again.joined("s", 3600.0, 0.0, is_own=False)
    assert again.cum_usd(9000.0) == pytest.approx(1000.0 + 120.0)


def test_status_shows_strangers_prices_refused_workers_and_missing_evaluations() -> None:
    workers = [
        {"id": "w-1", "price_usd_per_hour": 0.4, "is_own": False},
        {"id": "w-2", "price_usd_per_hour": 9.0, "is_own": True},
    ]
    status = {
        "workers": workers,
        "not_evaluated": {"10": "why", "0": "why"},
        "turned_away": {"w-9": "it asks $7 an hour"},
    }
    assert strangers_lines(status) == [
        "not evaluated: version 0, 10: no machine of yours is connected; run `echo2 eval DIR`",
        "strangers ask: w-1 $0.4/h",
        "turned away: w-9: it asks $7 an hour",
    ]
    assert strangers_lines({}) == []


def test_a_process_number_is_one_that_the_system_gives() -> None:
    assert [process_id(pid) for pid in (2**31, -1, 0, PID_MAX, 77)] == [0, 0, 0, PID_MAX, 77]


def test_an_evaluation_that_is_given_up_has_no_accuracy() -> None:
    evals = Evals()
    evals.start(3)
    row = evals.skip(3, "no machine of the owner")
    assert "eval/accuracy" not in row
    assert evals.not_evaluated == {3: "no machine of the owner"}


def fields_of(kind: Descriptor, where: str = "") -> set[str]:
    """Return the paths of all fields of a message, and of the messages in it."""
    found = {f"{where}{field.name}" for field in kind.fields}
    within = (field for field in kind.fields if field.message_type and not field.message_type.GetOptions().map_entry)
    return found.union(*(fields_of(field.message_type, f"{where}{field.name}.") for field in within))


def fields_in(message: Message, where: str = "") -> set[str]:
    """Return the paths of the fields that have a value."""
    found = set[str]()
    for field, value in message.ListFields():
        found.add(f"{where}{field.name}")
        values = [value] if isinstance(value, Message) else value if isinstance(value, MutableSequence) else []
        found = found.union(*(fields_in(one, f"{where}{field.name}.") for one in values if isinstance(one, Message)))
    return found


@pytest.mark.parametrize("kind", [wire.Deliveries, wire.WorkerHello, wire.WorkerReport, wire.FetchReport])
def test_the_searched_liars_lie_in_every_field_that_a_stranger_may_fill(kind: type[wire.Deliveries]) -> None:
    """Also in fields that are added later: the search of `make bench-hostile` walks the messages."""
    source, filled = random.Random(0), set[str]()
    for _ in range(40):
        message = kind()
        for _ in range(200):
            anything(message, source)
            filled |= fields_in(message)
            assert type(message).FromString(message.SerializeToString()) is not None
    assert filled == fields_of(kind.DESCRIPTOR)
