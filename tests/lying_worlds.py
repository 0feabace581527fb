"""Random worlds of strangers that lie in fields drawn at random, and what must be true of every run in them.

PYTHONPATH=src:tests:benchmarks/strangers python tests/worlds.py judge_lying 1000 2000      # seeds from 1000 up to 2000
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields, replace

from hostile_liars import LiarSpec, Lie, random_lie

from echo2.core.errors import InvariantError
from echo2.head.decide import commands as do
from echo2.head.strangers.decide.trust import Trust
from echo2.planning.sim.scenario import Scenario, WorkersSpec
from invariants import run_scenario
from worlds import CALM_SECONDS, calm, judge, judge_replay, random_scenario

#: Wrong groups of one ticket that may be trained once it is trusted: one in 20 is checked, so that one ticket in 10^5
#: would have more.
WRONG_MAX = 250
#: Tokens that a check may read for each token that was sampled.
DEAR_MAX = 2.0


def lying_scenario(seed: int) -> Scenario:
    """A random world whose own workers check strangers: honest ones, and such that lie in fields drawn at random."""
    scenario, rng = random_scenario(seed), random.Random(f"lies of {seed}")
    quiet = {"joins_at_seconds": 0.0, "life_seconds": 0.0, "cut_every_seconds": 0.0, "loss": 0.0}
    own = tuple(replace(spec, draws=True, **quiet) for spec in calm(scenario).workers)
    book = LiarSpec().book

    def stranger(ticket: str, lie: Lie | None) -> LiarSpec:
        like = {entry.name: getattr(rng.choice(own), entry.name) for entry in fields(WorkersSpec)}
        draws = lie is None or lie.draws
        return LiarSpec(**like | {"count": rng.randint(1, 3), "ticket": ticket, "draws": draws}, lie=lie, book=book)

    liars = [stranger(f"liar {at}", random_lie(rng)) for at in range(rng.randint(1, 3))]
    return replace(
        scenario,
        max_failures=3,
        head=calm(scenario).head,
        max_steps=scenario.max_steps + rng.choice([0, 20]),
        deterministic=False,
        swap=rng.choice(["between", "during"]),
        check_seed=seed,
        workers=(*own, stranger("honest", None), *liars),
        time_limit_seconds=scenario.faults_until_seconds + 5 * CALM_SECONDS,
    )


def judge_lying(seed: int) -> list[str]:
    """What is wrong with the world of liars of this seed: nothing wrong is trained of a ticket that was not trusted
    when it was delivered, and little of one that was; no check is dear; whoever is honest stays, and the run ends.
    """
    scenario = lying_scenario(seed)
    try:
        report = run_scenario(scenario, seed)
    except InvariantError as error:
        return [str(error)]
    wrong = judge(report, scenario) + judge_replay(report, scenario)
    specs = {f"w{at}-{n}": spec for at, spec in enumerate(scenario.workers) for n in range(spec.count)}
    book = next(spec.book for spec in specs.values() if isinstance(spec, LiarSpec))
    sampled: dict[int, str] = {}
    trust: dict[str, Trust] = {}
    believed = set[int]()
    for command in (command for life in report.history.lives for _, _, answer in life for command in answer):
        if isinstance(command, do.RecordTrust):
            trust[command.ticket] = command.trust
        elif isinstance(command, do.AcceptDelivery) and command.group.kind == "train":
            sampled[command.group.number] = command.worker_id
            believed.discard(command.group.number)
            if trust.get(specs[command.worker_id].ticket, Trust()).is_believed:
                believed.add(command.group.number)
        elif isinstance(command, do.ExpelWorker) and getattr(specs[command.worker_id], "lie", "") is None:
            wrong.append(f"{command.worker_id} is honest and was expelled: {command.reason}")
    if found := [ticket for ticket, one in trust.items() if ticket == "honest" and one.num_failed]:
        wrong.append(f"{found} is honest, and a check found a fault: {trust['honest'].history}")
    trained = [number for done in report.history.trained for number in done.numbers]
    lied = [number for number in trained if book.wrong.get((sampled[number], number))]
    if unbelieved := [number for number in lied if number not in believed]:
        wrong.append(f"wrong groups {unbelieved} were trained, of tickets that were not trusted")
    of_ticket = Counter(specs[sampled[number]].ticket for number in lied)
    wrong += [f"{n} wrong groups of {ticket} were trained" for ticket, n in of_ticket.items() if n > WRONG_MAX]
    if book.dearest > DEAR_MAX:
        wrong.append(f"a check read {book.dearest:.1f} tokens for each that was sampled")
    return wrong
