"""`echo2 audit`: counts a run's groups from the ledger and judges them."""

from __future__ import annotations

import argparse
import json
import sys

from echo2.buffer.audit import audit
from echo2.rundir import RunDir


def run(options: argparse.Namespace) -> int:
    """The command. Returns 0 if no group is lost, doubled or was trained above the staleness bound, else 1."""
    rundir = RunDir(options.directory)
    found = audit(rundir.ledger)
    bound = rundir.read_config().schedule.max_staleness if rundir.config.is_file() else None
    is_too_old = bound is not None and found.max_staleness > bound
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        for key, value in found.to_dict().items():
            counts = value.items() if isinstance(value, dict) else ()
            print(f"{key:>14}  {', '.join(f'{count} {why}' for why, count in counts) or value or 0}")
    if is_too_old:
        print(f"error: a group was trained {found.max_staleness} versions old; the bound is {bound}", file=sys.stderr)
    return 0 if found.lost == found.doubled == 0 and not is_too_old else 1
