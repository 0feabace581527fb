"""The learner's columns of a step that had nothing to measure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from echo2.config import Config
from echo2.core.types import RolloutGroup
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import LossStats, StepMeter, StepStats
from learner_cases import tiny_policy
from test_learner_loop import OPTIONS, ScriptedHead, run, step_groups


def test_a_mean_over_nothing_is_absent(tmp_path: Path) -> None:
    """All groups of step 1 are flat: no token is in its loss. 0, or an effective sample size of 1, would be read as a
    measurement.
    """
    head = ScriptedHead(max_steps=2)
    head.groups = lambda step: [flat(group) if step == 1 else group for group in step_groups(step)]
    run(head, GrpoClient(tiny_policy(), OPTIONS), tmp_path, max_steps=2)
    means = {"mismatch_kl/mean", "mismatch_kl/max", "mismatch/abs_log_ratio", "mismatch/ratio_max", "ess"}
    means |= {"entropy/mean", "loss/mean", "loss/dropped_positive", "loss/dropped_negative", "loss/capped"}
    means |= {"clip_ratio/mean"}
    assert means <= head.metrics[0].keys()
    assert not means & head.metrics[1].keys()
    assert head.metrics[1]["reward/frac_zero_std"] == 1.0
    assert head.metrics[1]["off_policy/mean"] == 0.0
    assert "kl/mean" not in head.metrics[0]  # there is no reference


def flat(group: RolloutGroup) -> RolloutGroup:
    return dataclasses.replace(group, rollouts=tuple(dataclasses.replace(r, reward=1.0) for r in group.rollouts))


def test_an_empty_step_has_no_means() -> None:
    row = StepMeter(0, Config()).metrics(StepStats(1e-3, 0.0, 0, True, LossStats()))
    assert json.dumps(row, allow_nan=False)
    assert not {name for name in row if name.startswith(("reward/", "off_policy/", "completions/", "entropy/"))}
