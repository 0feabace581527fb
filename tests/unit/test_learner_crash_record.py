"""A group that kills the learner is found, left out and named; whoever is innocent is trained on."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.config.rundir import CRASH_RECORD
from echo2.core.errors import UserError
from echo2.core.types import RolloutGroup
from echo2.launch.supervisor import RESTARTS_MAX
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.saving import ALONE_MAX, LEFT_OUT_MAX, TOGETHER_MAX, CrashRecord
from echo2.learner.grpo.step_meter import LossStats
from learner_cases import config_of, random_group, tiny_policy
from test_learner_loop import OPTIONS, ScriptedHead, run, step_groups, weights


class Killed(Exception):
    """As by the kernel: nothing of the learner runs any more."""


def groups(count: int) -> list[RolloutGroup]:
    return [random_group(random.Random(number), number) for number in range(count)]


def live(path: Path, batch: list[RolloutGroup], deadly: set[int]) -> list[int]:
    """One life of a learner that is fed these groups: the numbers of those it trained on.

    Raises:
        Killed: it died.
        UserError: it gave up.
    """
    record, trained = CrashRecord(path), list[int]()
    for part in record.batches([group for group in batch if not record.why_unfit(group)]):
        with record.training(part):
            numbers = [group.group.number for group in part]
            if deadly & set(numbers):
                raise Killed
            trained += numbers
    return trained


def lives(path: Path, batch: list[RolloutGroup], deadly: set[int]) -> tuple[int, list[int]]:
    """Deaths until a learner came through, and what that one trained on."""
    for deaths in range(100):
        with contextlib.suppress(Killed):
            return deaths, live(path, batch, deadly)
    raise AssertionError("it dies for ever")


@given(deadly=st.sets(st.integers(0, 7), max_size=LEFT_OUT_MAX), size=st.integers(1, 8))
def test_groups_that_kill_are_left_out_and_all_others_are_trained_on(
    tmp_path_factory: pytest.TempPathFactory, deadly: set[int], size: int
) -> None:
    path, batch = tmp_path_factory.mktemp("deaths") / "training.json", groups(size)
    present = {number for number in deadly if number < size}
    deaths, trained = lives(path, batch, deadly)
    assert sorted(trained) == sorted(set(range(size)) - present)
    assert deaths <= TOGETHER_MAX + ALONE_MAX * len(present)
    assert sorted(live(path, batch, deadly)) == sorted(trained), "nobody dies of it again"


def test_one_group_is_found_before_its_learner_counts_as_dying_for_ever(tmp_path: Path) -> None:
    deaths, _ = lives(tmp_path / "training.json", groups(8), {3})
    assert deaths == TOGETHER_MAX + ALONE_MAX < RESTARTS_MAX


def test_a_learner_that_fails_on_all_groups_says_so_and_blames_none(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    with pytest.raises(UserError, match="died on 4 groups in a row, each trained on alone: this machine"):
        lives(path, groups(8), set(range(8)))
    record = CrashRecord(path)
    assert not any(record.why_unfit(group) for group in groups(8)), "a larger machine tries them all again"


def test_occasional_stops_incriminate_no_group(tmp_path: Path) -> None:
    """Stopped by hand in the middle of a micro-batch, and the next time it comes through."""
    path, batch = tmp_path / "training.json", groups(4)
    for _ in range(10):
        with contextlib.suppress(Killed):
            live(path, batch, {0})
        assert live(path, batch, set()) == [0, 1, 2, 3]
    assert CrashRecord(path).batches(batch) == [batch]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"together": 1}', '{"at_work": ["x"]}', "[" * 100_000])
def test_a_damaged_crash_record_is_started_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "training.json"
    path.write_text(text)
    assert lives(path, groups(2), set()) == (0, [0, 1])


#: A step's groups are one micro-batch.
TOGETHER = config_of(OPTIONS, tokens_per_microbatch=1000)


class Fragile(GrpoClient):
    """Runs out of memory on group 1 of step 0."""

    def forward_backward(self, groups: list[RolloutGroup]) -> LossStats:  # type: ignore[override]
        if any(group.group.number == 1 for group in groups):
            raise torch.OutOfMemoryError("a group too large")
        return super().forward_backward(groups)


def test_the_loop_goes_on_without_the_group_that_killed_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(TOGETHER_MAX + ALONE_MAX):
        with pytest.raises(torch.OutOfMemoryError):
            run(ScriptedHead(max_steps=1), Fragile(tiny_policy(), TOGETHER), tmp_path)
    head, trainer, alone = (
        ScriptedHead(max_steps=1),
        Fragile(tiny_policy(), TOGETHER),
        GrpoClient(tiny_policy(), TOGETHER),
    )
    run(head, trainer, tmp_path)
    first, _, last = step_groups(0)
    alone.forward_backward([first])
    alone.forward_backward([last])  # still under suspicion: it comes after the one that killed
    alone.optim_step()
    assert weights(trainer) == weights(alone)
    assert head.metrics[0]["groups/unfit"] == 1
    assert (
        "train-1 of  is left out of step 0: the learner died 2 times while it trained on this group alone"
        in caplog.text
    )
    assert json.loads((tmp_path / CRASH_RECORD).read_text())["left_out"] == [1]
