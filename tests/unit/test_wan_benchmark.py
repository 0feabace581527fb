"""The arithmetic of the broadcast's benchmark: what is divided by what, who counts, and what is run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import broadcast_figures as figures
import broadcast_node as node
import broadcast_prediction as prediction
import broadcast_scenarios as scenarios
import broadcast_trial as trial
import connections
import pytest
from wan import lines, net

from echo2.weights.broadcast.decide.origin import PACE
from echo2.weights.broadcast.probe import CONNECTIONS
from echo2.weights.format.segments import chunk_bytes_for

MIB = 1 << 20


def known(name: str) -> Any:
    return {scenario.name: scenario for scenario in scenarios.scenarios()}[name]


def result(name: str = "even-4", setup: str = "trees", **changes: Any) -> Any:
    scenario = known(name)
    plain = trial.Result(
        scenario=name,
        setup=setup,
        num_workers=len(scenario.workers),
        num_bytes=MIB,
        seconds=dict.fromkeys(scenario.workers, 10.0),
        slow=tuple(scenario.slow),
        victim=None,
        fault_seconds=None,
        noticed_seconds=None,
        floor_seconds=8.0,
        bound_seconds=8.0,
        origin_sent_ratio=1.0,
        peers_sent_ratio=1.0,
        cpu_seconds={},
        machine_busy_share=0.5,
        late_share=0.0,
        queue_drops=0,
        bundle_packets=1.0,
        notes=[],
    )
    return replace(plain, **changes)


def test_the_emulator_gets_the_values_of_a_link_in_its_order() -> None:
    link = net.AccessLink(100.0, 40.0, 25.0, 0.5, 200.0, is_dead=False, is_closed=True)
    assert link.words() == "100 40 25 0.5 200 0 1"


def test_the_floor_is_the_fastest_workers_link() -> None:
    assert known("even-8").floor_seconds(256 * MIB) == pytest.approx(256 * MIB * 8 / 100e6)
    assert known("slow-8").floor_seconds(256 * MIB) == known("even-8").floor_seconds(256 * MIB)


def test_no_scheme_beats_the_uplinks_taken_together() -> None:
    size = 256 * MIB
    assert known("even-8").bound_seconds(size) == known("even-8").floor_seconds(size)
    uneven = known("uneven-8")
    assert uneven.bound_seconds(size) == pytest.approx(size * 8e-6 / ((100 + 360) / 8))


def test_slow_workers_do_not_count() -> None:
    scenario = known("slow-8")
    (slow,) = scenario.slow
    late = result("slow-8", seconds={worker: 200.0 if worker == slow else 20.0 for worker in scenario.workers})
    assert late.last == 20.0


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (8, 0), (10, 0), (11, 1), (16, 1), (22, 2)])
def test_the_quantile_leaves_out_one_in_eleven(count: int, left_out: int) -> None:
    shown = result(seconds={f"w{at:02}": float(at) for at in range(1, count + 1)})
    assert shown.quantile == count - left_out


def test_a_busy_machine_is_not_mistaken_for_a_slow_network() -> None:
    assert result().is_network_bound
    assert not result(machine_busy_share=0.95).is_network_bound
    assert not result(late_share=0.05).is_network_bound


def test_ratios_are_taken_within_a_round() -> None:
    rounds = figures.Rounds()
    for number, (alone, shared) in enumerate([(10.0, 11.0), (20.0, 30.0), (40.0, 48.0)]):
        rounds.add(number, result("alone", seconds={"w01": alone}))
        rounds.add(number, result("even-4", "chain", seconds={f"w{at:02}": shared for at in range(1, 5)}))
    rows = {(row["scenario"], row["setup"]): row for row in rounds.summary(scenarios.chosen(["even-4"]))}
    over = rows["even-4", "chain"]["over_alone"]
    assert over == pytest.approx({"median": 1.2, "p90": 1.5, "min": 1.1, "max": 1.5})
    assert rows["even-4", "chain"]["over_floor"]["median"] == 30.0 / 8.0


def test_first_and_later_broadcasts_have_distributions_of_their_own() -> None:
    rounds = figures.Rounds()
    for number in range(5):
        for nth in (1, 2, 3):
            alone = 10.0 if nth == 1 else 5.0
            rounds.add(number, result("alone", seconds={"w01": alone}, nth=nth))
            rounds.add(number, result("even-4", seconds={"w01": alone * (1.0 + number / 10 + nth)}, nth=nth))
    rows = {row["which"]: row for row in rounds.summary([known("even-4")])}
    assert rows["first"]["over_alone"] == pytest.approx({"median": 2.2, "p90": 2.4, "min": 2.0, "max": 2.4})
    assert rows["later"]["over_alone"] == pytest.approx({"median": 3.7, "p90": 4.3, "min": 3.0, "max": 4.4})
    assert rows["later"]["broadcasts"] == 10


def test_the_plain_connections_that_are_measured_are_those_of_a_run() -> None:
    assert connections.WAYS["shared"].connections == CONNECTIONS
    assert connections.WAYS["shared"].pace == PACE
    assert chunk_bytes_for(24 * MIB) == connections.CHUNK_BYTES


def test_the_cost_of_a_fault_excludes_its_detection() -> None:
    rounds = figures.Rounds()
    rounds.add(0, result("even-8", "chain", seconds={"w01": 20.0}))
    rounds.add(0, result("kill-8", "chain", seconds={"w01": 25.0}, noticed_seconds=3.0, victim="w02"))
    (row,) = (row for row in rounds.summary(scenarios.chosen(["kill-8"])) if row["scenario"] == "kill-8")
    assert row["over_undisturbed_less_detection"]["median"] == pytest.approx(22.0 / 20.0)


def test_a_failed_trial_gives_no_figure_and_is_reported() -> None:
    rounds = figures.Rounds()
    rounds.fail(0, "even-4", "star", "w01 has other bytes")
    assert rounds.summary(scenarios.scenarios()) == []
    assert rounds.failures == [{"round": 0, "scenario": "even-4", "setup": "star", "why": "w01 has other bytes"}]


def test_results_can_be_stored_and_shown() -> None:
    rounds = figures.Rounds()
    rounds.add(0, result("alone", seconds={"w01": 10.0}, machine_busy_share=0.99))
    rows = rounds.summary(scenarios.chosen(["alone"]))
    assert json.loads(json.dumps({"summary": rows, "trials": rounds.all()}))["trials"][0]["last"] == 10.0
    assert "too busy" in figures.table(rows)


def test_selecting_a_scenario_selects_its_reference_first() -> None:
    names = [scenario.name for scenario in scenarios.chosen(["kill-8"])]
    assert names == ["alone", "even-8", "kill-8"]
    assert not set(scenarios.EXTRA) & {scenario.name for scenario in scenarios.chosen([])}
    with pytest.raises(ValueError, match="no scenario nonsense"):
        scenarios.chosen(["nonsense"])


def test_every_scenario_comes_after_its_reference() -> None:
    seen: set[str] = {""}
    for scenario in scenarios.scenarios():
        assert scenario.name not in seen
        seen.add(scenario.name)
        assert scenario.alone in seen
        assert scenario.undisturbed in seen


def test_the_busiest_relay_is_the_one_with_most_below_it() -> None:
    chain = {"a": ("", ""), "b": ("a", "a"), "c": ("b", "b")}
    assert node.busiest(chain) == "a"
    assert node.busiest({"a": ("", "b"), "b": ("", ""), "c": ("b", "b")}) == "b"
    assert node.busiest({"a": ("",), "b": ("",)}) == "a"  # a star has none: anyone
    assert node.busiest({"a": ("b",), "b": ("a",)}) in ("a", "b")  # routes on their way to being changed


def test_the_simulator_is_only_asked_what_it_models() -> None:
    asked = prediction.predicted_seconds
    assert asked(known("even-4"), "trees", 8, 16 * MIB) >= known("even-4").floor_seconds(16 * MIB)
    assert [asked(known(name), "trees", 8, 16 * MIB) for name in ("loss-8", "kill-8", "cubic-8")] == [None] * 3


def test_the_content_depends_on_the_seed_only() -> None:
    assert lines.content(1000, 1) == lines.content(1000, 1) != lines.content(1000, 2)
    assert len(lines.content(lines.PIECE_BYTES + 1, 1)) == lines.PIECE_BYTES + 1
    assert lines.digest([b"ab", b"c"]) == lines.digest([memoryview(b"abc")])
