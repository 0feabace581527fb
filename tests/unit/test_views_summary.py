"""What the end of a run says of held-out tasks that failed, of a run without a step, and of an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.views.display import next_steps, show_summary
from test_views_display import console, shown, summary


def test_the_summary_says_why_held_out_tasks_failed() -> None:
    show_summary({**summary(), "eval_failed": {40: {"reward_failed": 9, "gave_up": 1}}}, on := console())
    assert "version 40 without the tasks that failed: 9 reward_failed, 1 gave_up" in shown(on)


def test_the_summary_of_a_run_without_a_step_has_no_means() -> None:
    nothing = {"learner_idle_ratio": None, "staleness_mean": None, "staleness_max": None}
    show_summary({**summary(), **nothing}, on := console())
    assert not [word for word in ("idle", "staleness") if word in shown(on)]


@pytest.mark.parametrize(("file", "kind"), [("adapter_config.json", "PEFT adapter"), ("config.json", "Hugging Face")])
def test_the_end_of_a_run_says_what_its_checkpoint_is(tmp_path: Path, file: str, kind: str) -> None:
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3" / file).touch()
    where, *_ = next_steps({"directory": str(tmp_path), "checkpoint": 3, "steps": 3})
    assert f"checkpoints/step_3, a {kind}" in where
