"""The commands before and after a run: plan, probe, simulate, cost."""

from __future__ import annotations

from pathlib import Path

from echo2.cli.adding import Add, module_command
from echo2.config.values import ENGINES


def add_plan(add: Add) -> None:
    """Add `plan`."""
    text = "Plan a run: the cheapest machines that keep the learner busy, and the bill."
    parser = add("plan", text, module_command("echo2.planning.plan_command"), takes_settings=True, has_json=True)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file of the run")
    text = "machines on offer, as in examples/offers.toml; `market`: today's prices, by gpuhunt (default: offers.toml, "
    text += "else the newest prices of the market that are here)"
    parser.add_argument("--offers", type=Path, metavar="FILE", help=text)
    parser.add_argument("--rent", action="store_true", help="print the commands that rent the plan's machines")
    parser.add_argument("--budget", type=float, metavar="USD", help="most that the run may cost")
    parser.add_argument("--rehearse", action="store_true", help="also simulate the plan with the real control code")
    given = parser.add_argument_group("measured or estimated", "Flags override what --from DIR supplies.")
    text = "the learner's GPUs, as in 4xA100-80GB: estimates what is not given from their data sheet"
    given.add_argument("--learner", metavar="GPUS", help=text)
    given.add_argument("--from", dest="source", type=Path, metavar="DIR", help="a similar run that was measured")
    for flag, symbol, what in (
        ("--train-seconds", "T", "seconds of training in one step"),
        ("--reward-seconds", "R", "seconds that your reward functions need for one group"),
        ("--broadcast-seconds", "Tb", "seconds from publication until workers have a snapshot"),
        ("--snapshot-bytes", "G", "bytes of a full snapshot (default: from the model)"),
        ("--uplink-mbps", "B0", "upload rate of the head in Mbit/s (default: 1000)"),
        ("--answer-tokens", "N", "mean tokens of an answer (default: half of sampling.max_tokens)"),
        ("--learner-memory-gb", "M", "memory of each GPU of the learner in GB (default: this machine's)"),
    ):
        given.add_argument(flag, type=float, metavar=symbol, help=what)
    market = parser.add_argument_group("machines of the market")
    market.add_argument("--gpus", metavar="NAMES", help="only these, as in RTX-4090,RTX-5090 (default: all)")
    market.add_argument("--region", metavar="NAME", help="only regions with this in their name (default: all)")
    market.add_argument("--spot", choices=("any", "yes", "no"), default="any", help="only spot machines, or none")
    text = "how many of each kind there are taken to be (default: 64)"
    market.add_argument("--each", type=int, default=64, metavar="N", help=text)
    mode = parser.add_argument_group("choices")
    mode.add_argument("--max-idle", type=float, default=0.02, help="share of time the learner may wait (default: 0.02)")


def add_planning(add: Add) -> None:
    """Add `probe`, `simulate` and `cost`."""
    text = "Measure this machine's rollouts per second, and print an entry for the offers file."
    parser = add("probe", text, module_command("echo2.planning.probe"), takes_settings=True, has_json=True)
    what = "configuration file, or a model directory"
    parser.add_argument("target", type=Path, metavar="CONFIG|MODEL_DIR", help=what)
    what = f"engine to measure: {', '.join(ENGINES)} (default: the run's)"
    parser.add_argument("--engine", default="", choices=ENGINES, metavar="NAME", help=what)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to sample (default: 30)")
    parser.add_argument("--name", default="this-machine", help="name of the entry (default: this-machine)")
    parser.add_argument("--price-usd-per-hour", type=float, default=0.0, metavar="USD", help="its price (default: 0)")
    text = "Simulate a run before you pay for it: the real control code with virtual machines and a virtual clock."
    parser = add("simulate", text, module_command("echo2.planning.simulate"), has_json=True)
    what = "scenario file (TOML), as in simulations/"
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help=what)
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default: 0)")
    text = "Show what a run has cost: dollars by machine and by cause."
    add("cost", text, module_command("echo2.head.ledger.costs"), directory="run directory", has_json=True)
