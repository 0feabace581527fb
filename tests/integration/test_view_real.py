"""`echo2 run --view`: the page of a real run, while it goes on and when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx2

from real_runs import ENDLESS, Run


def test_the_page_shows_the_run_and_ends_with_it(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, *ENDLESS).start("--view")
    assert run.process is not None
    assert run.process.stderr is not None
    address = next(line.split()[1] for line in run.process.stderr if line.startswith("open http"))
    run.wait_version(2)
    with httpx2.Client(follow_redirects=True, timeout=100.0) as browser:  # by default it gives up after five seconds
        assert "<html" in browser.get(address).text
        with browser.stream("GET", f"{address.partition('?')[0]}events") as events:
            lines = events.iter_lines()
            data = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
            told = next(one for one in data if "version" in one)
            run.process.send_signal(signal.SIGINT)
            for _ in lines:  # until the page lets go
                pass
    _, errors = run.process.communicate(timeout=120)
    assert told["version"] >= 2
    assert run.process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Cancel" not in errors  # uvicorn's word for answers that it breaks off


def test_a_script_is_told_the_address_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echo2", "view", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with httpx2.Client(follow_redirects=True, timeout=100.0) as browser:
            assert "<html" in browser.get(url).text
        process.send_signal(signal.SIGTERM)
