"""What a plan says of disks and of the network, against runs that were measured."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2 import config as configuration
from echo2.cli import main
from echo2.planning.disk_and_network import NetworkUse, PlannedFleet, kept_and_sent, num_checkpoints
from echo2.planning.plan_inputs import BroadcastInputs
from first_plans import MIXTURE, QWEN3_8B, write

#: Directories of runs of the pretrained example and of the demo: their settings, bytes of a snapshot, share and tokens
#: of `--from`, and what was there at the end; `received`: by workers, from the head and each other.
SMOLLM = {
    "run": {"max_steps": 3},
    "sampling": {"group_size": 8, "max_tokens": 32},
    "schedule": {"groups_per_step": 6, "max_staleness": 1},
    "learner": {"checkpoint_every": 1, "keep_checkpoints": 4},
    "workers": {"count": 2},
}
DEMO = {
    "run": {"max_steps": 80},
    "eval": {"source": "digit_sorting"},
    "sampling": {"group_size": 8, "max_tokens": 12},
    "schedule": {"groups_per_step": 64},
    "workers": {"count": 1},
}
MEASURED: dict[str, tuple[dict[str, Any], float, float, float, dict[str, float]]] = {
    "smollm": (
        SMOLLM,
        269_030_016,
        0.0172,
        25.7,
        {
            "bytes": 6_253_159_393,
            "checkpoints": 4_853_516_014,
            "snapshots": 287_077_129,
            "worker": 556_107_145,
            "received": 563_849_813,
        },
    ),
    "demo": (
        DEMO,
        14_091_264,
        0.159,
        8.3,
        {
            "bytes": 343_052_234,
            "checkpoints": 253_720_760,
            "snapshots": 34_379_239,
            "worker": 37_271_642,
            "event log": 12_971_491,
            "received": 205_948_889,
        },
    ),
}


def config(tables: dict[str, Any], **more: Any) -> configuration.Config:
    fixed = {"tasks": {"source": "digit_sorting"}, "reward": {"functions": ["exact_match"]}}
    model = {"model": {"path": "none", "snapshot_dtype": "bfloat16"}}
    return configuration.build({**model, **tables, **more, **fixed}, "test")


@pytest.mark.parametrize("name", MEASURED)
def test_measured_runs_are_forecast_within_a_quarter(name: str) -> None:
    tables, full, share, tokens, measured = MEASURED[name]
    run = config(tables)
    fleet = PlannedFleet(run.workers.count, run.workers.count, 1, run.schedule.max_staleness)
    found = kept_and_sent(run, BroadcastInputs(full, share * full), fleet, tokens)
    forecast = {"bytes": found.run.total, "worker": found.worker.total, "received": found.sent.to_workers}
    forecast |= {part: num_bytes for part, num_bytes in found.run.parts.items() if part in measured}
    assert forecast == pytest.approx(measured, rel=0.25)


@given(
    steps=st.integers(1, 400),
    every=st.integers(1, 40),
    kept=st.integers(1, 6),
    keep_every=st.integers(0, 60),
    best=st.booleans(),
)
def test_checkpoints_are_those_that_a_learner_leaves(
    steps: int, every: int, kept: int, keep_every: int, best: bool
) -> None:
    """As `Checkpoints._report` prunes them; the best one is taken to be among the oldest."""
    learner = {"checkpoint_every": every, "keep_checkpoints": kept, "keep_every": keep_every}
    run = config({"run": {"max_steps": steps}, "learner": learner, "eval": {"source": "digit_sorting" if best else ""}})
    saved = [*range(every, steps, every), steps]
    spared = {version for version in saved[:-kept] if keep_every and version % keep_every == 0}
    others = [version for version in saved[:-kept] if version not in spared]
    assert num_checkpoints(run) == len(saved[-kept:]) + len(spared) + (best and bool(others))


SETTINGS = """[run]
max_steps = 100
[sampling]
group_size = 16
groups_per_batch = 1
max_tokens = 2000
[schedule]
groups_per_step = 32
max_staleness = 3
[workers]
count = 0
"""
OFFERS = '[[offers]]\nname = "card"\nprice_usd_per_hour = 2.0\nrollouts_per_second = 2\ncount = 4\n'


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_says_what_disks_and_network_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*write(tmp_path, QWEN3_8B, SETTINGS, OFFERS), "--train-seconds", "600", "--learner", "4xH200"]
    plan = planned(words, capsys)
    full, weights = plan["network"]["first"], plan["network"]["version"]
    assert weights == int(plan["broadcast_bytes"])
    workers, every = sum(plan["machines"].values()), plan["publish_every"]
    assert plan["network"]["to_workers"] >= workers * (full + (math.ceil(100 / every) - 1) * weights)
    checkpoints = plan["disk"]["run"]["parts"]["checkpoints"]
    assert checkpoints == pytest.approx(2 * 6 * full)  # two, in float32 with two moments, of a model in 16 bits
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Disk and network", "run's directory", f"to {workers} worker", "of rollouts back"):
        assert part in text

    eight_bits = planned([*words[:-1], "H200", "--learner.ranks", "1", "--learner.quantised", "moments"], capsys)
    assert eight_bits["disk"]["run"]["parts"]["checkpoints"] == pytest.approx(2 * (4 + 2.03125) / 2 * full, rel=1e-6)
    adapter = planned([*words, "--lora.rank", "16"], capsys)
    base, small = 2 * plan["disk"]["worker"]["parts"]["weights"], adapter["disk"]["worker"]["parts"]
    assert small["base model"] == pytest.approx(base)
    assert small["weights"] < 0.01 * full < 0.5 * adapter["network"]["first"]
    assert adapter["disk"]["run"]["parts"]["checkpoints"] < 0.1 * checkpoints


def test_routes_travel_back_with_their_rollouts(tmp_path: Path) -> None:
    write(tmp_path, MIXTURE, SETTINGS, OFFERS)

    def sent(**learner: bool) -> NetworkUse:
        run = config(tomllib.loads(SETTINGS), learner=learner, model={"path": str(tmp_path / "model")})
        return kept_and_sent(run, BroadcastInputs(1e9), PlannedFleet(4, 4, 1, 3), 1000.0).sent

    plain, routed = sent(), sent(routing_replay=True)
    assert plain.routes == 0
    read = 32 * (128 + 16 * 1000)  # a prompt counts once for its group
    assert routed.routes == 384 * read  # bytes of a token: 48 layers, 8 experts
    assert routed.rollouts == plain.rollouts + routed.routes
    assert routed.to_head == 100 * routed.rollouts


def test_lost_machines_are_replaced_by_ones_that_need_all_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write(tmp_path, QWEN3_8B, SETTINGS, OFFERS), "--train-seconds", "600", "--learner", "4xH200"]
    steady = planned(words, capsys)
    (tmp_path / "offers.toml").write_text(OFFERS + "mean_life_hours = 0.5\nreplace_seconds = 1\n")
    lossy = planned(words, capsys)
    lives = lossy["prediction"]["run_seconds"] / 1800
    assert lives > 1
    more = sum(lossy["machines"].values()) * lives * lossy["network"]["first"]
    assert lossy["network"]["to_workers"] - steady["network"]["to_workers"] > 0.9 * more


def test_an_unknown_size_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(tmp_path, QWEN3_8B, SETTINGS, OFFERS)
    words += ["--train-seconds", "600", "--broadcast-seconds", "3", "--learner-memory-gb", "900"]
    assert "disk" in planned(words, capsys)
    words += ["--model.path", str(tmp_path / "elsewhere")]
    assert "disk" not in planned(words, capsys)
    assert main(words) == 0
    assert "Disk and network: unknown without the size of a snapshot" in " ".join(capsys.readouterr().out.split())
    known = planned([*words, "--snapshot-bytes", "16e9"], capsys)
    assert known["network"]["first"] == 16_000_000_000
    assert known["broadcast_seconds"] == 3.0
