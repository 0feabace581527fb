"""The service's learner: an operation once, in order; killed, moved out of memory or restarted, the same numbers."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disk_cases import no_file_beyond
from echo2.core.errors import InvariantError, UserError
from echo2.core.types import Backoff
from echo2.learner.core.adapters import load_base
from echo2_service import calling, limits
from echo2_service.backend import (
    AdamSettings,
    Answer,
    ClientDatum,
    CreateModelCall,
    ForwardBackwardCall,
    LoadStateCall,
    ModelCall,
    ModelSpec,
    OptimStepCall,
    SaveStateCall,
    UnloadCall,
)
from echo2_service.decide.order import FairQueue
from echo2_service.learner import models as models_module
from echo2_service.learner.models import IDLE_SECONDS, UNLOADED_AT_ONCE, Models, learner_data
from echo2_service.learner.tenants import Tenants
from learner_cases import model_directory
from service_cases import some_data

ADAM = AdamSettings(1e-2)


class Client:
    """Calls `Models` directly, as the process does."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 0.0
        self.models: Any = None
        self.restart()

    def restart(self) -> None:
        """As a new process: nothing is left but what is on disk."""
        if self.models is not None:
            self.models.close()
        path = self.root / "base"
        if not path.is_dir():
            model_directory(path)
        self.tenants = Tenants(load_base(str(path), "cpu"))
        self.models = Models({"tiny": self.tenants}, self.root / "models", lambda: self.now)

    def call(self, call: ModelCall) -> Answer:
        turn = self.models.carry_out(call)
        while True:
            try:
                next(turn)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def loss(self, model: str, operation: int) -> float:
        call = ForwardBackwardCall(model, operation, some_data(f"{operation}"), "cross_entropy", {}, False)
        answer = self.call(call)
        assert answer.trained is not None, answer
        return answer.trained.metrics["loss:sum"]

    def train(self, model: str, operations: range) -> list[float]:
        found = []
        for operation in operations:
            if operation % 3:
                found.append(self.loss(model, operation))
            else:
                metrics = self.call(OptimStepCall(model, operation, ADAM)).metrics
                assert metrics is not None
                found.append(metrics["grad_norm"])
        return found


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path)
    for model in ("m", "same"):
        client.call(CreateModelCall(model, ModelSpec("tiny", rank=2)))
    yield client
    client.models.close()


@pytest.mark.parametrize("redo_seconds", [0.0, 1000.0])
def test_a_restart_changes_no_bit(client: Client, redo_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "REDO_SECONDS", redo_seconds)
    undisturbed = client.train("same", range(1, 15))
    disturbed = []
    for stop in range(1, 15):  # after gradients and after steps
        disturbed += client.train("m", range(stop, stop + 1))
        client.restart()
    assert disturbed == undisturbed
    assert client.train("m", range(11, 15)) == undisturbed[10:]  # told again, not done again
    assert client.train("m", range(15, 19)) == client.train("same", range(15, 19))


def test_a_journal_is_bounded_until_a_step_lets_a_checkpoint_take_its_place(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOURNAL_BYTES_MAX", 5000)
    operation, refused = 0, ""
    while not refused:
        operation += 1
        call = ForwardBackwardCall("m", operation, some_data(f"{operation}"), "cross_entropy", {}, False)
        refused = client.call(call).fault
        assert operation < 100
    assert "Call optim_step before more data" in refused
    assert client.call(OptimStepCall("m", operation + 1, ADAM)).metrics
    found = client.loss("m", operation + 2)
    client.restart()
    assert client.loss("m", operation + 2) == found, "told again"
    assert client.loss("m", operation + 3) < found * 10


def test_what_is_not_repeated_leaves_the_disk(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_BYTES_MAX", 2000)
    journal, found = tmp_path / "models" / "m" / "journal", list[float]()
    for operation in range(1, 100):  # each answer has some 300 bytes
        client.call(ForwardBackwardCall("m", operation, some_data("1"), "cross_entropy", {}, True))
        assert journal.stat().st_size < 12_000, operation
    client.call(SaveStateCall("m", 100, str(tmp_path / "new")))
    for operation in range(101, 104):
        assert not client.call(LoadStateCall("m", operation, str(tmp_path / "new"), True)).fault
        assert [path.name for path in journal.parent.glob("step_*")] == [f"step_{operation}"]
    monkeypatch.undo()
    for operation in range(104, 108):
        client.restart()
        found += client.train("m", range(operation, operation + 1))
    assert client.train("m", range(104, 108)) == found, "told again"


def test_an_adapter_that_takes_too_much_memory_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ADAPTER_MEMORY_BYTES", 100_000)
    with pytest.raises(UserError, match=r"rank 64 takes \d+ bytes .*Lower the rank"):
        client.call(CreateModelCall("large", ModelSpec("tiny", rank=64)))
    client.call(CreateModelCall("large", ModelSpec("tiny", rank=2)))
    assert client.loss("large", 1) > 0


def test_a_model_moved_out_of_memory_comes_back(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "MEMORY_BYTES", 1)
    found: dict[str, list[float]] = {"m": [], "same": []}
    for operation in range(1, 8):
        for model, numbers in found.items():
            numbers += client.train(model, range(operation, operation + 1))
    assert found["m"] == found["same"]
    client.call(UnloadCall("m"))
    assert client.train("m", range(8, 11)) == client.train("same", range(8, 11))


def test_models_that_rest_leave_memory_a_few_at_a_time_and_come_back_the_same(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_module, "KEPT_MODELS", 2)
    names = [f"idle{number}" for number in range(2 * UNLOADED_AT_ONCE)]
    for name in names:
        client.call(CreateModelCall(name, ModelSpec("tiny", rank=2, seed=3)))
        client.train(name, range(1, 4))
    client.call(CreateModelCall("half", ModelSpec("tiny", rank=2, seed=3)))
    client.train("half", range(1, 6))  # gradients, and no step yet
    expected = client.train(names[-1], range(4, 7))
    client.now += IDLE_SECONDS
    client.train("m", range(1, 2))
    assert all(name in client.tenants for name in names), "not yet"
    client.now += 1.0
    client.train("m", range(2, 3))
    assert [name in client.tenants for name in names] == [False] * (UNLOADED_AT_ONCE - 1) + [True] * 5
    assert "same" not in client.tenants, "the one that rested longest"
    client.train("m", range(3, 7))
    assert [name for name in [*names, "half", "m"] if name in client.tenants] == [names[-1], "half", "m"]
    assert client.train(names[0], range(4, 7)) == expected
    assert client.train("half", range(6, 7)) == client.train(names[1], range(4, 7))[2:]


def test_a_state_that_was_loaded_survives_without_its_files(client: Client, tmp_path: Path) -> None:
    before = client.train("m", range(1, 4))
    assert client.call(SaveStateCall("m", 4, str(tmp_path / "saved"))) == Answer()
    client.train("m", range(5, 8))
    assert client.call(LoadStateCall("m", 8, str(tmp_path / "saved"), True)) == Answer()
    (tmp_path / "saved").rename(tmp_path / "away")
    client.restart()
    assert client.call(LoadStateCall("m", 8, str(tmp_path / "saved"), True)) == Answer()
    again = client.call(ForwardBackwardCall("m", 9, some_data("5"), "cross_entropy", {}, False)).trained
    assert client.train("same", range(1, 4)) == before
    expected = client.call(ForwardBackwardCall("same", 4, some_data("5"), "cross_entropy", {}, False)).trained
    assert again == expected
    assert "no complete checkpoint" in client.call(LoadStateCall("m", 10, str(tmp_path / "none"), True)).fault


def test_a_repeated_mistake_gets_the_same_answer_and_changes_nothing(client: Client) -> None:
    bad = ForwardBackwardCall("m", 1, some_data("1"), "cross entropy", {}, False)
    fault = client.call(bad).fault
    assert "There is no loss 'cross entropy'" in fault
    client.restart()
    assert client.call(bad).fault == fault
    assert client.train("m", range(4, 7)) == client.train("same", range(4, 7))
    with pytest.raises(UserError, match="There is no model 'other'"):
        client.call(OptimStepCall("other", 1, ADAM))
    with pytest.raises(UserError, match="is not a model id"):
        client.call(CreateModelCall("../m", ModelSpec("tiny")))
    with pytest.raises(UserError, match="There is no base model"):
        client.call(CreateModelCall("new", ModelSpec("huge")))


def test_a_torn_record_is_cut_off(client: Client, tmp_path: Path) -> None:
    before = client.train("m", range(1, 4))
    path = tmp_path / "models" / "m" / "journal"
    whole = path.read_bytes()
    for cut in (1, 5, 40):
        path.write_bytes(whole[:-cut])
        client.restart()
        assert client.train("m", range(3, 4)) == before[2:]
        assert path.read_bytes() == whole


def test_a_damaged_record_is_reported_with_all_that_follows_it(client: Client, tmp_path: Path) -> None:
    client.train("m", range(1, 8))
    path = tmp_path / "models" / "m" / "journal"
    whole = path.read_bytes()
    starts = [at for at in range(len(whole)) if whole[at + 4 :].startswith(b"\x84\xa9operation")]
    assert len(starts) == 7
    for start in starts:
        for offset in (0, 1, 2, 3, 4, 30):  # lengths, which may reach behind the end, and contents
            damaged = bytearray(whole)
            damaged[start + offset] ^= 64
            path.write_bytes(damaged)
            client.restart()
            if start == starts[-1] and offset in (1, 2, 3):
                continue  # the last record is longer than the file: it looks torn
            with pytest.raises(InvariantError, match=f"damaged at byte {start}.* saved state"):
                client.train("m", range(8, 9))
    path.write_bytes(whole)
    assert client.train("m", range(8, 9)) == client.train("same", range(1, 9))[7:]


def test_a_record_cut_by_a_power_failure_is_truncated(client: Client, tmp_path: Path) -> None:
    before = client.train("m", range(1, 4))
    path = tmp_path / "models" / "m" / "journal"
    whole = path.read_bytes()
    for left in (whole + bytes(4096), whole[:-40] + bytes(4096), whole[:-40] + bytes(40)):
        path.write_bytes(left)
        client.restart()
        assert client.train("m", range(3, 4)) == before[2:]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_full_disk_fails_an_operation_and_loses_none_of_the_others(
    client: Client, tmp_path: Path, is_restarted: bool
) -> None:
    expected, path = client.train("same", range(1, 7)), tmp_path / "models" / "m" / "journal"
    assert client.train("m", range(1, 4)) == expected[:3]
    whole = path.read_bytes()
    with no_file_beyond(len(whole) + 10), pytest.raises(UserError, match=r"Cannot write .*journal: File too large"):
        client.train("m", range(4, 5))
    assert path.read_bytes() == whole, "no half of a record"
    if is_restarted:
        client.restart()
    assert client.train("m", range(4, 7)) == expected[3:]


def test_a_lost_checkpoint_is_reported(client: Client, tmp_path: Path) -> None:
    client.train("m", range(1, 4))
    client.call(UnloadCall("m"))
    client.train("m", range(4, 7))
    client.restart()
    assert client.train("m", range(7, 8))
    client.restart()
    for path in (tmp_path / "models" / "m").glob("step_*/adapter_model.safetensors"):
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    with pytest.raises(InvariantError, match="the checkpoint after operation 3 is gone or damaged"):
        client.train("m", range(8, 9))


def test_targets_and_padding_by_column() -> None:
    datum = ClientDatum(
        array("i", [5, 6]), array("i", [0, 1, 2, 3]), None, array("d", [0, 1, 0, 2]), array("f", [0, -1, -2, -3])
    )
    data = learner_data([datum], "importance_sampling")
    assert [row.targets for row in data.rows] == [array("i", [0, 2]), array("i", [1, 3])]
    assert [row.weights for row in data.rows] == [array("d", [0, 1]), array("d", [1, 1])]
    assert data.by_client([array("d", [1, 2]), array("d", [3, 4])]) == [array("f", [1, 3, 2, 4])]
    for broken in (
        ClientDatum(array("i"), array("i")),
        ClientDatum(array("i", [1, 2]), array("i", [1, 2, 3])),
        ClientDatum(array("i", [1]), array("i", [1]), array("d", [float("nan")])),
        ClientDatum(array("i", [1]), array("i", [1]), array("d", [1.0, 2.0])),
    ):
        with pytest.raises(UserError, match="datum 0 has"):
            learner_data([broken], "cross_entropy")


def test_bounds_of_a_datum_are_for_losses_that_clip() -> None:
    numbers = array("i", [5, 6]), array("i", [1, 2])
    datum = ClientDatum(*numbers, clip_low=array("d", [0.5, 0.6]), clip_high=array("d", [1.5, 1.6]))
    (row,) = learner_data([datum], "ppo").rows
    assert (row.clip_low, row.clip_high) == (datum.clip_low, datum.clip_high)
    assert learner_data([ClientDatum(*numbers, clip_high=datum.clip_high)], "stable_reinforce").rows
    for loss, name in (("dro", "clip_low_threshold"), ("stable_reinforce", "clip_low_threshold")):
        with pytest.raises(UserError, match=f"datum 0 has {name}"):
            learner_data([datum], loss)


def test_shares_are_equal_whatever_the_pieces() -> None:
    turns, used = FairQueue(), {"small": 0.0, "large": 0.0, "late": 0.0}
    cost = {"small": 0.1, "large": 1.0, "late": 0.3}
    turns.wait("small")
    turns.wait("large")
    for step in range(400):
        if step == 200:
            turns.wait("late")
            at_200 = dict(used)
        owner = turns.next()
        assert owner is not None
        turns.charge(owner, cost[owner])
        used[owner] += cost[owner]
        if owner == "small":  # leaving for a moment gives no credit
            turns.rest("small")
            turns.wait("small")
    assert abs(used["small"] - used["large"]) <= 1.0
    assert abs(used["late"] - (used["large"] - at_200["large"])) <= 1.1


def test_a_process_that_does_not_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last words are in the log of `echo2 serve`, whose newest warnings the owner's page shows."""
    monkeypatch.setattr(calling, "RESTART_SECONDS", Backoff(0.0, 0.0))
    monkeypatch.setattr(calling, "MOST_DEATHS", 2)

    async def call() -> None:
        process = calling.AnsweringProcess("echo2_service.nowhere.process", "{}", tmp_path / "log")
        with pytest.raises(InvariantError, match="The nowhere process does not start"):
            await process.call(UnloadCall("m"))
        await process.close()

    asyncio.run(call())
    assert "No module named" in (tmp_path / "log").read_text()
    (told,) = {line for line in caplog.messages if "is started again" in line}
    assert re.fullmatch(
        r"the nowhere exited with status 1 and is started again: .*No module named 'echo2_service.nowhere'\)", told
    )


DYING = """
import os, signal
from echo2.core.child import take_pipes
from echo2_service.calling import frame
from echo2_service.backend import Answer
from echo2_service.calling import receive

inbox, outbox = take_pipes()

def take(request):
    outbox.write(frame(Answer(request.number, has_begun=True)))
    outbox.flush()
    if request.call.model == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    outbox.write(frame(Answer(request.number)))
    outbox.flush()

receive(inbox, take)
"""


#: Its first answer, or all of them, are no messages.
BABBLING = """
import pathlib, sys
from echo2.core.child import take_pipes
from echo2_service.calling import frame
from echo2_service.backend import Answer
from echo2_service.calling import receive

inbox, outbox = take_pipes()
flag = pathlib.Path(sys.argv[1])

def take(request):
    first = not flag.exists()
    flag.touch()
    outbox.write(b"\\x03\\0\\0\\0abc" if first or request.call.model == "babble" else frame(Answer(request.number)))
    outbox.flush()

receive(inbox, take)
"""


def test_a_process_that_cannot_be_started_for_a_while_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log's directory is missing, as descriptors or memory may be."""
    (tmp_path / "dying").mkdir()
    (tmp_path / "dying" / "process.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(calling, "RESTART_SECONDS", Backoff(0.0, 0.0))
    monkeypatch.setattr(calling, "MOST_DEATHS", 10**9)

    async def run() -> None:
        process = calling.AnsweringProcess("dying.process", "{}", tmp_path / "later" / "log")
        call = asyncio.create_task(process.call(UnloadCall("good")))
        while "cannot be started, trying again" not in caplog.text:  # noqa: ASYNC110  # nobody tells it
            await asyncio.sleep(0)
        (tmp_path / "later").mkdir()
        await call
        monkeypatch.setattr(calling, "MOST_DEATHS", 2)
        await process.close()
        process = calling.AnsweringProcess("dying.process", "{}", tmp_path / "never" / "log")
        with pytest.raises(InvariantError, match="The dying process does not start"):
            await process.call(UnloadCall("good"))
        (tmp_path / "never").mkdir()
        await process.call(UnloadCall("good"))
        await process.close()

    asyncio.run(run())


def test_an_answer_that_cannot_be_read_costs_the_process_and_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "babbling").mkdir()
    (tmp_path / "babbling" / "process.py").write_text(BABBLING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(calling, "RESTART_SECONDS", Backoff(0.0, 0.0))
    monkeypatch.setattr(calling, "MOST_DEATHS", 3)

    async def run() -> None:
        process = calling.AnsweringProcess("babbling.process", str(tmp_path / "flag"), tmp_path / "log")
        await process.call(UnloadCall("good"))
        with pytest.raises(InvariantError, match="The babbling process does not start"):
            await process.call(UnloadCall("babble"))
        await process.call(UnloadCall("good"))
        await process.close()

    asyncio.run(run())


def test_a_call_that_kills_is_failed_and_others_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying").mkdir()
    (tmp_path / "dying" / "process.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(calling, "RESTART_SECONDS", Backoff(0.0, 0.0))
    monkeypatch.setattr(calling, "MOST_DEATHS", 2)

    async def run() -> None:
        process = calling.AnsweringProcess("dying.process", "{}", tmp_path / "log")
        poison = asyncio.create_task(process.call(UnloadCall("poison")))
        good = asyncio.create_task(process.call(UnloadCall("good")))
        with pytest.raises(InvariantError, match="The dying process died 2 times while it worked on this"):
            await poison
        await good
        await process.call(UnloadCall("good again"))
        await process.close()

    asyncio.run(run())


def test_a_full_disk_is_logged_in_one_line_and_a_bug_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk fails at each retry."""
    full, ours = OSError(28, "No space left on device"), ValueError("ours")
    assert calling.failed(1, full, "save").is_ours
    assert calling.failed(2, ours, "save").is_ours
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]
    assert "No space left on device" in caplog.records[0].getMessage()
