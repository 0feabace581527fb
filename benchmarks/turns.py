"""Rollouts of eight turns with an engine that keeps what it has read, and with one that reads everything again.

    python examples/sokoban/build_model.py --out outputs/models/sokoban
    python benchmarks/turns.py [--rounds 5] [--side 1] [--out FILE]

Both sides sample the same batches of examples/sokoban.toml, in turn. A prompt token counts as read again when an
earlier request of the same text has read or written it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import recording
import torch

from echo2.config import load
from echo2.learner.model import load_policy
from echo2.planning.local_sampler import LocalSampler
from echo2.rollout.compact import CompactModel, build_compact
from echo2.rollout.decode_loop import DecodeLoop
from echo2.rollout.engine import Completion, SampleRequest
from echo2.rollout.tokenizer import load_tokenizer
from echo2.rollout.torch_engine import TorchDecoder
from echo2.types import RUN_POLICY, Snapshot, SnapshotRef

ROOT = Path(__file__).resolve().parents[1]
TURNS, SLOTS = 8, 64


class Reading(TorchDecoder):
    """Writes down what it is asked and counts what it reads of prompts."""

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.num_read = keeps, 0
        self.asked: dict[int, SampleRequest] = {}
        self.answered: list[tuple[SampleRequest, Completion]] = []
        super().__init__(self._counting, "cpu")

    def _counting(self, snapshot: Snapshot, device: torch.device) -> CompactModel:
        model = build_compact(snapshot, device)
        prefill = model.prefill

        def counted(prompts: Any, known: Any = ()) -> Any:
            told = [one.longest if one else 0 for one in (known if self.keeps else ()) or [None] * len(prompts)]
            self.num_read += sum(len(prompt) - first for prompt, first in zip(prompts, told, strict=True))
            return prefill(prompts, known if self.keeps else ())

        model.prefill = counted  # type: ignore[method-assign]
        return model

    def step(self, added: Any, dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        self.asked |= added
        ended = super().step(added, dropped)
        self.answered += [(self.asked.pop(number), completion) for number, completion in ended]
        return ended

    def num_needed(self) -> int:
        """Tokens of the prompts that nobody had read or written before. Forgets what it was asked."""
        prompts = {request.prompt_tokens[:-1].tobytes() for request, _ in self.answered}
        texts = {(request.prompt_tokens + done.tokens)[:-1].tobytes() for request, done in self.answered}
        self.answered.clear()
        return sum(len(prompt) - max(map(len, filter(prompt.startswith, texts)), default=0) for prompt in prompts) // 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "outputs/models/sokoban"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=1, help="height of the room")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load(
        ROOT / "examples/sokoban.toml",
        {
            "model.path": options.model,
            "sampling.max_turns": str(TURNS),
            "sampling.max_tokens": "900",
            "tasks.params": f"{{width = 8, height = {options.side}, walls = 0.0, pulls = 5, turn_moves = 3, "
            "instructions = false}",
        },
    )
    sides = {name: Reading(name == "kept") for name in ("kept", "read again")}
    figures = asyncio.run(compare(config, sides, options))
    seconds = {name: [one["seconds"] for one in figures[name]] for name in sides}
    pairs = zip(seconds["kept"], seconds["read again"], strict=True)
    ratios = [kept / again for kept, again in pairs]
    print(f"time of a batch, kept / read again: {statistics.median(ratios):.2f}")
    print(recording.save("turns", {"height": options.side, "batches": figures, "time_ratios": ratios}, options.out))


async def compare(config: Any, sides: dict[str, Reading], options: argparse.Namespace) -> dict[str, list[Any]]:
    """Figures of each batch, by side."""
    policy = load_policy(options.model, "float32", "cpu")
    snapshot = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(torch.float32), policy.files)
    tokenizer = load_tokenizer({name: bytes(data) for name, data in policy.files.items()})
    samplers = {}
    for name, decoder in sides.items():
        engine = DecodeLoop(decoder, SLOTS)
        await engine.update_weights(snapshot)
        samplers[name] = LocalSampler(config, "train", engine, tokenizer)
    found: dict[str, list[Any]] = {name: [] for name in sides}
    size = config.sampling.groups_per_batch
    for number in range(-1, options.rounds):  # the first, in which environments start, is not counted
        for name, decoder in sides.items():
            decoder.num_read, began = 0, time.perf_counter()
            groups = await samplers[name].sample(range(size * (number + 1), size * (number + 2)))
            seconds, num_rollouts = time.perf_counter() - began, sum(len(group.rollouts) for group in groups)
            again = (decoder.num_read - decoder.num_needed()) / num_rollouts
            if number >= 0:
                found[name].append({"seconds": round(seconds, 3), "read_again_per_rollout": round(again, 2)})
                told = (
                    f"{seconds:6.2f} s a batch of {num_rollouts} rollouts; each reads {again:.1f} prompt tokens again"
                )
                print(f"{name:<11} {told}")
    for sampler in samplers.values():
        assert not sampler.failures, sampler.failures[:1]
        await sampler.aclose()
    return found


if __name__ == "__main__":
    main()
