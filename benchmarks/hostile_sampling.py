"""What the check of strangers' rollouts finds: false alarms over honest groups of mixed engines, dtypes, batches and
threads, groups until a cheat is caught, and what a check costs.

    python benchmarks/hostile_sampling.py [--groups 1024] [--cheats 16] [--out FILE]

A Qwen3 of random weights (4 layers, width 96, 4,096 tokens, entropy of 1 to 4 nats). A group is 8 rollouts of 32
tokens. Honest groups are sampled by one engine, in one batch size, with one or two threads, and checked by another
engine; cheats are sampled and edited as each says, and judged by the real check. How many groups it takes is drawn,
over 10 seeds, from what share of a cheat's groups the check finds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from recording import quantile, save
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.control.seeds import mix
from echo2.rollout.engine import Engine
from echo2.rollout.engines import make_engine
from echo2.rollout.generate import sample_group
from echo2.rollout.verification import Verdict, check_group
from echo2.runtime.head.copied_rollouts import CopiedRollouts
from echo2.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    TensorBytes,
)

VOCAB, ROLLOUTS, TOKENS, SEEDS, THREADS = 4096, 8, 32, 10, (1, 2)
SHARES = (0.01, 0.02, 0.05)
PARAMS = {
    "plain": SamplingParams(max_tokens=TOKENS),
    "temperature .7": SamplingParams(temperature=0.7, max_tokens=TOKENS),
    "top-k 20": SamplingParams(top_k=20, max_tokens=TOKENS),
    "top-p .9": SamplingParams(top_p=0.9, max_tokens=TOKENS),
}
Edit = Callable[[random.Random, RolloutGroup], RolloutGroup]


def weights(noise: float = 0.0, bits: int = 0) -> dict[str, torch.Tensor]:
    """Random ones; the same with noise relative to each tensor's size, or rounded to so many bits a row."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.12,
        eos_token_id=1,
    )
    module = Qwen3ForCausalLM(config)
    found = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    found["lm_head.weight"] = found["lm_head.weight"] * 2.2
    generator = torch.Generator().manual_seed(5)
    for name, tensor in found.items():
        if noise:
            tensor += noise * tensor.std().nan_to_num(1.0) * torch.randn(tensor.shape, generator=generator)
        if bits and tensor.ndim == 2:
            step = tensor.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            found[name] = (tensor / step).round() * step
    weights.config = config.to_json_string(use_diff=False).encode()  # type: ignore[attr-defined]
    return found


def snapshot(dtype: str, **changes: Any) -> Snapshot:
    """These weights in this dtype ("F32", "BF16")."""
    kind, tensors = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype], {}
    for name, tensor in weights(**changes).items():
        data = tensor.to(kind).contiguous().view(torch.uint8).numpy().tobytes()
        tensors[name] = TensorBytes(dtype, tuple(tensor.shape), data)
    return Snapshot(SnapshotRef(RUN_POLICY, 1, 0), tensors, {"config.json": weights.config})  # type: ignore[attr-defined]


async def engine_of(name: str, held: Snapshot, slots: int = 64) -> Any:
    engine = make_engine(name, "cpu", slots)
    await engine.update_weights(held)
    return engine


def leased(number: int, params: SamplingParams) -> Assignment:
    rng = random.Random(number)
    prompt = array("i", [rng.randrange(2, VOCAB) for _ in range(rng.randrange(4, 24))])
    group = GroupRef(RUN_POLICY, "train", number)
    lease = Lease(1, group, 0, number, ROLLOUTS, 0, None, 60.0, 60.0, mix(number) >> 1)
    return Assignment(lease, prompt, params)


async def sampled(engine: Engine, assignments: Sequence[Assignment]) -> list[RolloutGroup]:
    """All of them at once: the engine's slots are the batch."""
    found = await asyncio.gather(*(sample_group(engine, None, one, "worker") for one in assignments))  # type: ignore[arg-type]
    return [group for group in found if isinstance(group, RolloutGroup)]


async def judged(engine: Any, pairs: Sequence[tuple[Assignment, RolloutGroup]]) -> list[Verdict]:
    return [await check_group(engine, engine.installed, assignment, group) for assignment, group in pairs]


# ---- honest ----------------------------------------------------------------------------------------------------------


async def honest(num_groups: int) -> list[dict[str, Any]]:
    """Worst distances and errors, by dtype and by who samples and who checks.

    Raises:
        PeerError: a rollout of an honest group counts as a copy.
    """
    rows, number, copies = [], 0, CopiedRollouts()
    for dtype in ("F32", "BF16"):
        held = snapshot(dtype)
        engines = {name: await engine_of(name, held) for name in ("compact", "transformers")}
        few = await engine_of("compact", held, slots=3)
        pairs = [("compact", "compact", 64), ("compact", "transformers", 64), ("transformers", "compact", 64)]
        for sampler, checker, slots in [*pairs, ("compact", "compact", 3)]:
            verdicts: list[Verdict] = []
            for params, threads in itertools.product(PARAMS.values(), THREADS):
                share = num_groups // (2 * 4 * len(PARAMS) * len(THREADS))
                asked = [leased(number + at, params) for at in range(share)]
                number += share
                torch.set_num_threads(threads)
                groups = await sampled(few if slots == 3 else engines[sampler], asked)
                torch.set_num_threads(1)
                verdicts += await judged(engines[checker], list(zip(asked, groups, strict=True)))
                for group in groups:
                    copies.check(group)
            rows.append({"dtype": dtype, "sampler": sampler, "checker": checker, "slots": slots, **spread(verdicts)})
            print(rows[-1], flush=True)
    return rows


def spread(verdicts: list[Verdict]) -> dict[str, Any]:
    """Of groups: how many, how many are faulty, and the largest of what the tolerances bound."""
    fields = ("worst_interval", "worst_support", "worst_logprob", "mean_logprob")
    found: dict[str, Any] = {"groups": len(verdicts), "false_alarms": sum(bool(one.fault) for one in verdicts)}
    found["tokens"] = sum(one.num_tokens for one in verdicts)
    for name in fields:
        values = [getattr(one, name) for one in verdicts]
        found[name] = {"median": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values)}
    found["surprise_max"] = max(abs(one.surprise) for one in verdicts)
    return found


# ---- cheats ----------------------------------------------------------------------------------------------------------


def of_rollouts(edit: Callable[[random.Random, Rollout], Rollout]) -> Edit:
    return lambda rng, group: replace(group, rollouts=tuple(edit(rng, one) for one in group.rollouts))


def random_tokens(share: float) -> Callable[[random.Random, Rollout], Rollout]:
    """So many of the tokens; at least one of the rollout."""

    def edit(rng: random.Random, rollout: Rollout) -> Rollout:
        tokens, num = array("i", rollout.tokens), max(1, round(share * len(rollout.tokens)))
        for place in rng.sample(range(len(tokens)), num):
            tokens[place] = rng.randrange(2, VOCAB)
        return replace(rollout, tokens=tokens)

    return edit


def shifted(by: float) -> Callable[[random.Random, Rollout], Rollout]:
    return lambda _, one: replace(one, logprobs=array("f", [min(0.0, x - by) for x in one.logprobs]))


def one_of_many(rng: random.Random, group: RolloutGroup) -> RolloutGroup:
    """One rollout of the group, the best of others that were sampled besides, stands in for another."""
    place, best = rng.randrange(ROLLOUTS), rng.randrange(ROLLOUTS)
    best = (place + 1) % ROLLOUTS if best == place else best
    chosen = (*group.rollouts[:place], group.rollouts[best], *group.rollouts[place + 1 :])
    return replace(group, rollouts=chosen)


CHEATS: dict[str, tuple[dict[str, Any], dict[str, Any], Edit | None]] = {
    "weights of 8 bits": ({"bits": 8}, {}, None),
    "weights of 4 bits": ({"bits": 4}, {}, None),
    "older weights, noise of 1e-4": ({"noise": 1e-4}, {}, None),
    "older weights, noise of 1e-3": ({"noise": 1e-3}, {}, None),
    "older weights, noise of 1e-2": ({"noise": 1e-2}, {}, None),
    "temperature .95": ({}, {"temperature": 0.95}, None),
    "one random token a rollout": ({}, {}, of_rollouts(random_tokens(0.0))),
    "one random token a group": (
        {},
        {},
        lambda rng, group: replace(group, rollouts=(random_tokens(0.0)(rng, group.rollouts[0]), *group.rollouts[1:])),
    ),
    "half of the tokens random": ({}, {}, of_rollouts(random_tokens(0.5))),
    "logprobs .01 lower": ({}, {}, of_rollouts(shifted(0.01))),
    "logprobs .1 lower": ({}, {}, of_rollouts(shifted(0.1))),
    "one rollout of another seed": ({}, {}, one_of_many),
    "one rollout eight times": ({}, {}, lambda _, group: replace(group, rollouts=(group.rollouts[0],) * ROLLOUTS)),
}


async def cheats(num_groups: int) -> list[dict[str, Any]]:
    """For each, the share of its groups that a check finds, and groups until the first is found."""
    rows = []
    for dtype in ("F32", "BF16"):
        checker = await engine_of("compact", snapshot(dtype))
        for name, (changes, params, edit) in CHEATS.items():
            engine = await engine_of("compact", snapshot(dtype, **changes)) if changes else checker
            rng, told = random.Random(1), PARAMS["plain"]
            asked = [leased(10_000 + at, told) for at in range(num_groups)]
            groups = await sampled(engine, [replace(one, params=replace(told, **params)) for one in asked])
            groups = [edit(rng, group) for group in groups] if edit is not None else groups
            verdicts = await judged(checker, list(zip(asked, groups, strict=True)))
            found = statistics.mean(bool(one.fault) for one in verdicts)
            until = {str(share): waits(found, share) for share in SHARES}
            rows.append({"dtype": dtype, "cheat": name, "found": found, "groups_until": until})
            print(rows[-1], flush=True)
    return rows


def waits(found: float, share: float) -> dict[str, float] | None:
    """Groups that a worker past its newcomer's checks delivers until one is found: over seeds; None: never."""
    if not found:
        return None
    counts = []
    for seed in range(SEEDS):
        rng, number = random.Random(seed), 1
        while not (mix(mix(seed) ^ number) < share * 2.0**64 and rng.random() < found):
            number += 1
        counts.append(number)
    return {"mean": statistics.mean(counts), "max": max(counts)}


# ---- cost ------------------------------------------------------------------------------------------------------------


async def cost(rounds: int = 5) -> dict[str, Any]:
    """Processor seconds of a check for each of sampling the same groups, in turn; 64 rollouts are sampled at once."""
    engine, ratios = await engine_of("compact", snapshot("F32")), []
    for turn in range(rounds + 1):
        asked = [leased(20_000 + 8 * turn + at, PARAMS["plain"]) for at in range(8)]
        began = time.process_time()
        groups = await sampled(engine, asked)
        between = time.process_time()
        await judged(engine, list(zip(asked, groups, strict=True)))
        if turn:  # the first warms up
            ratios.append((time.process_time() - between) / (between - began))
    middle = statistics.median(ratios)
    return {"check_per_sampled_second": middle, "spread": [min(ratios), max(ratios)], "at_5_percent": 0.05 * middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1024, help="honest ones")
    parser.add_argument("--cheats", type=int, default=16, help="groups of each cheat")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"cost": asyncio.run(cost())}
    print(figures["cost"], flush=True)
    figures["honest"] = asyncio.run(honest(options.groups))
    figures["cheats"] = asyncio.run(cheats(options.cheats))
    alarms = sum(row["false_alarms"] for row in figures["honest"])
    total = sum(row["groups"] for row in figures["honest"])
    # None in n: with 95 % probability the rate is below 3 / n.
    figures["false_alarms"] = {"num": alarms, "groups": total, "below": max(alarms, -math.log(0.05)) / total}
    print("saved to", save("hostile_sampling", figures, options.out))


if __name__ == "__main__":
    main()
