"""Searches for the lie that gets the most past the checks of strangers: random lies first, then changes of the worst.

    make bench-hostile_search ARGS='[--rounds 6] [--lies 12] [--worlds 3] [--seed 0] [--out FILE]'

Each lie (`hostile_liars.Lie`: every field that a stranger may fill) is told by three machines of one ticket, beside two
machines of the owner and two honest strangers, in the simulator with the production planner and the real check. The
damage of a lie is how many wrong groups of it were trained, as a share of all that were trained; beside it stand the
dearest check, honest groups that were retired, and how often the honest ticket was found at fault.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import recording
from hostile_liars import LiarSpec, Lie, mutated, random_lie
from hostile_workers import make_worker

from echo2.head.decide import commands as do
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from echo2.planning.simulate import run_scenario


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lies", type=int, default=12, help="a round")
    parser.add_argument("--worlds", type=int, default=3, help="of each lie")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    rng, rows = random.Random(options.seed), list[dict[str, Any]]()
    for round_ in range(options.rounds):
        best = [Lie(**row["lie"]) for row in rows[: options.lies // 3]]
        lies = [
            mutated(rng, rng.choice(best)) if best and rng.random() < 0.7 else random_lie(rng)
            for _ in range(options.lies)
        ]
        rows += [tried(lie, options.worlds) for lie in lies if asdict(lie) not in [row["lie"] for row in rows]]
        rows.sort(key=lambda row: (-row["damage"], -row["dearest"]))
        worst = rows[0]
        print(
            f"round {round_}: {len(rows)} lies; the worst has {worst['damage']:.1%} of the groups, {worst['lie']}",
            flush=True,
        )
    figures = {"rounds": options.rounds, "worlds": options.worlds, "seed": options.seed, "rows": rows}
    dearest = max(row["dearest"] for row in rows)
    faults, retired = (sum(row[name] for row in rows) for name in ("honest_faults", "honest_retired"))
    print(f"dearest check {dearest:.2f} tokens read a token; honest: {faults} faults, {retired} groups retired")
    print(f"saved in {recording.save('hostile_search', figures, options.out)}")


if __name__ == "__main__":
    main()
