"""``kill -9`` at random instants of a real deterministic run, and the weights of an unkilled one beside it.

    make demo                                               # once: the model
    python benchmarks/kills.py [--kills 100] [--seed 0] [--out FILE]

Victims are drawn: the head, the learner, a worker, all of them, or the supervisor, after which the run is resumed. The
next kill comes at a random instant once a further step is trained. At the end model and optimizer of the newest
checkpoint are compared with those of an undisturbed run of as many steps, byte for byte, and the ledger is audited.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import recording

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests")]

import real_runs  # noqa: E402 (a run, as the tests start it)
from echo2.runtime.launch.deaths import RESTARTS_MAX  # noqa: E402
from real_runs import Run, is_running, pause  # noqa: E402

VICTIMS = ("head", "learner", "worker-0", "all", "run")
#: From a step that is trained after a kill to the next kill.
PAUSE_SECONDS_MAX = 2.0
#: Steps of the run for each kill: on a quick machine several are trained between two.
STEPS_A_KILL = 3
#: Without anything new a run counts as stuck: a resumed one may take its time on a busy machine.
real_runs.STUCK_SECONDS = 300.0


def kill(run: Run, victim: str, deaths: Counter[str]) -> None:
    """Kill it; what nobody starts again is resumed. `deaths`: by process, since the supervisor was started."""
    pids = run.pids()
    names = ("head", "learner", "worker-0", "worker-1") if victim == "all" else (victim,)
    if any(deaths[name] + 1 >= RESTARTS_MAX for name in names):
        names = ("run",)  # it would end the run: who is killed so often is not started again
    for name in names:
        if name in pids and is_running(pids[name]):
            run.kill(name)
            deaths[name] += 1
    if names != ("run",):
        return
    deaths.clear()
    assert run.process is not None
    run.process.wait()
    run.process.communicate()
    while any(is_running(pid) for name, pid in pids.items() if name != "run"):
        pause()
    run.start("--resume")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "outputs" / "models" / "digit_sorting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    rng, done, deaths = random.Random(options.seed), Counter[str](), Counter[str]()
    num_steps = options.kills * STEPS_A_KILL
    settings = ("--run.deterministic", "true", "--run.max_steps", str(num_steps))
    with tempfile.TemporaryDirectory(prefix="echo2-kills-") as folder:
        calm, run = (Run(Path(folder) / name, options.model, *settings) for name in ("calm", "killed"))
        calm.start().finish(3600.0)
        run.start()
        for number in range(options.kills):
            version = run.status().get("version", 0) + 1
            if version >= num_steps:
                break  # it was quicker than its killer
            run.wait_version(version)
            time.sleep(rng.uniform(0.0, PAUSE_SECONDS_MAX))
            victim = rng.choice(VICTIMS)
            kill(run, victim, deaths)
            done[victim] += 1
            print(f"{number + 1}: {victim} at version {run.status().get('version')}", flush=True)
        run.finish(3600.0)
        audit, replay = run.command("audit"), run.command("replay")
        figures = {
            "kills": dict(done),
            "seed": options.seed,
            "lineages": run.status()["lineage"],
            "lost": audit["lost"],
            "doubled": audit["doubled"],
            "trained": audit["trained"],
            "trained_unkilled": calm.command("audit")["trained"],
            "replay_different": replay["num_different"],
            "policy_as_unkilled": run.weights() == calm.weights(),
        }
    print(figures)
    print(f"saved in {recording.save('kills', figures, options.out)}")


if __name__ == "__main__":
    main()
