"""What it costs that a stranger's rollouts keep the weights that they began with, and what choice is left to it.

    make bench-one_version ARGS='[--steps 200] [--groups 16] [--out FILE]'

*Price*: seconds of a token for 48 rows of one version, and of two; a Qwen3 of random weights, and one as wide as the
smallest real ones (width 576, 12 layers), on one thread, interleaved. *Whole runs*: simulated, one machine of the owner
and three strangers who swap between two groups, during them, or keep their weights. *Choice*: the worker samples each
group under both versions that it may, and sends the one with the better mean reward (the share of even tokens);
`gain`: of that mean, in standard deviations of a rollout's reward. Advantages are less the group's mean, so they gain
nothing by it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from hostile_sampling import APART, PARAMS, checker_of, leased, reward, sampled, snapshot, swapping
from recording import save
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.compact import build_compact
from echo2.engines.engine import SampleRequest
from echo2.engines.torch_engine import TorchDecoder
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from echo2.planning.simulate import run_scenario
from echo2.rollouts.verification import check_group

ROWS, SIZES = 48, {"width 96": (96, 4, 4), "width 576": (576, 12, 9)}


def weights(width: int, layers: int, heads: int, version: int) -> Snapshot:
    torch.manual_seed(version)
    sizes = {"hidden_size": width, "intermediate_size": 8 * width // 3 // 8 * 8, "num_hidden_layers": layers}
    more = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads, "vocab_size": 4096}
    values: dict[str, Any] = {**sizes, **more, "eos_token_id": None}
    module = Qwen3ForCausalLM(Qwen3Config(**values))
    tensors = {
        name: TensorBytes("F32", tuple(one.shape), one.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, one in module.state_dict().items()
    }
    files = {"config.json": module.config.to_json_string(use_diff=False).encode()}
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, files)


def price(name: str, num_steps: int) -> dict[str, Any]:
    """Seconds of a token, by the share of rows that still run with the weights before."""
    whole = TorchDecoder(build_compact, "cpu")
    whole.load(weights(*SIZES[name], 0))
    halves = {share: [TorchDecoder(build_compact, "cpu") for _ in range(2)] for share in (0.25, 0.5)}
    for pair in halves.values():
        for version, decoder in enumerate(pair):
            decoder.load(weights(*SIZES[name], version))
    params, number = SamplingParams(max_tokens=num_steps + 8), 0

    def rows(count: int) -> dict[int, SampleRequest]:
        nonlocal number
        number += count
        return {at: SampleRequest(array("i", range(2, 18)), 1, at, params) for at in range(number - count, number)}

    whole.step(rows(ROWS), ())
    for share, (older, newer) in halves.items():
        older.step(rows(round(share * ROWS)), ())
        newer.step(rows(ROWS - round(share * ROWS)), ())
    took: dict[str, list[float]] = {label: [] for label in ("one version", *(f"{share:g} older" for share in halves))}
    for _ in range(num_steps):
        for label, decoders in (("one version", [whole]), *((f"{s:g} older", pair) for s, pair in halves.items())):
            began = time.perf_counter()
            for decoder in decoders:
                decoder.step({}, ())
            took[label].append(time.perf_counter() - began)
    middles = {label: statistics.median(times) for label, times in took.items()}
    row: dict[str, Any] = {"model": name, "rows": ROWS, **middles}
    return row | {f"{label}, times": middles[label] / middles["one version"] for label in middles}


def whole_runs(seeds: int = 3) -> list[dict[str, Any]]:
    """Seconds of a run of 60 steps; `over_during`: as a multiple of those of a run that swaps during groups."""
    rows = []
    for seconds, spread, staleness in ((4.0, 0.3, 2), (4.0, 0.8, 2), (12.0, 0.5, 2), (4.0, 0.8, 4)):
        found = {}
        # Without `draws` strangers swap as the owner's machines do, and nobody checks them.
        for swap, draws in (("between", False), ("during", False), ("apart", True)):
            found[swap] = statistics.mean(
                _seconds(swap, draws, seconds, spread, staleness, seed) for seed in range(seeds)
            )
        ratios = {name: value / found["during"] for name, value in found.items()}
        rows.append({"group_seconds": seconds, "spread": spread, "max_staleness": staleness, "over_during": ratios})
        print(rows[-1], flush=True)
    return rows


def _seconds(swap: str, draws: bool, seconds: float, spread: float, staleness: int, seed: int) -> float:
    strangers = [WorkersSpec(ticket=f"t{at}", rollout_seconds=seconds, spread=spread, draws=draws) for at in range(3)]
    given: Literal["between", "auto"] = "between" if swap == "between" else "auto"
    scenario = Scenario(
        name=swap,
        max_steps=60,
        max_staleness=staleness,
        swap=given,
        lease_seconds=120.0,
        faults_until_seconds=0.0,
        learner=LearnerSpec(train_seconds=0.5),
        workers=(WorkersSpec(rollout_seconds=seconds, spread=spread, draws=True), *strangers),
    )
    return run_scenario(scenario, seed).seconds


async def choice(num_groups: int) -> list[dict[str, Any]]:
    rows = []
    for apart, noise in APART.items():
        old, new = snapshot("F32"), replace(snapshot("F32", noise=noise), ref=SnapshotRef(RUN_POLICY, 1, 1))
        reader = await checker_of("compact", old, new)
        asked = [leased(60_000 + at, PARAMS["plain"]) for at in range(num_groups)]
        under = [await sampled(swapping("compact", one, {}, 8 * num_groups), asked) for one in (old, new)]
        means = [[statistics.mean(map(reward, group.rollouts)) for group in groups] for groups in under]
        deviation = statistics.stdev(reward(one) for group in under[0] for one in group.rollouts)
        best = [max(pair) for pair in zip(*means, strict=True)]
        verdicts = [
            await check_group(reader, one.ref, *pair)
            for one, groups in zip((old, new), under, strict=True)
            for pair in zip(asked, groups, strict=True)
        ]
        gain = (statistics.mean(best) - statistics.mean(means[0])) / deviation
        faults = sum(bool(one.fault) for one in verdicts)
        rows.append({"apart": apart, "gain": gain, "faults": faults, "groups": len(verdicts)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        prices = [price(name, options.steps) for name in SIZES]
    for row in prices:
        print(row, flush=True)
    figures = {"price": prices, "choice": asyncio.run(choice(options.groups)), "whole_runs": whole_runs()}
    print("saved to", save("one_version", figures, options.out))


if __name__ == "__main__":
    main()
