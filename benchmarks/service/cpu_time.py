"""CPU seconds of processes that run: of service_client.py too, whose Python has nothing of ours."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
#: What makes the inverse of a process id the number of its CPU clock on Linux (clock_getcpuclockid), in nanoseconds.
PROCESS_CLOCK = 0b010


def cpu_seconds(root: int) -> float:
    """Of a process and all below it; of those that have ended, in hundredths."""
    parents: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            process = int(entry.name)
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                own = time.clock_gettime(~process << 3 | PROCESS_CLOCK)
            except OSError:
                continue  # it ended meanwhile
            parents.setdefault(int(fields[1]), []).append(process)
            seconds[process] = own + (int(fields[13]) + int(fields[14])) / TICKS
    total, below = 0.0, [root]
    while below:
        process = below.pop()
        total += seconds.get(process, 0.0)
        below += parents.get(process, [])
    return total
