"""How training ends before its last step: told to, refused, or with a head that stays away; and what is saved then."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from echo2.core.errors import InvariantError, LinkError, PeerError, UserError
from echo2.learner.core import checkpoint
from echo2.learner.grpo import saving
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.trained_policy import RunPosition
from echo2.learner.link import head_client
from echo2.transport import wire_pb2 as wire
from learner_cases import tiny_policy
from test_learner_loop import OPTIONS, ScriptedHead, run, weights


def test_stop_saves_and_ends(tmp_path: Path) -> None:
    head = ScriptedHead()
    head.stop_at = 3
    trainer = GrpoClient(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path) == "stopped by hand"
    assert checkpoint.latest(tmp_path) == tmp_path / "step_3"
    assert checkpoint.read_client(tmp_path / "step_3")["cursor"] == 9


def test_a_stop_drops_the_step_under_way_and_saves_the_one_before(tmp_path: Path) -> None:
    """The head says so when the first group of step 3 is on its way; the others never come."""

    class StoppingHead(ScriptedHead):
        async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
            async for fed in super().stream(method, request):
                yield fed
                if method == "TakeGroups" and request.step == 3:
                    self.orders.put_nowait(wire.LearnerWelcome(stop="stopped by hand"))
                    await asyncio.Event().wait()

    straight = GrpoClient(tiny_policy(), OPTIONS)
    run(ScriptedHead(max_steps=3), straight, tmp_path / "straight")
    head, trainer = StoppingHead(), GrpoClient(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path / "run", checkpoint_every=100) == "stopped by hand"
    assert checkpoint.read_client(tmp_path / "run" / "step_3") == dataclasses.asdict(RunPosition(3, 1, 9))
    assert weights(trainer) == weights(straight)


def test_a_step_that_the_head_records_no_more_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run can't go on from a version that its ledger does not know; the checkpoint before is what there is."""

    class DeafHead(ScriptedHead):
        def _ReportStep(self, request: wire.StepReport) -> wire.Empty:
            if request.step == 3:
                raise PeerError("over", "the run is over: stopped by hand")
            return super()._ReportStep(request)

    assert "stopped by hand" in run(DeafHead(), GrpoClient(tiny_policy(), OPTIONS), tmp_path, checkpoint_every=2)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_2"
    assert "no checkpoint of the step under way: the head has not recorded it" in caplog.text


def test_a_learner_whose_head_stays_away_saves_a_checkpoint(tmp_path: Path) -> None:
    def fault(head: ScriptedHead, now: str, count: int) -> None:
        if now == "before:FedGroups" and head.version == 3:
            raise LinkError("gone for good")

    with pytest.raises(LinkError, match="TakeGroups"):
        run(ScriptedHead(fault=fault), GrpoClient(tiny_policy(), OPTIONS), tmp_path, patience_seconds=0.3)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_3"


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or a network that fails for a moment: the run would go on from an older step."""
    client = GrpoClient(tiny_policy(), OPTIONS)
    client.save_state(tmp_path / "step_2").result()
    opened = Path.open

    def fails(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        with pytest.raises(UserError, match=r"step_2 cannot be read now: Input/output error\. Try again"):
            checkpoint.recover(tmp_path)
    assert checkpoint.recover(tmp_path) == tmp_path / "step_2"


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_one_that_was_resumed(tmp_path: Path) -> None:
    run(ScriptedHead(max_steps=2), GrpoClient(tiny_policy(), OPTIONS), tmp_path)
    shutil.copytree(tmp_path / "step_2", tmp_path / "step_4")
    weights_file = tmp_path / "step_4" / "model.safetensors"
    data = weights_file.read_bytes()
    weights_file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the right size: only the digest says so
    trainer, head = GrpoClient(tiny_policy(), OPTIONS), ScriptedHead(max_steps=2)
    head.version = 2
    run(head, trainer, tmp_path, keep_checkpoints=1)
    assert trainer.version == 2
    assert checkpoint.latest(tmp_path) == tmp_path / "step_2"
    assert sorted(path.name for path in tmp_path.glob("*step_*")) == ["damaged_step_4", "step_2"]
    assert head.checkpoints == [(2, 2)]


def test_the_newest_checkpoints_stay_and_the_best_and_every_nth(tmp_path: Path) -> None:
    class JudgingHead(ScriptedHead):
        def _ReportCheckpoint(self, request: wire.CheckpointReport) -> wire.CheckpointReply:
            self.best = {1} if request.version < 5 else {5}
            assert {*range(3, request.version, 3), request.version} <= set(request.versions)
            return super()._ReportCheckpoint(request)

    def stands() -> list[int]:
        return checkpoint.versions(tmp_path)

    trainer = GrpoClient(tiny_policy(), OPTIONS)
    run(JudgingHead(max_steps=4), trainer, tmp_path, checkpoint_every=1, keep_checkpoints=1, keep_every=3)
    assert stands() == [4, 3, 1]
    head = JudgingHead(max_steps=7)
    head.version = 4
    run(head, trainer, tmp_path, checkpoint_every=1, keep_checkpoints=1, keep_every=3)
    assert stands() == [7, 6, 5, 3]
    assert [oldest for _, oldest in head.checkpoints] == [4, 5, 6, 7]  # what is spared is not to resume from


def test_a_stopping_learner_waits_for_room_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(handle: int) -> None:
        if ".partial" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(saving, "NO_ROOM_SECONDS", 0.01)
    monkeypatch.setattr(saving, "LAST_ROOM_SECONDS", 0.1)
    head = ScriptedHead()
    head.stop_at = 1
    tried: list[str] = []
    ended = threading.Thread(
        target=lambda: tried.append(run(head, GrpoClient(tiny_policy(), OPTIONS), tmp_path)), daemon=True
    )
    ended.start()
    ended.join(60.0)
    assert tried == ["stopped by hand"]
    assert "version 1 has no checkpoint" in caplog.text
    assert "the disk is out of room" in caplog.text
    assert checkpoint.latest(tmp_path) is None


def test_a_second_learner_waits_a_while_and_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head_client, "TAKEN_PAUSE_SECONDS", 0.05)

    class TakenHead(ScriptedHead):
        def _hello(self, request: wire.LearnerHello) -> wire.LearnerWelcome:
            if self.counts["before:LearnerHello"] < tries:
                raise PeerError("taken", "the run has a learner, process 7 on a: end that one first")
            return super()._hello(request)

    tries = 3
    assert run(TakenHead(max_steps=1), GrpoClient(tiny_policy(), OPTIONS), tmp_path) == "all steps are trained"
    assert "waiting up to 30 s for its place: the run has a learner, process 7 on a" in caplog.text
    monkeypatch.setattr(head_client, "TAKEN_SECONDS", 0.2)
    tries = 10**6
    with pytest.raises(LinkError, match="process 7 on a"):
        run(TakenHead(), GrpoClient(tiny_policy(), OPTIONS), tmp_path / "other", patience_seconds=0.3)


def test_a_stop_within_a_round_saves_no_partial_version(tmp_path: Path) -> None:
    class StoppingHead(ScriptedHead):
        async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
            async for fed in super().stream(method, request):
                if method == "TakeGroups" and request.step == 3 and fed.HasField("done"):
                    fed.done.stop = True
                yield fed

    head, trainer = StoppingHead(), GrpoClient(tiny_policy(), OPTIONS)
    run(head, trainer, tmp_path, checkpoint_every=2, updates_per_step=3)
    assert trainer.is_within_step
    assert checkpoint.latest(tmp_path) == tmp_path / "step_2"
    with pytest.raises(InvariantError, match="within step 3"):
        trainer.save_state(tmp_path / "step_3").result()
    trainer.load_state(tmp_path / "step_2")
    assert not trainer.is_within_step
