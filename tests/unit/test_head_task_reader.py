"""The head reads the user's tasks on a thread: slow, hanging and unfit rows cost their own groups and no heartbeat."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, GroupRef
from echo2.head.serve import reading
from echo2.head.serve.reading import TaskReader
from echo2.tasks.base import TaskStream
from echo2.transport import wire_pb2 as wire
from head_cases import SECONDS, OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END

TRAIN, EVAL = GroupRef(RUN_POLICY, "train", 0), GroupRef(RUN_POLICY, "eval", 0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


class Rows:
    """Row 7 raises, row 9 waits until it is let go."""

    def __init__(self) -> None:
        self.gate, self.asked = threading.Event(), list[int]()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        if index == 7:
            raise ValueError("row 7 is torn")
        if index == 9:
            self.gate.wait()
        return {"prompt": f"row {index}"}


def test_each_row_is_read_once_and_some_ahead() -> None:
    rows = Rows()
    rows.gate.set()
    reader = TaskReader(TaskStream(rows, 0, False), None)

    async def scenario() -> None:
        assert [(await reader.task(TRAIN, cursor)).prompt for cursor in (0, 1, 0)] == ["row 0", "row 1", "row 0"]
        await until(lambda: len(rows.asked) == 1 + reading.AHEAD)  # once more when the stream was made
        assert sorted(rows.asked) == sorted([0, *range(reading.AHEAD)])

    run(scenario())
    reader.close()


def test_rows_are_read_ahead_in_portions_so_that_few_leases_wake_the_thread() -> None:
    rows = Rows()
    rows.gate.set()
    reader, half = TaskReader(TaskStream(rows, 0, False), None), reading.AHEAD // 2

    async def scenario() -> None:
        for cursor in (*range(7), *range(8, 3 * half)):
            await reader.task(TRAIN, cursor)
        with suppress(UserError):
            await reader.task(TRAIN, 99)  # read after all that was asked for
        assert rows.asked[: rows.asked.index(99)] == [0, *range(4 * half)]

    run(scenario())
    reader.close()


def test_the_rows_of_all_open_leases_are_kept_and_none_is_read_ahead_of_a_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "KEPT", 50)
    rows, num_leases = Rows(), 90
    rows.gate.set()
    reader = TaskReader(TaskStream(rows, 0, False), None, lambda: num_leases)

    async def ask(cursors: range) -> None:
        for cursor in cursors:
            with suppress(UserError):  # of row 7
                await reader.task(TRAIN, cursor)

    async def scenario() -> None:
        nonlocal num_leases
        await ask(range(num_leases))
        await until(lambda: len(rows.asked) == 1 + 112)  # in portions of 16, the last of them with row 80
        rows.asked.clear()
        await ask(range(num_leases))
        assert rows.asked == [], "each delivery finds what its lease read"
        num_leases = 0
        await ask(range(200, 201))  # keeps the newest 50: 167 to 199 are not among them
        await until(lambda: len(rows.asked) == reading.AHEAD)
        rows.asked.clear()
        await ask(range(50, 51))
        assert rows.asked == [50], "the groups after it are not about to be leased"

    run(scenario())
    reader.close()


def test_the_error_has_the_number_of_the_unfit_row() -> None:
    rows = Rows()
    rows.gate.set()
    reader = TaskReader(TaskStream(rows, 0, False), None)

    async def scenario() -> None:
        with pytest.raises(UserError, match=r"Rows row 7 could not be read: .*row 7 is torn"):
            await reader.task(TRAIN, 7)
        assert (await reader.task(TRAIN, 8)).prompt == "row 8"
        with pytest.raises(UserError, match="no eval tasks"):
            await reader.task(EVAL, 0)

    run(scenario())
    reader.close()


class OddRow(dict[str, Any]):
    """Raises when it is looked at, not when it is fetched."""

    def __contains__(self, name: object) -> bool:
        raise OSError("the shard is gone")


class OddRows(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return OddRow() if index == 3 else super().__getitem__(index)

    def where(self, index: int) -> str:
        return f"shard:{[0, 1, 2, 3, 4][index]}"  # there is no name for row 5


def test_a_row_that_raises_when_it_is_checked_or_named_is_unfit_and_the_next_is_read() -> None:
    reader = TaskReader(TaskStream(OddRows(), 0, False), None)

    async def scenario() -> None:
        for cursor, said in (
            (3, "shard:3 could not be read: .*OSError: the shard is gone"),
            (5, "OddRows row 5 could not be read: .*IndexError"),
        ):
            with pytest.raises(UserError, match=said):
                await asyncio.wait_for(reader.task(TRAIN, cursor), SECONDS)
        assert (await asyncio.wait_for(reader.task(TRAIN, 4), SECONDS)).prompt == "row 4"

    run(scenario())
    reader.close()


def test_a_row_that_hangs_is_given_up_and_those_behind_it_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ROW_SECONDS", 0.2)
    rows = Rows()
    reader = TaskReader(TaskStream(rows, 0, False), None)

    async def scenario() -> None:
        with pytest.raises(UserError, match=r"Task 9: reading its row took longer than 0\.2 s"):
            await reader.task(TRAIN, 9)
        monkeypatch.setattr(reading, "ROW_SECONDS", SECONDS)  # this row is good, however slow the machine
        assert (await reader.task(TRAIN, 10)).prompt == "row 10"
        with pytest.raises(UserError, match="Task 9"):
            await reader.task(TRAIN, 9)

    run(scenario())
    rows.gate.set()
    reader.close()


OWN_ROWS = """
class Rows:
    def __init__(self, gate, bad):
        self.gate, self.bad, self.calls = gate, bad, 0

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.calls += 1
        if self.calls == 2 and self.gate:
            with open(self.gate) as gate:
                gate.read()
        if self.calls == self.bad:
            return {"prompt": ""}
        if self.calls == -self.bad:
            raise KeyError("absent")
        return {"prompt": "53=", "answer": "35"}
"""


def own_rows(path: Path, gate: str = "", bad: int = 0) -> dict[str, dict[str, Any]]:
    (path / "rows.py").write_text(OWN_ROWS)
    return settings(f"{path / 'rows.py'}:Rows", tasks={"params": {"gate": gate, "bad": bad}})


def test_heartbeats_are_answered_while_a_row_is_read(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)

    async def scenario() -> None:
        async with OpenHead(tmp_path, own_rows(tmp_path, gate)) as open_head, open_head.attending() as leases:
            await until(lambda: len(open_head.head.planner.leases))
            report = wire.WorkerReport(doing="waiting")
            await asyncio.wait_for(open_head.service.report(open_head.peer("w-1"), report), SECONDS)
            assert not leases
            await asyncio.to_thread(Path(gate).write_text, "go on")
            await until(lambda: leases)

    run(scenario())


@pytest.mark.parametrize(
    ("bad", "words", "traceback"),
    [(2, "'prompt' is empty", ""), (-2, "KeyError: 'absent'", 'raise KeyError("absent")')],
)
def test_an_unfit_row_in_the_middle_retires_its_group_and_the_run_goes_on(
    tmp_path: Path, bad: int, words: str, traceback: str
) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, own_rows(tmp_path, bad=bad)) as open_head, open_head.attending() as leases:
            planner = open_head.head.planner
            await until(lambda: planner.groups.get(0) is not None and planner.groups.get(0).state == "retired")
            assert open_head.head.ledger.counts()["retired"] == {"bad_task": 1}
            (failure,) = open_head.head.books.failures.to_plain()
            assert failure["kind"] == "bad_task"
            assert words in failure["message"]
            assert traceback in failure["traceback"]
            assert "Rows row" in failure["message"]
            await until(lambda: [lease for lease in leases if lease.step == 0])
            (lease,) = (lease for lease in leases if lease.step == 0)
            assert lease.number > 0
            said = [sample([5, 7, END])] * 4
            assert (await open_head.deliver(delivery(lease, said)))[0][0]
            await until(lambda: open_head.fed)
            assert open_head.head.ending.outcome is None

    run(scenario())


@pytest.mark.parametrize("kind", ["tasks", "eval"])
def test_a_run_is_not_continued_on_other_rows(tmp_path: Path, kind: str) -> None:
    async def open_once(raw: dict[str, dict[str, Any]]) -> None:
        async with OpenHead(tmp_path, raw):
            pass

    names = {"tasks": rows(tmp_path / "tasks.jsonl", "53="), "eval": rows(tmp_path / "eval.jsonl", "54=")}
    raw = settings(names["tasks"], eval={"source": names["eval"]})
    asyncio.run(open_once(raw))
    asyncio.run(open_once(raw))
    rows(Path(names[kind]), "53=", "55=")
    with pytest.raises(
        UserError, match=rf"The rows of .*/{kind}.jsonl have changed since this began.* Put the old file"
    ):
        asyncio.run(open_once(raw))
    other = rows(tmp_path / "others.jsonl", "53=", "55=")  # who names another file wants other rows
    asyncio.run(open_once(settings(other, eval={"source": other})))
