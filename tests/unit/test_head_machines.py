"""Commands that rent and release machines: real processes that write down what they were told."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from disk_cases import no_file_beyond
from echo2.config.offers import Offer
from echo2.core.types import Backoff
from echo2.head.fleet import machines
from echo2.head.fleet.machines import Machines

#: Appends its arguments and what it finds in its environment to a file, then ends as it is told to.
RECORD = """
import json, os, sys
told = {k.removeprefix("ECHO2_").lower(): v for k, v in os.environ.items() if k.startswith("ECHO2_")}
with open(sys.argv[1], "a") as file:
    file.write(json.dumps({"verb": sys.argv[2], "words": sys.argv[4:], **told}) + "\\n")
flag = sys.argv[3]
sys.exit(0 if flag == "-" else 3 if os.path.exists(flag) else 0)
"""


class Yard:
    """A `Machines` over a scratch directory; `fails` makes releases fail while it exists, `no_rent` rents."""

    def __init__(self, path: Path, saved: dict[str, Any] | None = None) -> None:
        self.path, self.saved = path, dict(saved or {})
        self.told, self.fails, self.no_rent = path / "told.jsonl", path / "fails", path / "no_rent"
        (path / "ticket").write_text("a ticket; rm -rf $HOME\n")
        (path / "record.py").write_text(RECORD)
        command = f"{sys.executable} {path / 'record.py'} {self.told}"
        offer = Offer(
            "spot",
            0.5,
            1.0,
            rent=f"{command} rent {self.no_rent} '{{name}} and more' {{ticket}}",
            release=f"{command} release {self.fails} {{name}}",
        )
        self.failures: list[tuple[str, str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.machines = Machines(
            {"spot": offer, "own": Offer("own", 0.1, 1.0)},
            "0123456789ab",
            path / "ticket",
            path / "machines.log",
            self.saved,
            self._save,
            lambda name, reason: self.failures.append((name, reason)),
            self._spawn,
        )

    def _save(self, plain: dict[str, Any]) -> None:
        self.saved = json.loads(json.dumps(plain))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(coroutine))

    async def settle(self) -> None:
        await asyncio.gather(*self.tasks)

    def calls(self, verb: str) -> list[dict[str, Any]]:
        lines = self.told.read_text().splitlines() if self.told.exists() else []
        return [call for call in map(json.loads, lines) if call["verb"] == verb]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "RETRY_SECONDS", Backoff(0.01, 0.02))


def test_a_machine_is_rented_joins_under_its_name_and_is_given_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        yard = Yard(tmp_path)
        yard.machines.rent("spot")
        await yard.settle()
        [call] = yard.calls("rent")
        name = call["machine"]
        assert call["words"] == [f"{name} and more", "a ticket; rm -rf $HOME"]  # one word each, and no shell
        assert (call["offer"], call["ticket"], call["worker_id"]) == ("spot", "a ticket; rm -rf $HOME", "")
        bound = yard.machines.bind(name, "w-1")
        assert bound is not None
        assert (bound.name, bound.price_usd_per_hour) == ("spot", 0.5)
        assert yard.machines.bind(name, "w-1") is not None  # it comes back
        assert yard.machines.bind(name, "w-2") is None  # another that claims its name
        assert yard.machines.bind("spot", "w-3") is None
        yard.machines.return_machine("spot", "w-1")
        await yard.settle()
        [call] = yard.calls("release")
        assert (call["words"], call["worker_id"]) == ([name], "w-1")
        assert yard.machines.names() == []
        assert yard.saved["machines"] == []
        assert not yard.machines._busy

    asyncio.run(scenario())


def test_a_machine_is_returned_although_the_log_of_its_command_cannot_be_written(tmp_path: Path) -> None:
    """It would cost money until somebody frees the disk."""

    async def scenario() -> None:
        yard = Yard(tmp_path)
        yard.machines.rent("spot")
        await yard.settle()
        with (tmp_path / "machines.log").open("ab") as file:
            file.write(b"x" * 5000 + b"\nhalf a line of a command that was killed")
        yard.machines.return_machine("spot", "")
        with no_file_beyond((tmp_path / "machines.log").stat().st_size):
            await yard.settle()
        assert (len(yard.calls("release")), yard.machines.names()) == (1, [])
        yard.machines.rent("spot")
        await yard.settle()
        assert "\n--- rent spot-012345-2\n" in (tmp_path / "machines.log").read_text()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_failed_rent_is_reported_and_its_machine_returned(tmp_path: Path) -> None:
    async def scenario() -> None:
        yard = Yard(tmp_path)
        yard.no_rent.touch()
        yard.machines.rent("spot")
        await yard.settle()
        assert [name for name, _ in yard.failures] == ["spot"]
        assert "exit status 3" in yard.failures[0][1]
        assert len(yard.calls("release")) == 1
        assert yard.machines.names() == []

    asyncio.run(scenario())


def test_a_command_that_does_not_exist_is_a_failure_like_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        yard = Yard(tmp_path)
        yard.machines.offers = {"spot": Offer("spot", 0.5, 1.0, rent=str(tmp_path / "nowhere"))}
        yard.machines.rent("spot")
        await yard.settle()
        assert "cannot start" in yard.failures[0][1]

    asyncio.run(scenario())


def test_a_command_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "HOOK_SECONDS", 0.2)

    async def scenario() -> None:
        yard = Yard(tmp_path)
        command = f"{sys.executable} -c 'import signal; signal.pause()'"
        yard.machines.offers = {"spot": Offer("spot", 0.5, 1.0, rent=command)}
        yard.machines.rent("spot")
        await yard.settle()
        assert "no end after" in yard.failures[0][1]

    asyncio.run(scenario())


def test_a_release_that_fails_is_tried_again_by_the_next_head_too(tmp_path: Path) -> None:
    async def first() -> dict[str, Any]:
        yard = Yard(tmp_path)
        yard.machines.rent("spot")
        await yard.settle()
        yard.machines.bind(yard.machines.names()[0], "w-1")
        yard.fails.touch()
        await yard.machines.close()
        assert len(yard.calls("release")) == machines.LAST_TRIES
        assert len(yard.machines.names()) == 1
        yard.machines.return_machine("spot", "w-1")
        for task in yard.tasks:
            task.cancel()
        return yard.saved

    async def second(saved: dict[str, Any]) -> None:
        yard = Yard(tmp_path, saved)
        yard.fails.unlink()
        before = len(yard.calls("release"))
        yard.machines.start()
        await yard.settle()
        assert len(yard.calls("release")) == before + 1
        assert yard.machines.names() == []
        yard.machines.rent("spot")
        await yard.settle()
        assert yard.machines.names()[0].endswith("-2")  # no name is used twice

    asyncio.run(second(asyncio.run(first())))


def test_machines_that_never_joined_are_returned_by_offer_and_all_at_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        yard = Yard(tmp_path)
        for _ in range(3):
            yard.machines.rent("spot")
        await yard.settle()
        names = yard.machines.names()
        yard.machines.bind(names[0], "w-1")
        yard.machines.return_machine("spot", "")
        await yard.settle()
        assert yard.machines.names() == [names[0], names[2]]
        await yard.machines.close()
        assert yard.machines.names() == []
        assert len(yard.calls("release")) == 3

    asyncio.run(scenario())


def test_the_next_head_knows_which_machines_were_coming_had_joined_or_were_leaving(tmp_path: Path) -> None:
    async def first() -> dict[str, Any]:
        yard = Yard(tmp_path)
        for _ in range(3):
            yard.machines.rent("spot")
        await yard.settle()
        joined, leaving, _ = yard.machines.names()
        yard.machines.bind(joined, "w-1")
        yard.machines.bind(leaving, "w-2")
        yard.fails.touch()
        yard.machines.return_machine("spot", "w-2")
        for task in yard.tasks:
            task.cancel()
        return yard.saved

    async def second(saved: dict[str, Any]) -> None:
        kept = Yard(tmp_path, saved).machines.kept()
        assert [(machine.offer, machine.worker_id) for machine in kept] == [("spot", "w-1"), ("spot", "")]

    asyncio.run(second(asyncio.run(first())))
