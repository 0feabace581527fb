"""Holds `echo2 plan`'s estimates from data sheets against public measurements: half of the sources fit the constants,
the other half judge them. And against two sets that neither half has: what RL trainers publish, and what this project
measured on a GPU.

    make bench-calibration

Of RL trainers, prime-rl publishes steps of two rows on each GPU, in which what a step costs once weighs much, and NeMo
RL steps in which the same GPUs train, score and sample. ECHO-2 and RolloutPipe publish seconds without lengths: said is
the length at which the estimate would be right.

Each point has its source; `public_speeds.json` beside this script lists them. A source is in one half with all its
points, so that no constant is fitted to the system that judges it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording import save, there

from echo2.core.errors import UserError
from echo2.learner.core.fitting import PROMPT_TOKENS, model_shape
from echo2.learner.decide.model_shape import LayerShape, ModelShape
from echo2.planning import estimates
from echo2.planning.gpus import Gpu, cards, gpu

POINTS = Path(__file__).with_name("public_speeds.json")
#: Constants that are fitted together, and the values that are tried.
TRAINING: Mapping[str, Sequence[float]] = {
    "TRAINING_SHARE": [0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7],
    "HALF_WIDTH": [250, 500, 1000, 1500, 2000, 2500, 3000, 4000],
    "MIXTURE_SHARE": [0.5, 0.6, 0.7, 0.8, 0.9],
}
DECODING: Mapping[str, Sequence[float]] = {
    "BANDWIDTH_SHARE": [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9],
    "DECODING_SHARE": [0.2, 0.3, 0.4, 0.5, 0.6, 0.8],
    "VLLM_STEP_SECONDS": [0.0, 0.0005, 0.001, 0.002, 0.003, 0.004],
}
Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trainer:
    """Published seconds of training without the lengths of rows."""

    what: str
    model: str
    gpu: str
    count: int
    rollouts: int
    seconds: float


TRAINERS = (
    Trainer("ECHO-2, S = 3 (128 groups of 16, as assumed)", "Qwen/Qwen3-8B", "A100-80GB", 4, 2048, 1631.2),
    Trainer("RolloutPipe, LSAT-AR, R = 32 groups of 8", "Qwen/Qwen3-1.7B", "RTX-4090", 8, 256, 195.9),
    Trainer("RolloutPipe, OlyPhys, R = 96 groups of 8", "Qwen/Qwen3-1.7B", "RTX-4090", 8, 768, 644.4),
)


def shape_of(point: Point) -> ModelShape:
    """A model of this point's sizes."""
    layers = int(point.get("layers") or 32)
    hidden = int(point.get("hidden") or 4096)
    cache = int(point.get("kv_values_per_token") or 2 * layers * 1024) // layers
    layer = LayerShape(others=int(point["parameters"]) // layers, cache=cache)
    return ModelShape(1, hidden, (layer,) * layers, True, 1 << 20, active=int(point["parameters_active"]))


def card_of(point: Point) -> Gpu | None:
    try:
        return gpu(str(point["gpu"]), "point")
    except UserError:
        return None


def estimated(point: Point) -> float | None:
    """Tokens a second of a GPU in training, of a machine in decoding, as the plan estimates it; None if the point lacks
    something."""
    card = card_of(point)
    if card is None:
        return None
    if point["kind"] == "train":
        if not point.get("tokens_per_second_per_gpu") or not point.get("hidden") or not point.get("sequence"):
            return None
        again = point.get("checkpointing") is True
        is_lora, length = point["what"] == "lora", float(point["sequence"])
        work = estimates.Workload(shape_of(point), length, 0.0, lora=is_lora, checkpointing=again)
        return length / estimates.training_seconds(work, 1, card, 1)
    if point["kind"] == "step":
        return int(point["rollouts"]) / step_seconds(point, card)
    if point["gpus"] != 1 or not point.get("concurrent") or point.get("bytes_per_weight") != 2:
        return None
    prompt, answer = float(point.get("prompt_tokens") or 128), float(point.get("output_tokens") or 256)
    work = estimates.Workload(shape_of(point), answer, prompt)
    return estimates.tokens_per_second(work, card, max(1, round(point["concurrent"])))


def step_seconds(point: Point, card: Gpu) -> float:
    """A step in which all GPUs train, then score once, then sample, `cards` of them together."""
    rollouts, count, together = int(point["rollouts"]), int(point["gpus"]), int(point["cards"])
    work = estimates.Workload(shape_of(point), float(point["sequence"]) - PROMPT_TOKENS, PROMPT_TOKENS)
    trains = estimates.training_seconds(work, rollouts, card, count)
    scores = estimates.teacher_seconds(work.shape, work, rollouts, card, count)
    engines = count // together
    machine = cards(f"{together}x{point['gpu']}", "point")[2]
    samples = rollouts / engines / estimates.rollouts_per_second(work, machine, -(-rollouts // engines))
    return trains + scores + samples


def length_of(trainer: Trainer) -> float:
    """The tokens of a row with which the estimate of its step is what was published."""
    card = gpu(trainer.gpu, "trainer")
    low, high = 1.0, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        work = estimates.Workload(known_shape(trainer.model), middle, 0.0, checkpointing=True)
        slower = estimates.training_seconds(work, trainer.rollouts, card, trainer.count) > trainer.seconds
        low, high = (low, middle) if slower else (middle, high)
    return low


def known_shape(model: str) -> ModelShape:
    found = model_shape(model)
    assert found is not None
    return found


def measured(point: Point) -> float:
    if point["kind"] == "step":
        return float(point["rollouts"]) / float(point["step_seconds"])
    return float(point["tokens_per_second_per_gpu" if point["kind"] == "train" else "output_tokens_per_second"])


def usable(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if estimated(point) is not None]


def halves(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """By source: the largest first, each to the half that has fewer points."""
    by_source: dict[str, list[Point]] = {}
    for point in points:
        by_source.setdefault(str(point["source"]), []).append(point)
    fitting: list[Point] = []
    judging: list[Point] = []
    for source in sorted(by_source, key=lambda one: (-len(by_source[one]), one)):
        (fitting if len(fitting) <= len(judging) else judging).extend(by_source[source])
    return fitting, judging


def errors(points: Sequence[Point]) -> list[float]:
    """The factor by which each estimate is off, at least 1."""
    return [math.exp(abs(math.log(float(estimated(point) or 0) / measured(point)))) for point in points]


def told(points: Sequence[Point]) -> dict[str, float]:
    found = sorted(errors(points))
    ratios = [float(estimated(point) or 0) / measured(point) for point in points]
    return {
        "points": len(found),
        "median_factor": round(statistics.median(found), 3),
        "within_2": round(sum(one <= 2 for one in found) / len(found), 3),
        "ninth_of_ten": round(found[math.ceil(0.9 * len(found)) - 1], 3),
        "median_ratio": round(statistics.median(ratios), 3),
    }


def fit(points: Sequence[Point], grid: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The constants with the least mean logarithm of the factor, each source weighing the same."""
    counts = Counter(point["source"] for point in points)

    def loss() -> float:
        factors = zip(points, errors(points), strict=True)
        return math.fsum(math.log(one) / counts[point["source"]] for point, one in factors)

    best: tuple[float, dict[str, float]] = (math.inf, {})
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        assign(chosen)
        best = min(best, (loss(), chosen), key=lambda one: one[0])
    return best[1]


def assign(constants: Mapping[str, float]) -> None:
    for name, value in constants.items():
        if name == "VLLM_STEP_SECONDS":
            estimates.STEP_SECONDS["vllm"] = value
        else:
            setattr(estimates, name, value)


def of_rl_trainers(points: Sequence[Point]) -> dict[str, Any]:
    """How far off the shipped estimates are for RL trainers, by trainer and kind of training."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(f"{point['system']}, {point['what']}" for point in points):
        some = [point for point in points if f"{point['system']}, {point['what']}" == kind]
        rows = [
            {name: point[name] for name in ("model", "gpu", "gpus", "sequence")}
            | {"estimated": round(float(estimated(point) or 0), 2), "measured": round(measured(point), 2)}
            for point in some
        ]
        found[kind] = {**told(some), "rows": rows}
        print(f"RL trainers, {kind}: {told(some)}")
    for trainer in TRAINERS:
        found[trainer.what] = {"tokens_of_a_row": round(length_of(trainer))}
        print(f"RL trainers, {trainer.what}: right if a row has {length_of(trainer):.0f} tokens")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=there, default=POINTS)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    points, result = usable(json.loads(options.points.read_text(encoding="utf-8"))), {}
    own = [point for point in points if point.get("own")]
    print(f"own measurements, as shipped: {told(own)}")
    result["own"] = {"points": len(own), "as_shipped": told(own), "factors": [round(one, 3) for one in errors(own)]}
    others = [point for point in points if point.get("rl")]
    points = [point for point in points if not point.get("own") and not point.get("rl")]
    shipped = {
        **{name: getattr(estimates, name) for name in (*TRAINING, *DECODING) if hasattr(estimates, name)},
        "VLLM_STEP_SECONDS": estimates.STEP_SECONDS["vllm"],
    }
    estimates.OWN_SHARE = 1.0  # others' systems
    result["rl_trainers"] = of_rl_trainers(others)
    grids: dict[str, Mapping[str, Sequence[float]]] = {"train": TRAINING, "decode": DECODING}
    for kind, grid in grids.items():
        fitting, judging = halves([point for point in points if point["kind"] == kind])
        assign(shipped)
        as_shipped = {"fitting": told(fitting), "judging": told(judging)}
        found = fit(fitting, grid)
        assign(found)
        result[kind] = {
            "shipped": as_shipped,
            "fitted_constants": found,
            "fitted": {"fitting": told(fitting), "judging": told(judging)},
        }
        print(f"{kind}: fitted {found}")
        for name, half in (("fitting", fitting), ("judging", judging)):
            print(f"  {name}: as fitted {told(half)}")
            print(f"           as shipped {as_shipped[name]}")
            for point, error in zip(half, errors(half), strict=True):
                if error > 2:
                    guess = estimated(point)
                    what = f"{point['model']} {point['gpu']}"
                    print(f"    off by {error:.1f}: {what} {guess:.0f} for {measured(point):.0f}")
    save("calibration", {"shipped": shipped, "halves": result}, options.out)


if __name__ == "__main__":
    main()
