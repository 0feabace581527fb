"""Plans from what an earlier run measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo2 import config as configuration
from echo2.cli import main
from echo2.config.rundir import RunDir
from echo2.core.errors import UserError
from echo2.planning.plan_inputs import read_past_run
from first_plans import write_files


def test_the_command_takes_what_a_past_run_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, offers = write_files(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {
            "step": at,
            "time/train": seconds,
            "broadcast/t_bcast": None if at == 2 else 1.5,
            "broadcast/delta_ratio": 0.05,
        }
        for at, seconds in ((1, 90.0), (2, 20.0), (3, 22.0), (4, 21.0))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + '{"step": 5, "time/tr', encoding="utf-8")
    past = read_past_run(run)
    assert (past.num_steps, past.train_seconds, past.broadcast_seconds, past.delta_ratio) == (4, 21.0, 1.5, 0.05)
    assert main(["plan", config, "--offers", offers, "--from", str(run), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["broadcast_seconds"] >= 1.5
    assert plan["prediction"]["step_seconds"] >= 21.0
    # The run's own settings will do, where it has them.
    alone = ["plan", "--offers", offers, "--from", str(run), "--json"]
    assert main(alone) == 2
    assert "has no config.json: name the run's configuration file" in json.loads(capsys.readouterr().err)["error"]
    RunDir(run).config.write_text(configuration.to_json(configuration.load(Path(config), {})))
    assert main(alone) == 0
    assert json.loads(capsys.readouterr().out) == plan
    assert main([*alone, "--schedule.groups_per_step", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["needed_rate"] == pytest.approx(2 * plan["needed_rate"], rel=0.2)


def write_events(path: Path, delays: list[float]) -> None:
    """The log of a head that began twice, with deliveries of two groups at a time, and evaluations."""

    def line(now: float, kind: str, number: int, of: str = "train") -> str:
        event = {"type": kind, "group": {"policy": "policy", "kind": of, "number": number}}
        return json.dumps({"now": now, "event": event, "commands": []}) + "\n"

    log = json.dumps({"options": {}, "echo2": "1"}) + "\n"
    for number in range(0, len(delays), 2):
        log += "".join(line(1000.0 + number, "GroupDelivered", one) for one in (number, number + 1))
        log += line(1000.0 + number, "GroupDelivered", number, "eval") + line(9e9, "GroupScored", number, "eval")
        log += "".join(line(1000.0 + number + delays[one], "GroupScored", one) for one in (number + 1, number))
    path.write_text(log + line(1.0, "GroupScored", 10_000) + '{"now": 7, "event": {"type": "GroupScored", "gr')


def test_a_past_run_whose_judge_hung_is_planned_with_its_own_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, offers = write_files(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    row = {"step": 1, "time/train": 20.0, "broadcast/t_bcast": 1.5, "broadcast/delta_ratio": 0.05}
    RunDir(run).metrics.write_text(json.dumps(row) + "\n")
    words = ["plan", config, "--offers", offers, "--from", str(run)]
    assert main([*words, "--json"]) == 0
    prompt = json.loads(capsys.readouterr().out)
    assert "rewards known" not in prompt["inputs"]
    hung = [0.25 if number % 8 else 14.0 for number in range(64)]
    write_events(RunDir(run).events, hung)
    assert read_past_run(run).delays == pytest.approx(sorted(hung))
    assert main([*words, "--json", "--rehearse"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["inputs"]["rewards known"][0] == "0.25 s after delivery, one of ten more than 14 s"
    assert plan["prediction"]["idle_ratio"] > prompt["prediction"]["idle_ratio"]  # of the first steps at least
    steady = plan["rehearsal"]["steady_idle_ratio"]  # by which groups hang: .02 to .09 with six seeds
    assert steady == pytest.approx(plan["prediction"]["steady_idle_ratio"], abs=0.15)

    write_events(RunDir(run).events, [0.25 if number % 8 else 70.0 for number in range(64)])
    assert main([*words, "--json"]) == 2
    refusal = json.loads(capsys.readouterr().err)["error"]
    assert "one of 10 groups more than 70 s for its rewards" in refusal
    assert "echo2 plan" in refusal


def test_steps_whose_groups_were_all_flat_say_nothing_of_what_training_takes(tmp_path: Path) -> None:
    """They train nothing, in milliseconds: a plan from them said that no number of workers is enough."""
    trained = {"time/train": 20.0, "loss/mean": -0.1, "reward/frac_zero_std": 0.8, "broadcast/delta_ratio": 0.05}
    flat = {"time/train": 0.005, "reward/frac_zero_std": 1.0, "broadcast/delta_ratio": 0.0}
    rows = [{"step": step + 1, **row} for step, row in enumerate([trained, flat, flat, trained, flat])]
    RunDir(tmp_path).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    past = read_past_run(tmp_path)
    assert (past.num_steps, past.train_seconds, past.delta_ratio) == (2, 20.0, 0.05)
    RunDir(tmp_path).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows[1:3]))
    with pytest.raises(UserError, match="2 steps trained nothing: all rewards of each group were equal"):
        read_past_run(tmp_path)
