"""`echo2 demo`: builds the model once, in a separate process, and then starts an ordinary run."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from echo2.core.devices import require_torch
from echo2.launch import start
from echo2.launch.start import how_to_continue

CONFIG = Path(__file__).with_name("sort.toml")
MODEL = Path("outputs/models/digit_sorting")  # as in the configuration


def run(options: argparse.Namespace) -> int:
    """Build the model unless it exists, train it and print a summary; returns the exit status.

    Raises:
        UserError: torch is not installed, or as `start.run`.
    """
    require_torch()
    if not (MODEL / "config.json").is_file():
        print("Building the demo's model and warming it up (once; about a minute) ...", file=sys.stderr)
        subprocess.run(
            [sys.executable, "-m", "echo2.demo.digit_sorting", "--out", MODEL], check=True, stdout=sys.stderr
        )
    where = options.out or Path("outputs") / time.strftime("demo-%Y%m%d-%H%M%S")
    options.interrupted = how_to_continue(["run", str(where / "config.json"), "--out", str(where)])
    return start.run(CONFIG, where, False, False, {}, options.json)
