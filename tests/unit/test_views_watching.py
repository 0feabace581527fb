"""Alerts and the board are made of metrics that exist, and a bundle has nothing that must not leave the run."""

from __future__ import annotations

import json
import logging
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import view_cases
from echo2.config.rundir import RunDir
from echo2.core.errors import UserError
from echo2.core.logs import JsonLines
from echo2.transport.tickets import TICKET_PREFIX
from echo2.views.run_files import pack
from echo2.views.run_view import RunView
from echo2.views.serve import exposition

ROOT = Path(__file__).parents[2]
WATCHING = ROOT / "launch" / "watching"
SECRET = "s3cr3t-of-the-owner"
TICKET = TICKET_PREFIX + "A" * 60


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return view_cases.make_run(tmp_path / "run", num_steps=30)


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((WATCHING / "prometheus-rules.yml").read_text())["groups"]
    return list(group["rules"])


def expressions() -> list[str]:
    panels = json.loads((WATCHING / "grafana.json").read_text())["panels"]
    return [rule["expr"] for rule in rules()] + [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_an_alert_or_of_the_board_is_exported_or_documented(rundir: RunDir) -> None:
    exported = set(re.findall(r"^# TYPE (\w+) gauge$", exposition([RunView.read(rundir.path)]), re.MULTILINE))
    page = (ROOT / "docs" / "operations.md").read_text().partition("\n## Metrics\n")[2]
    documented = {f"echo2_{name.replace('/', '_')}" for name in re.findall(r"`([a-z0-9_]+/[a-z0-9_]+|ess)`", page)}
    used = {name for expression in expressions() for name in re.findall(r"echo2_\w+", expression)}
    assert len(used) > 30
    assert used - exported - documented == set()


def test_every_alert_says_what_to_do_and_which_run_it_means() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert all("$labels.run" in rule["annotations"]["summary"] for rule in rules())


def test_metrics_that_need_attention_are_exported(rundir: RunDir) -> None:
    status = json.loads(rundir.status.read_text())
    trust = {"is_quarantined": True, "num_passed": 3, "num_failed": 2, "num_missed": 1}
    rundir.status.write_text(json.dumps({**status, "paused": "no room", "trust": {"t-1": trust, "t-2": trust}}))
    lines = exposition([RunView.read(rundir.path)]).splitlines()
    for name, value in (("run_paused", 1), ("checks_quarantined_tickets", 2), ("checks_failed", 4)):
        assert f'echo2_{name}{{run="run"}} {value}' in lines
    assert any(line.startswith("echo2_disk_free_bytes") for line in lines)


def test_a_bundle_has_what_a_report_needs_and_no_secret_or_text_of_a_rollout(rundir: RunDir, tmp_path: Path) -> None:
    rundir.logs.mkdir(exist_ok=True)
    (rundir.logs / "head.log").write_text(
        f"joined with {TICKET}\nlog in at https://me:{SECRET}@example.org\n{SECRET}\n"
    )
    record = logging.LogRecord(
        "x", logging.INFO, "", 1, f"{TICKET}, https://me:{SECRET}@example.org {SECRET}", (), None
    )
    (rundir.logs / "learner.log").write_text(JsonLines("learner").format(record) + "\n")
    (rundir.logs / "reward.log").write_text("the completion is: PROMPT")
    event = {
        "event": {"type": "GroupFailed", "detail": "PROMPT", "traceback": "PROMPT"},
        "options": {"check_seed": 77123},
    }
    rundir.events.write_text(json.dumps(event) + "\n" + '{"cut')
    to = tmp_path / "bundle.tar.gz"
    names = pack(rundir, to, {"python": "3.13"}, {"WANDB_API_KEY": f"{SECRET}\n", "MY_TOKEN": "short"})
    with tarfile.open(to) as file:
        members = file.getmembers()
        texts = {member.name: file.extractfile(member).read().decode() for member in members}
    assert [f"echo2-bundle/{name}" for name in names] == list(texts)
    assert {"machine.json", "config.json", "status.json", "audit.json", "metrics.jsonl", "events.jsonl"} <= set(names)
    assert len(texts["echo2-bundle/metrics.jsonl"].splitlines()) == len(RunView.read(rundir.path).rows)
    assert json.loads(texts["echo2-bundle/events.jsonl"])["event"] == {"type": "GroupFailed"}
    everything = "".join(texts.values())
    prompts = [prompt for prompt in (view_cases.HOSTILE, "PROMPT", "77123") if prompt in everything]
    assert (prompts, SECRET in everything, TICKET in everything) == ([], False, False)
    assert "a ticket" in texts["echo2-bundle/logs/head.log"]
    told = json.loads(texts["echo2-bundle/logs/learner.log"])["message"]
    assert told == f"{TICKET_PREFIX}(a ticket), https://(credentials)@example.org ($WANDB_API_KEY)"
    with pytest.raises(UserError, match="Choose another --to"):
        pack(rundir, to, {})
