"""Groups that can't be trained on: left out of their step and named, instead of ending the run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from echo2.learner.trainer import Trainer
from echo2.types import GroupRef, RolloutGroup
from learner_cases import VOCAB, group, rollout, tiny_policy
from test_learner_loop import OPTIONS, ScriptedHead, run, step_groups, weights

UNFIT: dict[str, tuple[RolloutGroup, str]] = {
    "no prompt": (group(1, [], [rollout([1, 2])]), "prompt is empty"),
    "longer than leased": (group(1, [1], [rollout([1] * 257)]), "sampling.max_tokens is 256"),
    "beyond the context": (group(1, [1] * 250, [rollout([1] * 7)]), r"250 \+ 7 tokens.*256 positions"),
    "no such token": (group(1, [1], [rollout([VOCAB])]), "vocabulary"),
    "no such prompt token": (group(1, [VOCAB], [rollout([1])]), "vocabulary"),
    "no such candidate": (group(1, [1], [rollout([1], support=[[1, VOCAB]])]), "vocabulary"),
    "more candidates than tokens": (group(1, [1], [rollout([1], support=[[1] * (VOCAB + 1)])]), "14 candidates"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_group_that_cannot_be_trained_on_is_left_out_and_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step goes on with the others, and the head is told that it is done with all of them."""
    bad, problem = UNFIT[name]
    head = ScriptedHead(max_steps=1)
    good = step_groups(0)
    head.groups = lambda step: [good[0], dataclasses.replace(bad, worker_id="w-9"), good[2]]
    trainer, alone = Trainer(tiny_policy(), OPTIONS), Trainer(tiny_policy(), OPTIONS)
    run(head, trainer, tmp_path)
    alone.forward_backward([good[0], good[2]])
    alone.optim_step()
    assert weights(trainer) == weights(alone)
    assert (head.version, head.metrics[0]["groups/unfit"]) == (1, 1)
    assert re.search(f"train-1 of w-9 is left out of step 0: .*{problem}", caplog.text)


def test_a_step_of_nothing_but_unfit_groups_changes_nothing(tmp_path: Path) -> None:
    head, trainer = ScriptedHead(max_steps=1), Trainer(tiny_policy(), OPTIONS)
    before = weights(trainer)
    head.groups = lambda step: [
        dataclasses.replace(bad, group=GroupRef("train", i)) for i, (bad, _) in enumerate(UNFIT.values())
    ]
    run(head, trainer, tmp_path)
    assert (head.version, head.metrics[0]["groups/unfit"], weights(trainer)) == (1, len(UNFIT), before)
