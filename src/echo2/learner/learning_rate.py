"""The learning rate of a step, from `learner.lr`, `learner.warmup_steps` and `learner.lr_schedule`."""

from __future__ import annotations

import math

from echo2.config.sections import LearnerConfig


def learning_rate(learner: LearnerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `num_steps`."""
    if step < learner.warmup_steps:
        return learner.lr * (step + 1) / learner.warmup_steps
    if learner.lr_schedule == "constant":
        return learner.lr
    done = (step - learner.warmup_steps) / max(1, num_steps - learner.warmup_steps)
    left = 1.0 - min(1.0, done)
    return learner.lr * (left if learner.lr_schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))
