"""False alarms and detection of the checks of strangers with a real model: honest groups whose weights really change on
the way, a training step apart, and cheats that claim such changes.

    make bench-hostile_real ARGS='CHECKPOINT CHECKPOINT ... --rows rows.jsonl [--groups 1000] [--out FILE]'

The checkpoints are those of successive steps of one run. Of each pair in turn, eight groups of eight rollouts begin
with the older weights; the newer ones are installed between two tokens, at a random one, while the engine samples.
Another engine, which installed both, checks every group. `rows.jsonl`: a column `prompt` of chat messages.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hostile_sampling import HIDDEN, checker_of, moved_numbers, sampled, spread, swapping, with_true_logprobs
from recording import save, there
from transformers import AutoTokenizer

from echo2.core.decide.seeds import mix
from echo2.core.types import RUN_POLICY, Assignment, GroupRef, Lease, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.head.strangers.decide.trust import SURPRISE_MAX
from echo2.rollouts.verification import Verdict, check_group
from echo2.weights.format.model_files import read_base_model

GROUPS_AT_ONCE, ROLLOUTS, MAX_TOKENS = 8, 8, 32
KINDS = {"F32": torch.float32, "BF16": torch.bfloat16}
CLAIMS = {"no swap": ((0, 0),), "a swap at token 1": ((0, 0), (1, 1))}
#: A matrix whose change between two versions is told.
TOLD = "model.layers.0.mlp.up_proj.weight"


def snapshot(directory: Path, version: int, dtype: str) -> Snapshot:
    """The model of this directory, in this dtype."""
    read = read_base_model(directory)
    tensors = {}
    for name, tensor in read.tensors.items():
        values = torch.frombuffer(bytearray(tensor.read(0, tensor.num_bytes)), dtype=KINDS[tensor.dtype])
        tensors[name] = TensorBytes(dtype, tensor.shape, values.to(KINDS[dtype]).view(torch.uint8).numpy().tobytes())
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, read.files)


def prompts(directory: Path, rows: Path) -> list[array[int]]:
    """The tokens of every row's messages."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    told = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    return [
        array("i", tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) for one in told
    ]


def leased(number: int, prompt: array[int], temperature: float = 1.0) -> Assignment:
    group = GroupRef(RUN_POLICY, "train", number)
    lease = Lease(1, group, 0, number, ROLLOUTS, 0, None, 60.0, 60.0, mix(number) >> 1)
    return Assignment(lease, prompt, SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS))


async def honest(
    pairs: Sequence[tuple[Snapshot, Snapshot]], told: Sequence[array[int]], num_groups: int
) -> dict[str, Any]:
    """The spread of what checks find in honest groups, how many rollouts had a swap inside, and what checks cost."""
    rng, verdicts, number, num_swapped = random.Random(0), list[Verdict](), 0, 0
    prices = list[float]()
    for old, new in pairs:
        reader = await checker_of("compact", old, new)
        for _ in range(num_groups // (GROUPS_AT_ONCE * len(pairs))):
            asked = [leased(number + at, rng.choice(told)) for at in range(GROUPS_AT_ONCE)]
            number += GROUPS_AT_ONCE
            engine = swapping("compact", old, {rng.randrange(2, MAX_TOKENS - 4): new}, rng.choice((64, 40)))
            began = time.process_time()
            groups = await sampled(engine, asked)
            between = time.process_time()
            await engine.close()
            checked = time.process_time()
            verdicts += [await check_group(reader, old.ref, *pair) for pair in zip(asked, groups, strict=True)]
            prices.append((time.process_time() - checked) / (between - began))
            num_swapped += sum(len(one.version_spans) > 1 for group in groups for one in group.rollouts)
        print(f"{len(verdicts)} groups, {sum(bool(one.fault) for one in verdicts)} false alarms", flush=True)
    num_skipped, typical = sum(one.num_skipped for one in verdicts), max(one.typical_interval for one in verdicts)
    together = sum(one.surprise for one in verdicts) / math.sqrt(len(verdicts))
    found = {"swapped_rollouts": num_swapped, "skipped": num_skipped, "typical_max": typical}
    price = {"check_per_sampled_second": [min(prices), statistics.median(prices), max(prices)]}
    return {**spread(verdicts), **found, **price, "surprise_of_all": together}


async def cheats(old: Snapshot, new: Snapshot, told: Sequence[array[int]], num_groups: int) -> list[dict[str, Any]]:
    """The share of groups that a check finds, by cheat and by claim, and how many checked groups show it together."""
    rng, rows = random.Random(1), list[dict[str, Any]]()
    reader = await checker_of("compact", old, new)
    asked = [leased(90_000 + at, rng.choice(told)) for at in range(num_groups)]
    for name, (change, by) in HIDDEN.items():
        with moved_numbers(by, 0):
            groups = await sampled(swapping("compact", old, {}, hidden=change), asked)
        for claim, spans in CLAIMS.items():
            verdicts = list[Verdict]()
            for assignment, group in zip(asked, groups, strict=True):
                said = [
                    replace(one, version_spans=spans[: len(one.tokens)], support_tokens=None, support_offsets=None)
                    for one in group.rollouts
                ]
                true = await with_true_logprobs(reader, assignment, replace(group, rollouts=tuple(said)))
                verdicts.append(await check_group(reader, old.ref, assignment, true))
            found = sum(bool(one.fault) for one in verdicts) / num_groups
            off = abs(sum(one.surprise for one in verdicts)) / num_groups
            groups_needed = math.ceil((SURPRISE_MAX / off) ** 2) if off else None
            rows.append({"cheat": name, "claim": claim, "found": found, "found_together_after": groups_needed})
            print(rows[-1], flush=True)
    return rows


async def run(options: argparse.Namespace) -> dict[str, Any]:
    told, found = prompts(options.checkpoints[0], options.rows), dict[str, Any]()
    for dtype in options.dtypes:
        held = [snapshot(directory, version, dtype) for version, directory in enumerate(options.checkpoints)]
        bits = [np.frombuffer(one.tensors[TOLD].read(0, one.tensors[TOLD].num_bytes), np.uint16) for one in held]
        changed = [float(np.mean(old != new)) for old, new in itertools.pairwise(bits)]
        found[dtype] = {"honest": await honest(list(itertools.pairwise(held)), told, options.groups)}
        found[dtype]["changed"] = changed
        if options.cheats:
            found[dtype]["cheats"] = await cheats(held[0], held[1], told, options.cheats)
        print(dtype, found[dtype]["honest"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=there, nargs="+")
    parser.add_argument("--rows", type=there, required=True)
    parser.add_argument("--groups", type=int, default=1000, help="honest groups, of each dtype")
    parser.add_argument("--cheats", type=int, default=16, help="groups of each cheat")
    parser.add_argument("--dtypes", nargs="+", default=["BF16", "F32"])
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    with torch.inference_mode():
        figures = asyncio.run(run(options))
    print(f"saved in {save('hostile_real', figures, options.out)}")


if __name__ == "__main__":
    main()
