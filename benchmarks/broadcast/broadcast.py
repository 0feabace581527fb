"""How long until the last of n workers has the weights: star, the paper's striped chain, and ours, over emulated links.

    sudo make bench-broadcast                       # everything, three rounds: hours
    sudo make bench-broadcast ARGS='--only even-4 even-8 --size-mib 64 --repeats 1'
    sudo make bench-broadcast ARGS='--only even-4 --size-mib 64 --schemes trees --broadcasts 3 --repeats 20'
    sudo make bench-broadcast ARGS='--list'
    sudo make bench-broadcast ARGS='--network'      # does the emulated network do what it says here?

Origin and workers are real processes in network namespaces (`wan/`), with real enrolment, mutual TLS, signed manifests
and stores; every worker's bytes are compared with the origin's before its time counts. In one round every scenario runs
once with every scheme, one after the other, so that a machine that slows down slows all of them; ratios are taken
within a round. With `--broadcasts 3` each trial sends three contents in turn, the later ones over connections that the
first opened, as in a run; a later one is held against the later one of a worker alone. The first and the later ones of
all rounds are told of apart: median, least, 90th percentile, greatest. With `--before DIR` the program in that checkout
of another commit runs in each round, too.

    over alone    T(n) over the time one worker alone took in the same round, over the same links
    over G/B_w    T(n) over the content's bits over a worker's line rate: headers and hand-shakes count against us
    over bound    T(n) over what no scheme can beat: G / min(B_0, slowest receiver, (B_0 + all uplinks) / n)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from broadcast_figures import Rounds, network_stack, one_line, progress, table
from broadcast_prediction import predicted_seconds
from broadcast_scenarios import chosen, scenarios
from broadcast_schemes import SCHEMES
from broadcast_trial import Scenario, Setup, Trial, TrialError, stop_on_sigterm
from recording import save
from wan.net import WanError, self_test

HERE = Path(__file__).resolve().parent
OURS = "trees"


def setup(scheme: str, fan_out: int, before: Path | None = None) -> Setup:
    """echo2, by this interpreter; or as it was `before`."""
    options = {"broadcast": {"scheme": scheme, "fan_out": fan_out}}
    if before is None:
        return Setup(scheme, (sys.executable, str(HERE / "broadcast_node.py")), options)
    node = before / HERE.relative_to(HERE.parents[1]) / "broadcast_node.py"
    command = ("env", f"PYTHONPATH={before / 'src'}", sys.executable, str(node))
    return Setup(f"{scheme} before", command, options)


def plan(wanted: Sequence[Scenario], options: argparse.Namespace) -> Iterator[tuple[int, Scenario, Setup]]:
    """(round, scenario, setup) in the order of running. One worker alone is the same in every scheme."""
    for number in range(options.repeats):
        for scenario in wanted:
            is_alone = len(scenario.workers) == 1
            for scheme in (OURS,) if is_alone else options.schemes:
                is_pointless = scheme == "star" and (scenario.fault or len(scenario.workers) > options.star_max)
                if not is_pointless:
                    yield number, scenario, setup(scheme, options.fan_out)
                if options.before is not None and not (is_pointless or is_alone):
                    yield number, scenario, setup(scheme, options.fan_out, options.before.resolve())


def measure(trials: Sequence[tuple[int, Scenario, Setup]], num_bytes: int, num_broadcasts: int = 1) -> Rounds:
    """All trials in turn; one that fails is told of, and the rest goes on. When stopped, it keeps what was measured."""
    rounds, refused = Rounds(), set()
    for at, (number, scenario, chosen_setup) in enumerate(trials):
        if scenario.congestion in refused:
            continue
        try:
            predicted = prediction(scenario, chosen_setup, num_bytes)
            for result in Trial(scenario, chosen_setup, num_bytes, number, num_broadcasts).run():
                rounds.add(number, replace(result, predicted_seconds=predicted))
                progress(f"[{at + 1}/{len(trials)}] {one_line(result)}")
        except TrialError as error:
            rounds.fail(number, scenario.name, chosen_setup.name, str(error))
            progress(f"[{at + 1}/{len(trials)}] {scenario.name} {chosen_setup.name} FAILED: {error}")
        except WanError as error:
            if not scenario.congestion:
                raise
            refused.add(scenario.congestion)
            rounds.fail(number, scenario.name, chosen_setup.name, str(error))
            progress(f"{scenario.congestion}: not here: {error}")
        except (KeyboardInterrupt, SystemExit):  # as by SIGTERM
            progress(f"[{at + 1}/{len(trials)}] stopped")
            break
    return rounds


def prediction(scenario: Scenario, which: Setup, num_bytes: int) -> float | None:
    """The simulator's word on ours; it knows no other programs."""
    told = which.options.get("broadcast")
    return predicted_seconds(scenario, told["scheme"], told["fan_out"], num_bytes) if told else None


def write(rounds: Rounds, wanted: Sequence[Scenario], name: str, options: argparse.Namespace) -> Path:
    """The result file."""
    figures = {
        "network": network_stack(),
        "size_mib": options.size_mib,
        "summary": rounds.summary(wanted),
        "failures": rounds.failures,
        "trials": rounds.all(),
    }
    return save(name, figures, options.out)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What both comparisons can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=float, default=256.0)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--only", nargs="+", default=[], help="scenarios; what they are held against is run, too")
    parser.add_argument("--fan-out", type=int, default=8, help="neighbours that one worker serves at most")
    parser.add_argument("--out", type=Path, help="result file (default: below benchmarks/results)")
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--broadcasts", type=int, default=1, help="in each trial, over connections that stay open")
    parser.add_argument("--star-max", type=int, default=8, help="workers up to which the star, n times as slow, is run")
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of another commit, to run as well")
    parser.add_argument("--list", action="store_true", help="say which scenarios there are")
    parser.add_argument("--network", action="store_true", help="only check round trip, rate, loss and faults of links")
    options = parser.parse_args()
    if options.list:
        for scenario in scenarios():
            links = sorted({link.words() for link in scenario.links.values()})
            print(f"{scenario.name:18} n = {len(scenario.workers):2}  {scenario.congestion:6} {'; '.join(links)}")
        return
    stop_on_sigterm()
    try:
        if options.network:
            wrong = self_test()
            sys.exit(f"error: not as asked for: {'; '.join(wrong)}" if wrong else 0)
        wanted = chosen(options.only)
        trials = list(plan(wanted, options))
        rounds = measure(trials, int(options.size_mib * (1 << 20)), options.broadcasts)
    except (ValueError, WanError) as error:
        sys.exit(f"error: {error}")
    print(table(rounds.summary(wanted)))
    out = write(rounds, wanted, "broadcast", options)
    print(f"Written to {out.name}.")
    if rounds.failures:
        sys.exit(f"error: {len(rounds.failures)} trials failed")


if __name__ == "__main__":
    main()
