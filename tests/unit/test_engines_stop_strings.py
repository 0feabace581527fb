"""Stop strings: a sample ends with the first token behind which one stands in its text, in every engine alike."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import house
from echo2.engines import tokenizer as stop_strings
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer, stop_rule
from rollout_cases import END, load, plain_tokenizer, requests, run, snapshot_of, tiny_module, tokenizer_files
from seeds import seeds

TEXT = "Question: what is it?\nAnswer: two é → ü, or 日本 </answer>\n\nQuestion: and that?\n" * 8
STRINGS = ("\n\n", "</answer>", "Question:", ": ", " ", "é", "→", "日本", "r <", "<|end|>")


@lru_cache(maxsize=1)
def byte_tokenizer() -> Any:
    """Of bytes and their merges: characters and strings begin and end within tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    core.add_special_tokens(["<|end|>"])
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}'
    return load_tokenizer({"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings})


@given(st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3), st.integers(0, 1 << 30))
def test_sampling_ends_at_the_first_stop_string_of_the_whole_text(strings: list[str], seed: int) -> None:
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    pieces = [rng.choice([*STRINGS, "A", "two", "\n", "日", "Quest", "ion"]) for _ in range(rng.randrange(1, 12))]
    cut = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    strange = [rng.randrange(len(tokenizer) + 3) for _ in range(3)]  # parts of characters; ids beyond the tokenizer's
    tokens = array("i", [token for piece in [*cut, strange, *cut] for token in piece])

    def text(count: int) -> str:
        known = [token for token in tokens[:count] if token < len(tokenizer)]
        return str(tokenizer.decode(known, skip_special_tokens=False))

    ends = (count for count in range(1, len(tokens) + 1) if any(string in text(count) for string in strings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_strings, "BLOCK_TOKENS", rng.randrange(1, 20))
        assert stop_rule(tokenizer, tuple(strings)).length(tokens) == next(ends, None)


def test_a_rollout_of_tokens_that_may_all_end_a_string_is_decoded_about_once() -> None:
    """The head looks at every rollout of strangers, who choose its tokens."""
    decoded: list[int] = []

    class Counting:
        def get_vocab(self) -> dict[str, int]:
            vocabulary: dict[str, int] = byte_tokenizer().get_vocab()
            return vocabulary

        def decode(self, token_ids: list[int], **options: Any) -> str:
            decoded.extend(token_ids)
            return str(byte_tokenizer().decode(token_ids, **options))

    tokens = array("i", byte_tokenizer().encode(">", add_special_tokens=False) * 4096)
    rule = replace(stop_rule(byte_tokenizer(), ("</answer>",)), tokenizer=cast(Any, Counting()))
    assert rule.length(tokens) is None
    assert len(decoded) < 1.1 * len(tokens)


@pytest.mark.parametrize("name", ["compact", "transformers", "fake"])
def test_a_rollout_ends_with_the_token_that_completes_a_string_and_is_else_the_same(name: str) -> None:
    engine, tokenizer = make_engine(name, "cpu", 8), plain_tokenizer()
    load(engine, snapshot_of(tiny_module("qwen3")))
    free = [one for seed in range(6) for one in requests(seed, samples=4, max_tokens=24)]
    whole = run(engine, free)
    middle = tokenizer.decode(max(whole[1::2], key=lambda one: len(one.tokens)).tokens[5:7].tolist())
    for strings, num_least in (((middle,), 1), (("0", "a"), 3), (("never",), 0)):
        stop, num_stopped = stop_rule(tokenizer, strings), 0
        # Beside each other in one batch: with these strings, and without.
        stopped = run(engine, [replace(one, stop=stop if at % 2 else None) for at, one in enumerate(free)])
        for at, (short, long) in enumerate(zip(stopped, whole, strict=True)):
            begun = (tokenizer.decode(long.tokens[:end].tolist()) for end in range(1, len(long.tokens) + 1))
            ends = [end for end, text in enumerate(begun, 1) if any(string in text for string in strings)]
            length = ends[0] if ends and at % 2 else len(long.tokens)
            assert short.tokens == long.tokens[:length]
            assert short.logprobs.tolist() == pytest.approx(long.logprobs[:length].tolist(), abs=1e-5)
            is_stopped = bool(ends) and at % 2 == 1
            assert short.finish == ("stop" if is_stopped or long.tokens[-1] == END else "length")
            num_stopped += length < len(long.tokens)
        assert num_stopped >= num_least


def test_one_rule_is_made_of_the_same_strings() -> None:
    assert stop_rule(plain_tokenizer(), ("ab", "+")) is stop_rule(plain_tokenizer(), ("ab", "+"))


THREADS = """
import sys, threading
from echo2.engines.tokenizer import load_tokenizer
sys.path.insert(0, sys.argv[1])
from rollout_cases import tokenizer_files

sys.setswitchinterval(1e-6)
files, together, found = tokenizer_files(), threading.Barrier(8), []

def load():
    together.wait()
    try:
        found.append(len(load_tokenizer(files)))
    except Exception as error:
        found.append(repr(error))

threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*sorted(set(map(str, found))), sep="\\n")
"""


@pytest.mark.parametrize("attempt", seeds(1, 3))
def test_tokenizers_that_threads_load_at_once_in_a_fresh_process_are_all_loaded(attempt: int) -> None:
    """transformers imports its classes lazily, and threads disturb each other at that in about one process of three."""
    command = [sys.executable, "-c", THREADS, str(house.REPOSITORY / "tests")]
    environment = {**os.environ, "PYTHONPATH": str(house.SOURCE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    expected = str(len(load_tokenizer(tokenizer_files())))
    assert (done.stdout.splitlines(), done.returncode) == ([expected], 0), done.stderr
