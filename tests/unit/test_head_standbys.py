"""Several standbys of one run, in many orders of what they do to its store: one takes the run over, and the others wait
on."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo2.config.rundir import RunDir
from echo2.core.objects import open_objects
from echo2.head.store import contents
from echo2.head.store import mirror as mirror_module
from echo2.head.store.contents import fetch_run, stand_by
from echo2.head.store.decide.log import LOOK_SECONDS, SILENT_SECONDS, SignOfLife, SignWatch
from echo2.head.store.log import ALIVE_KEY, encode
from echo2.head.store.mirror import Mirror, read_claim
from seeds import seeds
from test_head_store import leave_a_run

OVER = "all steps are trained"
#: A head is up so many looks after its standby has taken the run over, at most.
START_LOOKS = int(0.6 * SILENT_SECONDS / LOOK_SECONDS)


class Turns:
    """Threads of which one goes on at a time, up to its next step; the seed says which."""

    def __init__(self, seed: int) -> None:
        self._random, self._changed = random.Random(seed), threading.Condition()
        self._threads: list[threading.Thread] = []
        self._waiting: dict[threading.Thread, bool] = {}

    def run(self, works: list[Callable[[], None]]) -> None:
        """Run them to their ends, and raise what one of them raised."""
        errors: list[BaseException] = []

        def whole(work: Callable[[], None]) -> None:
            try:
                self.step()
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._changed:
                    self._threads.remove(threading.current_thread())
                    self._choose()

        self._threads = [threading.Thread(target=whole, args=(work,)) for work in works]
        threads = list(self._threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def step(self) -> None:
        """Stand aside until it is this thread's turn."""
        me = threading.current_thread()
        if me not in self._threads:
            return
        with self._changed:
            self._waiting[me] = False
            self._choose()
            self._changed.wait_for(lambda: self._waiting[me])
            del self._waiting[me]

    def _choose(self) -> None:
        if self._threads and set(self._waiting) == set(self._threads):
            chosen = self._random.choice(self._threads)
            self._waiting[chosen] = True
            self._changed.notify_all()


class InTurns:
    """A store in which each operation is a step."""

    def __init__(self, objects: Any, turns: Turns) -> None:
        self._objects, self._turns = objects, turns

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._objects, name)

        def called(*arguments: Any) -> Any:
            self._turns.step()
            return found(*arguments)

        return called if callable(found) else found


class Clock:
    """Seconds that pass when a standby sleeps, and nobody waits for."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._now = turns, 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._turns.step()
        self._now += seconds


@pytest.fixture
def store(tmp_path: Path) -> str:
    return leave_a_run(tmp_path)


@pytest.mark.parametrize("seed", seeds(8, 100))
def test_one_of_several_standbys_becomes_the_head(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    turns, outcomes, chance = Turns(seed), list[str](), random.Random(seed)
    for module in (contents, mirror_module):
        monkeypatch.setattr(module, "open_objects", lambda url: InTurns(open_objects(url), turns))

    def standby(number: int) -> None:
        clock, out = clocks[number], tmp_path / f"out-{number}"
        over = stand_by(store, out, lambda _: None)
        if not over:
            for _ in range(chance.randrange(START_LOOKS)):
                clock.sleep(LOOK_SECONDS)
            begun = Mirror.open(RunDir(out), store, 0.0)  # else another one has followed
            begun.objects.upload(ALIVE_KEY, [encode(SignOfLife(read_claim(RunDir(out)).own, begun.epoch, 1, OVER))])
        outcomes.append(over)

    num = 2 + seed % 2
    clocks = [Clock(turns) for _ in range(num)]
    mine = {f"standby-{number}": clock for number, clock in enumerate(clocks)}

    def named(number: int) -> None:
        threading.current_thread().name = f"standby-{number}"
        standby(number)

    def current() -> Clock:
        return mine[threading.current_thread().name]

    time = SimpleNamespace(sleep=lambda seconds: current().sleep(seconds), monotonic=lambda: current().monotonic())
    monkeypatch.setattr(contents, "time", time)
    turns.run([lambda number=number: named(number) for number in range(num)])  # type: ignore[misc]
    assert sorted(outcomes) == ["", *[OVER] * (num - 1)], seed


def test_a_head_that_began_without_a_sign_is_waited_for_once_more(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have died before its first sign."""
    clock = Clock(Turns(0))
    monkeypatch.setattr(contents, "time", clock)
    Mirror.open(fetch_run(store, tmp_path / "other"), store, 0.0)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    assert stand_by(store, tmp_path / "out", lambda _: None) == ""
    into = [one.split(" into ")[1] for one in caplog.messages if " into " in one]
    assert set(into) == {str(tmp_path / "out")}
    assert "or another one has begun: standing by" in caplog.text
    assert clock.monotonic() >= 2 * SILENT_SECONDS


def test_the_head_with_the_last_sign_of_life_is_followed_at_once() -> None:
    watch = SignWatch()
    for now in range(0, int(SILENT_SECONDS) + 4, 2):
        watch.look(b"sign", float(now))
    assert watch.may_follow(("a", 1), ("a", 1))
    assert not watch.may_follow(("b", 2), ("a", 1))
    assert not watch.is_silent
