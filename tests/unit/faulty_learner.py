"""The learner's process of a service, whose writes fail at times, as its settings' `seed` says; for tests."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

from echo2.core import disk
from echo2_service.learner import call_queue, journal
from random_faults import Faults

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    starts = Path(settings["root"]) / "starts"
    starts.parent.mkdir(parents=True, exist_ok=True)
    number = len(starts.read_bytes()) if starts.exists() else 0
    starts.write_bytes(bytes(number + 1))  # the next start fails elsewhere
    faults = Faults(random.Random(f"{settings['seed']} {number}"))
    writes = [(os, "replace"), (journal, "append_whole"), (disk, "append_whole"), (Path, "replace"), (os, "fsync")]
    with faults.in_calls(writes, before=True):
        call_queue.main(sys.argv[1])
