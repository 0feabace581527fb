"""The dashboard's HTTP side: who is let in, what is told, and that a run of any length and any state is shown."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import view_cases
from echo2.config import all_fields
from echo2.config.rundir import RunDir
from echo2.core.printable import printable
from echo2.head.ledger import rollout_log
from echo2.transport.identity import RunIdentity
from echo2.views.run_view import RunView
from echo2.views.serve import FILES, GROUPS_SHOWN, Dashboard
from echo2.views.watch import POINTS_MAX, WORKERS_SHOWN, ChartPoints, Watch, cost_data, run_data
from view_cases import HOSTILE

TOKEN = "let-me-in"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return view_cases.make_run(tmp_path / "run", num_steps=30)


def client(*directories: Path) -> TestClient:
    return TestClient(Dashboard(directories, TOKEN).app, base_url="http://127.0.0.1:8000")


@pytest.fixture
def browser(rundir: RunDir) -> TestClient:
    made = client(rundir.path)
    assert made.get(f"/?token={TOKEN}").status_code == 200
    return made


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/events", "/rollouts", "/task", "/workers", "/metrics", "/settings", "/logs"),
        *(f"/{name}" for name in FILES),
    ],
)
def test_no_page_is_shown_without_the_token(rundir: RunDir, path: str) -> None:
    outside = client(rundir.path)
    for given in ("", "?token=", "?token=wrong", "?token=%C3%A9"):
        refused = outside.get(path + given)
        assert refused.status_code == 403
        assert refused.text.startswith("Open the address")
    outside.cookies.set("echo2_view_8000", "wrong")
    assert outside.get(path).status_code == 403


def test_prometheus_gets_the_newest_numbers_of_each_run(rundir: RunDir, tmp_path: Path) -> None:
    strange = tmp_path / 'a"b\\c'
    strange.mkdir()
    rows = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": 0.25, "mismatch/w-1.x": 1.0, "note": "no"}]
    (strange / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scraper = client(rundir.path, strange)
    assert scraper.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 403
    answer = scraper.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert 'echo2_reward_mean{run="a\\"b\\\\c"} 0.25' in lines
    assert 'echo2_eval_accuracy{run="a\\"b\\\\c"} 0.5' in lines
    assert lines.count("# TYPE echo2_reward_mean gauge") == 1
    assert 'echo2_version{run="run"} 30' in lines
    assert "w_1" not in answer.text
    assert "note" not in answer.text


def test_the_token_leaves_the_address_and_becomes_a_cookie_that_no_script_reads(rundir: RunDir) -> None:
    answer = client(rundir.path).get(f"/?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]


def test_every_answer_forbids_scripts_of_others(browser: TestClient) -> None:
    for path in ("/", "/page.js", "/rollouts", "/nothing-here", "/task?group=x"):
        answer = browser.get(path)
        if answer.status_code != 404 or path.startswith("/task"):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_file_of_the_page_is_there_and_nothing_else(browser: TestClient) -> None:
    page = browser.get("/").text
    for name in FILES:
        assert browser.get(f"/{name}").status_code == 200
    for name in ("page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css"):
        assert name in page
    assert "https://" not in page
    for name in ("/uPlot.LICENSE", "/../app.py", "/%2e%2e/app.py", "/index.html"):
        assert browser.get(name).status_code == 404


def test_rollouts_come_file_by_file_with_their_text_unchanged(browser: TestClient, rundir: RunDir) -> None:
    names = browser.get("/rollouts?run=0").json()
    assert names[:2] == ["step_30", "step_29"]
    groups = browser.get("/rollouts?run=0&name=step_30").json()
    assert len(groups) == 3
    assert groups[2]["prompt"] == view_cases.HOSTILE
    with (rundir.rollouts / "step_30.jsonl").open("a") as file:
        file.write('{"group": 7, "promp')  # a head was killed there
    assert browser.get("/rollouts?run=0&name=step_30").json() == groups


def test_responses_are_compressed(browser: TestClient) -> None:
    for path in ("/page.js", "/uPlot.iife.min.js", "/rollouts?run=0&name=step_30"):
        plain = browser.get(path, headers={"Accept-Encoding": "identity"})
        packed = browser.get(path, headers={"Accept-Encoding": "gzip"})
        assert packed.content == plain.content
        assert int(packed.headers["Content-Length"]) < 0.5 * len(plain.content)
        assert "Content-Encoding" not in plain.headers


def test_a_large_file_is_cut_to_its_first_groups(browser: TestClient, rundir: RunDir) -> None:
    line = (rundir.rollouts / "step_30.jsonl").read_text().splitlines()[0]
    (rundir.rollouts / "eval_30.jsonl").write_text(f"{line}\n" * (GROUPS_SHOWN + 9))
    assert len(browser.get("/rollouts?run=0&name=eval_30").json()) == GROUPS_SHOWN


@pytest.mark.parametrize(
    "query", ["run=0&name=../config", "run=0&name=step_1/../../x", "run=7", "run=-1", "run=x", "run=0&name=step_%C2%B2"]
)
def test_only_files_of_rollouts_can_be_asked_for(browser: TestClient, query: str) -> None:
    assert browser.get(f"/rollouts?{query}").status_code == 404


def test_settings_are_shown_with_those_that_were_set(browser: TestClient, rundir: RunDir) -> None:
    config = json.loads(rundir.config.read_text())
    rundir.config.write_text(json.dumps({**config, "learner": {**config["learner"], "lr": 3e-5}}))
    told = browser.get("/settings?run=0").json()
    assert [one for one in told if not one["is_default"]] == [
        {"name": "learner.lr", "value": "3e-05", "is_default": False}
    ]
    assert len(told) == len(list(all_fields()))
    rundir.config.unlink()
    assert browser.get("/settings?run=0").status_code == 404


def test_ends_of_logs_are_shown_without_control_characters_or_tickets(browser: TestClient, rundir: RunDir) -> None:
    assert browser.get("/logs?run=0").json() == []
    rundir.logs.mkdir(exist_ok=True)
    ticket = RunIdentity.create_or_load(rundir.identity).make_ticket("worker", "127.0.0.1:1", 1, 1.0)
    lines = [*(f"line {number}" for number in range(20_000)), f"rented with {ticket} by me", f"he said {HOSTILE}"]
    (rundir.logs / "head.log").write_text("\n".join(lines) + "\n")
    (rundir.logs / "notes.txt").write_text("mine")
    os.utime(rundir.logs / "head.log", (1, 1))
    (rundir.logs / "worker-0.log.1").write_bytes(b"\xff\x1b[31m red\n")
    assert browser.get("/logs?run=0").json() == ["worker-0.log.1", "head.log"]
    told = browser.get("/logs?run=0&name=head.log").json().splitlines()
    assert 5_000 < len(told) < 20_000
    assert told[0].startswith("line ")
    assert told[-2] == "rented with echo2-(a ticket) by me"
    assert told[-1] == f"he said {printable(HOSTILE)}"
    assert browser.get("/logs?run=0&name=worker-0.log.1").json() == "\N{REPLACEMENT CHARACTER} red\n"
    for name in ("notes.txt", "../config.json", "none.log", ""):
        assert browser.get("/logs", params={"run": 0, "name": name}).status_code == 404


def test_one_task_over_the_steps(browser: TestClient) -> None:
    first = browser.get("/rollouts?run=0&name=step_30").json()[0]
    tries = browser.get(f"/task?run=0&name=step_30&group={first['group']}").json()
    assert [name for name, _ in tries] == [f"step_{step}" for step in range(26, 31)]
    assert {group["prompt"] for _, group in tries} == {first["prompt"]}
    assert browser.get("/task?run=0&name=step_30&group=99999").status_code == 404


def test_files_of_rollouts_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("step_2", "step_10", "eval_10", "eval_0", "notes"):
        (tmp_path / f"{name}.jsonl").touch()
    assert rollout_log.names(tmp_path) == ["step_10", "eval_10", "step_2", "eval_0"]
    assert rollout_log.names(tmp_path / "nowhere") == []


def test_the_page_gets_the_state_of_the_run(rundir: RunDir) -> None:
    view = RunView.read(rundir.path)
    told = run_data(view)
    assert (told["state"], told["version"], told["max_steps"]) == ("running", 30, view_cases.MAX_STEPS)
    assert told["goes_on"] is True
    assert [wait["who"] for wait in told["waits"]] == ["learner", view_cases.HOSTILE]
    assert (told["num_workers"], told["num_idle"], told["num_current"]) == (6, 1, 5)
    relayed = [worker for worker in told["workers"] if worker["sources"] and worker["sources"] != [""]]
    assert len(relayed) == 4
    cost = cost_data(view)
    assert cost["by_cause"]["stale"] > 0
    assert cost["forecast"]["usd"] == pytest.approx(0.004 * view_cases.MAX_STEPS, rel=1e-3)


def test_a_run_that_has_not_begun_is_shown(tmp_path: Path) -> None:
    view = RunView.read(tmp_path / "nothing")
    assert run_data(view)["state"] == "no head was started here yet"
    assert run_data(view)["goes_on"] is False
    assert points(view.rows) == {"from": 0, "steps": [], "seconds": [], "stride": 1, "columns": {}}
    assert cost_data(view)["usd"] is None


@pytest.mark.parametrize("num_steps", [1, POINTS_MAX - 1, POINTS_MAX, 3 * POINTS_MAX, 10_000])
def test_charts_are_thinned_out_and_lose_no_peak(num_steps: int) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "off_policy/max": 1, "reward/mean": 0.5} for step in range(num_steps)]
    rows[num_steps // 2]["off_policy/max"] = 9
    rows[num_steps // 3]["reward/mean"] = float("nan")
    found = points(rows)
    assert len(found["steps"]) <= POINTS_MAX + 1
    assert max(found["columns"]["off_policy/max"]) == 9
    assert found["steps"][-1] == num_steps - 1
    json.dumps(found, allow_nan=False)
    longer = points([*rows, {"step": num_steps, "off_policy/max": 1}])
    if longer["stride"] == found["stride"]:  # points keep their place
        assert longer["steps"][: len(found["steps"]) - 1] == found["steps"][:-1]


def test_a_step_sends_only_its_changed_points() -> None:
    """Whatever happens to a run's rows, a page that puts what is told behind what it has shows what is there."""
    rng, told, shown = random.Random(5), ChartPoints(), {"steps": [], "seconds": [], "columns": {}}
    rows: list[dict[str, Any]] = []
    num_short = 0
    for turn in range(3 * POINTS_MAX):
        if rows and rng.random() < 0.02:  # an evaluation ends late
            number = rng.randrange(len(rows))
            rows = [*rows[:number], rows[number] | {"eval/accuracy": rng.random()}, *rows[number + 1 :]]
        elif rows and rng.random() < 0.01:  # the learner falls back
            rows = rows[: rng.randrange(len(rows))]
        else:
            more = {"reward/mean": rng.random(), "wait/lost": float(rng.random() < 0.01)}
            if rng.random() < 0.02:
                more[f"eval/accuracy/set {rng.randrange(30)}"] = rng.random()  # more than a page is told of
            if rng.random() < 0.9:
                more["time/unix"] = 1e9 + 2.0 * len(rows) + rng.random()
            rows = [*rows, {"step": len(rows), **more}]
        news = told.tail(told.take(rows))
        kept = news["from"]
        num_short += len(news["steps"]) < 5
        columns = {
            name: [*(shown["columns"][name][:kept] if kept else []), *new] for name, new in news["columns"].items()
        }
        shown = {name: [*shown[name][:kept], *news[name]] for name in ("steps", "seconds")} | {"columns": columns}
        if turn % 29 == 0:
            assert shown == {key: points(rows)[key] for key in shown}
    assert num_short > 2 * POINTS_MAX


def test_held_out_sets_and_samples_have_lines_of_their_own_and_steps_a_time() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/accuracy": 0.25, "eval/accuracy/easy": 0.4, "eval/pass@2": 0.5},
        {"step": 1, "time/unix": 1.8e9 + 5.5, "time/step": 2.5, "loss/mean": 0.1, "ess": 0.9},
        {"step": 2, "time/unix": 1.8e9 + 8.0, "time/step": 2.5, "optim/grad_norm": 3.0},
        {"step": 3, "time/unix": 1.8e9 + 7.0},  # a clock that was set back
    ]
    found = points(rows)
    assert found["seconds"] == [0.0, 2.5, 5.0, 5.0]
    assert found["columns"]["eval/accuracy/easy"] == [0.4, None, None, None]
    assert found["columns"]["eval/pass@2"] == [0.5, None, None, None]
    assert found["columns"]["optim/grad_norm"] == [None, None, 3.0, None]
    assert {"loss/mean", "ess"} <= set(found["columns"])


def points(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All that a page is told of these."""
    made = ChartPoints()
    assert made.take(rows) == 0
    return made.tail(0)


def test_workers_are_sent_by_the_page_of_a_table(rundir: RunDir) -> None:
    view_cases.write_status(rundir, 30, num_workers=1000)
    browser = client(rundir.path)
    browser.get(f"/?token={TOKEN}")
    told = run_data(RunView.read(rundir.path))
    assert told["num_workers"] == 1000
    assert len(told["workers"]) == WORKERS_SHOWN
    seen: list[str] = []
    while len(seen) < 1000:
        answer = browser.get(f"/workers?run=0&first={len(seen)}").json()
        assert answer["num_found"] == 1000
        seen += [worker["id"] for worker in answer["workers"]]
    assert len(set(seen)) == 1000
    assert seen[:WORKERS_SHOWN] == [worker["id"] for worker in told["workers"]]
    found = browser.get("/workers", params={"find": "MACHINE-77"}).json()
    assert found["num_found"] == 11  # 77, 770 to 779
    assert {worker["host"][:10] for worker in found["workers"]} == {"machine-77"}
    assert browser.get("/workers?first=2000").json()["workers"] == []
    assert browser.get("/workers?first=x").status_code == 404


def test_unchanged_files_are_not_read_again(rundir: RunDir) -> None:
    before = RunView.read(rundir.path)
    assert (same := before.newer()).status is before.status
    assert same.rows is before.rows
    view_cases.write_status(rundir, 30)
    assert same.newer().status is not before.status
    outcome = {"kind": "finished", "reason": "all steps are trained"}
    rundir.outcome.write_text(json.dumps(outcome))
    assert same.newer().state == "finished: all steps are trained"
    assert run_data(same.newer())["goes_on"] is False


def test_a_page_that_closes_while_a_run_is_read_loses_no_step(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    async def heard_by(events: AsyncIterator[bytes], step: int) -> None:
        """Wait until a page is told this step."""
        heard = b""
        while True:
            heard += await anext(events)
            lines = [line for line in heard.decode().splitlines() if line.startswith('data: {"run":0,"from":')]
            if any(step in json.loads(line.removeprefix("data: "))["steps"] for line in lines):
                return

    async def listen() -> None:
        watch = Watch([rundir.path])
        read = watch._read

        def slow() -> Any:
            begun.set()
            assert goes_on.wait(30)
            return read()

        first = watch.events()
        await heard_by(first, 30)
        monkeypatch.setattr(watch, "_read", slow)
        assert await asyncio.to_thread(begun.wait, 30)
        view_cases.append_step(rundir, 31)
        await first.aclose()
        second = watch.events()
        goes_on.set()
        await heard_by(second, 31)
        await second.aclose()

    asyncio.run(asyncio.wait_for(listen(), 60))


def test_a_listener_gets_the_whole_state_first_and_then_changes(rundir: RunDir) -> None:
    async def listen() -> tuple[list[str], str]:
        watch = Watch([rundir.path])
        events = watch.events()
        heard = b""
        while heard.count(b"event: ") < 3:
            heard += await anext(events)
        view_cases.append_step(rundir, 31)
        news = b""
        while b"event: steps" not in news:
            news += await anext(events)
        await events.aclose()
        assert watch.num_listeners == 0
        return sorted(line for line in heard.decode().splitlines() if line.startswith("event: ")), news.decode()

    kinds, news = asyncio.run(asyncio.wait_for(listen(), 30))
    assert kinds == ["event: cost", "event: run", "event: steps"]
    (steps,) = [line for line in news.splitlines() if line.startswith('data: {"run":0,"from":')]
    told = json.loads(steps.removeprefix("data: "))
    assert (told["from"], told["steps"]) == (31, [31])  # the page has those before
