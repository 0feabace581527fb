"""A run directory for the dashboard's tests and benchmark: everything that a head writes, and hostile words in it."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

from echo2.config import Config
from echo2.config.rundir import RunDir, create
from echo2.core.types import RUN_POLICY, GroupRef, RolloutGroup, Task
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.rollout_log import RolloutLog
from learner_cases import rollout

HOSTILE = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\'"&amp;\u202e\x1b[31m'
MAX_STEPS = 200
WORDS = ["The", " answer", " is", " 4", "2", ".", "\n", " So", " we", " add", " 1", "7", " and", " 25", "<b>", "é"]


def row(step: int, rng: random.Random) -> dict[str, Any]:
    """The metrics of a step."""
    share = 1 - math.exp(-step / 60)
    wait = 0.6 + rng.random()
    return {
        "step": step,
        "policy": RUN_POLICY,
        "time/unix": 1.8e9 + 4.0 * step,
        "time/since_start": 4.0 * step,
        "time/step": 3.4 + wait,
        "time/wait_for_batch": wait,
        **dict.fromkeys(("wait/replaced", "wait/lease", "wait/held"), 0.0),
        "wait/lost": wait * 0.7 * (step % 30 == 0),
        "wait/sampling": wait * (0.2 if step % 30 == 0 else 0.9),
        "wait/rewards": wait * 0.1,
        "wait/last_worker": "w-00010001",
        "reward/mean": 0.2 + 0.6 * share + rng.gauss(0, 0.03),
        "off_policy/mean": 0.7 + 0.4 * rng.random(),
        "off_policy/max": rng.choice([1, 1, 1, 2]),
        "off_policy/bound": 2,
        "learner/idle_ratio": wait / (3.4 + wait),
        "learner/idle_predicted": 0.2,
        "fleet/rate": 140 + rng.gauss(0, 6),
        "fleet/needed_rate": 150.0,
        "workers/active": 6,
        "broadcast/t_bcast": 0.5 + 0.1 * rng.random(),
        "cost/cum_usd": 0.004 * step,
        "cost/wasted_usd": 0.0003 * step,
        "entropy/mean": 1.4 - 0.6 * share,
        "reward/frac_zero_std": 0.3 + 0.3 * rng.random(),
        "completions/mean_length": 40 + 8 * rng.random(),
        "completions/clipped_ratio": 0.05 * rng.random(),
        "loss/mean": rng.gauss(0, 0.01),
        "optim/grad_norm": 1.5 + rng.random(),
        "ess": 0.9 + 0.05 * rng.random(),
        "clip_ratio/mean": 0.0,
        "mismatch_kl/mean": 0.002 + 0.001 * rng.random(),
        "mismatch/abs_log_ratio": 0.03 + 0.01 * rng.random(),
        **(held_out(0.25 + 0.6 * share) if step % 20 == 0 else {}),
    }


def held_out(reward: float) -> dict[str, float]:
    """The metrics of an evaluation of two sets, four rollouts a task."""
    sets = {"eval/accuracy/easy": reward + 0.1, "eval/accuracy/hard": reward - 0.1}
    return {
        "eval/accuracy": reward,
        **sets,
        "eval/pass@2": reward + 0.05,
        "eval/pass@4": reward + 0.12,
        "eval/mean_length": 42.0,
    }


def worker(number: int, version: int, sources: list[str]) -> dict[str, Any]:
    """A worker in status.json; the third fetches, the fourth is a stranger's, the sixth rounds its weights."""
    fetching = {"version": version, "base": version - 1, "bytes_stored": 63, "bytes_total": 100}
    return {
        "id": f"w-{number:04x}{number * 7919 % 65536:04x}",
        "pid": None,
        "host": f"machine-{number}",
        "engine": "llamacpp-q8_0" if number == 5 else "vllm",
        "device": "cuda",
        "doing": "sampling 48 rollouts of 6 groups",
        "installed": f"{RUN_POLICY}@1.{version - (number == 2)}",
        "leases": 0 if number == 4 else 6,
        "attends": True,
        "standby": False,
        "rate": 20.0 + number % 7,
        "price_usd_per_hour": 0.35,
        "is_own": number != 3,
        "fetching": fetching if number == 2 else None,
        "sources": sources,
        "bytes_received": 22_574_663,
        "bytes_sent": 11_296_147,
        "suspected": None,
        "mismatch": 0.001,
    }


def status(version: int, num_workers: int = 6) -> dict[str, Any]:
    """What a head that lives on this machine tells."""
    now = time.time()
    ids = [worker(number, version, [])["id"] for number in range(num_workers)]
    sources = [
        ["", ids[0]] if number == 1 else [""] if number < 3 else [ids[number % 3]] for number in range(num_workers)
    ]
    reason = f"step {version + 1}: [{ids[0]}] holds 4 of 4 missing groups"
    return {
        "time": now,
        "head": {"pid": os.getpid(), "host": socket.gethostname()},
        "learner": {"pid": os.getpid(), "host": socket.gethostname(), "device": "cuda", "doing": f"step {version + 1}"},
        "workers": [worker(number, version, sources[number]) for number in range(num_workers)],
        "version": version,
        "lineage": 1,
        "max_steps": MAX_STEPS,
        "max_staleness": 2,
        "published": version,
        "checkpoint": version // 10 * 10,
        "broadcast": {"broadcast/t_bcast": 0.55, "origin_bytes": 22_601_476, "peer_bytes": 67_800_000, "suspects": {}},
        "waits": [
            {"waiter": "learner", "waits_for": ids[0], "since": now - 1.5, "until": now + 500.0, "reason": reason},
            {"waiter": HOSTILE, "waits_for": "head", "since": 0.0, "until": None, "reason": HOSTILE},
        ],
        "decisions": [
            {"at": now - 90.0, "kind": "ReleaseWorker", "what": f"{ids[1]} stands by", "reason": "spare", "count": 3},
            {"at": now - 600.0, "kind": "RestWorker", "what": HOSTILE, "reason": HOSTILE, "count": 1},
        ],
        "cost_usd": 0.004 * version,
        "trust": {
            "t-77": {"score": 0.93, "num_groups": 40, "num_passed": 12, "num_failed": 0, "num_missed": 1, "history": []}
        },
    }


def append_step(rundir: RunDir, step: int, num_workers: int = 6) -> None:
    """What a head writes when a step is done."""
    with rundir.metrics.open("a") as file:
        file.write(json.dumps(row(step, random.Random(step))) + "\n")
    write_status(rundir, step, num_workers)


def write_status(rundir: RunDir, version: int, num_workers: int = 6) -> None:
    """Replaced whole, as the head does."""
    new = rundir.status.with_suffix(".new")
    new.write_text(json.dumps(status(version, num_workers)))
    new.replace(rundir.status)


def log_groups(rundir: RunDir, step: int, num_groups: int = 3, num_tokens: int = 48) -> None:
    """The rollouts of a step; the first group's task is the same at every step, the last one's words are hostile."""
    rng, log = random.Random(step), RolloutLog(rundir.rollouts, "grpo")
    trained: dict[int, list[list[float]]] = {}
    for number in range(num_groups):
        made = [
            rollout(
                [rng.randrange(len(WORDS)) for _ in range(num_tokens)],
                reward=float((index + number + step) % 2),
                logprobs=[-rng.expovariate(1.2) for _ in range(num_tokens)],
                loss_mask=b"\1" * (num_tokens - 6) + b"\0" * 3 + b"\1" * 3,
                version=step - 1 - number % 2,
            )
            for index in range(4)
        ]
        is_hostile = number == num_groups - 1
        words = [*WORDS[:-1], HOSTILE] if is_hostile else WORDS
        group = RolloutGroup(
            group=GroupRef(RUN_POLICY, "train", step * num_groups + number),
            step=step - 1,
            lineage=1,
            cursor=number,
            prompt_tokens=made[0].tokens[:3],
            rollouts=tuple(made),
            worker_id=f"w-{number}",
            generate_seconds=1.25,
        )
        prompt = HOSTILE if is_hostile else f"What is 17 + 25? ({0 if number == 0 else step * 10 + number})"
        task = Task(number, prompt, {"answer": HOSTILE if is_hostile else "42"})
        log.write(f"step_{step}", group, task, lambda tokens, words=words: [words[each] for each in tokens])
        trained[group.group.number] = [[value + rng.gauss(0.0, 0.6) for value in each.logprobs] for each in made]
    log.trained(step, trained)


def make_run(path: Path, num_steps: int, num_workers: int = 6, num_logged: int = 5) -> RunDir:
    """A run that goes on and has trained so many steps."""
    rundir = create(path, Config(), resume=False)
    rows = [{"step": 0, **held_out(0.25)}, *(row(step, random.Random(step)) for step in range(1, num_steps + 1))]
    rundir.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    ledger = Ledger(rundir.ledger)
    seconds = 0.004 * num_steps / (0.35 + 3.06) * 3600  # a bill that the rows' `cost/cum_usd` agree with
    times = {"attended_seconds": seconds, "useful_seconds": 0.75 * seconds, "useful_groups": 900}
    wasted = {"expired": 0.05 * seconds, "stale": 0.0125 * seconds}
    costs = {
        "w-1": {**times, "price_usd_per_hour": 0.35, "wasted_seconds": wasted},
        "learner": {**times, "price_usd_per_hour": 3.06, "wasted_seconds": {}},
    }
    ledger.set_meta("costs", costs)
    ledger.close()
    write_status(rundir, num_steps, num_workers)
    for step in range(max(1, num_steps - num_logged + 1), num_steps + 1):
        log_groups(rundir, step)
    return rundir
