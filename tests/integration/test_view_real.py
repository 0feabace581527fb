"""`echo2 view` in a script. `test_stops.py` has the page of a run that goes on and ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx2


def test_a_script_gets_the_address_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echo2", "view", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with httpx2.Client(follow_redirects=True, timeout=100.0) as browser:
            assert "<html" in browser.get(url).text
        process.send_signal(signal.SIGTERM)
