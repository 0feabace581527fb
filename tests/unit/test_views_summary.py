"""What the closing table of a run says of held-out tasks that failed, and of a run without a step."""

from __future__ import annotations

from echo2.views.display import show_summary
from test_views_display import console, shown, summary


def test_the_summary_tells_why_held_out_tasks_failed() -> None:
    show_summary({**summary(), "eval_failed": {40: {"reward_failed": 9, "gave_up": 1}}}, on := console())
    assert "version 40 without the tasks that failed: 9 reward_failed, 1 gave_up" in shown(on)


def test_the_summary_of_a_run_without_a_step_has_no_means() -> None:
    nothing = {"learner_idle_ratio": None, "staleness_mean": None, "staleness_max": None}
    show_summary({**summary(), **nothing}, on := console())
    assert not [word for word in ("idle", "staleness") if word in shown(on)]
