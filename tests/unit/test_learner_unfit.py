"""Groups that can't be trained on: left out of their step and named, instead of ending the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from echo2.core.types import RUN_POLICY, GroupRef
from echo2.learner.grpo.loop import GrpoClient
from learner_cases import group, rollout, tiny_policy
from test_learner_loop import OPTIONS, ScriptedHead, run, step_groups, weights

TOO_LONG = group(1, [1] * 250, [rollout([1] * 7)])


def test_a_group_that_the_model_cannot_read_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step goes on with the others, and the head is told that it is done with all of them."""
    head = ScriptedHead(max_steps=1)
    good = step_groups(0)
    head.groups = lambda step: [good[0], dataclasses.replace(TOO_LONG, worker_id="w-9"), good[2]]
    trainer, alone = GrpoClient(tiny_policy(), OPTIONS), GrpoClient(tiny_policy(), OPTIONS)
    run(head, trainer, tmp_path)
    alone.forward_backward([good[0], good[2]])
    alone.optim_step()
    assert weights(trainer) == weights(alone)
    assert (head.version, head.metrics[0]["groups/unfit"]) == (1, 1)
    assert "train-1 of w-9 is left out of step 0: 250 + 7 tokens, where the model has 256 positions" in caplog.text


def test_a_step_of_nothing_but_unfit_groups_changes_nothing(tmp_path: Path) -> None:
    head, trainer = ScriptedHead(max_steps=1), GrpoClient(tiny_policy(), OPTIONS)
    before = weights(trainer)
    head.groups = lambda step: [dataclasses.replace(TOO_LONG, group=GroupRef(RUN_POLICY, "train", i)) for i in range(3)]
    run(head, trainer, tmp_path)
    assert (head.version, head.metrics[0]["groups/unfit"], weights(trainer)) == (1, 3, before)
