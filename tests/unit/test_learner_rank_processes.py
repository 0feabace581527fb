"""What the first rank does when another rank's process ends before it has left itself."""

from __future__ import annotations

import subprocess
import sys

WATCH = """
import sys, threading
from echo2.core.child import ChildProcess
from echo2.learner.learner_process import _end_with_rank
for status in (0, 2):
    heard = threading.Event()
    def ended(status):
        _end_with_rank(1, threading.Event(), status)
        heard.set()
    ChildProcess([sys.executable, "-S", "-c", f"raise SystemExit({status})"], on_end=ended)
    heard.wait()
    print("goes on after", status, flush=True)
"""


def test_a_rank_that_was_released_ends_before_the_first_has_left() -> None:
    """The first may take longer: it waits for an encoding, or the head. Any other end ends the learner."""
    ended = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "goes on after 0\n"), ended.stderr
