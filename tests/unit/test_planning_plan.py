"""`echo2 plan`: the choice, its figures, and every refusal."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.cli import main
from echo2.config.offers import Offer
from echo2.core.errors import UserError
from echo2.head.fleet.decide.activation import Candidate
from echo2.learner.core.fitting import num_parameters, snapshot_bytes
from echo2.planning import plan_request
from echo2.planning.plan import NoPlanError, by_staleness, least_idle, make_plan
from echo2.planning.plan_inputs import BroadcastInputs, PlanInputs, read_past_run
from echo2.planning.probe import Measured, as_offer
from echo2.planning.remedies import Remedy, remedies
from echo2.planning.simulate import rehearse
from first_plans import write_files, write_model
from greedy_choice import choose_greedy
from seeds import examples

#: The paper's: 128 x 16 rollouts, 4 A100, RTX 5090 at $0.35; the rate of one is fitted (docs/capacity.md).
CARD = Offer("rtx5090", 0.35, 0.3125, count=30)
PAPER = PlanInputs(
    groups_per_step=128,
    group_size=16,
    steps=100,
    max_staleness=3,
    train_seconds=1631.2,
    offers=(CARD,),
    broadcast=BroadcastInputs(seconds=1437.0),
    learner_usd_per_hour=12.24,
    groups_per_batch=1,
    generate_during_broadcast=False,
)
VERL_SYNC, VERL_ASYNC = 24.48 * 1508.2 / 3600, 24.48 * 1582.3 / 3600


def test_vector_8_the_paper_s_bills_and_the_plan_for_its_setting() -> None:
    assert (pytest.approx(10.26, abs=0.005), pytest.approx(10.76, abs=0.005)) == (VERL_SYNC, VERL_ASYNC)
    plan = make_plan(PAPER)
    assert (plan.machines, plan.max_staleness, plan.publish_every) == ({"rtx5090": 8}, 3, 2)
    assert plan.usd_per_step == pytest.approx(6.82, abs=0.02)
    assert 1 - plan.usd_per_step / VERL_SYNC == pytest.approx(0.336, abs=0.003)
    assert 1 - plan.usd_per_step / VERL_ASYNC == pytest.approx(0.367, abs=0.003)
    assert plan.prediction.steady_idle_ratio < 0.02
    assert (plan.binds, plan.fleet_set_by) == ("learner", "broadcast")


def test_deltas_make_kappa_1_affordable_and_the_plan_cheaper_than_the_paper_s() -> None:
    deltas = BroadcastInputs(full_bytes=16.4e9, delta_bytes=16.4e9 / 32)
    plan = make_plan(replace(PAPER, broadcast=deltas, generate_during_broadcast=True))
    assert plan.publish_every == 1
    assert plan.max_staleness <= 3
    assert plan.floor_usd_per_step == pytest.approx(5.546, abs=0.001)
    assert 1 - plan.usd_per_step / VERL_SYNC >= 0.38
    assert 1 - plan.usd_per_step / VERL_ASYNC >= 0.41


def test_machines_whose_weights_come_after_their_steps_are_not_planned_with_and_a_refusal_names_them() -> None:
    """Only 1 / 1.1 of the machines count for the time of a broadcast, so that a few slow ones looked cheap and able."""
    slow = Offer("slow", 0.01, 0.3125, count=1, down_mbps=1.0)
    deltas = BroadcastInputs(full_bytes=16.4e9, delta_bytes=16.4e9 / 16)  # 8,200 s over 1 Mbit/s: 5.03 steps
    inputs = replace(PAPER, offers=(CARD, slow), broadcast=deltas, generate_during_broadcast=True)
    plan = make_plan(inputs)
    assert list(plan.machines) == ["rtx5090"]
    assert inputs.outrun(3, 1) == {"slow": pytest.approx(5.03, abs=0.01)}
    with pytest.raises(NoPlanError, match=r"slow \(5.0 steps\).*max_staleness >= 6"):
        make_plan(replace(inputs, offers=(replace(CARD, count=2), slow)))
    assert "slow" in make_plan(replace(inputs, max_staleness=6)).machines


def test_a_plan_agrees_with_its_simulation() -> None:
    inputs = replace(PAPER, steps=16, groups_per_step=32, train_seconds=100.0, broadcast=BroadcastInputs(seconds=40.0))
    inputs = replace(inputs, offers=(CARD, replace(CARD, name="fast", rollouts_per_second=1.0, price_usd_per_hour=1.0)))
    plan = make_plan(replace(inputs, generate_during_broadcast=True))
    found = rehearse(plan, replace(inputs, generate_during_broadcast=True))
    assert found.max_staleness <= plan.max_staleness
    assert found.idle_ratio == pytest.approx(plan.prediction.idle_ratio, abs=0.04)
    assert found.usd + found.learner_usd == pytest.approx(plan.usd, rel=0.05)
    assert found.steady_idle_ratio <= 0.04


@pytest.mark.slow
@given(
    bound=st.integers(1, 4),
    broadcast=st.floats(0.0, 2.0),
    prices=st.lists(st.floats(0.05, 3.0), min_size=1, max_size=4),
    rates=st.lists(st.floats(0.2, 3.0), min_size=4, max_size=4),
    overlaps=st.booleans(),
)
def test_every_plan_keeps_its_promises(
    bound: int, broadcast: float, prices: list[float], rates: list[float], overlaps: bool
) -> None:
    offers = tuple(Offer(f"k{at}", price, rates[at], count=9) for at, price in enumerate(prices))
    inputs = PlanInputs(
        groups_per_step=16,
        group_size=4,
        steps=30,
        max_staleness=bound,
        train_seconds=10.0,
        offers=offers,
        broadcast=BroadcastInputs(seconds=10 * broadcast),
        learner_usd_per_hour=2.0,
        groups_per_batch=1,
        generate_during_broadcast=overlaps,
    )
    try:
        plan = make_plan(inputs)
    except UserError:
        return
    assert plan.max_staleness <= bound
    assert plan.prediction.max_staleness <= plan.max_staleness
    assert plan.prediction.steady_idle_ratio <= inputs.max_idle
    assert plan.rate >= 1.1 * plan.needed_rate * (1 - 1e-6)
    assert all(1 <= plan.machines[name] <= 9 for name in plan.machines)
    machines = [
        Candidate(f"{offer.name}#{number}", offer.effective_rate, offer.effective_usd_per_hour)
        for offer in inputs.offers
        for number in range(offer.count)
    ]
    greedy = choose_greedy(machines, plan.rate)
    assert plan.usd_per_hour <= 2.0 + greedy.usd_per_hour + 1e-6
    for other in by_staleness(inputs):
        assert plan.usd_per_step <= other.usd_per_step * 1.006


def test_on_policy_takes_the_cheapest_step_and_says_that_the_learner_waits() -> None:
    plan = make_plan(replace(PAPER, max_staleness=0, broadcast=BroadcastInputs(seconds=30.0)))
    assert (plan.max_staleness, plan.publish_every, plan.binds) == (0, 1, "staleness")
    assert plan.prediction.staleness == {0: 1.0}
    assert plan.prediction.steady_idle_ratio > 0.1


# ---- refusals --------------------------------------------------------------------------------------------------------


def ways_out(inputs: PlanInputs) -> list[Remedy]:
    """The remedies of inputs that have no plan; each of them has one."""
    with pytest.raises(NoPlanError) as refused:
        make_plan(inputs)
    found = remedies(refused.value)
    for one in found:
        assert one.plan == make_plan(one.inputs)
        assert one.flags or one.counts
    return found


def test_a_broadcast_that_cannot_be_hidden_is_refused_with_what_would_do() -> None:
    inputs = replace(PAPER, max_staleness=1, broadcast=BroadcastInputs(seconds=1700.0))
    with pytest.raises(UserError, match=r"68\.8 s are missing") as refused:
        make_plan(inputs)
    assert "deltas" in str(refused.value)
    staler, larger = ways_out(inputs)[:2]
    assert staler.flags == {"--schedule.max_staleness": "3"}
    assert staler.plan.publish_every == 2
    assert larger.flags == {"--schedule.groups_per_step": "256", "--train-seconds": "3262"}


def test_offers_that_are_too_slow_are_refused_with_the_missing_rate() -> None:
    few = replace(PAPER, offers=(replace(CARD, count=5),))
    with pytest.raises(UserError, match=r"all 5 machines together make 1\.562.* are missing\."):
        make_plan(few)
    found = ways_out(few)
    assert [one.counts for one in found if one.counts] == [{"rtx5090": 8}]
    assert make_plan(replace(PAPER, offers=(replace(CARD, count=8),))).machines == {"rtx5090": 8}
    assert next(one.plan.machines for one in found if "--schedule.max_staleness" in one.flags) == {"rtx5090": 5}


def test_a_window_that_is_too_narrow_for_too_few_machines_needs_both() -> None:
    inputs = replace(
        PAPER, max_staleness=1, broadcast=BroadcastInputs(seconds=1700.0), offers=(replace(CARD, count=1),)
    )
    (both,) = ways_out(inputs)
    assert both.flags
    assert both.counts["rtx5090"] > 1


def test_fleets_of_as_many_but_other_machines_are_forecast_each() -> None:
    kinds = (("a", 1.0, 0.4), ("b", 0.3, 0.2), ("c", 0.1, 0.8))
    inputs = replace(PAPER, groups_per_step=8, group_size=4, max_staleness=1, train_seconds=40.0)
    inputs = replace(inputs, generate_during_broadcast=True, broadcast=BroadcastInputs(seconds=1.0))
    assert make_plan(replace(inputs, offers=tuple(Offer(*kind) for kind in kinds))).machines == {"a": 1, "c": 1}


def test_a_budget_that_no_change_keeps_to_is_dropped_and_the_least_waiting_is_allowed() -> None:
    few = replace(PAPER, offers=(replace(CARD, count=2),))
    (without,) = ways_out(replace(few, budget_usd=1.0))
    assert without.flags == {"--budget": ""}
    assert without.plan == make_plan(without.inputs)
    hasty = replace(PAPER, steps=1, train_seconds=25.0, offers=(replace(CARD, rollouts_per_second=200.0),))
    hasty = replace(hasty, generate_during_broadcast=True, broadcast=BroadcastInputs(seconds=10.0))
    with pytest.raises(NoPlanError, match="would still wait") as refused:
        make_plan(hasty)
    assert refused.value.idle > 0.2
    (idler,) = (float(one.flags["--max-idle"]) for one in ways_out(hasty) if "--max-idle" in one.flags)
    assert idler > refused.value.idle


def test_a_budget_decides_or_is_refused_with_the_price() -> None:
    plan = make_plan(PAPER)
    assert make_plan(replace(PAPER, budget_usd=plan.usd + 0.01)) == plan
    with pytest.raises(UserError, match=r"A budget of \$100\.00 is too small: the cheapest plan costs"):
        make_plan(replace(PAPER, budget_usd=100.0))
    fewer, dearer = ways_out(replace(PAPER, budget_usd=100.0))
    assert fewer.plan.usd <= 100.0
    assert fewer.flags["--run.max_steps"] == str(fewer.inputs.steps)
    assert float(dearer.flags["--budget"]) == dearer.inputs.budget_usd
    dear = replace(
        PAPER, learner_usd_per_hour=0.1, broadcast=BroadcastInputs(seconds=10.0), generate_during_broadcast=True
    )
    busy = make_plan(dear)
    frugal = make_plan(replace(dear, budget_usd=busy.usd * 0.999))
    assert frugal.binds == "budget"
    assert frugal.usd <= busy.usd * 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offers": ()}, "no machines on offer"),
        ({"budget_usd": 0.0}, "--budget 0.0 must be above 0"),
        ({"learner_usd_per_hour": -1.0}, "must not be negative"),
        ({"max_idle": 0.0}, "--max-idle"),
        (
            {"budget_usd": 9.0, "learner_usd_per_hour": 0.0, "offers": (replace(CARD, price_usd_per_hour=0.0),)},
            "cannot be planned: neither",
        ),
        ({"train_seconds": 0.0}, "train_seconds = 0.0 must be a positive number"),
        ({"offers": (Offer("new", 1.0),)}, "echo2 probe"),
    ],
)
def test_impossible_inputs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(replace(PAPER, **change))  # type: ignore[arg-type]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_size_of_a_snapshot_is_read_from_the_headers_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", 4000)
    assert snapshot_bytes(model, "bfloat16") == 8000
    assert snapshot_bytes(model, "float32") == 16000
    (model / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="not a readable safetensors"):
        snapshot_bytes(model, "float32")
    with pytest.raises(UserError, match="--snapshot-bytes"):
        snapshot_bytes(tmp_path, "float32")


def test_the_command_prints_a_plan_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, offers = write_files(tmp_path)
    words = ["plan", config, "--offers", offers, "--train-seconds", "20"]
    assert main(words) == 0
    text = capsys.readouterr().out
    for part in ("x card", "publish_every", "staleness", "learner idle", "a step", "the pace by the", "Rests on"):
        assert part in text
    assert main([*words, "--json", "--rehearse"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["machines"]["card"] >= 2
    assert max(map(int, plan["rehearsal"]["staleness"])) <= plan["max_staleness"] <= 2
    assert plan["inputs"]["snapshot"][0] == "16 MB"


def test_slow_rewards_bound_the_rate_whatever_is_rented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_request, "groups_at_once", lambda is_async: 2)
    config, offers = write_files(tmp_path)
    words = ["plan", config, "--offers", offers, "--train-seconds", "20"]
    assert main([*words, "--json"]) == 0
    quick = json.loads(capsys.readouterr().out)
    assert main([*words, "--json", "--reward-seconds", "10"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["prediction"]["step_seconds"] >= 159.9  # 32 groups of 10 s, two at a time
    assert slow["machines"]["card"] < quick["machines"]["card"]
    assert slow["inputs"]["rewards"][0] == "10 s a group, 2 at once: 2.7 min a step"
    assert main([*words, "--reward-seconds", "10"]) == 0
    text = capsys.readouterr().out
    assert "score 1.6 rollouts/s at most, and more machines would not help" in " ".join(text.split())
    idle = re.search(r"learner idle +([\d.]+)% once", text)
    assert idle is not None
    assert float(idle.group(1)) >= 87.0  # 140 of 160 s


JUDGE = """functions = ["judge"]
[reward.judge]
model = "m"
base_url = "http://127.0.0.1:1/v1"
rubric = "Good?"
form = "pairwise"
usd_per_mtok = [1.0, 2.0]
requests_per_minute = 1792
"""


def test_plan_names_the_judge_with_its_price_and_what_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, offers = write_files(tmp_path)
    text = Path(config).read_text()
    Path(config).write_text(text.replace('functions = ["exact_match"]', JUDGE))
    words = ["plan", config, "--offers", offers, "--train-seconds", "20", "--sampling.group_size", "8"]
    assert main(words) == 0
    told = " ".join(capsys.readouterr().out.split())
    line = "judge 896 requests a step, 30 s by requests_per_minute; not counted: its dollars (a run with --from DIR has"
    assert line in told
    assert "how long it takes (--reward-seconds)" in told
    assert told.count("896 requests") == 1
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": 0, "cost/judge_usd": 0.0}]
    rows += [{"step": at, "time/train": 20.0, "time/reward": 3.0, "cost/judge_usd": 0.25 * at} for at in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_past_run(run).judge_usd == 0.25
    assert main([*words, "--from", str(run)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "$0.25 a step and $12.50 for 50 steps beside the bill; m at http://127.0.0.1:1/v1" in told
    assert "not counted" not in told


def test_the_command_s_mistakes_cost_a_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, offers = write_files(tmp_path)
    for words, message in (
        (["plan", config, "--offers", offers], "--train-seconds"),
        (["plan", "--offers", offers], "No configuration was given: name the run's configuration file, or --from DIR"),
        (["plan", config, "--offers", str(tmp_path / "none.toml"), "--train-seconds", "20"], "Cannot read the offers"),
        (["plan", config, "--offers", offers, "--train-seconds", "-1"], "--train-seconds -1.0 must be a positive"),
        (["plan", config, "--offers", offers, "--train-seconds", "20", "--budget", "0.01"], "too small"),
        (["plan", config, "--offers", offers, "--from", str(tmp_path)], "has no trained step yet"),
        (["plan", config, "--offers", offers, "--from", str(tmp_path / "none")], "There is no directory"),
        (["cost", str(tmp_path)], "not a run directory"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_the_example_s_offers_serve_a_small_model_whose_learner_is_faster_than_weights_travel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a newcomer did with the demo's own run: the refusal ends in a command, and the command works."""
    config, _ = write_files(tmp_path)
    offers = str(Path(__file__).resolve().parents[2] / "examples" / "offers.toml")
    run = tmp_path / "a run"
    run.mkdir()
    rows = [{"step": at, "time/train": 0.07026, "broadcast/t_bcast": 0.4699} for at in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["plan", config, "--from", str(run), "--offers", offers, "--sampling.max_tokens=12"]
    assert main([*words, "--json"]) == 2
    told = json.loads(capsys.readouterr().err)["error"]
    assert "The learner is faster than weights travel" in told
    assert "Or: --schedule.groups_per_step" in told
    command = told.partition("A plan that works: `echo2 ")[2].partition("`")[0]
    assert main(shlex.split(command)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "guessed from another model; `echo2 probe` measures them" in text


def test_a_rate_measured_with_the_runs_model_is_no_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, offers = write_files(tmp_path)
    write_layers(tmp_path / "model", {"model.embed_tokens": (134_515, 1_000), "model.norm": (8, 1)})
    count = num_parameters(str(tmp_path / "model"))
    assert count == 134_515_008
    measured = Measured(6.0, 0.1, 0.21, 900.0, 8, 5, 320, 128.0, parameters=count, max_tokens=256)
    Path(offers).write_text(as_offer("this machine", 0.4, measured).replace("count = 1", "count = 20"))
    assert main(["plan", config, "--offers", offers, "--train-seconds", "60"]) == 0
    assert "another model" not in " ".join(capsys.readouterr().out.split())


def test_an_adapter_is_planned_as_what_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, offers = write_files(tmp_path)
    write_layers(tmp_path / "model", {"model.layers.0.mlp.up_proj": (3000, 1000), "model.embed_tokens": (1000, 1000)})
    words = [
        "plan",
        config,
        "--offers",
        offers,
        "--train-seconds",
        "20",
        "--model.snapshot_dtype",
        "bfloat16",
        "--json",
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["broadcast_bytes"] == 2 * 4_000_000
    assert main([*words, "--lora.rank", "8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["broadcast_bytes"] == 2 * 8 * (3000 + 1000)
    assert plan["inputs"]["snapshot"][0] == "64 kB"
    assert "the model under it, 8 MB, travels once" in plan["inputs"]["snapshot"][1]


def write_layers(directory: Path, layers: dict[str, tuple[int, int]]) -> None:
    """A model of these weights in float32, all 0: a header, and a file with a hole."""
    entries, end = {}, 0
    for name, shape in layers.items():
        start, end = end, end + 4 * shape[0] * shape[1]
        entries[f"{name}.weight"] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def test_batches_that_are_too_slow_for_any_number_of_machines_are_refused_before_any_walk() -> None:
    """A batch lasts 1280 s beside steps of 20 s: two thousand machines of that kind would be walked for minutes."""
    slow = Offer("slow", 0.4, 0.05, count=2000)
    inputs = replace(PAPER, groups_per_step=32, group_size=8, train_seconds=20.0, offers=(slow,), groups_per_batch=8)
    with pytest.raises(UserError, match=r"128 machines, as many as 4 steps have groups, make 6\.4 rollouts/s"):
        make_plan(replace(inputs, broadcast=BroadcastInputs(seconds=5.0), generate_during_broadcast=True))


@examples(15)
@example(bound=2, batch=5, rate=1.0, spread=0.0)
@given(bound=st.integers(1, 4), batch=st.integers(1, 8), rate=st.floats(0.5, 8.0), spread=st.floats(0.0, 0.3))
def test_the_reported_minimum_wait_is_never_above_that_of_a_plan(
    bound: int, batch: int, rate: float, spread: float
) -> None:
    offers = (Offer("a", 1.0, rate, spread=spread, count=60),)
    inputs = replace(PAPER, groups_per_step=16, group_size=4, steps=200, max_staleness=bound, train_seconds=10.0)
    inputs = replace(
        inputs, offers=offers, broadcast=BroadcastInputs(seconds=3.0), groups_per_batch=batch, max_idle=0.9
    )
    inputs = replace(inputs, generate_during_broadcast=True)
    try:
        plan = make_plan(inputs)
    except UserError:
        return
    least = least_idle(inputs, plan.max_staleness, plan.publish_every)
    assert least <= plan.prediction.steady_idle_ratio + 0.01  # of 100 steps: where they begin in a period is chance
