"""The four protocols are four settings of one machine: alike but for a few keys; simulated, each keeps its bound."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from echo2 import config
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "presets"
NAMES = ("sequential-pull", "async-push-pull", "rolloutpipe", "echo2")
PROTOCOL = {
    "schedule.max_staleness",
    "schedule.publish_every",
    "schedule.order",
    "learner.tokens_per_microbatch",
}


def load(name: str) -> config.Config:
    return config.load(FOLDER / f"{name}.toml")


def values(name: str) -> dict[str, object]:
    settings = load(name)
    return {f"{section}.{key}": getattr(getattr(settings, section), key) for section, key, *_ in config.all_fields()}


def simulate(name: str, seed: int) -> Report:
    """Four workers, one of them slow, that sample a step in about the time that the learner trains one."""
    settings = load(name)
    schedule, sampling = settings.schedule, settings.sampling
    scenario = Scenario(
        name=name,
        max_steps=12,
        groups_per_step=schedule.groups_per_step,
        group_size=sampling.group_size,
        max_staleness=schedule.max_staleness,
        publish_every=schedule.publish_every,
        order=schedule.order,
        groups_per_batch=4,
        swap="between" if settings.swap_of(is_own=True, draws=True) == "between" else "during",
        workers=(WorkersSpec(count=3, rollout_seconds=1.5), WorkersSpec(rollout_seconds=6.0)),
        learner=LearnerSpec(train_seconds=4.0),
    )
    report = run_scenario(scenario, seed)
    assert report.finished, report.to_text()
    return report


def test_there_are_four_presets() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(NAMES)


def test_presets_differ_in_the_protocol_only() -> None:
    first = values(NAMES[0])
    for name in NAMES[1:]:
        other = values(name)
        assert {key for key in other if other[key] != first[key]} <= PROTOCOL, name
    assert len({tuple(str(values(name)[key]) for key in sorted(PROTOCOL)) for name in NAMES}) == len(NAMES)


def test_presets_have_the_bounds_of_their_names() -> None:
    bounds = {name: (load(name).schedule.max_staleness, load(name).schedule.publish_every) for name in NAMES}
    assert bounds["sequential-pull"] == bounds["rolloutpipe"] == (0, 1)
    assert bounds["echo2"] == (3, 2)
    assert bounds["async-push-pull"][0] > 3
    step_tokens = max(load(name).schedule.groups_per_step * 8 * (12 + 16) for name in NAMES)  # prompts are below 16
    whole = {name for name in NAMES if load(name).learner.tokens_per_microbatch > step_tokens}
    assert whole == {"sequential-pull"}
    assert {name for name in NAMES if load(name).schedule.order == "frontier"} == {"rolloutpipe"}
    assert load("rolloutpipe").learner.tokens_per_microbatch == 192


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_keeps_its_bound_and_drops_nothing(name: str) -> None:
    for seed in range(2):
        report = simulate(name, seed)
        bound = load(name).schedule.max_staleness
        assert min(bound, 1) <= report.max_staleness <= bound, (name, seed)
        assert "stale" not in report.refused, (name, seed, report.refused)
        assert report.retired == {}, (name, seed)


def test_a_wider_window_keeps_the_learner_busier() -> None:
    presets = ("sequential-pull", "echo2", "async-push-pull")
    idle = {name: statistics.fmean(simulate(name, seed).idle_ratio for seed in range(4)) for name in presets}
    assert idle["sequential-pull"] > 1.3 * idle["echo2"], idle
    assert idle["echo2"] > idle["async-push-pull"], idle
