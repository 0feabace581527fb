"""Our broadcast beside libtorrent, lattica's content exchange and shardcast: same links, same bytes, same n, one run.

    sudo make bench-broadcast_peers                       # n = 5 and 8, even and uneven links, three rounds
    sudo make bench-broadcast_peers ARGS='--only even-5 --size-mib 64 --repeats 1 --with libtorrent shardcast'

The others are installed by pip into an environment of their own (outputs/peers-venv), never into ours. Each is measured
with several settings, and the one that is best for it, scenario by scenario, is the one that counts:

    libtorrent    2, 4 and 8 upload slots; TCP; pieces as large as our chunks; everybody knows everybody at the start
    lattica       one block of 8 MiB after another, as Parallax drives it; and 8 threads with blocks of 1 MiB
    shardcast     2 or 3 of the workers relay to the others; shards of 16 and 48 MiB; relays look for news every second

What favours them: torrent files and block names are handed out before the clock starts, and nothing of theirs is
signed; libtorrent and shardcast talk in the clear. A time ends when their own check of all bytes has passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import broadcast
from broadcast_figures import progress, table
from broadcast_scenarios import chosen
from broadcast_trial import Scenario, Setup, stop_on_sigterm
from wan.net import WanError

SCENARIOS = ("even-5", "even-8", "uneven-5", "uneven-8")
REQUIREMENTS = ("libtorrent==2.1.1", "lattica==1.0.21", "shardcast==0.3.2", "blake3")
NODES = str(broadcast.HERE / "broadcast_peer_nodes.py")
OURS = "echo2"


def peers_python(given: Path | None) -> str:
    """The interpreter that has them; its environment is made at the first call."""
    if given is not None:
        return str(given)
    environment = broadcast.HERE.parents[1] / "outputs" / "peers-venv"
    python = environment / "bin" / "python"
    if not python.exists():
        progress(f"Making {environment.name} ...")
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    return str(python)


def setups(python: str, piece_bytes: int) -> dict[str, list[Setup]]:
    """By program: what it is measured with."""
    command = (python, NODES)
    libtorrent = {"system": "libtorrent", "piece_bytes": piece_bytes}
    shardcast = {"system": "shardcast", "downloads": 3}
    lattica = {"system": "lattica"}
    return {
        "libtorrent": [
            Setup(f"libtorrent-{slots}", command, {**libtorrent, "slots": slots}, pulls=True) for slots in (2, 4, 8)
        ],
        "lattica": [
            Setup(
                name, command, {**lattica, "threads": threads, "block_bytes": mib << 20}, pulls=True, settle_seconds=8.0
            )
            for name, threads, mib in (("lattica-parallax", 1, 8), ("lattica-8", 8, 1))
        ],
        "shardcast": [
            Setup(
                f"shardcast-{middles}-{mib}",
                command,
                {**shardcast, "middles": middles, "shard_bytes": mib << 20},
                joins_in_turn=True,
                pulls=True,
            )
            for middles, mib in ((2, 16), (3, 16), (3, 48))
        ],
    }


def trials(wanted: Sequence[Scenario], python: str, options: argparse.Namespace) -> list[tuple[int, Scenario, Setup]]:
    """Ours and all others, one after the other, on one network after the other."""
    ours = broadcast.setup("trees", options.fan_out)
    ours = Setup(OURS, ours.command, ours.options)
    by_program = setups(python, options.piece_kib << 10)
    others = [each for program in options.programs for each in by_program[program]]
    return [
        (number, scenario, each)
        for number in range(options.repeats)
        for scenario in wanted
        for each in ((ours,) if len(scenario.workers) == 1 else (ours, *others))
    ]


def best(rows: Sequence[dict[str, Any]], programs: Sequence[str]) -> list[str]:
    """How many times as long as ours each program took with its best setting, scenario by scenario."""
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        mine = {row["setup"]: row["last_seconds"]["median"] for row in rows if row["scenario"] == scenario}
        for program in programs:
            theirs = {name: seconds for name, seconds in mine.items() if name.startswith(program)}
            if OURS in mine and theirs:
                name = min(theirs, key=theirs.__getitem__)
                ratio = theirs[name] / mine[OURS]
                lines.append(
                    f"{scenario:10} {name:18} {theirs[name]:7.1f} s, {ratio:.2f} times ours ({mine[OURS]:.1f} s)"
                )
    return lines


def main() -> None:
    parser = broadcast.arguments(__doc__)
    parser.add_argument("--with", dest="programs", nargs="+", default=["libtorrent", "lattica", "shardcast"])
    parser.add_argument("--python", type=Path, help="an interpreter that has them installed")
    parser.add_argument("--piece-kib", type=int, default=256, help="of torrents")
    options = parser.parse_args()
    stop_on_sigterm()
    try:
        wanted = chosen(options.only or SCENARIOS)
        rounds = broadcast.measure(
            trials(wanted, peers_python(options.python), options), int(options.size_mib * (1 << 20))
        )
    except (ValueError, WanError) as error:
        sys.exit(f"error: {error}")
    rows = rounds.summary(wanted)
    print(table(rows))
    print("\n".join(best(rows, options.programs)))
    out = broadcast.write(rounds, wanted, "broadcast_peers", options)
    print(f"Written to {out.name}.")


if __name__ == "__main__":
    main()
