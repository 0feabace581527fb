"""What the check of strangers' rollouts finds: false alarms over honest groups of mixed engines, dtypes, batches and
threads, with and without swaps of weights; groups until a cheat is caught, also one that claims swaps; and what a check
costs.

    make bench-hostile_sampling ARGS='[--groups 1024] [--cheats 16] [--parts NAME ...] [--out FILE]'

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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from recording import quantile, save
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.core.decide.seeds import mix
from echo2.core.types import (
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
from echo2.engines import sampler
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, Engine, Prefill, PrefillRequest, SampleRequest
from echo2.engines.hf_engine import build_transformers
from echo2.engines.registry import make_engine
from echo2.engines.torch_engine import BuildModel, Model, TorchDecoder
from echo2.head.strangers.copies import CopiedRollouts
from echo2.rollouts.generate import sample_group
from echo2.rollouts.verification import Verdict, check_group, readings_of

VOCAB, ROLLOUTS, TOKENS, SEEDS, THREADS = 4096, 8, 32, 10, (1, 2)
SHARES, DTYPES = (0.01, 0.02, 0.05), ("F32", "BF16")
#: Noise of weights that take the place of others on the way, relative to their size.
APART = {"a step": 1e-3, "far": 0.3}
PAIRS = [("compact", "compact"), ("compact", "transformers"), ("transformers", "compact")]
PARAMS = {
    "plain": SamplingParams(max_tokens=TOKENS),
    "temperature .7": SamplingParams(temperature=0.7, max_tokens=TOKENS),
    "top-k 20": SamplingParams(top_k=20, max_tokens=TOKENS),
    "top-p .9": SamplingParams(top_p=0.9, max_tokens=TOKENS),
}
Edit = Callable[[random.Random, RolloutGroup], RolloutGroup]
Change = Callable[[torch.Tensor], torch.Tensor]


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
    rng, group = random.Random(number), GroupRef(RUN_POLICY, "train", number)
    prompt = array("i", [rng.randrange(2, VOCAB) for _ in range(rng.randrange(4, 24))])
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
    for dtype in DTYPES:
        held = snapshot(dtype)
        engines = {name: await engine_of(name, held) for name in ("compact", "transformers")}
        few = await engine_of("compact", held, slots=3)
        for source, checker, slots in [*((*pair, 64) for pair in PAIRS), ("compact", "compact", 3)]:
            verdicts: list[Verdict] = []
            for params, threads in itertools.product(PARAMS.values(), THREADS):
                share = max(1, num_groups // (2 * 4 * len(PARAMS) * len(THREADS)))
                asked = [leased(number + at, params) for at in range(share)]
                number += share
                torch.set_num_threads(threads)
                groups = await sampled(few if slots == 3 else engines[source], asked)
                torch.set_num_threads(1)
                verdicts += await judged(engines[checker], list(zip(asked, groups, strict=True)))
                for group in groups:
                    copies.check(group, "honest")
            rows.append({"dtype": dtype, "sampler": source, "checker": checker, "slots": slots, **spread(verdicts)})
            print(rows[-1], flush=True)
    return rows


def spread(verdicts: list[Verdict]) -> dict[str, Any]:
    """Of groups: how many, how many are faulty, and the largest of what the tolerances bound."""
    fields = ("worst_interval", "typical_interval", "worst_support", "typical_support", "worst_logprob", "mean_logprob")
    false_alarms, tokens = sum(bool(one.fault) for one in verdicts), sum(one.num_tokens for one in verdicts)
    found: dict[str, Any] = {"groups": len(verdicts), "false_alarms": false_alarms, "tokens": tokens}
    for name in fields:
        values = [getattr(one, name) for one in verdicts]
        found[name] = {"median": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values)}
    found["surprise_max"] = max(abs(one.surprise) for one in verdicts)
    return found


async def honest_swaps(num_groups: int) -> list[dict[str, Any]]:
    """As `honest`, over groups whose weights are swapped on the way for others, a training step or far apart. Half of
    the batches have few slots, so that rows join later."""
    rows, number = [], 500_000
    for dtype, (name, noise), (source, checker) in itertools.product(DTYPES, APART.items(), PAIRS):
        old, new = snapshot(dtype), replace(snapshot(dtype, noise=noise), ref=SnapshotRef(RUN_POLICY, 1, 1))
        reader, verdicts = await checker_of(checker, old, new), list[Verdict]()
        for batch in range(max(1, num_groups // (8 * len(DTYPES) * len(APART) * len(PAIRS)))):
            asked = [leased(number + at, (PARAMS["plain"], PARAMS["temperature .7"])[at % 2]) for at in range(8)]
            number += 8
            engine = swapping(source, old, {random.Random(number).randrange(2, TOKENS): new}, (64, 24)[batch % 2])
            groups = await sampled(engine, asked)
            verdicts += [await check_group(reader, old.ref, *pair) for pair in zip(asked, groups, strict=True)]
        rows.append({"dtype": dtype, "apart": name, "sampler": source, "checker": checker, **spread(verdicts)})
        print(rows[-1], flush=True)
    return rows


class Swapping(TorchDecoder):
    """Gets new weights before some of its steps. `hidden` changes the logits of all steps but the first."""

    def __init__(self, name: str, swaps: Mapping[int, Snapshot], hidden: Change | None = None) -> None:
        builds: dict[str, BuildModel] = {"compact": build_compact, "transformers": build_transformers}
        super().__init__(builds[name], "cpu")
        self._swaps, self._hidden, self._num_steps = swaps, hidden, 0

    def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        self._num_steps += 1
        if (newer := self._swaps.get(self._num_steps)) is not None:
            self.load(newer)
        return super().step(added, dropped)

    def _rows_model(self, model: Model) -> Any:
        if (hidden := self._hidden) is None or self._num_steps == 1:
            return model
        return SimpleNamespace(step=lambda cache, tokens_B: hidden(model.step(cache, tokens_B)))


def swapping(
    name: str, old: Snapshot, swaps: Mapping[int, Snapshot], slots: int = 64, hidden: Change | None = None
) -> DecodeLoop:
    decoder = Swapping(name, swaps, hidden)
    decoder.load(old)
    return DecodeLoop(decoder, slots)


async def checker_of(name: str, old: Snapshot, new: Snapshot) -> Any:
    """An engine that holds both."""
    engine = await engine_of(name, old)
    await engine.prefill(old.ref, [])  # from now on it keeps the weights before
    await engine.update_weights(new)
    return engine


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
    for dtype in DTYPES:
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


# ---- cheats that claim swaps ----------------------------------------------------------------------------------------


def nucleus(logits_BV: torch.Tensor) -> torch.Tensor:
    """Top-p .9, in the order of the vocabulary, as the head's numbers are used without it."""
    sorted_BV, order_BV = logits_BV.softmax(-1).sort(descending=True)
    is_cut_BV = sorted_BV.cumsum(-1) - sorted_BV >= 0.9
    return logits_BV.masked_fill(is_cut_BV.scatter(1, order_BV, is_cut_BV), float("-inf"))


#: What the worker hides, from each rollout's second token on: a change of the logits, and by how much it moves the
#: random numbers to choose the best of four rollouts.
HIDDEN: dict[str, tuple[Change | None, float]] = {
    "temperature .95": (lambda logits_BV: logits_BV / 0.95, 0.0),
    "temperature .9": (lambda logits_BV: logits_BV / 0.9, 0.0),
    "top-p .9": (nucleus, 0.0),
    "best of 4, numbers moved by .15": (None, 0.15),
    "best of 4, numbers moved by .03": (None, 0.03),
}
CLAIMS: dict[str, Callable[[Rollout], tuple[tuple[int, int], ...]]] = {
    "none": lambda _: ((0, 0),),
    "a span at every token, all of one version": lambda one: tuple((at, 0) for at in range(len(one.tokens))),
    "a swap at token 1": lambda one: one.version_spans,  # it really swaps there
}
POSITIONS = range(2, TOKENS, 4)


async def claimed_swaps(num_groups: int) -> list[dict[str, Any]]:
    """The share of groups that a check finds, by cheat and claim. All report the logprobs that an honest worker would.
    The weights claimed to come next are a training step apart; `gain`: by how many standard deviations of the reward
    (the share of even tokens) the chosen rollouts are better than honest ones."""
    rows, told = [], PARAMS["plain"]
    for dtype in DTYPES:
        old, new = snapshot(dtype), replace(snapshot(dtype, noise=APART["a step"]), ref=SnapshotRef(RUN_POLICY, 1, 1))
        reader = await checker_of("compact", old, new)
        asked = [leased(40_000 + at, told) for at in range(num_groups)]
        fair = await sampled(swapping("compact", old, {}), asked)
        for (name, (hidden, by)), (claim, spans) in itertools.product(HIDDEN.items(), CLAIMS.items()):
            swaps, tries = {2: new} if claim == "a swap at token 1" else {}, list[list[RolloutGroup]]()
            for seed in range(4 if by else 1):
                with moved_numbers(by, seed):
                    tries.append(await sampled(swapping("compact", old, swaps, 8 * num_groups, hidden), asked))
            groups = [best(list(one), spans) for one in zip(*tries, strict=True)]
            rows.append({"dtype": dtype, "cheat": name, "claim": claim, **await outcome(reader, asked, groups, fair)})
            print(rows[-1], flush=True)
        for apart, noise in APART.items():  # honest rollouts; but the worker chooses where to swap
            newer = replace(snapshot(dtype, noise=noise), ref=new.ref)
            reader = await checker_of("compact", old, newer)
            engines = [swapping("compact", old, {step: newer}, 8 * num_groups) for step in POSITIONS]
            tries = [await sampled(engine, asked) for engine in engines]
            groups = [best(list(one), lambda rollout: rollout.version_spans) for one in zip(*tries, strict=True)]
            cheat = f"best of {len(POSITIONS)} places to swap, {apart} apart"
            rows.append({"dtype": dtype, "cheat": cheat, "claim": "true", **await outcome(reader, asked, groups, fair)})
            print(rows[-1], flush=True)
    return rows


@contextmanager
def moved_numbers(by: float, seed: int) -> Iterator[None]:
    """The sampler's random numbers are up to this far from the head's, but for each rollout's first."""
    rng, true = np.random.default_rng(seed), vars(sampler)["uniforms"]

    def moved(keys_B: Any, token_B: Any) -> Any:
        off = rng.uniform(-by, by, len(keys_B)) * (token_B > 0)
        return np.clip(true(keys_B, token_B) + off, 0.0, 1.0 - 2.0**-53)

    vars(sampler)["uniforms"] = moved if by else true
    yield
    vars(sampler)["uniforms"] = true


def reward(rollout: Rollout) -> float:
    return statistics.mean(token % 2 == 0 for token in rollout.tokens)


def best(tries: Sequence[RolloutGroup], spans: Callable[[Rollout], tuple[tuple[int, int], ...]]) -> RolloutGroup:
    """The best try of each rollout, with the spans that are claimed."""
    chosen = [max(of_sample, key=reward) for of_sample in zip(*(one.rollouts for one in tries), strict=True)]
    return replace(tries[0], rollouts=tuple(replace(one, version_spans=spans(one)) for one in chosen))


async def outcome(
    reader: Any, asked: Sequence[Assignment], groups: Sequence[RolloutGroup], fair: Sequence[RolloutGroup]
) -> dict[str, Any]:
    verdicts = []
    for assignment, group in zip(asked, groups, strict=True):
        true = await with_true_logprobs(reader, assignment, group)
        verdicts.append(await check_group(reader, SnapshotRef(RUN_POLICY, 1, 0), assignment, true))
    rewards = [[reward(one) for group in part for one in group.rollouts] for part in (groups, fair)]
    gain = (statistics.mean(rewards[0]) - statistics.mean(rewards[1])) / statistics.stdev(rewards[1])
    return {"found": statistics.mean(bool(one.fault) for one in verdicts), "gain": gain}


async def with_true_logprobs(reader: Any, assignment: Assignment, group: RolloutGroup) -> RolloutGroup:
    """As a worker computes them who knows the weights."""
    versions = {one.version for one in reader.held_refs}
    read = [list(readings_of(assignment, one, versions)) for one in group.rollouts]
    found = await reader.prefill(SnapshotRef(RUN_POLICY, 1, 0), [reading.request for (reading,) in read])
    logprobs = [array("f", one.logprobs.clip(max=0.0).tolist()) for one in found]
    rollouts = [replace(one, logprobs=own) for one, own in zip(group.rollouts, logprobs, strict=True)]
    return replace(group, rollouts=tuple(rollouts))


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


class Counted:
    """A `PrefillEngine` that counts the tokens which the engine behind it reads."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.num_read = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        self.num_read += sum(len(one.prompt_tokens) + len(one.tokens) for one in requests)
        found: list[Prefill] = await self._engine.prefill(ref, requests)
        return found


async def cost_of_claims() -> list[dict[str, Any]]:
    """Tokens that a check reads for each sampled token, by how many spans a rollout claims."""
    old, new = snapshot("F32"), replace(snapshot("F32", noise=1e-3), ref=SnapshotRef(RUN_POLICY, 1, 1))
    engine, rows = await checker_of("compact", old, new), []
    asked = [leased(50_000 + at, PARAMS["plain"]) for at in range(8)]
    groups = await sampled(swapping("compact", old, {}), asked)
    for num, versions in itertools.product((1, 2, 8, 32), ("one version", "versions of their own")):
        counted, tokens = Counted(engine), 0
        for assignment, group in zip(asked, groups, strict=True):
            rollouts = []
            for one in group.rollouts:
                starts = [at * len(one.tokens) // num for at in range(num) if len(one.tokens) >= num] or [0]
                spans = tuple((start, at if versions != "one version" else 0) for at, start in enumerate(starts))
                rollouts.append(replace(one, version_spans=spans))
            await check_group(counted, old.ref, assignment, replace(group, rollouts=tuple(rollouts)))
            tokens += group.num_tokens
        rows.append({"spans": num, "of": versions, "read_per_sampled_token": counted.num_read / tokens})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1024, help="honest ones")
    parser.add_argument("--cheats", type=int, default=16, help="groups of each cheat")
    parser.add_argument("--parts", nargs="*", help="names in the result, such as honest; all by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "cost": cost,
        "cost_of_claims": cost_of_claims,
        "honest": lambda: honest(options.groups),
        "honest_swaps": lambda: honest_swaps(options.groups),
        "cheats": lambda: cheats(options.cheats),
        "claimed_swaps": lambda: claimed_swaps(options.cheats),
    }
    figures: dict[str, Any] = {name: asyncio.run(parts[name]()) for name in options.parts or parts}
    honest_rows = [row for name in ("honest", "honest_swaps") for row in figures.get(name, ())]
    alarms = sum(row["false_alarms"] for row in honest_rows)
    total = sum(row["groups"] for row in honest_rows)
    # None in n: with 95 % probability the rate is below 3 / n.
    figures["false_alarms"] = {"num": alarms, "groups": total, "below": max(alarms, -math.log(0.05)) / max(1, total)}
    print("saved to", save("hostile_sampling", figures, options.out))


if __name__ == "__main__":
    main()
