"""Slots kept busy by 512 rollouts whose environments take .1 to 5 s to answer: how large a share, and at what memory.

    python benchmarks/concurrency.py [--seconds 60] [--out FILE]

One worker's engine and sampling, without a head, on the demo's model (`make demo` builds it) without its end token, so
that every turn has as many tokens. A group that ends is followed by another, as a worker's leases are. Three
environments with the same delays, each for the same time, in turn: a plain `step` (spread over processes), `async def
step`, and a harness that calls the endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import psutil
from recording import save

from echo2.learner.model import DTYPES, load_policy
from echo2.rollout.engine import Engine
from echo2.rollout.engines import make_engine
from echo2.rollout.generate import assignment_of, sample_group
from echo2.rollout.harness import HarnessEnvironment
from echo2.rollout.tokenizer import load_tokenizer
from echo2.tasks.environment_process import EnvironmentProcess
from echo2.tasks.harness_process import HarnessProcess
from echo2.types import RUN_POLICY, GroupRef, Lease, RolloutGroup, SamplingParams, Snapshot, SnapshotRef, Task

HERE = Path(__file__).resolve()
NUM_ROLLOUTS, GROUP_SIZE, SLOTS = 512, 8, 64
NUM_TURNS, TURN_TOKENS = 4, 24
DELAY_SECONDS = (0.1, 5.0)
SIDES = {"plain": f"{HERE}:Plain", "async": f"{HERE}:Async", "harness": f"harness:{HERE}:Calling"}


class Slow:
    """Draws its delays from the rollout's seed."""

    turn_tokens = TURN_TOKENS

    def __init__(self, columns: dict[str, Any], seed: int) -> None:
        import random

        self._random, self._turns = random.Random(seed), 0

    def delay(self) -> float:
        return self._random.uniform(*DELAY_SECONDS)

    def answer(self) -> tuple[str, float, bool]:
        self._turns += 1
        return "=", 1.0, self._turns == NUM_TURNS


class Plain(Slow):
    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(self.delay())
        return self.answer()


class Async(Slow):
    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self.delay())
        return self.answer()


class Calling(Slow):
    async def run(self, policy: Any) -> float:
        said = [3, 4, 5]
        for _ in range(NUM_TURNS):
            choice = await policy.generate(said, max_tokens=TURN_TOKENS)
            await asyncio.sleep(self.delay())
            said += [*choice["token_ids"], 3]
        return 1.0


def snapshot(model: Path) -> Snapshot:
    policy = load_policy(str(model), "float32", "auto")
    files = {name: bytes(data) for name, data in policy.files.items() if name != "generation_config.json"}
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "eos_token_id": None}).encode()
    return Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(DTYPES["float32"]), files)


async def measure(spec: str, snapshot: Snapshot, seconds: float) -> dict[str, float]:
    engine = make_engine("compact", slots=SLOTS)
    await engine.update_weights(snapshot)
    tokenizer = load_tokenizer(dict(snapshot.files))
    is_harness = spec.startswith("harness:")
    environment = HarnessEnvironment(HarnessProcess(spec)) if is_harness else EnvironmentProcess(spec)
    await environment.start()
    limits = SamplingParams(max_tokens=NUM_TURNS * (TURN_TOKENS + 1))
    outcomes: list[Any] = []

    async def groups_of(first: int) -> None:
        for number in itertools.count(first, NUM_ROLLOUTS):
            ref = GroupRef(RUN_POLICY, "train", number)
            lease = Lease(number + 1, ref, 0, 0, GROUP_SIZE, 0, None, 9e9, 600.0, number)
            leased = assignment_of(lease, Task(number, "=", {}), array("i", [3, 4, 5]), limits, spec, NUM_TURNS)
            outcomes.append(await sample_group(engine, tokenizer, leased, "w", {spec: environment}))

    began = time.monotonic()
    tasks = [asyncio.ensure_future(groups_of(number)) for number in range(NUM_ROLLOUTS // GROUP_SIZE)]
    busy, rss, children = await _watch(engine, began + seconds)
    took = time.monotonic() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    groups = [outcome for outcome in outcomes if isinstance(outcome, RolloutGroup)]
    await environment.close()
    await engine.close()
    return {
        "seconds": round(took, 1),
        "slots_busy_share": round(statistics.fmean(busy), 3),
        "groups_done": len(groups),
        "groups_lost": len(outcomes) - len(groups),
        "tokens_per_second": round(sum(one.num_tokens for one in groups) / took, 1),
        "worker_rss_mb": rss,
        "environment_rss_mb": children,
    }


async def _watch(engine: Engine, until: float) -> tuple[list[float], int, int]:
    """Shares of slots busy, every 50 ms; memory at the end, here and in children."""
    busy, here = [], psutil.Process()
    while time.monotonic() < until:
        await asyncio.sleep(0.05)
        busy.append(1.0 - engine.free_slots / engine.slots)
    children = sum(child.memory_info().rss for child in here.children(recursive=True))
    return busy, here.memory_info().rss >> 20, children >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("outputs/models/digit_sorting"))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each side at most")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    content = snapshot(arguments.model)
    figures: dict[str, Any] = {}
    for side, spec in SIDES.items():
        figures[side] = asyncio.run(measure(spec, content, arguments.seconds))
        print(side, figures[side], flush=True)
    ratio = figures["async"]["slots_busy_share"] / max(1e-9, figures["plain"]["slots_busy_share"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"slots busy, async over plain: {ratio:.1f}; peak memory {peak} MB")
    settings = {"rollouts": NUM_ROLLOUTS, "slots": SLOTS, "turns": NUM_TURNS, "turn_tokens": TURN_TOKENS}
    print(f"figures are in {save('concurrency', {**settings, 'sides': figures, 'ratio': ratio}, arguments.out)}")


if __name__ == "__main__":
    main()
