"""What a stranger's group makes the head compute, in seconds for each byte that was delivered: texts that hang the
confined `math` reward, tokens that are slow to decode or to search for stop strings, turns in an environment.

    make bench-hostile_texts
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from echo2.core.types import RUN_POLICY, GroupRef, Lease, Rollout, RolloutGroup, Task
from echo2.head.serve.reading import RunTokenizer
from echo2.head.strangers.replay import EnvironmentReplay, TurnRules
from echo2.reward.sandbox import Sandbox

TOKEN_BYTES = 9  # of a token, its logprob and its mask
SIZE, LENGTH = 8, 4096  # rollouts of a group, tokens of each
TEXTS = {
    "usual": "so it is $\\boxed{42}$",
    "hangs": "$\\boxed{9^{9^{9}}}$",
    "slow": "$\\boxed{100000!}$",
}
ENVIRONMENT = """
class Silent:
    stop, turn_tokens = "=", 1
    def __init__(self, columns, seed): pass
    def step(self, action): return "", 0.0, False
"""


def byte_tokenizer_files() -> dict[str, bytes]:
    """A tokenizer of bytes and their merges in this file and the standard library's largest."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    modules = sorted(Path(asyncio.__file__).parent.parent.glob("*.py"), key=lambda path: path.stat().st_size)
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train([str(path) for path in (Path(__file__), *modules[-20:])], trainer)
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
    return {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings, "config.json": b"{}"}


def told(what: str, seconds: float, num_bytes: int) -> None:
    print(f"{what:44} {seconds:8.3f} s {1e6 * seconds / num_bytes:10.2f} us a byte", flush=True)


def group_of(rollouts: Sequence[array[int]]) -> RolloutGroup:
    made = tuple(
        Rollout(one, array("f", [-3.0] * len(one)), b"\1" * len(one), ((0, 0),), "length", "") for one in rollouts
    )
    return RolloutGroup(GroupRef(RUN_POLICY, "train", 0), 0, 1, 0, array("i", [3]), made, "w", 0.1)


def measure_math(tokenizer: Any) -> None:
    sandbox = Sandbox()
    sandbox.load("math")
    for name, text in TEXTS.items():
        for size in (8, 64):
            num_bytes = TOKEN_BYTES * size * len(tokenizer.encode(text, add_special_tokens=False))
            began = time.perf_counter()
            sandbox.score("math", "$2$", [text] * size)
            told(f"math: {size} texts, {name}", time.perf_counter() - began, num_bytes)
    sandbox.close()


def measure_tokens(reader: RunTokenizer) -> None:
    tokenizer: Any = reader.tokenizer
    longest = max(range(len(tokenizer)), key=lambda token: len(tokenizer.decode([token])))
    last = tokenizer.encode(">", add_special_tokens=False)[-1]
    cases = {
        "usual": range(300, 300 + LENGTH),
        "the longest token": [longest] * LENGTH,
        "a stop's last": [last] * LENGTH,
    }
    for name, tokens in cases.items():
        group = group_of([array("i", tokens)] * SIZE)
        began = time.process_time()
        reader.check_ends(group, LENGTH)
        searched = time.process_time()
        reader.texts(group, Task(0, "?", {}))
        num_bytes = TOKEN_BYTES * SIZE * LENGTH
        told(f"searching for stop strings: {name}", searched - began, num_bytes)
        told(f"decoding: {name}", time.process_time() - searched, num_bytes)


async def measure_turns(tokenizer: Any, folder: Path) -> None:
    (folder / "own.py").write_text(ENVIRONMENT)
    replay = EnvironmentReplay(f"{folder}/own.py:Silent")
    await replay.stop()
    for turns in (16, 512):
        rules = TurnRules(tokenizer, frozenset(), "", False, turns, turns + 1, 0)
        group = group_of([array("i", [5] * turns)] * SIZE)
        lease = Lease(1, group.group, 0, 0, SIZE, 0, None, 1e18, 1.0, 0)
        began = time.perf_counter()
        await replay.replay(rules, lease, Task(0, "?", {}), group, 600.0, is_own=False)
        told(f"replay: {turns} turns of one token", time.perf_counter() - began, TOKEN_BYTES * SIZE * turns)
    await replay.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    reader = RunTokenizer(byte_tokenizer_files(), stop_strings=("</answer>",))
    measure_tokens(reader)
    with TemporaryDirectory() as folder:
        asyncio.run(measure_turns(reader.tokenizer, Path(folder)))
    measure_math(reader.tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
