"""The bill: its causes add up to what was paid, whatever happened; `echo2 cost` shows it."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from echo2.cli import main
from echo2.core.errors import UserError
from echo2.head.ledger import costs
from echo2.head.ledger.costs import CHECK_PER_SAMPLED, Bill, CostBook, itemise, read_report, total
from echo2.head.ledger.ledger import Ledger
from echo2.head.strangers.decide.trust import Trust

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["joined", "left", "useful", "wasted", "wasted_lease", "stands_by", "activated", "restart"]),
        st.sampled_from(["w-a", "w-b", "learner"]),
        st.floats(0.0, 50.0),
        st.sampled_from([0.0, 0.35, 3.06]),
        st.sampled_from(["stale", "duplicate", "expired"]),
    ),
    max_size=40,
)


@given(actions=ACTIONS, idle=st.floats(0.0, 1.0))
def test_causes_add_up_to_the_total_of_every_machine(
    actions: list[tuple[str, str, float, float, str]], idle: float
) -> None:
    book, now = CostBook(), 0.0
    for action, name, seconds, price, cause in actions:
        now += seconds
        match action:
            case "joined":
                book.joined(name, price, now)
            case "left" | "stands_by" | "activated":
                getattr(book, action)(name, now)
            case "useful":
                book.useful(name, seconds, now)
            case "restart":
                book = CostBook(json.loads(json.dumps(book.to_plain(now))))
            case _:
                getattr(book, action)(name, cause, seconds)
    bills = itemise(book.to_plain(now), idle)
    everything = total(bills)
    assert everything.usd == pytest.approx(book.cum_usd(now))
    wasted = sum(everything.by_cause.get(cause, 0.0) for cause in ("stale", "duplicate", "expired"))
    if not book.machines.get("learner"):
        assert book.wasted_usd(now) == pytest.approx(wasted)
    for bill in [*bills, everything]:
        assert math.fsum(bill.by_cause.values()) == pytest.approx(bill.usd)
        assert min(bill.by_cause.values(), default=0.0) >= 0.0


def test_a_worker_that_comes_back_at_another_price_does_not_re_price_its_past() -> None:
    book = CostBook()
    book.joined("w", 3.6, now=0.0)
    book.useful("w", 10.0, now=10.0)
    book.left("w", now=10.0)  # a cent
    book.joined("w", 36.0, now=20.0)
    assert book.cum_usd(20.0) == pytest.approx(0.01)
    book.joined("w", 3.6, now=30.0)  # again, without having left
    assert book.cum_usd(40.0) == pytest.approx(0.01 + 0.1 + 0.01)
    assert sorted(book.machines) == ["w", "w at $3.6/h", "w at $36/h"] or sorted(book.machines) == ["w", "w at $36/h"]
    bills = itemise(book.to_plain(40.0))
    assert total(bills).usd == pytest.approx(0.12)
    assert total(bills).by_cause["useful"] == pytest.approx(0.01)


def test_groups_of_one_batch_share_its_time() -> None:
    book = CostBook()
    book.joined("w", 3.6, now=0.0)
    for at in (8.0, 9.0, 10.0):  # three groups of a batch that began at 0
        book.useful("w", at, now=at)
    book.wasted("w", "stale", 10.0, now=10.0)
    machine = book.machines["w"]
    assert machine.useful_seconds == pytest.approx(10.0)
    assert machine.wasted_seconds == {"stale": 0.0}
    (bill,) = itemise(book.to_plain(20.0))
    assert bill.by_cause == {"useful": pytest.approx(0.01), "idle": pytest.approx(0.01)}


def test_standby_is_a_cause_of_its_own_and_ends_with_attendance() -> None:
    book = CostBook()
    book.joined("w", 3.6, now=0.0)
    book.stands_by("w", now=0.0)
    book.stands_by("w", now=3.0)
    book.activated("w", now=5.0)
    book.useful("w", 2.0, now=8.0)
    book.stands_by("w", now=8.0)
    book.left("w", now=10.0)
    (bill,) = itemise(book.to_plain(99.0))
    seconds = {cause: usd * 1000 for cause, usd in bill.by_cause.items()}
    assert seconds == {"useful": pytest.approx(2), "standby": pytest.approx(7), "idle": pytest.approx(1)}
    assert list(seconds) == ["useful", "standby", "idle"]


def test_the_command_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = CostBook()
    book.joined("learner", 12.0, now=0.0)
    book.joined("w-1", 0.36, now=0.0)
    book.useful("w-1", 900.0, now=1000.0)
    book.wasted("w-1", "stale", 100.0, now=1200.0)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(UserError, match="no accounts yet"):
        read_report(tmp_path)
    book.joined("w-2", 7.2, now=0.0, is_own=False)
    for at in (1000.0, 2000.0):
        book.useful("w-2", 1000.0, now=at)  # for two dollars each
    ledger.set_meta("costs", book.to_plain(3600.0))
    ledger.keep("trust", "t", asdict(Trust(num_passed=3, num_failed=1)))
    ledger.close()
    rows = [{"step": at, "time/step": 100.0, "time/wait_for_batch": 25.0} for at in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + "".join(json.dumps(row) + "\n" for row in rows))
    report = read_report(tmp_path)
    assert report["total"]["usd"] == pytest.approx(16.36)
    assert report["usd_per_step"] == pytest.approx(16.36 / 3)
    assert report["total"]["by_cause"]["training"] == pytest.approx(9.0)
    assert report["total"]["by_cause"]["stale"] == pytest.approx(0.01)
    assert report["total"]["by_cause"]["idle"] == pytest.approx(3.0 + 0.26)
    assert main(["cost", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    strangers = report["strangers"]
    assert [strangers[name] for name in ("tickets", "groups", "checks", "failed")] == [1, 2, 4, 1]
    assert strangers["cheat_usd"] == pytest.approx(40.0)
    assert strangers["checks_usd"] == pytest.approx(4 * 2.0 * CHECK_PER_SAMPLED)
    assert [report["total"]["by_cause"][cause] for cause in ("failed", "duplicate")] == [0.0, 0.0]  # named all the same
    for part in ("learner", "w-1", "stale", "failed", "duplicate", "idle", "16.36", "a step", "of them false"):
        assert part in text
    assert main(["cost", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


def test_the_bill_is_readable_in_a_narrow_terminal() -> None:
    causes = {"training": 1.0, "useful": 2.0, "idle": 0.5, "stale": 0.25, "lost": 0.25}
    bill = asdict(Bill("w-1", 4.0, 60.0, causes, 8))
    report = {"steps": 2, "usd_per_step": 2.0, "usd_per_mtok": None, "total": bill, "machines": [bill]}
    report["strangers"] = None
    on = Console(file=io.StringIO(), width=80)
    costs.show(report, on)
    text = on.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    lines = [line.split() for line in text.splitlines()]
    assert ["useful", "2.0000", "50.0%"] in [line[:3] for line in lines]
    assert ["w-1", "4.0000", "60", "s", "8", "training", "1.0000,"] in [line[:7] for line in lines]
