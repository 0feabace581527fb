"""What the check of strangers makes of the engines `llamacpp-*`, or `mlx*`, on a pretrained model: distances of honest
groups, and cheats (of llama.cpp's engines). Their speed: `engine_speed.py`.

    make bench-rounded_weights ARGS='[--model DIR] [--parts honest,cheats] [--groups 64] [--threads 1]'
    make bench-rounded_weights ARGS='--engines mlx,mlx-q8,mlx-q4 --device auto --parts honest'    # on a Mac
    make bench-rounded_weights ARGS='--parts alarms --groups 1000 --cheats 128 --minutes 60 [--dtype bfloat16]'
    make bench-rounded_weights ARGS='--parts pairs --engines compact,transformers,mlx --checkers transformers,mlx'

The part `alarms` counts, by form, honest groups that are found faulty, and groups of each cheat until the head finds
one where 1, 2 or 5 % are checked: as many groups as the minutes allow. `compact` and `mlx` may be among its engines.
The part `pairs` has the same honest groups of each engine checked by each of `--checkers`.

Needs `pip install 'echo2[llamacpp]'`, or `'echo2[mlx]'`. A group is 8 rollouts of 48 tokens, or fewer. Groups are
checked by `compact`, which rounds the same snapshot, if not by others (`pairs`). `--model`: a directory with
model.safetensors and tokenizer.json. With `--device auto`, an engine may use a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from recording import quantile, save, there
from safetensors import safe_open
from tokenizers import Tokenizer

from echo2.config.values import FORMS, LLAMACPP_FORMS
from echo2.core.decide.seeds import mix
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    StoredTensor,
)
from echo2.engines.registry import make_engine
from echo2.head.strangers.decide.trust import SURPRISE_MAX, Trust
from echo2.rollouts.generate import sample_group
from echo2.rollouts.verification import Verdict, check_group

ROLLOUTS, TOKENS = 8, 48
ANIMALS = ("a cat", "an old dog", "the moon", "two ships", "my neighbour", "rain", "a small town", "the last train")
ASKED = (
    "Write a story about",
    "Give the facts about",
    "Write a poem on",
    "Why do people speak of",
    "List five things about",
)
#: Groups of `alarms` that are sampled together; shares of a worker's groups that the head has checked.
TOGETHER, SHARES = 8, (0.01, 0.02, 0.05)
HONEST = "honest"
FAULTS_TOLD = 8
FIELDS = ("worst_interval", "typical_interval", "worst_logprob", "mean_logprob", "surprise")


def snapshot(model: Path, version: int = 1, dtype: str = "") -> Snapshot:
    """A model directory, whose tensors are read from the file as on a worker. `dtype`: another one than the file's."""
    kind = getattr(torch, dtype) if dtype else None
    with safe_open(model / "model.safetensors", "pt") as file:
        tensors = {name: _stored(file.get_tensor(name).to(kind)) for name in file.keys()}  # noqa: SIM118
    files = {one.name: one.read_bytes() for one in model.iterdir() if one.suffix == ".json"}
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, files)


def _stored(tensor: torch.Tensor) -> StoredTensor:
    data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
    return StoredTensor(dtype, tuple(tensor.shape), data.nbytes, lambda start, stop: data[start:stop].tobytes())


def prompts(model: Path) -> list[array[int]]:
    if not (model / "tokenizer.json").is_file():  # the demo's: numbers are as good as texts
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        rng = random.Random(1)
        return [array("i", [rng.randrange(2, vocab_size) for _ in range(16)]) for _ in range(40)]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    said = [f"<|im_start|>user\n{ask} {what}.<|im_end|>\n<|im_start|>assistant\n" for ask in ASKED for what in ANIMALS]
    return [array("i", tokenizer.encode(text).ids) for text in said]


def leased(prompt: array[int], number: int, max_tokens: int = TOKENS, **params: Any) -> Assignment:
    lease = Lease(1, GroupRef(RUN_POLICY, "train", number), 0, number, ROLLOUTS, 0, None, 60.0, 60.0, mix(number) >> 1)
    return Assignment(lease, prompt, SamplingParams(max_tokens=max_tokens, **params))


async def groups_of(name: str, held: Snapshot, asked: Sequence[Assignment], device: str = "cpu") -> list[RolloutGroup]:
    engine = make_engine(name, device, 32)
    await engine.update_weights(held)
    found = await asyncio.gather(*(sample_group(engine, None, one, "worker") for one in asked))  # type: ignore[arg-type]
    await engine.close()
    return [group for group in found if isinstance(group, RolloutGroup)]


async def judged(checker: Any, asked: Sequence[Assignment], groups: Sequence[RolloutGroup], form: str) -> list[Verdict]:
    return [await check_group(checker, checker.installed, *pair, form=form) for pair in zip(asked, groups, strict=True)]


# ---- checks ----------------------------------------------------------------------------------------------------------


async def honest(model: Path, num_groups: int, forms: Mapping[str, str], device: str) -> list[dict[str, Any]]:
    """Of groups sampled with each form: distances to the form (as the check sees them), to another form, and to the
    published weights (as the learner sees them)."""
    held, texts, rows = snapshot(model), prompts(model), list[dict[str, Any]]()
    checker: Any = make_engine("compact", "cpu", 32)
    await checker.update_weights(held)
    for name, form in forms.items():
        asked = [leased(texts[at % len(texts)], 1000 + at) for at in range(num_groups)]
        groups = await groups_of(name, held, asked, device)
        for read_as in dict.fromkeys((form, *forms.values(), "")):
            verdicts = await judged(checker, asked, groups, read_as)
            rows.append({"sampled": name, "read_as": read_as or "published", **spread(verdicts)})
            print(rows[-1], flush=True)
    return rows


def spread(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "groups": len(verdicts),
        "tokens": sum(one.num_tokens for one in verdicts),
        "faulty": sum(bool(one.fault) for one in verdicts),
    }
    for field in FIELDS:
        values = [abs(getattr(one, field)) for one in verdicts]
        found[field] = {"median": quantile(values, 0.5), "max": max(values), "mean": statistics.mean(values)}
    return found


async def cheats(model: Path, num_groups: int) -> list[dict[str, Any]]:
    """What share of the groups of a cheat the check finds. Each says that it rounds to 8 bits, but the last."""
    held, texts, rows = snapshot(model), prompts(model), list[dict[str, Any]]()
    checker: Any = make_engine("compact", "cpu", 32)
    await checker.update_weights(held)
    tries: Mapping[str, tuple[str, dict[str, Any], str, int]] = {
        "published weights, says q8_0": ("compact", {}, "q8_0", 0),
        "rounds to 4 bits, says q8_0": ("llamacpp-q4_0", {}, "q8_0", 0),
        "rounds to 8 bits, says q4_0": ("llamacpp-q8_0", {}, "q4_0", 0),
        "temperature .9": ("llamacpp-q8_0", {"temperature": 0.9}, "q8_0", 0),
        "temperature .8": ("llamacpp-q8_0", {"temperature": 0.8}, "q8_0", 0),
        "top-p .9": ("llamacpp-q8_0", {"top_p": 0.9}, "q8_0", 0),
        "one rollout of another seed": ("llamacpp-q8_0", {}, "q8_0", 1),
        "one rollout of another seed, says q4_0": ("llamacpp-q4_0", {}, "q4_0", 1),
    }
    for what, (name, params, form, others) in tries.items():
        asked = [leased(texts[at % len(texts)], 5000 + at) for at in range(num_groups)]
        groups = await groups_of(name, held, [replace(one, params=replace(one.params, **params)) for one in asked])
        if others:
            strange = [replace(one, lease=replace(one.lease, seed=one.lease.seed ^ 12345)) for one in asked]
            swapped = await groups_of(name, held, strange)
            pairs = zip(groups, swapped, strict=True)
            groups = [replace(one, rollouts=(other.rollouts[0], *one.rollouts[1:])) for one, other in pairs]
        groups = [_hidden(one) for one in groups]
        verdicts = await judged(checker, asked, groups, form)
        rows.append({"cheat": what, **spread(verdicts)})
        print(rows[-1], flush=True)
    return rows


async def alarms(model: Path, options: argparse.Namespace, forms: Mapping[str, str]) -> list[dict[str, Any]]:
    """Of honest groups of each form, and of cheats in its name, how many the check finds. Each form gets groups in
    turn, until it has `groups` honest ones or the minutes are over; `cheats` of each cheat."""
    held, texts = snapshot(model, dtype=options.dtype), prompts(model)
    checker: Any = make_engine("compact", "cpu", 32)
    await checker.update_weights(held)
    counts: dict[tuple[str, str], Found] = {}
    ends, number = time.monotonic() + 60 * options.minutes, 100_000
    while time.monotonic() < ends and any(
        counts.get((name, HONEST), Found()).groups < options.groups for name in forms
    ):
        for name, form in forms.items():
            if counts.get((name, HONEST), Found()).groups >= options.groups:
                continue
            numbers = range(number, number + options.together)
            asked = [leased(texts[at % len(texts)], at, options.tokens) for at in numbers]
            groups_by_kind: dict[str, Sequence[RolloutGroup]] = {}
            groups_by_kind[HONEST] = await groups_of(name, held, asked, options.device)
            if counts.get((name, HONEST), Found()).groups < options.cheats:
                groups_by_kind |= await lies(name, held, asked, groups_by_kind[HONEST], options.device)
            for what, groups in groups_by_kind.items():
                of = counts.setdefault((name, what), Found())
                for verdict in await judged(checker, asked, groups, form):
                    of.add(verdict)
            number += options.together
            print({", ".join(key): (of.groups, of.alone, of.together) for key, of in counts.items()}, flush=True)
    return [{"engine": name, "says": forms[name], "what": what, **of.row()} for (name, what), of in counts.items()]


async def pairs(model: Path, options: argparse.Namespace, forms: Mapping[str, str]) -> list[dict[str, Any]]:
    """How far honest groups of each engine are from what each checker reads. `compact` alone reads rounded weights."""
    held, texts, rows = snapshot(model, dtype=options.dtype), prompts(model), list[dict[str, Any]]()
    checkers: dict[str, Any] = {name: make_engine(name, "cpu", 32) for name in options.checkers.split(",")}
    for checker in checkers.values():
        await checker.update_weights(held)
    for name, form in forms.items():
        found = {by: Found() for by in checkers if not form or by == "compact"}
        for number in range(200_000, 200_000 + options.groups, options.together):
            numbers = range(number, number + options.together)
            asked = [leased(texts[at % len(texts)], at, options.tokens) for at in numbers]
            groups = await groups_of(name, held, asked, options.device)
            for by, of in found.items():
                for verdict in await judged(checkers[by], asked, groups, form):
                    of.add(verdict)
        rows += [{"engine": name, "says": form, "checker": by, **of.row()} for by, of in found.items()]
        print(*rows[-len(found) :], sep="\n", flush=True)
    return rows


class Found:
    """What the checks of one ticket come to: each group alone, or, as the head judges it, together with the groups that
    were checked before (`Trust.with_tokens`)."""

    def __init__(self) -> None:
        self.groups, self.alone, self.together, self.tokens, self.worst, self.trust = 0, 0, 0, 0, 0.0, Trust()
        self.most, self.faults = dict.fromkeys(FIELDS, 0.0), list[str]()

    def add(self, verdict: Verdict) -> None:
        trust = self.trust.with_tokens(verdict.num_tokens, verdict.surprise, verdict.variance)
        is_found = bool(verdict.fault) or abs(trust.deviations) > SURPRISE_MAX
        self.worst = max(self.worst, abs(trust.deviations))
        self.most = {name: max(value, abs(getattr(verdict, name))) for name, value in self.most.items()}
        self.trust = Trust() if is_found else trust
        if verdict.fault and len(self.faults) < FAULTS_TOLD:
            self.faults.append(verdict.fault)
        self.groups, self.tokens = self.groups + 1, self.tokens + verdict.num_tokens
        self.alone, self.together = self.alone + bool(verdict.fault), self.together + is_found

    def row(self) -> dict[str, Any]:
        """Groups found faulty, alone and as the head judges them; of none the share that would show none in 1 of 20
        tries (3 / n), else the mean number of groups until the head finds one, by the share that is checked."""
        found: dict[str, Any] = {
            "groups": self.groups,
            "tokens": self.tokens,
            "found_alone": self.alone,
            "found": self.together,
        }
        found |= {"most_deviations": self.worst, "most": self.most, "faults": self.faults}
        if not self.together:
            return {**found, "share_at_most": min(1.0, 3 / max(1, self.groups))}
        return {**found, "groups_until": {str(share): self.groups / (share * self.together) for share in SHARES}}


async def lies(
    name: str, held: Snapshot, asked: Sequence[Assignment], honest: Sequence[RolloutGroup], device: str
) -> dict[str, Sequence[RolloutGroup]]:
    """Groups of cheats that say that they are of this engine. `honest`: what it samples."""
    coarser = {"llamacpp-q8_0": "llamacpp-q4_0", "mlx-q8": "mlx-q4", "compact": "llamacpp-q8_0", "mlx": "mlx-q8"}
    other = coarser.get(name, "compact")
    changed: dict[str, dict[str, Any]] = {"temperature .9": {"temperature": 0.9}, "top-p .9": {"top_p": 0.9}}
    found: dict[str, Sequence[RolloutGroup]] = {f"weights of {other}": await groups_of(other, held, asked, device)}
    for what, params in changed.items():
        said = [replace(one, params=replace(one.params, **params)) for one in asked]
        found[what] = await groups_of(name, held, said, device)
    strange = [replace(one, lease=replace(one.lease, seed=one.lease.seed ^ 12345)) for one in asked]
    again = await groups_of(name, held, strange, device)
    found["one rollout of another seed"] = [
        replace(one, rollouts=(other.rollouts[0], *one.rollouts[1:])) for one, other in zip(honest, again, strict=True)
    ]
    found["the likelier of two"] = [
        replace(one, rollouts=tuple(map(_likelier, one.rollouts, other.rollouts)))
        for one, other in zip(honest, again, strict=True)
    ]
    return {what: [_hidden(group) for group in groups] for what, groups in found.items()}


def _likelier(one: Any, other: Any) -> Any:
    """Best of two, where a liar takes a rollout's probability for its reward."""
    return max(one, other, key=lambda each: sum(each.logprobs))


def _hidden(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=tuple(_plain(each) for each in group.rollouts))


def _plain(rollout: Any) -> Any:
    """A rollout that hides what top-p left."""
    return replace(rollout, support_tokens=None, support_offsets=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=there, default=Path("outputs/models/smollm2"))
    parser.add_argument("--parts", default="honest,cheats")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--cheats", type=int, default=64, help="groups of each cheat (alarms)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a rollout, at most (alarms, pairs)")
    parser.add_argument(
        "--together", type=int, default=TOGETHER, help="groups that are sampled together (alarms, pairs)"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--dtype", default="", choices=("", "float32", "bfloat16"), help="of the snapshot (alarms, pairs)"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", default=",".join(LLAMACPP_FORMS))
    parser.add_argument("--checkers", default="compact", help="engines (pairs)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {"model": options.model.name, "threads": options.threads, "device": options.device}
    figures |= {"tokens_at_most": options.tokens, "snapshot_dtype": options.dtype or "the file's"}
    forms = {name: FORMS.get(name, "") for name in options.engines.split(",")}
    if "honest" in options.parts:
        figures["honest"] = asyncio.run(honest(options.model, options.groups, forms, options.device))
    if "cheats" in options.parts:
        figures["cheats"] = asyncio.run(cheats(options.model, max(1, options.groups // 4)))
    if "alarms" in options.parts:
        figures["alarms"] = asyncio.run(alarms(options.model, options, forms))
        print(json.dumps(figures["alarms"], indent=1), flush=True)
    if "pairs" in options.parts:
        figures["pairs"] = asyncio.run(pairs(options.model, options, forms))
    print("saved to", save("rounded_weights", figures, options.out))


if __name__ == "__main__":
    main()
