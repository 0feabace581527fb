"""An agent of another framework learns: examples/agents.toml, from a warm-up by `echo2 sft` to its held-out reward, and
whether the tokens that were trained are those that were sampled, by the agent's own log (trained_tokens.py).

    make agents outputs/models/smollm2/config.json                                              # once
    make bench-agent_learns ARGS='--seeds 0 1 2'
    make bench-agent_learns ARGS='--steps 2 --warm-up-steps 2 -- --eval.limit 8'                # a try

What follows `--` are flags of `echo2 sft` and `echo2 run`. The ledger forgets what a checkpoint covers, so its rows are
read while the run goes on. A run whose rows could not all be read, or in which a token differs, ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trained_tokens
from recording import output_of, save

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE, SHOWN = "examples/agents.toml", "examples/agents/people.py:Shown#train"
ECHO2 = [sys.executable, "-m", "echo2"]
LOOK_SECONDS = 1.0
#: Of `metrics.jsonl`, what is kept of each step.
COLUMNS = ("step", "reward/mean", "eval/accuracy", "time/step", "completions/mean_length", "off_policy/mean")


def one_seed(options: argparse.Namespace, seed: int, work: Path) -> dict[str, Any]:
    """Warm up, run, and compare. A warm-up that `work` has already is taken."""
    warm, run, log = work / "warm", work / "run", work / "agent.jsonl"
    flags = [*options.flags, "--run.seed", str(seed)]
    teach = [*ECHO2, "sft", EXAMPLE, "--to", warm, "--column", "answer", "--json", "--steps", options.warm_up_steps]
    teach += ["--rows-per-step", 8, "--tasks.source", SHOWN, "--eval.source", "", "--model.path", options.model]
    if not (said := work / "warm.json").exists():
        said.write_text(output_of([*map(str, teach), *flags], cwd=REPOSITORY))
    train = [*ECHO2, "run", EXAMPLE, "--out", run, "--model.path", warm, "--run.max_steps", options.steps]
    train += ["--learner.checkpoint_every", 10_000, "--head.listen", "127.0.0.1:0", "--json"]
    began, environment = time.monotonic(), {**os.environ, "AGENT_RECORDS": str(log)}
    with (work / "run.log").open("wb") as words:
        process = subprocess.Popen(
            [*map(str, train), *flags], cwd=REPOSITORY, env=environment, stdout=words, stderr=words
        )
        groups = dict[int, bytes]()
        while process.poll() is None:
            look(run / "ledger.sqlite", groups)
            time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}; see {work / 'run.log'}")
    seconds = time.monotonic() - began
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: row[name] for name in COLUMNS if name in row} for row in rows]
    held_out = [(row["step"], row["eval/accuracy"]) for row in kept if "eval/accuracy" in row]
    return {
        "seed": seed,
        "warm_up_loss": json.loads(said.read_text())["loss"],
        "held_out": held_out,
        "seconds": round(seconds, 1),
        "steps": kept,
        "tokens": compared(run / "ledger.sqlite", log, groups),
    }


def look(ledger: Path, groups: dict[int, bytes]) -> None:
    """Read the rollouts of groups that were not read before, as the ledger has them."""
    if not ledger.exists():
        return
    have = ",".join(map(str, groups)) or "-1"
    try:
        with sqlite3.connect(f"{ledger.resolve().as_uri()}?mode=ro", uri=True) as tables:
            groups |= dict(tables.execute(f"SELECT number, data FROM rollouts WHERE number NOT IN ({have})"))
    except sqlite3.OperationalError:  # it is being made, or locked for a moment
        return


def compared(ledger: Path, log: Path, groups: Mapping[int, bytes]) -> dict[str, Any]:
    """What the comparison says of the groups that were trained."""
    with sqlite3.connect(f"{ledger.resolve().as_uri()}?mode=ro", uri=True) as tables:
        numbers = [number for (number,) in tables.execute("SELECT number FROM trainings")]
        counted = dict(tables.execute("SELECT number, num_tokens FROM groups WHERE state = 'trained'"))
        (flat,) = tables.execute("SELECT count(*) FROM groups WHERE state = 'trained' AND is_flat").fetchone()
    missing = sorted(set(numbers) - set(groups))
    found = trained_tokens.compare(log, {number: groups[number] for number in numbers if number in groups})
    if missing or len(set(numbers)) != len(numbers) or sum(counted.values()) != found.tokens_trained:
        found.complaints.append(f"{len(numbers)} trainings, not read: {missing}; the ledger counts {counted}")
    return {**asdict(found), "flat_groups": flat}


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="outputs/models/smollm2")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warm-up-steps", type=int, default=11)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--untrained", action="store_true", help="also the held-out reward of the model as it is")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "outputs" / f"agent-learns-{time.strftime('%H%M%S')}")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words[:at])
    options.flags = words[at + 1 :]
    figures: dict[str, Any] = {"options": {"steps": options.steps, "warm_up_steps": options.warm_up_steps}}
    figures |= {"flags": options.flags, "runs": []}
    if options.untrained:
        command = [*ECHO2, "eval", EXAMPLE, "--json", "--model.path", options.model, *options.flags]
        figures["untrained"] = json.loads(output_of(command, cwd=REPOSITORY))["eval/accuracy"]
    for seed in options.seeds:
        work = options.work / str(seed)
        work.mkdir(parents=True, exist_ok=True)
        figures["runs"].append(one_seed(options, seed, work))
        print(save("agent_learns", figures, options.out), figures["runs"][-1]["held_out"], flush=True)
    if any(run["tokens"]["complaints"] for run in figures["runs"]):
        raise SystemExit("tokens trained are not the tokens sampled; see `complaints`")


if __name__ == "__main__":
    main()
