"""What the first rank does when another rank's process ends before it has left itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCH = """
import sys, threading
from echo2.core.child import ChildProcess
from echo2.learner.learner_process import _end_with_rank
heard = threading.Event()
def ended(status):
    _end_with_rank(1, threading.Event(), status)
    heard.set()
ChildProcess([sys.executable, "-c", f"raise SystemExit({sys.argv[1]})"], on_end=ended)
heard.wait()
print("goes on")
"""


@pytest.mark.parametrize(("status", "status_of_all"), [(0, 0), (2, 2)])
def test_a_rank_that_was_released_ends_before_the_first_has_left(status: int, status_of_all: int) -> None:
    """The first may take longer: it waits for an encoding, or the head. Any other end ends the learner."""
    ended = subprocess.run([sys.executable, "-c", WATCH, str(status)], capture_output=True, text=True)
    assert (ended.returncode, "goes on" in ended.stdout) == (status_of_all, status == 0), ended.stderr
