"""The planning commands' flags. Light: what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

#: (name, help, command) -> the command's parser.
Add = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add_commands(add: Add) -> None:
    """Register plan, probe, simulate and cost."""
    _add_plan(add)
    _add_probe(add)
    _add_simulate(add)
    parser = add("cost", "What a run has cost: dollars by worker and by cause.", _cost)
    parser.add_argument("directory", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true")


def _add_plan(add: Add) -> None:
    parser = add("plan", "What a run needs: the cheapest machines that keep the learner busy, and the bill.", _plan)
    parser.set_defaults(takes_settings=True)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file of the run")
    parser.add_argument("--offers", type=Path, default=Path("offers.toml"), help="machines on offer (TOML)")
    parser.add_argument("--budget", type=float, metavar="USD", help="most that the whole run may cost")
    given = parser.add_argument_group("measured or estimated", "Taken from --from DIR where a run of the kind exists.")
    given.add_argument("--from", dest="source", type=Path, metavar="DIR", help="a run whose metrics are to be used")
    given.add_argument("--train-seconds", type=float, metavar="T", help="the learner's seconds for one step")
    given.add_argument("--broadcast-seconds", type=float, metavar="Tb", help="publication until workers have it")
    given.add_argument(
        "--snapshot-bytes", type=float, metavar="G", help="bytes of a full snapshot (default: the model)"
    )
    given.add_argument("--delta-bytes", type=float, metavar="D", help="bytes of an update, where deltas are sent")
    given.add_argument("--uplink-mbps", type=float, metavar="B0", help="the head's upload (default: 1000)")
    given.add_argument("--reload-seconds", type=float, metavar="L", help="a worker's pause to load a snapshot")
    mode = parser.add_argument_group("what may be chosen")
    mode.add_argument("--publish-every", type=int, metavar="K", help="fix kappa instead of searching")
    mode.add_argument("--max-idle", type=float, default=0.02, help="learner's share of waiting that is fine (0.02)")
    mode.add_argument("--pause-during-broadcast", action="store_true", help="workers stop while a snapshot travels")
    parser.add_argument("--rehearse", action="store_true", help="simulate the plan, too, with the real control code")
    parser.add_argument("--json", action="store_true")


def _add_probe(add: Add) -> None:
    parser = add("probe", "Measure this machine's rollouts per second, as an entry for the offers file.", _probe)
    parser.set_defaults(takes_settings=True)
    parser.add_argument(
        "target", type=Path, metavar="CONFIG|MODEL_DIR", help="configuration file, or a model directory"
    )
    parser.add_argument("--engine", default="", choices=["", "compact", "transformers", "fake"])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to sample (30)")
    parser.add_argument("--name", default="this-machine", help="name of the offer")
    parser.add_argument("--price-usd-per-hour", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")


def _add_simulate(add: Add) -> None:
    parser = add("simulate", "Run a scenario: the real control code, virtual machines, a virtual clock.", _simulate)
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="scenario file (TOML), as in simulations/")
    parser.add_argument("--seed", type=int, default=0, help="of all chance in it (0)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what came out (png, svg, pdf)")


def _plan(options: argparse.Namespace) -> int:
    from echo2.planning.plan_command import run

    return run(options)


def _probe(options: argparse.Namespace) -> int:
    from echo2.planning.probe import run

    return run(options)


def _cost(options: argparse.Namespace) -> int:
    from echo2.planning.cost_report import run

    return run(options.directory, options.json)


def _simulate(options: argparse.Namespace) -> int:
    from echo2.planning.simulate import run

    return run(options)
