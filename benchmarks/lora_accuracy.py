"""LoRA beside full training on the demo's task: held-out accuracy over steps, and bytes of a snapshot.

    python benchmarks/lora_accuracy.py [--model DIR] [--rank 16] [--lr 2e-3] [--steps 40] [--groups 32] [--seeds 3]
        [--out FILE]

In one process each, without network and without a clock (`staleness_cell.py`), at staleness 1. `--lr` is the adapter's;
full training has the demo's, 2e-4. Bytes: of a whole snapshot, as a worker without any would get it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

from recording import save
from staleness_cell import train_cell

from echo2 import config as configuration
from echo2.learner.adapters import load_trained

DEMO = Path(__file__).parents[1] / "src" / "echo2" / "demo" / "sort.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="outputs/models/digit_sorting")
    parser.add_argument("--lr", type=float, default=2e-3)
    for name, default in (("rank", 16), ("steps", 40), ("groups", 32), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = {
        "full": {},
        "lora": {"lora.rank": str(options.rank), "learner.lr": str(options.lr)},
    }
    figures: dict[str, Any] = {}
    for side, flags in sides.items():
        common = {"model.path": options.model, "schedule.groups_per_step": str(options.groups), "eval.every": "10"}
        config = configuration.load(DEMO, common | flags)
        weights = load_trained(config, "cpu").weights()
        size = sum(tensor.num_bytes for tensor in weights.values())
        cells = [train_cell(config, 1, seed, options.steps) for seed in range(options.seeds)]
        figures[side] = {"snapshot_bytes": size, "config": dataclasses.asdict(config), "cells": cells}
        for place, point in enumerate(cells[0]["points"]):
            found = [cell["points"][place]["accuracy"] for cell in cells]
            spread = f"({min(found):.3f} to {max(found):.3f})"
            print(f"{side}: step {point['step']}: accuracy {statistics.fmean(found):.3f} {spread}", flush=True)
        print(f"{side}: {size} bytes a snapshot", flush=True)
    ratio = figures["full"]["snapshot_bytes"] / figures["lora"]["snapshot_bytes"]
    last = [statistics.fmean(cell["points"][-1]["accuracy"] for cell in figures[side]["cells"]) for side in sides]
    print(f"bytes: 1 to {ratio:.1f}; accuracy at the end: full {last[0]:.3f}, lora {last[1]:.3f}")
    shown = {name: str(value) for name, value in vars(options).items() if name not in ("out", "model")}
    for side in figures.values():
        side["config"]["model"].pop("path")
    print(f"figures are in {save('lora_accuracy', {'options': shown, **figures}, options.out)}")


if __name__ == "__main__":
    main()
