"""What strangers that mean harm cost a run, by simulation: each way of harm at 1 of 2, 3 of 8 and 20 of 22 workers of
one ticket, and at 4 of 7 with a ticket each, beside the same run with the honest workers alone.

The honest ones are machines of the run's owner. `ratio` is of the run's time; `wait` what the learner waits longer, in
lease deadlines; `share` the largest that the strangers supplied of a step.

    make bench-hostile_fleet ARGS='[--seeds 3]'      # writes benchmarks/results/hostile_fleet-*.json
    make bench-hostile_fleet ARGS='--search [--rounds 6] [--lies 12] [--seeds 3]'

`--search` looks for the lie that gets the most past the checks: random lies first, then changes of the worst. Each
lie (`hostile_liars.Lie`: every field that a stranger may fill) is told by three machines of one ticket, beside two
machines of the owner and two honest strangers, with the real check. The damage of a lie is how many wrong groups of it
were trained, as a share of all that were trained; beside it stand the dearest check, honest groups that were retired,
and how often the honest ticket was found at fault.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hostile_liars import LiarSpec, Lie, mutated, random_lie
from hostile_workers import HostileSpec, make_worker
from recording import save

from echo2.head.decide import commands as do
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from echo2.planning.simulate import run_scenario

LEASE_SECONDS = 120.0
#: Honest workers, hostile ones, and the tickets of the latter.
FLEETS = ((1, 1, 1), (5, 3, 1), (2, 20, 1), (3, 4, 4))
WAYS: tuple[Any, ...] = ("", "holds", "holds_some", "fails", "malformed", "junk", "claims")


def simulate(name: str, workers: tuple[WorkersSpec, ...], seed: int, max_staleness: int, steps: int) -> Report:
    return run_scenario(
        Scenario(
            name=name,
            max_steps=steps,
            groups_per_step=16,
            max_staleness=max_staleness,
            lease_seconds=LEASE_SECONDS,
            faults_until_seconds=0.0,
            learner=LearnerSpec(train_seconds=2.0),
            workers=workers,
        ),
        seed,
        make_worker=make_worker,
    )


def largest_share(report: Report) -> float:
    """Of a step's groups, the most that came from others than the first kind of workers."""
    commands = [command for life in report.history.lives for _, _, answer in life for command in answer]
    accepted = {c.group.number: c.worker_id for c in commands if isinstance(c, do.AcceptDelivery)}
    steps = [done.numbers for done in report.history.trained]
    return max(sum(not accepted[number].startswith("w0-") for number in numbers) / len(numbers) for numbers in steps)


def measure(
    honest: int, hostile: int, tickets: int, way: Any, max_staleness: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One row, with the run of the honest workers alone in the same go. `way` empty: honest strangers."""
    own = WorkersSpec(count=honest)
    rows = []
    for seed in range(options.seeds):
        alone = simulate("alone", (own,), seed, max_staleness, options.steps)
        kind = partial(HostileSpec, hostile=way) if way else WorkersSpec
        liars = [kind(count=hostile // tickets, ticket=f"t{at}") for at in range(tickets)]
        beside = simulate(way or "honest strangers", (own, *liars), seed, max_staleness, options.steps)
        waited = beside.history.wait_seconds - alone.history.wait_seconds
        rows.append(
            {
                "finished": float(beside.finished),
                "ratio": beside.seconds / alone.seconds,
                "steps_per_second": beside.steps / beside.seconds,
                "idle_ratio": beside.idle_ratio,
                "wait_leases": waited / LEASE_SECONDS,
                "share": largest_share(beside),
                "refused": float(sum(beside.refused.values())),
            }
        )
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0]} | {
        "worst_ratio": max(row["ratio"] for row in rows)
    }


def world(lie: Lie) -> Scenario:
    """The run in which a lie is tried."""
    book = LiarSpec().book
    strangers = (
        LiarSpec(count=2, ticket="honest", draws=True, book=book),
        LiarSpec(count=3, ticket="liar", draws=lie.draws, lie=lie, book=book),
    )
    return Scenario(
        name="search",
        max_steps=120,
        groups_per_step=8,
        group_size=4,
        max_staleness=2,
        swap="during",
        lease_seconds=60.0,
        check_seed=7,
        faults_until_seconds=0.0,
        time_limit_seconds=4000.0,
        workers=(WorkersSpec(count=2, draws=True, rollout_seconds=2.0), *strangers),
        learner=LearnerSpec(train_seconds=2.0),
    )


def tried(lie: Lie, num_worlds: int) -> dict[str, Any]:
    """The damage of a lie, over so many worlds."""
    row: dict[str, Any] = {"lie": asdict(lie), "trained": 0, "wrong": 0, "dearest": 0.0}
    row |= {"honest_retired": 0, "honest_faults": 0}
    for seed in range(num_worlds):
        scenario = world(lie)
        report = run_scenario(scenario, seed, make_worker=make_worker)
        specs = {f"w{at}-{n}": spec for at, spec in enumerate(scenario.workers) for n in range(spec.count)}
        book = next(spec.book for spec in specs.values() if isinstance(spec, LiarSpec))
        sampled: dict[int, str] = {}
        for command in (command for life in report.history.lives for _, _, answer in life for command in answer):
            if isinstance(command, do.AcceptDelivery) and command.group.kind == "train":
                sampled[command.group.number] = command.worker_id
            elif isinstance(command, do.RetireGroup) and command.why == "untrusted":
                row["honest_retired"] += specs[sampled[command.number]].ticket == "honest"
            elif isinstance(command, do.RecordTrust) and command.ticket == "honest":
                row["honest_faults"] = max(row["honest_faults"], command.trust.num_failed)
        trained = [number for done in report.history.trained for number in done.numbers]
        row["trained"] += len(trained)
        row["wrong"] += sum(book.wrong.get((sampled[number], number), False) for number in trained)
        row["dearest"] = max(row["dearest"], round(book.dearest, 2))
    row["damage"] = round(row["wrong"] / max(1, row["trained"]), 4)
    return row


def search(options: argparse.Namespace) -> None:
    rng, rows = random.Random(0), list[dict[str, Any]]()
    for round_ in range(options.rounds):
        best = [Lie(**row["lie"]) for row in rows[: options.lies // 3]]
        lies = [
            mutated(rng, rng.choice(best)) if best and rng.random() < 0.7 else random_lie(rng)
            for _ in range(options.lies)
        ]
        rows += [tried(lie, options.seeds) for lie in lies if asdict(lie) not in [row["lie"] for row in rows]]
        rows.sort(key=lambda row: (-row["damage"], -row["dearest"]))
        worst = rows[0]
        print(
            f"round {round_}: {len(rows)} lies; the worst has {worst['damage']:.1%} of the groups, {worst['lie']}",
            flush=True,
        )
    figures = {"rounds": options.rounds, "worlds": options.seeds, "rows": rows}
    dearest = max(row["dearest"] for row in rows)
    faults, retired = (sum(row[name] for row in rows) for name in ("honest_faults", "honest_retired"))
    print(f"dearest check {dearest:.2f} tokens read a token; honest: {faults} faults, {retired} groups retired")
    print(f"saved in {save('hostile_search', figures, options.out)}")


def compare(options: argparse.Namespace) -> None:
    rows = []
    print("  S  fleet                   way          ratio  worst  steps/s  idle  wait/lease  share  refused")
    for max_staleness in (1, 0):
        for honest, hostile, tickets in FLEETS:
            for way in WAYS:
                row = measure(honest, hostile, tickets, way, max_staleness, options)
                which = {"max_staleness": max_staleness, "honest": honest, "hostile": hostile, "tickets": tickets}
                rows.append({**which, "way": way, **row})
                fleet = f"{hostile} of {honest + hostile}, tickets: {tickets}"
                end = "" if row["finished"] == 1.0 else "  NOT FINISHED"
                print(
                    f"  {max_staleness}  {fleet:22s}  {way or 'honest':11s}  {row['ratio']:5.2f}"
                    f"  {row['worst_ratio']:5.2f}  {row['steps_per_second']:7.3f}  {row['idle_ratio']:4.2f}"
                    f"  {row['wait_leases']:10.2f}  {row['share']:5.2f}  {row['refused']:7.0f}{end}",
                    flush=True,
                )
    print(save("hostile_fleet", {"rows": rows, "lease_seconds": LEASE_SECONDS}, options.out))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="worlds of each row, or of each lie")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--search", action="store_true", help="look for the worst lie")
    parser.add_argument("--rounds", type=int, default=6, help="of the search")
    parser.add_argument("--lies", type=int, default=12, help="a round")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    (search if options.search else compare)(options)


if __name__ == "__main__":
    main(sys.argv[1:])
