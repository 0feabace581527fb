"""What people see of a run: status, the progress display and the closing summary, on consoles of any kind."""

from __future__ import annotations

import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from echo2.config import Config
from echo2.config.rundir import RunDir, claimed, create
from echo2.core.errors import UserError
from echo2.views import display
from echo2.views.display import RunDisplay, next_steps, show_summary, sparkline
from echo2.views.run_view import read_status
from echo2.views.status import fleet_words, show_status

HERE = socket.gethostname()
WIDTHS = (20, 40, 80, 200)


def console(width: int = 200, is_terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)


def shown(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def dead_pid() -> int:
    """The pid of a process that has ended and was reaped."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def status(head_pid: int) -> dict[str, Any]:
    worker = {"host": HERE, "doing": "sampling 8 groups with version 3", "installed": "1.2", "suspected": None}
    fetching = {"version": 3, "base": 2, "bytes_stored": 63, "bytes_total": 100}
    far = {"host": "elsewhere", "fetching": fetching, "bytes_sent": 3_100_000}
    far |= {"engine": "llamacpp-q8_0", "mismatch": 0.0764}
    return {
        "time": 1000.0,
        "head": {"pid": head_pid, "host": HERE},
        "learner": {"pid": os.getpid(), "host": HERE, "device": "cpu", "doing": "training step 3"},
        "workers": [
            {"id": "w-here", "pid": os.getpid(), **worker},
            {"id": "w-far", "pid": os.getpid(), **worker, **far},
            {"id": "w-away", "pid": None, "host": None, "doing": ""},
        ],
        "version": 3,
        "lineage": 1,
        "max_steps": 40,
        "published": 3,
        "checkpoint": None,
        "waits": [
            {
                "waiter": "learner",
                "waits_for": "w-here",
                "since": 998.5,
                "until": 1030.0,
                "reason": "step 3: [w-here] holds 4 of 4 missing groups",
            },
            {"waiter": "head", "waits_for": "learner", "since": 0.0, "until": None, "reason": "none is connected"},
        ],
        "broadcast": {"broadcast/t_bcast": 1.25, "origin_bytes": 10, "peer_bytes": 20, "suspects": {"w-far": "lies"}},
        "cost_usd": 0.125,
        "outcome": None,
    }


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return create(tmp_path / "run", Config(), resume=False)


def test_a_run_that_never_started_has_no_status(rundir: RunDir) -> None:
    with pytest.raises(UserError, match="has no status yet: no head was started there"):
        read_status(rundir)
    with claimed(rundir.path, "run"), pytest.raises(UserError, match="its head is being started, or stands by"):
        read_status(rundir)


def test_a_new_head_is_listed_beside_the_dead_one_that_wrote_the_status(rundir: RunDir) -> None:
    rundir.status.write_text(json.dumps(status(dead_pid())))
    rundir.processes.write_text(json.dumps([{"role": "head", "name": "head", "pid": os.getppid()}]))
    found = read_status(rundir)
    assert [one["alive"] for one in found["processes"] if one["role"] == "head"] == [False, True]
    assert found["waits"] == []  # the new one has told nothing


def test_status_shows_which_processes_are_alive(rundir: RunDir) -> None:
    dead = dead_pid()
    rundir.status.write_text(json.dumps(status(head_pid=os.getpid())))
    listing = [{"role": "supervisor", "name": "run", "pid": dead}, {"role": "head", "name": "head", "pid": os.getpid()}]
    rundir.processes.write_text(json.dumps(listing))
    found = read_status(rundir)
    assert found["state"] == "running"
    assert len(found["waits"]) == 2
    alive = {(process["role"], process["id"]): process["alive"] for process in found["processes"]}
    assert alive == {
        ("head", "head"): True,
        ("learner", "learner"): True,
        ("worker", "w-here"): True,
        ("worker", "w-far"): None,
        ("worker", "w-away"): None,
        ("supervisor", "run"): False,
    }
    assert all(set(process) >= {"role", "id", "pid"} for process in found["processes"])


@pytest.mark.parametrize("pid", [2**31, 2**64 - 1, 0, -1, (1 << 22) + 1])
def test_an_invented_pid_belongs_to_no_process(rundir: RunDir, pid: int) -> None:
    said = status(head_pid=os.getpid())
    said["workers"][0]["pid"] = pid
    rundir.status.write_text(json.dumps(said))
    (worker,) = [process for process in read_status(rundir)["processes"] if process["id"] == "w-here"]
    assert worker["alive"] is None


HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202edne\r\n[red]forged[/red][/nonsense]\x00" + "x" * 5000


def hostile_status() -> dict[str, Any]:
    """Every text that a peer has any part in, as if nobody had looked at it when it came."""
    said = status(head_pid=os.getpid())
    for worker in said["workers"]:
        worker |= dict.fromkeys(("id", "host", "engine", "device", "doing", "suspected"), HOSTILE)
    said["learner"] |= {"host": HOSTILE, "doing": HOSTILE}
    for wait in said["waits"]:
        wait |= {"waiter": HOSTILE, "waits_for": HOSTILE, "reason": HOSTILE}
    said["broadcast"]["suspects"] = {HOSTILE: HOSTILE}
    return said


def controls(text: str) -> set[str]:
    """What a terminal would obey or hide."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}


def test_status_prints_text_of_peers_without_control_characters_or_markup(rundir: RunDir) -> None:
    rundir.status.write_text(json.dumps(hostile_status()))
    rundir.outcome.write_text(json.dumps({"kind": "stopped", "reason": HOSTILE}))
    on = console(width=20_000)
    show_status(read_status(rundir), on)
    assert not controls(shown(on))
    assert "[red]forged[/red]" in shown(on)
    assert len(shown(on)) < 20_000 * 20


def poll_again(display: RunDisplay) -> None:
    display._read_at = display._printed_at = -math.inf
    display.poll()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_progress_display_shows_no_control_characters_of_peers(rundir: RunDir, is_terminal: bool) -> None:
    rundir.status.write_text(json.dumps(hostile_status()))
    on = console(is_terminal=is_terminal)
    with RunDisplay(rundir, 40, on) as display:
        poll_again(display)
        poll_again(display)
    assert "forged" in shown(on)
    ours = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown(on)) if is_terminal else shown(on)  # how rich redraws
    assert not controls(ours)
    assert "owned" not in shown(on)


def test_the_summary_shows_no_control_characters_of_peers() -> None:
    told = summary()
    told["groups"] |= {"retired": {HOSTILE: 1}, "refused": {HOSTILE: 1}}
    told["machines"] = {HOSTILE: {**told["machines"]["w1"], "wasted_seconds": {HOSTILE: 1.0}}}
    on = console(width=20_000)
    show_summary(told, on)
    assert not controls(shown(on))
    assert "[red]forged[/red]" in shown(on)


def test_a_dead_head_has_no_waits(rundir: RunDir) -> None:
    rundir.status.write_text(json.dumps(status(head_pid=dead_pid())))
    found = read_status(rundir)
    assert found["state"] == "the head is not running; continue with `echo2 run ... --resume`"
    assert found["waits"] == []


def test_a_run_that_is_over_says_how(rundir: RunDir) -> None:
    rundir.status.write_text(json.dumps(status(head_pid=dead_pid())))
    rundir.outcome.write_text('{"kind": "stopped", "reason": "8 groups failed in a row"}')
    assert read_status(rundir)["state"] == "stopped: 8 groups failed in a row"


ADVICE: dict[str, Any] = {"active": 1, "standby": 0, "rented": [], "text": "11 workers short", "needed_rate": 17_512.0}
ADVICE |= {"rate": 1_490.4, "idle_ratio": None, "idle_predicted": None}


@pytest.mark.parametrize(("told", "newest"), [(2, "3"), (5, "5"), (None, "3"), (-1, "3")])
def test_a_run_that_is_over_has_the_checkpoint_saved_last_and_wants_no_worker(
    rundir: RunDir, told: int | None, newest: str
) -> None:
    rundir.status.write_text(json.dumps(status(head_pid=os.getpid()) | {"checkpoint": told, "fleet": ADVICE}))
    on = console()
    show_status(read_status(rundir), on)
    assert "fleet: 1 active; 11 workers short: 1,490 of 17,500 rollouts/s needed" in shown(on)
    rundir.outcome.write_text('{"kind": "stopped", "reason": "told to stop"}')
    (rundir.checkpoints / "step_3").mkdir(parents=True)
    (rundir.checkpoints / "step_3" / "state.json").write_text("{}")
    (rundir.checkpoints / "step_9").mkdir()  # half a checkpoint
    on = console()
    show_status(read_status(rundir), on)
    assert f"checkpoint {newest}  " in shown(on)
    assert "fleet" not in shown(on)


@pytest.mark.parametrize("told", [None, -1])
def test_status_shows_none_without_a_checkpoint(rundir: RunDir, told: int | None) -> None:
    told_status = status(head_pid=dead_pid()) | {"checkpoint": told, "published": None, "fleet": ADVICE}
    rundir.status.write_text(json.dumps(told_status))
    on = console()
    show_status(read_status(rundir), on)
    assert "snapshot none, checkpoint none  " in shown(on)
    assert "fleet" not in shown(on)


def test_status_shows_every_wait_with_its_party_and_reason(rundir: RunDir) -> None:
    rundir.status.write_text(json.dumps(status(head_pid=os.getpid())))
    on = console()
    show_status(read_status(rundir), on)
    text = shown(on)
    (wait,) = [line for line in text.splitlines() if "missing groups" in line]
    assert [cell.strip() for cell in wait.strip("│").split("│")] == [
        "learner",
        "w-here",
        "1.5 s",
        "in 30.0 s",
        "step 3: [w-here] holds 4 of 4 missing groups",  # brackets are text, not markup
    ]
    assert "step 3 of 40" in text
    assert "$0.1250" in text
    (far,) = [line for line in text.splitlines() if "w-far" in line]
    assert "llamacpp-q8_0" in far
    assert "v2, v3 63%, up 3.1 MB, logprobs 0.076 nats from the learner's" in far
    for process, state in (("w-here", "alive"), ("w-far", "remote"), ("w-away", "away")):
        assert any(process in line and state in line for line in text.splitlines()), text


@pytest.mark.parametrize("width", WIDTHS)
def test_status_fits_any_console(rundir: RunDir, width: int) -> None:
    rundir.status.write_text(json.dumps(status(head_pid=os.getpid())))
    on = console(width)
    show_status(read_status(rundir), on)
    assert all(len(line) <= width for line in shown(on).splitlines())


def summary() -> dict[str, Any]:
    machine = {"usd": 0.5, "wasted_usd": 0.0, "seconds": 60.0, "useful_seconds": 0.0, "useful_groups": 0}
    return {
        "outcome": ["finished", "all steps are trained"],
        "steps": 40,
        "eval_before": 0.3,
        "eval_after": 0.75,
        "learner_idle_ratio": 0.25,
        "staleness_mean": 0.5,
        "staleness_max": 2,
        "staleness_bound": 3,
        "groups": {"trained": 2560, "retired": {"stale": 3, "failed": 1}, "refused": {"duplicate": 7}},
        "origin_bytes": 12_345_678,
        "peer_bytes": 98_765_432,
        "seconds": 61.0,
        "machines": {
            "learner": {**machine, "wasted_seconds": {}},
            "w1": {
                **machine,
                "useful_groups": 9,
                "useful_seconds": 55.0,
                "wasted_usd": 0.25,
                "wasted_seconds": {"expired": 3.5},
            },
        },
        "cost_usd": 1.0,
        "wasted_usd": 0.25,
    }


def test_the_summary_is_worth_reading() -> None:
    on = console()
    show_summary(summary(), on)
    text = shown(on)
    for words in (
        "0.300 before, 0.750 after 40 steps",
        "25.0%",
        "mean 0.50, max 2, bound 3",
        "2560 trained, retired: 3 stale, 1 failed; deliveries refused: 7 duplicate",
        "12.3 MB from the head, 98.8 MB between workers",
        "$1.0000, of which $0.2500 wasted",
        "$0.2500 (expired 3.5 s)",
    ):
        assert words in text
    assert [line for line in text.splitlines() if "learner " in line and "-" in line], "a learner makes no groups"


FAILED = {
    "kind": "reward_failed",
    "count": 10,
    "message": "The reward function mine raised at own.py:3 in mine: KeyError: 'answer'",
    "traceback": "Traceback (most recent call last):\n  File \"own.py\", line 3, in mine\nKeyError: 'answer'\n",
}


def test_failures_are_counted_and_shown_with_the_first_traceback(rundir: RunDir) -> None:
    found = status(os.getpid()) | {"failures": [FAILED]}
    rundir.status.write_text(json.dumps(found))
    on = console()
    show_status(read_status(rundir), on)
    line = "10 rollouts or groups lost to your reward function; logs/reward.log has all. The first: The reward "
    assert line in shown(on)
    assert '  File "own.py", line 3, in mine' in shown(on)
    on = console()
    with RunDisplay(rundir, 10, on) as display:
        display.poll()
    assert "10 rollouts or groups lost to your reward function" in shown(on)
    on = console()
    show_summary(summary() | {"failures": [FAILED]}, on)
    assert "10 rollouts or groups lost to your reward function" in shown(on)


def test_the_end_of_a_run_says_where_the_model_is_and_what_to_do_with_it() -> None:
    on = console()
    show_summary(summary() | {"directory": "/runs/a", "checkpoint": 40}, on)
    assert "The model after step 40 is in /runs/a/checkpoints/step_40" in shown(on)
    for command in ("echo2 export /runs/a --to DIR", "echo2 view /runs/a", "echo2 chat /runs/a", "echo2 eval /runs/a"):
        assert command in shown(on)
    on = console()
    show_summary(summary() | {"directory": "/runs/a", "checkpoint": 0, "steps": 0}, on)
    assert "Nothing was trained.\nLogs: /runs/a/logs" in shown(on)
    assert "echo2 export" not in shown(on)
    assert "Nothing was trained: no reward\nLogs: /runs/a/logs" in "\n".join(
        next_steps({"directory": "/runs/a", "checkpoint": 0, "steps": 0}, "no\x1b[31m reward")
    )


@pytest.mark.parametrize("width", [40, 80])
def test_the_end_of_a_run_shows_what_the_model_says(tmp_path: Path, width: int) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    on = console(width)
    told = summary() | {"directory": str(tmp_path), "steps": 40}
    show_summary(told, on)
    assert "Samples" not in shown(on)  # none are written
    tries = [
        {"text": "first line\nsecond \x1b[31m[red]", "reward": 1.0},
        {"text": "no " * 900, "reward": 0.0},
        {"text": "half", "reward": 0.5},
    ]
    prompt = [["system", "be good"], ["user", "What is the very long question of " + "words " * 50 + "in the end?"]]
    group = {"group": 0, "prompt": prompt, "rollouts": tries}
    for name in ("eval_20", "eval_60", "step_40"):
        text = json.dumps(group).replace("half", name).replace("0.5", "2" if name == "eval_60" else "0.5")
        (folder / f"{name}.jsonl").write_text(text + "\n")
    show_summary(told, on)
    after = shown(on).partition("Samples from held-out tasks:\n")[2].splitlines()[:2]
    assert [line.split()[:2] for line in after] == [["reward", "1"], ["reward", "0"]]
    assert "in the end? → first line" in after[0]
    assert "\x1b" not in shown(on)
    assert all(len(line) <= width for line in after)
    (folder / "eval_20.jsonl").unlink()  # that of version 60 is of a run before this one
    on = console(width)
    show_summary(told, on)
    assert "Samples from the last steps:" in shown(on)


@pytest.mark.parametrize(("ratio", "told"), [(0.4, "40.0%, 80% of it waiting for rewards"), (0.01, "1.0% ")])
def test_the_end_of_a_run_says_what_the_learner_waited_for(ratio: float, told: str) -> None:
    on = console()
    waits = {"rewards": 8.0, "sampling": 1.5, "lease": 0.5, "lost": 0.0}
    show_summary(summary() | {"learner_idle_ratio": ratio, "learner_waits": waits}, on)
    assert told in shown(on)


def test_a_run_without_evaluation_has_no_held_out_reward_to_show() -> None:
    show_summary(summary(), with_one := console())
    show_summary({**summary(), "eval_before": None, "eval_after": None}, without := console())
    assert ("held-out reward" in shown(with_one), "held-out" in shown(without)) == (True, False)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_summary_fits_any_console(width: int) -> None:
    on = console(width)
    show_summary(summary(), on)
    assert all(len(line) <= width for line in shown(on).splitlines())


@given(st.lists(st.floats(), max_size=60), st.integers(1, 50))
def test_a_sparkline_has_a_bar_for_each_finite_value_up_to_its_width(values: list[float], width: int) -> None:
    finite = [value for value in values if value - value == 0.0]
    assert len(sparkline(values, width)) == min(len(finite), width)


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([2.0, 2.0]) == "▁▁"


def write_progress(rundir: RunDir) -> None:
    rundir.status.write_text(json.dumps(status(head_pid=os.getpid())))
    rows = [{"step": 0, "eval/accuracy": 0.25}] + [{"step": n, "reward/mean": n / 4} for n in (1, 2, 3)]
    rundir.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_without_a_terminal_progress_is_one_line_of_eighty_columns_now_and_then(rundir: RunDir) -> None:
    write_progress(rundir)
    on = console(width=40)
    with RunDisplay(rundir, 40, on) as display:
        display.poll()
        display.poll()
        assert shown(on) == "step 3/40  reward 0.750  held-out 0.250  idle 0%  workers 0  $0.000\n"


def test_a_new_evaluation_is_shown_with_samples_once(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(display, "REFRESH_SECONDS", 0.0)
    write_progress(rundir)
    group = {"group": 0, "prompt": "21=", "rollouts": [{"text": "12", "reward": 1.0}, {"text": "2", "reward": 0.0}]}
    (rundir.rollouts / "eval_0.jsonl").write_text(json.dumps(group))
    on = console(width=80)
    with RunDisplay(rundir, 40, on) as live:
        live.poll()
        live.poll()
    assert shown(on).count("  reward 1  21= → 12\n  reward 0  21= → 2\n") == 1
    assert shown(on).count("step 3/40") == 2


def test_without_a_terminal_waits_are_printed_when_nothing_happens_and_each_failure_once(rundir: RunDir) -> None:
    write_progress(rundir)
    rundir.status.write_text(json.dumps(status(os.getpid()) | {"failures": [FAILED]}))
    on = console()
    with RunDisplay(rundir, 40, on) as display:
        for _ in range(3):
            poll_again(display)
    lines = shown(on).splitlines()
    assert [line.partition(" ")[0] for line in lines if line[0] != " "] == ["step", "10", "step", "step"]
    assert [line.strip() for line in lines if line[0] == " "][-1] == "head waits for learner: none is connected"
    assert not lines[1].startswith(" ")


def test_the_view_works_before_the_first_status(rundir: RunDir) -> None:
    on = console()
    with RunDisplay(rundir, 40, on) as display:
        display.poll()
    assert shown(on) == "step 0/?\n"


def test_a_terminal_gets_a_live_display(rundir: RunDir) -> None:
    write_progress(rundir)
    on = console(is_terminal=True)
    with RunDisplay(rundir, 40, on) as display:
        display.poll()
    text = shown(on)
    assert "3/40" in text
    assert "reward 0.750" in text


def test_the_summary_line_of_the_fleet() -> None:
    fleet: dict[str, Any] = {"active": 3, "standby": 0, "rented": [], "text": "2 workers short", "needed_rate": 5.0}
    fleet |= {"rate": 3.0, "idle_ratio": None, "idle_predicted": None}
    assert fleet_words(fleet) == ["3 active", "2 workers short: 3 of 5 rollouts/s needed"]
    fleet |= {"standby": 1, "rented": ["spot-1"], "idle_ratio": 0.4, "idle_predicted": 0.385}
    assert fleet_words(fleet)[:3] == ["3 active", "1 standing by", "1 rented"]
    assert fleet_words(fleet)[-1] == "learner idle 40.0%, predicted 38.5%"
    fleet |= {"idle_steps": 15}
    assert fleet_words(fleet)[-1] == "learner idle 40.0% over the last 15 steps, predicted 38.5%"
    fleet |= {"needed_rate": None, "text": "2 workers over", "idle_ratio": None}
    assert fleet_words(fleet) == ["3 active", "1 standing by", "1 rented", "2 workers over"]
    assert fleet_words(None) == []  # of an older run


def test_standby_workers_are_shown(rundir: RunDir) -> None:
    told = status(os.getpid())
    told["workers"][0]["standby"] = True
    rundir.status.write_text(json.dumps(told))
    doing = {process["id"]: process["doing"] for process in read_status(rundir)["processes"]}
    assert doing["w-here"] == "stands by"
    assert doing["w-far"] == "sampling 8 groups with version 3"
