"""One real run in which environments, their containers and the judge fail: each fault costs one rollout or time."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from echo2.sandbox import containers
from echo2.transport.limits import LOGGED_GROUPS
from judge_standin import PROBE, judge_standin
from real_runs import Run, odd_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, GROUPS, SIZE, SMALLEST = 10, LOGGED_GROUPS, 8, 7  # all groups of a step are logged
DYING = 0.15
#: Below this judge's answers: a hang lasts a minute there, and the head waits for this long.
TIMEOUT_SECONDS = 3
FAULTS = ("429", "429 1", "500", "hang")

#: Images would have to be pulled.
RUNTIME = next((name for name in ("bubblewrap", "landlock") if not containers._unusable(name)), "")

# 15 % of rollouts die at their second turn, by their seed: a third each by an exception, by the end of the process, and
# by a container that has no memory left. The file `fates` has a line for each rollout that came so far, `stops` for
# each container.
OWN = """
import asyncio, os
from pathlib import Path
from random import Random

from echo2.sandbox import containers
from echo2.sandbox.programs import ContainerLimits

class Rows:
    def __len__(self): return 64
    def __getitem__(self, index): return {"prompt": f"{index}=", "answer": "1"}

def write(name, *words):
    with Path(__file__).with_name(name).open("a") as file:
        print(*words, file=file)

async def fill_container():
    container = await containers.Containers(RUNTIME).open(containers.Image(), ContainerLimits(memory_bytes=96 << 20))
    try:
        ran = await container.run("tail /dev/zero", 60.0)
    finally:
        await container.close()
    return ran.stopped

class Odd:
    turn_tokens = 2

    def __init__(self, columns, seed):
        self.seed, self.turns, drawn = seed, 0, Random(seed).random()
        self.fate = ("raises", "ends", "fills")[int(drawn / DYING * 3)] if drawn < DYING else "lives"

    def step(self, action):
        self.turns += 1
        if self.turns == 1: return "1=", 1.0, False
        write("fates", self.seed, self.fate)
        if self.fate == "raises": raise KeyError("no square")
        if self.fate == "ends": os._exit(5)
        if self.fate == "fills":
            write("stops", self.seed, asyncio.run(fill_container()))
            raise MemoryError("the container is full")
        return "2=", 1.0, True
"""


class Faults:
    """15 % of requests fail: always the same, whenever they come, and of each kind as many."""

    def __init__(self) -> None:
        self.made = Counter[str]()

    def __call__(self, question: str, n: int) -> str:
        drawn = int.from_bytes(blake2b(f"{n} {question}".encode()).digest()[:4], "big")
        if drawn % 100 >= 15 or question == PROBE:
            return ""
        kind = FAULTS[self.made.total() % len(FAULTS)]
        self.made[kind] += 1
        return kind


def trained_groups(run: Run) -> list[list[dict[str, Any]]]:
    """The rollouts of all groups that were trained."""
    lines = [line for path in (run.out / "rollouts").glob("step_*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line)["rollouts"] for line in lines]


def sampled(run: Run) -> tuple[int, int]:
    """How many rollouts were leased, by the ledger's table: those of accepted leases, and of all others."""
    query = "SELECT sum(num_samples * (outcome = 'accepted')), sum(num_samples * (outcome != 'accepted')) FROM leases"
    with closing(sqlite3.connect(run.out / "ledger.sqlite")) as connection:
        accepted, others = connection.execute(query).fetchone()
    return int(accepted), int(others)


def by_seed(path: Path) -> Counter[str]:
    """Count rollouts by what a file of the environment says of them."""
    return Counter(dict(line.split() for line in path.read_text().splitlines()).values())


@pytest.mark.skipif(not RUNTIME, reason="no container without an image can be made here")
def test_faults_of_environments_containers_and_the_judge_cost_rollouts_and_time_only(
    sort_model: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"DYING, RUNTIME = {DYING}, {RUNTIME!r}\n{OWN}")
    faults = Faults()
    with judge_standin(faults) as standin:
        table = f'{{model = "m", base_url = "{standin.url}", rubric = "More digits are better.", max_concurrency = 8}}'
        run = Run(
            tmp_path / "run",
            sort_model,
            f"--run.max_steps={STEPS}",
            "--workers.count=1",
            *odd_tasks(own),
            f"--sampling.group_size={SIZE}",
            f"--sampling.min_group={SMALLEST}",
            f"--schedule.groups_per_step={GROUPS}",
            "--schedule.lease_seconds=150",
            '--reward.functions=["environment", "judge"]',
            f"--reward.judge={table}",
            f"--reward.timeout_seconds={TIMEOUT_SECONDS}",
        ).start()
        summary = run.finish(400)
    audit = run.command("audit")
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["open"]) == (STEPS * GROUPS, 0, 0, 0)

    groups = trained_groups(run)
    assert len(groups) == STEPS * GROUPS
    assert {len(group) for group in groups} <= set(range(SMALLEST, SIZE + 1))
    for rollout in (rollout for group in groups for rollout in group):  # one that died had 1.0 or nothing
        grade = min(10, sum(one.isdigit() for one in rollout["text"])) / 10
        assert rollout["reward_parts"] == {"environment": 2.0, "judge": grade}
        assert rollout["reward"] == 2.0 + grade

    fates = by_seed(tmp_path / "fates")
    assert set(fates) == {"raises", "ends", "fills", "lives"}
    assert by_seed(tmp_path / "stops") == {"memory": fates["fills"]}
    num_dead, num_lost = fates.total() - fates["lives"], summary["groups"]["lost"]["environment_failed"]
    num_trained, (accepted, others) = sum(map(len, groups)), sampled(run)
    assert num_trained + num_lost == accepted, "each rollout of an accepted lease was trained or is counted as lost"
    assert num_lost <= num_dead <= num_lost + others, "each death is counted once"
    assert 0.07 < num_lost / accepted < 0.25
    assert summary["groups"]["lost"].keys() == {"environment_failed"}

    told = {one["kind"]: one["count"] for one in summary["failures"]}
    assert set(faults.made) == set(FAULTS)
    assert told["judge_retried"] >= faults.made["500"] + faults.made["hang"]  # a limit of the judge's is no failure
