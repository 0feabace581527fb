"""What wrong settings cost, and how much of it the planner makes good while the run goes on.

In the simulator: the real planner and worker scheduler, a learner of 30 s a step (32 groups of 8), broadcasts of 6 s,
machines of 1 rollout a second with four groups at once (32 s a group), about 9 of which are needed. Each family begins
with wrong settings and lists others to begin with; the best of these, by all dollars of the run, is the comparison.
With `--search` the others are a grid, from which successive halving finds the best: each round has twice the seeds and
the better half of the settings. The planner adapts what it can whatever a run begins with, so the others are not fixed;
`--starts` with the source of another commit in PYTHONPATH gives its figures. A short run (`--steps`) pays for its
beginning, a long one for its steady state. The idle ratio is of the second half of the steps, the dollars are of the
whole run; the learner costs $12.24 an hour, a machine $0.30.

With `--real`, three of the families run as processes: head, learner and workers whose speeds are set (`idle_nodes.py`),
all five times faster than in the simulator, so that steps, leases and snapshots take seconds.

    make bench-wrong_settings                        # 20 seeds: ten minutes on two cores
    make bench-wrong_settings ARGS='--seeds 3 --only straggler'
    make bench-wrong_settings ARGS='--seeds 8 --search'
    make bench-wrong_settings ARGS='--steps 12'
    make bench-wrong_settings ARGS='--real --seeds 3'
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from idle_nodes import Fleet
from idle_nodes import measure as measure_processes
from recording import HERE, save, there

from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec
from echo2.planning.simulate import run_scenario

STEPS = 40


@dataclass(frozen=True, slots=True)
class World:
    """A run's settings and its fleet. `slow`: machines `slow_factor` times slower beside `workers`; `stragglers`: share
    of the groups that take ten times as long, by the machine's fault; `answers`: spread of durations that are the
    answer's; `rented`: most machines on offer, and then the planner chooses who works; `full`: groups with which an
    engine is full; `room`: groups that it has room for (0: as many as `slots`).
    """

    max_staleness: int = 2
    workers: int = 13
    slots: int = 4
    room: int = 0
    full: int = 0
    slow: int = 0
    slow_factor: float = 10.0
    stragglers: float = 0.0
    answers: float = 0.0
    rented: int = 0
    publish_every: int = 1
    lease_seconds: float = 120.0
    steps: int = STEPS

    def scenario(self) -> Scenario:
        rate = 1.0 if not self.full else min(1.0, self.slots / self.full)
        common: dict[str, Any] = {
            "capacity_groups": self.room or self.slots,
            "full_groups": self.full,
            "spread": 0.1 if self.answers else 0.3,
            "answer_spread": self.answers,
            "straggler_chance": self.stragglers,
            "straggler_factor": 10.0,
        }
        kinds = [WorkersSpec(count=self.workers, rollouts_per_second=rate, **common)]
        if self.slow:
            kinds.append(WorkersSpec(count=self.slow, rollouts_per_second=rate / self.slow_factor, **common))
        if self.rented:
            spec = WorkersSpec(count=self.rented, rollouts_per_second=rate, offer="o", restart_seconds=60.0, **common)
            kinds.append(spec)
        return Scenario(
            name=str(self),
            max_steps=self.steps,
            groups_per_step=32,
            group_size=8,
            max_staleness=self.max_staleness,
            publish_every=self.publish_every,
            groups_per_batch=self.slots,
            activation=bool(self.rented),
            lease_seconds=self.lease_seconds,
            heartbeat_seconds=5.0,
            max_failures=1000,
            faults_until_seconds=0.0,
            time_limit_seconds=60_000.0,
            workers=tuple(kinds),
            learner=LearnerSpec(train_seconds=30.0, spread=0.05, publish_seconds=0.5, price_usd_per_hour=12.24),
            broadcast=BroadcastSpec(scheme="fixed", seconds=6.0),
        )


#: By family: the wrong start, and the fixed settings that are searched.
FAMILIES: dict[str, tuple[World, dict[str, World]]] = {
    "straggler machines, S = 2": (World(slow=4), {"without them": World()}),
    "straggler machines, S = 4": (World(4, slow=4), {"without them": World(4)}),
    "1 straggler group in 50, S = 4": (World(4, stragglers=0.02), {"16 machines": World(4, 16, stragglers=0.02)}),
    "too few machines, offers to rent": (World(workers=4, rented=16), {f"{n}": World(workers=n) for n in (10, 13)}),
    "leases too long": (
        World(4, stragglers=0.02, lease_seconds=1200.0),
        {"120 s": World(4, stragglers=0.02, lease_seconds=120.0)},
    ),
    "slots too few": (World(full=4, slots=1, room=16), {"4 groups": World(full=4, slots=4, room=16)}),
    "slots too many": (World(full=4, slots=16, room=16), {"4 groups": World(full=4, slots=4, room=16)}),
    "slots too many, too few machines": (
        World(workers=6, full=4, slots=16, room=16),
        {"4 groups": World(workers=6, full=4, slots=4, room=16)},
    ),
    "steps between snapshots": (World(4, publish_every=4), {"1": World(4)}),
}


#: By family, of those in which the planner does not reach the best: the settings that are searched. Not `slots` where
#: `full` is 0: there, machines with fewer slots are other machines, which sample a group in less time.
GRIDS: dict[str, dict[str, Sequence[int]]] = {
    "straggler machines, S = 2": {"slow": (0, 1, 2, 4), "publish_every": (1, 2)},
    "straggler machines, S = 4": {"slow": (0, 1, 2, 4), "publish_every": (1, 2)},
    "slots too few": {"slots": (1, 2, 3, 4, 6, 8), "publish_every": (1, 2)},
    "slots too many": {"slots": (1, 2, 3, 4, 6, 8, 16), "publish_every": (1, 2)},
    "steps between snapshots": {"publish_every": (1, 2, 3, 4)},
}
#: Settings that halving leaves for all seeds.
LEFT = 2

LEARNER_USD_PER_HOUR, MACHINE_USD_PER_HOUR = 12.24, 0.3
MODEL = HERE.parent / "outputs" / "models" / "digit_sorting"
#: With processes, a fifth of the simulator's seconds: 6 s a step, 32 s a group of a full engine become 6.4 s.
REAL = Fleet(
    workers=13,
    rate=5.0,
    max_staleness=2,
    publish_every=1,
    groups_per_step=32,
    group_size=8,
    train_seconds=6.0,
    broadcast_seconds=1.2,
    steps=STEPS,
    slots=4,
    full=4,
    room=16,
    lease_seconds=24.0,
)
#: By family: the wrong start, and a better beginning.
REAL_FAMILIES = {
    "straggler machines, S = 2": (replace(REAL, workers=17, slow=4), REAL),
    "slots too many": (replace(REAL, slots=16), REAL),
    "steps between snapshots": (replace(REAL, max_staleness=4, publish_every=4), replace(REAL, max_staleness=4)),
}


def searched(family: str, start: World, seeds: range, pool: Pool) -> list[dict[str, Any]]:
    """Return every setting of the family's grid with what it gave, those of the most seeds first, and then the best."""
    grid = GRIDS[family]
    alive = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    found: dict[str, list[tuple[float, float, int, bool]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    num_seeds = 1
    while True:
        asked = [(one, seed) for one in alive for seed in seeds[len(found.get(str(one), ())) : num_seeds]]
        tasks = [(replace(start, **one), seed) for one, seed in asked]
        for (one, _), result in zip(asked, pool.map(measure, tasks, chunksize=1), strict=True):
            found.setdefault(str(one), []).append(result)
        for one in alive:
            rows[str(one)] = {**summed_up(str(one), found[str(one)]), "seeds": num_seeds}
        alive.sort(key=lambda one: float(rows[str(one)]["usd_per_step"]))
        if num_seeds == len(seeds):
            return sorted(rows.values(), key=lambda row: (-row["seeds"], row["usd_per_step"]))
        num_seeds = min(len(seeds), 2 * num_seeds)
        alive = alive[: max(LEFT, len(alive) // 2)]


def measure(task: tuple[World, int]) -> tuple[float, float, int, bool]:
    """Return idle ratio, all dollars by steps, leases that another overtook, and whether the run ended."""
    world, seed = task
    report = run_scenario(world.scenario(), seed, keeps_events=False)
    return (
        report.steady_idle_ratio,
        (report.usd + report.learner_usd) / max(1, report.steps),
        report.leases.get("superseded", 0),
        report.finished,
    )


def summed_up(name: str, found: Sequence[tuple[float, float, int, bool]]) -> dict[str, Any]:
    idle, usd = [one[0] for one in found], [one[1] for one in found]
    return {
        "settings": name,
        "idle": statistics.fmean(idle),
        "idle_sd": statistics.pstdev(idle),
        "usd_per_step": statistics.fmean(usd),
        "usd_sd": statistics.pstdev(usd),
        "superseded": statistics.fmean(one[2] for one in found),
        "unfinished": sum(not one[3] for one in found),
    }


def with_processes(options: argparse.Namespace, seeds: range) -> list[dict[str, Any]]:
    """Return, by family, what each run of processes gave, wrong start beside better beginning."""
    tasks = [
        (family, kind, replace(fleet, steps=options.steps, seed=seed))
        for seed in seeds
        for family, pair in REAL_FAMILIES.items()
        for kind, fleet in zip(("started", "better"), pair, strict=True)
        if options.only in family
    ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="echo2-wrong-") as folder, ThreadPoolExecutor(options.processes) as pool:

        def one(number: int, family: str, kind: str, fleet: Fleet) -> None:
            try:
                found = measure_processes(fleet, options.model, Path(folder) / str(number))
            except RuntimeError as error:  # the others are worth their hour
                print(f"{family:34} {kind:8} seed {fleet.seed}  failed: {error}", flush=True)
                return
            hourly = LEARNER_USD_PER_HOUR + MACHINE_USD_PER_HOUR * fleet.workers
            usd = found.run_seconds / 3600.0 * hourly / fleet.steps
            row = {"family": family, "kind": kind, "seed": fleet.seed, "idle": found.idle_ratio, "usd_per_step": usd}
            rows.append({**row, "measured_in_full": asdict(found)})
            print(
                f"{family:34} {kind:8} seed {fleet.seed}  idle {found.idle_ratio:5.1%}  ${usd:.4f} a step", flush=True
            )

        for done in [pool.submit(one, number, *task) for number, task in enumerate(tasks)]:
            done.result()
    return rows


def above_better(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, by family, the means over the seeds of which both runs ended, and what the wrong start costs above the
    better beginning."""
    found: dict[str, dict[str, float]] = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        of_family = [row for row in rows if row["family"] == family]
        seeds = {kind: {row["seed"]: row for row in of_family if row["kind"] == kind} for kind in ("started", "better")}
        both = seeds["started"].keys() & seeds["better"].keys()
        if not both:
            continue
        means = {
            f"{kind}_{key}": statistics.fmean(of_kind[seed][key] for seed in both)
            for kind, of_kind in seeds.items()
            for key in ("idle", "usd_per_step")
        }
        means["above_better"] = means["started_usd_per_step"] / means["better_usd_per_step"] - 1
        found[family] = means
        print(f"{family:34} {means['above_better']:+.1%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="others than those that chose the planner's constants"
    )
    parser.add_argument("--only", default="", help="families with this in their name")
    parser.add_argument(
        "--starts", action="store_true", help="only the wrong starts: for the planner of another commit"
    )
    parser.add_argument("--search", action="store_true", help="find the best fixed settings in a grid")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--real", action="store_true", help="processes of set speeds in place of the simulator")
    parser.add_argument("--model", type=there, default=MODEL, help="with --real: what examples/digit_sorting made")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, seeds = [], range(options.first_seed, options.first_seed + options.seeds)
    if options.real:
        real = with_processes(options, seeds)
        figures = {"steps": options.steps, "summary": above_better(real), "rows": real}
        print(f"written to {save('wrong_settings_real', figures, options.out)}")
        return
    with get_context().Pool(options.processes) as pool:
        for family, (start, others) in FAMILIES.items():
            if options.only not in family or (options.search and family not in GRIDS):
                continue
            start = replace(start, steps=options.steps)
            others = {name: replace(world, steps=options.steps) for name, world in others.items()}
            fixed = searched(family, start, seeds, pool) if options.search else []
            worlds = {"as started": start, **({} if options.starts or options.search else others)}
            tasks = [(world, seed) for world in worlds.values() for seed in seeds]
            found = pool.map(measure, tasks, chunksize=1)
            parts = [found[at : at + options.seeds] for at in range(0, len(found), options.seeds)]
            started, *listed = [summed_up(name, part) for name, part in zip(worlds, parts, strict=True)]
            fixed += listed
            most = [row for row in fixed if row.get("seeds", options.seeds) == options.seeds]
            best = min((started, *most), key=lambda row: row["usd_per_step"])
            above = started["usd_per_step"] / best["usd_per_step"] - 1
            rows.append({"family": family, "started": started, "fixed": fixed, "best": best, "above_best": above})
            print(
                f"{family:34} idle {started['idle']:5.1%} ({started['idle_sd']:.1%})  "
                f"${started['usd_per_step']:.4f} a step ({started['usd_sd']:.4f})  best fixed: {best['settings']}, "
                f"{best['idle']:5.1%}, ${best['usd_per_step']:.4f}: {above:+.1%}",
                flush=True,
            )
    path = save("wrong_settings", {"seeds": list(seeds), "steps": options.steps, "rows": rows}, options.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
