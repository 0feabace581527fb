"""The head's machine is lost again and again under load, and the run resumed from its store: which results are lost?

    make bench-head_loss ARGS='--instants 20 --stores store store?lag_seconds=3'

A real `echo2 head`, the learner and the workers of `head_fleet.py`, which live on and find the next head. At a random
instant the store takes nothing any more, for up to twice the lag (or two seconds); then the head is killed, its
directory deleted, and the run resumed from the store in an empty one. Counted: results that workers were told to be
accepted, and that the last ledger lacks. Between the first and the last of one instant there may be the lag, by the
lost ledger's times. Where the store took nothing for longer, the head took results and told nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import head_fleet
import head_load
import recording

from echo2.config.rundir import RunDir

#: For a step to be trained.
STUCK_SECONDS = 600.0


def accepted(run: Path) -> dict[int, float]:
    """When each result in a ledger was accepted, by its lease."""
    with closing(sqlite3.connect(f"file:{RunDir(run).ledger}?mode=ro", uri=True)) as ledger:
        found = ledger.execute("SELECT lease_id, closed_at FROM leases WHERE outcome = 'accepted'")
        return dict(found.fetchall())


def resume(head: head_load.RealHead, place: Path) -> None:
    """Start a head in an empty directory, from the store."""
    command = [sys.executable, "-m", "echo2", "head", "--resume-from", str(place), "--out", str(head.run)]
    head.process = subprocess.Popen(command, stderr=head._log)


async def burn(head: head_load.RealHead, place: Path, stalled_seconds: float) -> dict[int, float]:
    """Keep the head from its log for a while, lose its machine, and resume elsewhere. Return what it had accepted."""
    (place / "log").rename(place / "away")
    await asyncio.sleep(stalled_seconds)
    head.process.kill()
    head.process.wait()
    (place / "away").rename(place / "log")
    burnt = accepted(head.run)
    shutil.rmtree(head.run)
    resume(head, place)
    return burnt


async def lose(head: head_load.RealHead, options: argparse.Namespace) -> dict[str, Any]:
    url, _, lag = head.store.partition("?lag_seconds=")
    place, lag_seconds, chance = Path(url), float(lag or 0.0), random.Random(options.seed)
    marks, ready = list[tuple[int, float]](), asyncio.Event()
    learning = asyncio.ensure_future(head_load.learner(head.directory, ready, marks))
    burnt, stalled, back = list[dict[int, float]](), list[float](), list[float]()
    fleet = None

    async def trained(steps: int) -> None:
        until, began = len(marks) + steps, time.time()
        while len(marks) < until:
            if learning.done():
                learning.result()
            if head.process.poll() is not None or time.time() > began + STUCK_SECONDS:
                raise SystemExit((head.directory / "head.log").read_text()[-2000:])
            await asyncio.sleep(0.05)

    try:
        await asyncio.wait([learning, waiting := asyncio.ensure_future(ready.wait())], return_when="FIRST_COMPLETED")
        waiting.cancel()
        fleet = head_fleet.Fleet(head, options.workers, options)
        fleet.go()
        for number in range(options.instants):
            await trained(1)
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            stalled.append(chance.uniform(0.0, 2.0 * (lag_seconds or 1.0)))
            burnt.append(await burn(head, place, stalled[-1]))
            at = time.time()
            await trained(1)
            back.append(time.time() - at)
            print(f"instant {number + 1}: {len(burnt[-1])} accepted, a step after {back[-1]:.0f} s", file=sys.stderr)
        notes = fleet.end()
    finally:
        learning.cancel()
        if fleet is not None:
            fleet.kill()
    head.close()
    audit = json.loads(recording.output_of([sys.executable, "-m", "echo2", "audit", str(head.run), "--json"]))
    acknowledged, kept = {int(lease) for _, kind, lease in notes if kind == "acknowledged"}, accepted(head.run)
    missing = acknowledged - kept.keys()
    lost = [sorted(one[lease] for lease in missing & one.keys()) for one in burnt]
    spans = [times[-1] - times[0] if times else 0.0 for times in lost]
    figures = {
        "store": head.store.removeprefix(f"{head.directory}/"),
        "workers": options.workers,
        "seed": options.seed,
        "steps": len(marks),
        "acknowledged": len(acknowledged),
        "lost": [len(times) for times in lost],
        "lost_seconds": spans,
        "lost_in_no_ledger": len(missing.difference(*burnt)),
        "stalled_seconds": stalled,
        "seconds_to_next_step": back,
        "audit": {name: audit[name] for name in ("trained", "lost", "doubled")},
    }
    is_held = max(spans) <= lag_seconds and (lag_seconds or not missing) and not missing.difference(*burnt)
    return {"is_held": bool(is_held), **{name: head_fleet.rounded(value) for name, value in figures.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stores", nargs="+", default=["store", "store?lag_seconds=3"], help="directories' names")
    parser.add_argument("--instants", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--sampling-seconds", type=float, default=0.5, help="of a group, on average")
    parser.add_argument("--step", type=int, default=32, help="groups a step")
    parser.add_argument("--out", type=Path, help="file for the figures (default: in results/)")
    fixed = {"samples": 8, "tokens": 32, "batch": 4, "join_seconds": 1.0, "profile": ""}
    options, rows = parser.parse_args(namespace=argparse.Namespace(**fixed)), []
    for store in options.stores:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            head_fleet.enrol(Path(folder), options.workers)
            head_fleet.give_addresses(Path(folder))
            head = head_load.RealHead(Path(folder), 0, options, store=store)
            try:
                rows.append(asyncio.run(lose(head, options)))
            finally:
                head.close()
        print(json.dumps(rows[-1]), flush=True)
    print(recording.save("head_loss", {"rows": rows}, options.out))
    if not all(row["is_held"] for row in rows):
        raise SystemExit("more was lost than the store's lag allows")


if __name__ == "__main__":
    main()
