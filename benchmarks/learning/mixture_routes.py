"""What routing replay does to learning: the demo's task on a small mixture of experts, with and without, three seeds.

    make bench-mixture_routes                          # on-policy: three minutes of one core
    make bench-mixture_routes ARGS='--lags 4'          # with weights that are four versions old

A Qwen3-MoE like the demo's model is made here and taught until a quarter of its answers are right. Then each seed is
trained twice from it: with the experts that sampled each token (`learner.routing_replay`), and with the learner's own
choice (live). Snapshots, engine and learner compute in bfloat16, so their choices differ. Every step is sampled by
weights that are as old as the lag says (`staleness_cell.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from recording import save
from staleness_cell import Sampling, train_cell
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from echo2.config import Config, load
from echo2.core.types import RolloutGroup
from echo2.demo import digit_sorting as demo
from echo2.demo.small_models import answer_loss, character_tokenizer, update, write_model
from echo2.learner.core.adapters import load_trained
from echo2.learner.core.trainer import ForwardBackward
from echo2.learner.grpo.data import GroupData
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import LossStats
from echo2.tasks.digit_sorting import DigitSorting

ENGINE = "transformers"
WAYS = {"live": False, "replay": True}
CHECK_EVERY_STEPS = 20


class Watched(GrpoClient):
    """A learner that remembers its largest |log ratio|, and how many of its rollouts had routes."""

    largest = 0.0
    num_data = num_routed = 0

    def add_to_step(
        self, groups: Sequence[RolloutGroup], parts: Sequence[GroupData], done: ForwardBackward[LossStats]
    ) -> LossStats:
        data = [datum for part in parts for datum in part.data]
        for datum, logprobs in zip(data, done.logprobs, strict=True):
            assert datum.behaviour_logprobs is not None
            ratios = zip(datum.loss_mask, logprobs, datum.behaviour_logprobs, strict=True)
            self.largest = max(self.largest, *(abs(own - other) for counts, own, other in ratios if counts))
            self.num_routed += datum.routes is not None
        self.num_data += len(data)
        return super().add_to_step(groups, parts, done)


def job_config(model: Path, groups: int, is_replayed: bool) -> Config:
    """The demo's job with this model, in bfloat16."""
    config = load(Path(demo.__file__).with_name("sort.toml"), {"model.path": str(model)})
    return replace(
        config,
        model=replace(config.model, snapshot_dtype="bfloat16", compute_dtype="bfloat16"),
        schedule=replace(config.schedule, groups_per_step=groups),
        eval=replace(config.eval, every=10),
        learner=replace(config.learner, routing_replay=is_replayed, tokens_per_microbatch=2048),
    )


def make_model(out: Path, seed: int, layers: int) -> dict[str, float]:
    """Teach a random mixture by examples, as the demo's model is taught. Returns steps and accuracy."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(demo.CHARACTERS, unknown="<unk>")
    sizes = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = Qwen3MoeForCausalLM(sizes)  # the demo's functions name another class
    train = DigitSorting("train", demo.MIN_DIGITS, demo.MAX_DIGITS, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=demo.PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(demo.MAX_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = demo.learning_rate(step)
        loss = answer_loss(model, *demo.examples(tokenizer, train, step))
        update(model, optimizer, loss)
        if (step + 1) % CHECK_EVERY_STEPS == 0:
            write_model(model, tokenizer, out)
            accuracy = accuracy_of(out)
            print(f"warm-up: step {step + 1}, loss {loss.item():.2f}, held-out accuracy {accuracy:.2f}", flush=True)
            if accuracy >= demo.TARGET_ACCURACY:
                parameters = sum(parameter.numel() for parameter in model.parameters())
                return {"parameters": parameters, "warm_up_steps": step + 1, "accuracy": accuracy}
    raise SystemExit(f"the warm-up ended after {demo.MAX_STEPS} steps at {accuracy:.2f}: try another --model-seed")


def accuracy_of(model: Path) -> float:
    config = job_config(model, 1, False)
    sampling = Sampling(config, 0, ENGINE)
    sampling.keep(GrpoClient(load_trained(config, "cpu"), config), 0)
    return sampling.accuracy(0)


def trained(model: Path, way: str, lag: int, seed: int, steps: int, groups: int) -> dict[str, Any]:
    """One run."""
    made: list[Watched] = []

    def make_client(*arguments: Any) -> Watched:
        made.append(Watched(*arguments))
        return made[-1]

    config = job_config(model, groups, WAYS[way])
    figures = train_cell(config, lag, seed, steps, ENGINE, make_client)
    share = made[0].num_routed / max(1, made[0].num_data)
    told = {"way": way, "lag": lag, "seed": seed, "largest_log_ratio": made[0].largest, "replayed_share": share}
    return told | figures


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each lag and way: least, mean and most over the seeds."""
    rows = []
    for lag, way in sorted({(run["lag"], run["way"]) for run in runs}):
        mine = [run for run in runs if (run["lag"], run["way"]) == (lag, way)]
        found: dict[str, list[float]] = {"largest_log_ratio": [run["largest_log_ratio"] for run in mine]}
        for name in ("abs_log_ratio", "k3", "ess"):
            found[name] = [statistics.fmean(point[name] for point in run["points"][1:]) for run in mine]
        for at in sorted({point["step"] for run in mine for point in run["points"]}):
            after = [point["accuracy"] for run in mine for point in run["points"] if point["step"] == at]
            found[f"accuracy_{at}"] = after
        diverged = sum(run["diverged"] is not None for run in mine)
        spread = {name: [min(all_), statistics.fmean(all_), max(all_)] for name, all_ in found.items()}
        rows.append({"lag": lag, "way": way, "seeds": len(mine), "diverged": diverged, **spread})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32, help="groups of 8 rollouts in a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/mixture_routes-DATE.json)")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), options.model_seed, options.layers)
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            waiting = [
                pool.submit(trained, Path(directory), way, lag, seed, options.steps, options.groups)
                for seed in options.seeds
                for lag in options.lags
                for way in WAYS
            ]
            for done in as_completed(waiting):
                runs.append(done.result())
                print(json.dumps(runs[-1]), flush=True)
    settings = {"steps": options.steps, "groups": options.groups, "model": model}
    path = save("mixture_routes", {**settings, "table": table(runs), "runs": runs}, options.out)
    print(json.dumps(table(runs), indent=1), f"\nwritten to {path}")


if __name__ == "__main__":
    main()
