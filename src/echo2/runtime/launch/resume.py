"""Decides which settings a resumed run may change: lists the changes, and refuses those that the ledger or the
checkpoints depend on. Names the command that resumes a run.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence

from echo2 import config as configuration
from echo2.config import Config
from echo2.errors import UserError
from echo2.runtime.lifeline import LIFELINE_VARIABLE

#: Settings that a resumed run can't change -> the reason.
FIXED = {
    "model.path": "the checkpoints are of that model",
    "lora.rank": "the checkpoints are of an adapter of that rank, or of a whole model",
    "lora.alpha": "the adapter in the checkpoints is scaled by it",
    "lora.targets": "the adapter in the checkpoints is of these layers",
    "lora.path": "the checkpoints go on from it",
    "sampling.group_size": "delivered groups have that many rollouts",
    "run.seed": "the tasks of issued groups follow from it",
    "tasks.source": "issued groups are of its tasks",
    "tasks.params": "issued groups are of the tasks that follow from it",
    "tasks.environment": "delivered groups were played in it",
}


def changes(old: Config, new: Config) -> list[str]:
    """Return one line per setting that differs: `learner.lr: 1e-06 -> 2e-06`.

    Raises:
        UserError: a setting of `FIXED` differs, or max_staleness was lowered.
    """
    found = []
    for section, key, *_ in configuration.all_fields():
        name = f"{section}.{key}"
        before, after = (getattr(getattr(config, section), key) for config in (old, new))
        if before == after:
            continue
        change = f"{name}: {json.dumps(before)} -> {json.dumps(after)}"
        if name in FIXED:
            raise UserError(f"--resume cannot change {change}: {FIXED[name]}. Set it back, or start another --out.")
        found.append(change)
    before, after = old.schedule.max_staleness, new.schedule.max_staleness
    if after < before:
        raise UserError(
            f"--resume cannot lower schedule.max_staleness ({before} -> {after}): groups that are sampled "
            f"already would be thrown away, and `echo2 audit` would find older ones. Set it to {before} or more."
        )
    return found


def how_to_continue(arguments: Sequence[str]) -> str:
    """Return the line for a run that was interrupted: the command that continues it, from its `arguments`, those of
    `echo2`. Only --resume is named if Python started the run: nobody typed the command."""
    if LIFELINE_VARIABLE in os.environ:
        return "interrupted; continue the run with --resume"
    resume = [] if "--resume" in arguments else ["--resume"]
    return f"interrupted; continue the run with: {shlex.join(['echo2', *arguments, *resume])}"
