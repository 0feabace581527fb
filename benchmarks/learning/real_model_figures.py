"""What a run directory of the pretrained model says, in figures; and the weights that its steps changed.

make bench-real_model_figures ARGS='MODEL CHECKPOINT ...'           # the share of each step, in bfloat16
make bench-real_model_figures ARGS='--forms MODEL CHECKPOINT ...'   # bytes and blocks of the rounded weights
"""

from __future__ import annotations

import argparse
import json
import operator
import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from recording import there
from time_to_accuracy import crossing, first_lease

from echo2.config import Config
from echo2.config.rundir import RunDir, read_json, read_metrics
from echo2.core.devices import this_machine
from echo2.core.errors import UserError
from echo2.core.types import Hardware
from echo2.learner.core.fitting import learner_need, model_shape, snapshot_size, worker_need

THRESHOLD = 0.7
#: Of which bytes are counted.
PUBLISHED_FORMS = ("q8_0", "q4_0", "mlx-q8", "mlx-q4")
#: Steps at the beginning that count for no mean: the workers load the model, the learner's moments are made.
COLD_STEPS = 2
#: What is large in a run directory and not needed once its figures are read.
LARGE = ("checkpoints", "snapshots", "workers", "learner")
#: Figure -> metric of a step, whose mean over the steps after the cold ones it is.
MEANS = {
    "step_seconds": "time/step",
    "train_seconds": "time/train",
    "wait_seconds": "time/wait_for_batch",
    "checkpoint_seconds": "time/checkpoint",
    "staleness_mean": "off_policy/mean",
    "broadcast_seconds": "broadcast/t_bcast",
    "ess": "ess",
    "entropy": "entropy/mean",
    "flat_share": "reward/frac_zero_std",
    "tokens_per_second": "perf/tokens_per_s",
    "mismatch_lag_0": "mismatch/abs_log_ratio/lag_0",
    "mismatch_kl_lag_0": "mismatch_kl/lag_0",
}

Figures = dict[str, Any]


def run_figures(run: Path) -> Figures:
    """All that is read of a run, also of one that was interrupted.

    Raises:
        UserError: it has trained no step.
    """
    rows = read_metrics(RunDir(run).metrics)
    steps = [row for row in rows if "time/train" in row]
    if not steps:
        raise UserError(f"{run} has trained no step")
    config = RunDir(run).read_config()
    started = first_lease(run / "events.jsonl")
    summary = read_json(RunDir(run).summary) or {}
    warm = steps[COLD_STEPS:] or steps
    found: Figures = {name: _mean(warm, metric) for name, metric in MEANS.items()}
    found |= {"steps": len(steps), "staleness_max": max(row.get("off_policy/max", 0) for row in steps)}
    found |= {"train_run_seconds": round(steps[-1]["time/unix"] - started, 2)}
    found |= {"idle_ratio": summary.get("learner_idle_ratio"), "idle_once_under_way": _idle(warm)}
    found |= {"waits": summary.get("learner_waits"), "groups": summary.get("groups")}
    found |= _held_out(rows, steps, started) | _sent(steps, config)
    found["rewards"] = [row.get("reward/mean") for row in steps]
    return {name: value for name, value in found.items() if value is not None} | {"forecast": forecast(config)}


def _mean(rows: Iterable[Figures], metric: str) -> float | None:
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return float(f"{statistics.fmean(values):.5g}") if values else None


def _idle(rows: Sequence[Figures]) -> float | None:
    total = sum(row["time/step"] for row in rows)
    return round(sum(row["time/wait_for_batch"] for row in rows) / total, 4) if total else None


def _held_out(rows: Sequence[Figures], steps: Sequence[Figures], started: float) -> Figures:
    """Held-out reward by version, with the seconds from the first lease to when that version was trained."""
    unix = {row["step"]: row["time/unix"] - started for row in steps}
    points = [
        (row["eval/version"], round(unix.get(row["eval/version"], 0.0), 2), round(row["eval/accuracy"], 4))
        for row in rows
        if "eval/accuracy" in row
    ]
    if not points:
        return {}
    to_threshold = crossing([(seconds, reward) for _, seconds, reward in points], THRESHOLD)
    return {
        "held_out": points,
        "held_out_before": points[0][2],
        "held_out_after": points[-1][2],
        "held_out_best": max(reward for *_, reward in points),
        "seconds_to_threshold": None if to_threshold is None else round(to_threshold, 2),
    }


def _sent(steps: Sequence[Figures], config: Config) -> Figures:
    """Bytes of the snapshots after the first, by their share of the whole."""
    ratios = [row["broadcast/delta_ratio"] for row in steps if 0.0 < row.get("broadcast/delta_ratio", 0.0) < 1.0]
    if not ratios:
        return {}
    whole = snapshot_size(config).num_bytes
    share = statistics.median(ratios)
    return {
        "delta_ratio": round(share, 6),
        "delta_ratio_range": [round(min(ratios), 6), round(max(ratios), 6)],
        "delta_bytes": round(share * whole),
        "snapshot_bytes": whole,
    }


@cache
def machine_here() -> Hardware:
    return this_machine()


def forecast(config: Config) -> Figures:
    """Bytes that learner and worker are said to need: on a GPU, of its memory."""
    shape = model_shape(config.model.path)
    if shape is None:
        return {}
    needs = {
        "learner": learner_need(config, shape, machine_here()),
        "worker": worker_need(config, shape, machine_here()),
    }
    return {name: {"bytes": need.total, "of": need.place, "parts": need.parts} for name, need in needs.items()}


def clean(directory: Path) -> None:
    """Remove what is large: dozens of runs would fill a disk."""
    for name in LARGE:
        shutil.rmtree(directory / "run" / name, ignore_errors=True)
    shutil.rmtree(directory / "warm", ignore_errors=True)


# ---- weights that a step changed -------------------------------------------------------------------------------------


def changed_shares(models: Sequence[Path]) -> list[float]:
    """The share of weights that differ between one model directory and the next, rounded to bfloat16."""
    import torch
    from safetensors.torch import load_file

    def rounded(directory: Path) -> dict[str, torch.Tensor]:
        found = load_file(directory / "model.safetensors")
        return {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}

    shares, before = [], rounded(models[0])
    for directory in models[1:]:
        after = rounded(directory)
        total = sum(tensor.numel() for tensor in after.values())
        changed = sum(int((tensor != before[name]).sum()) for name, tensor in after.items())
        shares.append(round(changed / total, 6))
        before = after
    return shares


def changed_forms(models: Sequence[Path], times: float = 1.0) -> list[Figures]:
    """From one model directory to the next, by the published weights' dtype and by form: the shares of the rounded
    tensors' bytes and of their blocks that differ, and to which share of the bytes zstd packs the differences. `times`:
    the difference to the first model is multiplied by it, which is one step of AdamW at another learning rate."""
    import torch
    from safetensors import safe_open

    from echo2.engines import forms

    def blocks(values: torch.Tensor, kind: str) -> torch.Tensor:
        """The bytes of each block, as they are stored."""
        if kind not in forms.AFFINE_BITS:
            return forms.encode(values, kind)
        q, d, e = forms.affine(values, kind)
        return torch.cat((forms.packed(q, kind), d.view(torch.uint8), e.view(torch.uint8)), dim=1)

    kinds = [(dtype, form) for dtype in (torch.bfloat16, torch.float32) for form in PUBLISHED_FORMS]
    # Changed bytes, packed bytes, all bytes, changed blocks, all blocks.
    counts = [{kind: [0] * 5 for kind in kinds} for _ in models[1:]]
    pack = zstandard.ZstdCompressor().compress
    files: list[Any] = [safe_open(directory / "model.safetensors", "pt") for directory in models]
    for name in sorted(files[0].keys()):
        first, *rest = (file.get_tensor(name).double() for file in files)
        held = [first.float(), *((first + times * (values - first)).float() for values in rest)]
        for dtype, form in kinds:
            if not (kind := forms.format_of(name, form)):
                continue
            before = blocks(held[0].to(dtype), kind)
            for found, values in zip(counts, held[1:], strict=True):
                after = blocks(values.to(dtype), kind)
                is_other = after != before
                packed = len(pack((after - before).T.numpy().tobytes()))
                news = (int(is_other.sum()), packed, is_other.numel(), int(is_other.any(1).sum()), len(is_other))
                found[dtype, form] = list(map(operator.add, found[dtype, form], news))
                before = after
    return [
        {
            f"{form} of {str(dtype).removeprefix('torch.')}": {
                "bytes": round(found[dtype, form][0] / found[dtype, form][2], 6),
                "packed": round(found[dtype, form][1] / found[dtype, form][2], 6),
                "blocks": round(found[dtype, form][3] / found[dtype, form][4], 6),
            }
            for dtype, form in kinds
        }
        for found in counts
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", action="store_true", help="of the rounded weights, in each form")
    parser.add_argument("--times", type=float, default=1.0, help="of forms: as if the rate were so many times as large")
    parser.add_argument("snapshots", type=there, nargs="+")
    options = parser.parse_args(arguments)
    found = changed_forms(options.snapshots, options.times) if options.forms else changed_shares(options.snapshots)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
