"""The forecast against the simulator, which runs the real control code, and against the fluid formulas."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import UserError
from echo2.head.fleet.decide import formulas
from echo2.head.fleet.decide.forecast import OneMachine, ScoringDelays, WorkerKind, forecast, longest_of
from echo2.head.fleet.decide.formulas import Demand
from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario

INSTALL_SECONDS = 0.1


def demand_of(scenario: Scenario) -> Demand:
    # 0.1 s: from the end of a step to the snapshot's announcement, through the simulated network.
    travels = scenario.broadcast.seconds + INSTALL_SECONDS + 0.1
    return Demand(
        scenario.groups_per_step,
        scenario.group_size,
        scenario.publish_every,
        scenario.max_staleness,
        scenario.learner.train_seconds,
        travels,
        scenario.generate_during_broadcast,
        INSTALL_SECONDS,
    )


def scenario_of(
    bound: int, kappa: int, count: int, factor: float, broadcast: float, pauses: bool = False, batch: int = 2
) -> Scenario:
    train, groups = 10.0, 32
    return Scenario(
        max_steps=24,
        groups_per_step=groups,
        group_size=8,
        max_staleness=bound,
        publish_every=kappa,
        groups_per_batch=batch,
        lease_seconds=1e4,
        heartbeat_seconds=5.0,
        generate_during_broadcast=not pauses,
        broadcast=BroadcastSpec(scheme="fixed", seconds=broadcast * train),
        workers=(
            WorkersSpec(
                count=count,
                capacity_groups=batch,
                rollouts_per_second=factor * groups * 8 / train / count,
                spread=0.2,
                install_seconds=INSTALL_SECONDS,
                latency_seconds=0.01,
                bytes_per_second=1e12,
            ),
        ),
        learner=LearnerSpec(train_seconds=train, spread=0.0, publish_seconds=0.0, checkpoint_every=1000),
    )


@pytest.mark.parametrize(
    ("bound", "kappa", "count", "factor", "broadcast", "pauses"),
    [
        (0, 1, 8, 1.0, 0.3, False),  # on-policy: sampling and training take turns
        (1, 1, 6, 1.5, 0.2, False),
        (1, 1, 12, 0.7, 0.2, False),  # too small
        (2, 1, 8, 1.1, 0.5, False),
        (3, 2, 8, 1.8, 0.8, True),  # the paper's mode
        (3, 2, 8, 1.4, 0.8, True),  # ... below its minimum
        (6, 5, 6, 1.2, 0.5, True),
    ],
)
def test_idle_staleness_and_seconds_are_those_of_the_simulator(
    bound: int, kappa: int, count: int, factor: float, broadcast: float, pauses: bool
) -> None:
    scenario = scenario_of(bound, kappa, count, factor, broadcast, pauses)
    predicted = forecast(
        demand_of(scenario), [WorkerKind(scenario.worker_rate(scenario.workers[0]), count, 2, 0.2)], scenario.max_steps
    )
    found = run_scenario(scenario, seed=3, keeps_events=False)
    assert found.steps == scenario.max_steps
    assert predicted.idle_ratio == pytest.approx(found.idle_ratio, abs=0.05)
    assert predicted.run_seconds == pytest.approx(found.seconds, rel=0.07)  # it knows whole batches, not slots
    assert predicted.mean_staleness == pytest.approx(found.mean_staleness, abs=0.2)
    assert predicted.max_staleness == found.max_staleness <= bound


@given(
    bound=st.integers(0, 5),
    kappa=st.integers(0, 5),
    broadcast=st.floats(0.0, 2.0),
    factor=st.floats(0.3, 3.0),
    count=st.integers(1, 20),
    batch=st.integers(1, 6),
    overlaps=st.booleans(),
)
def test_a_forecast_keeps_the_bound_and_never_beats_the_fluid(
    bound: int, kappa: int, broadcast: float, factor: float, count: int, batch: int, overlaps: bool
) -> None:
    demand = Demand(12, 4, 1 + kappa % (bound + 1), bound, 1.0, broadcast, overlaps)
    mu = factor * demand.rollouts_per_step
    found = forecast(demand, [WorkerKind(mu / count, count, batch, 0.2)], 60)
    assert found.max_staleness <= bound
    assert math.fsum(found.staleness.values()) == pytest.approx(1.0)
    assert 0.0 <= found.idle_ratio < 1.0
    assert found.run_seconds >= 60 * demand.train_seconds
    if demand.pause_seconds == 0:
        assert found.step_seconds >= formulas.step_seconds(demand, mu) * 0.93  # of 30 steps with random durations


def test_very_many_quick_workers_behave_like_the_fluid_model() -> None:
    for bound, kappa, broadcast in ((0, 1, 0.3), (1, 1, 0.3), (2, 2, 0.5), (3, 2, 0.2)):
        demand = Demand(400, 1, kappa, bound, 1.0, broadcast)
        found = forecast(demand, [WorkerKind(rate=0.9 * 400 / 10, count=10, groups_per_batch=1)], 80)
        assert found.step_seconds == pytest.approx(formulas.step_seconds(demand, 0.9 * 400), rel=0.02)


def test_the_same_inputs_give_the_same_forecast_and_a_long_run_is_extrapolated() -> None:
    demand = Demand(16, 4, 1, 2, 1.0, 0.3)
    paces = [WorkerKind(40.0, 2, 2, 0.3), WorkerKind(5.0, 3, 4, 0.1)]
    assert forecast(demand, paces, 50) == forecast(demand, paces, 50)
    short, long = forecast(demand, paces, 120), forecast(demand, paces, 12_000)
    assert long.run_seconds == pytest.approx(short.run_seconds + 11_880 * short.step_seconds)
    assert long.steady_idle_ratio == short.steady_idle_ratio


def test_processes_of_one_machine_share_its_cores() -> None:
    # In each step the learner needs 4 s of a core, and two workers 2 s each: all three share two cores for 3 s, then
    # the learner has one for the 2 s that it still needs.
    demand = Demand(2, 1, 1, 1, 4.0, 0.0)
    found = forecast(demand, [WorkerKind(0.5, 2, 1)], 40, machine=OneMachine(2))
    assert found.step_seconds == pytest.approx(5.0, rel=0.02)  # nothing is sampled during the last step
    assert found.steady_idle_ratio == pytest.approx(0.0, abs=1e-9)
    # One core has all the 8 s to do.
    assert forecast(demand, [WorkerKind(0.5, 2, 1)], 40, machine=OneMachine(1)).step_seconds == pytest.approx(
        8.0, rel=0.03
    )


def test_a_machine_with_a_core_for_each_process_is_as_good_as_many_machines() -> None:
    for demand in (Demand(16, 4, 1, 2, 1.0, 0.3), Demand(8, 2, 2, 3, 1.0, 0.1), Demand(8, 2, 1, 0, 1.0, 0.2)):
        kinds = [WorkerKind(40.0, 2, 2, 0.3), WorkerKind(5.0, 3, 4, 0.1)]
        alone = forecast(demand, kinds, 50)
        shared = forecast(demand, kinds, 50, machine=OneMachine(6, demand.broadcast_seconds))
        assert shared.step_seconds == pytest.approx(alone.step_seconds)
        assert shared.idle_ratio == pytest.approx(alone.idle_ratio)
        assert shared.staleness == alone.staleness


def test_a_learner_that_trains_on_groups_as_they_arrive_waits_less_and_an_evaluation_makes_it_wait() -> None:
    demand, kinds = Demand(8, 1, 1, 0, 4.0, 0.0), [WorkerKind(1.0, 1, 1)]  # on-policy: 8 s of sampling, 4 of training
    whole = forecast(demand, kinds, 40, machine=OneMachine(2))
    parts = forecast(demand, kinds, 40, machine=OneMachine(2, num_parts=8))
    assert whole.step_seconds == pytest.approx(12.0)
    assert parts.step_seconds == pytest.approx(8.5)  # the last group's training is all that sampling does not hide
    judged = forecast(demand, kinds, 40, machine=OneMachine(2, eval_groups=4, eval_every=1))
    assert judged.step_seconds == pytest.approx(16.0)
    once = forecast(demand, kinds, 40, machine=OneMachine(2, eval_groups=4))
    assert once.run_seconds == pytest.approx(whole.run_seconds + 4.0)


def test_a_partly_full_batch_takes_proportionally_less() -> None:
    demand = Demand(3, 1, 1, 0, 1.0, 0.0)  # three groups at once of six: 6 s when full
    for share, seconds in ((1.0, 6.0), (0.5, 4.5), (0.0, 3.0)):
        kind = WorkerKind(1.0, 1, 6, fixed_share=share)
        assert forecast(demand, [kind], 40).step_seconds == pytest.approx(1.0 + seconds)


def hanging(usual: float, share: float, late: float) -> ScoringDelays:
    """A judge that hangs for a share of the groups, and is asked again, when it hangs as often; `late`: mean of what
    that takes."""
    count, stall = 512, late * (1 - share)
    shares = [(place + 0.5) / count for place in range(count)]
    return ScoringDelays(tuple(usual + stall * int(math.log(1 - one) / math.log(share)) for one in shares))


@pytest.mark.parametrize(
    ("workers", "usual", "share", "late", "measured"),
    [(2, 0.20, 0.135, 6.12, 0.381), (3, 0.42, 0.160, 6.05, 0.157), (4, 0.51, 0.156, 6.07, 0.098)],
)
def test_a_judge_that_hangs_is_forecast_from_its_own_times(
    workers: int, usual: float, share: float, late: float, measured: float
) -> None:
    """Against real runs with paced workers (docs/log.md, "Faults together"), of which a seed is one draw."""
    demand, kind = Demand(24, 4, 2, 3, 6.0, 1.0), WorkerKind(5.0, workers, 1, 0.28)
    delays = hanging(usual, share, late)
    walks = [forecast(demand, [kind], 20, seed, delays=delays).steady_idle_ratio for seed in range(16)]
    assert statistics.fmean(walks) == pytest.approx(measured, abs=0.05)
    assert forecast(demand, [kind], 20, delays=ScoringDelays()) == forecast(demand, [kind], 20)
    if workers == 4:
        assert forecast(demand, [kind], 20).steady_idle_ratio == 0.0


def test_a_rare_stall_strikes_a_large_step_also_where_the_forecast_is_scaled_down() -> None:
    """Of 8,192 groups that one of a thousand takes a minute: each step has some, and the window hides ten seconds."""
    delays = ScoringDelays((*(999 * [0.0]), 60.0))
    demand, kind = Demand(8192, 1, 1, 1, 20.0, 0.1), WorkerKind(2.0, 512, 8, 0.1)
    idle = [forecast(demand, [kind], 200, delays=one).steady_idle_ratio for one in (None, delays)]
    assert idle[0] < 0.02 < 0.4 < idle[1]


def test_a_forecast_without_workers_is_refused() -> None:
    demand = Demand(16, 4, 1, 2, 1.0, 0.3)
    for paces in ([], [WorkerKind(0.0)], [WorkerKind(1.0, count=0)]):
        with pytest.raises(UserError, match="needs workers"):
            forecast(demand, paces, 10)


def test_the_longest_of_some_durations() -> None:
    rng = random.Random(5)
    drawn = statistics.fmean(max(rng.lognormvariate(0.0, 0.4) for _ in range(8)) for _ in range(20_000))
    assert longest_of(8, 0.4) == pytest.approx(drawn, rel=0.02)
    assert longest_of(1, 0.0) == 1.0
