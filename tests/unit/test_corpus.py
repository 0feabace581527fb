"""Inputs on which a reader once failed, read again: `make bench-fuzz` put them below tests/corpus. And the fuzzer
itself: its targets read what is valid, and it finds what is there to be found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import fuzz
import fuzz_methods
import fuzz_target
import pytest

from echo2.core.errors import PeerError

TARGETS = fuzz.all_targets()
CORPUS = sorted(path for path in fuzz.CORPUS.glob("*/*"))
#: They import transformers.
SLOW = ("tokenizer_json", "tokenizer_config_json")


def _marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.fixture(autouse=True)
def own_heads() -> Iterator[None]:
    """Each test has heads of its own: a learner that says hello ends the session of the one before."""
    yield
    fuzz_methods.close()


@pytest.mark.parametrize("name", [_marked(name) for name in sorted({path.parent.name for path in CORPUS})])
def test_every_input_of_the_corpus_is_refused_with_a_typed_error(name: str) -> None:
    fuzz.outcome_of(TARGETS[name], TARGETS[name].seeds[0])  # the first read imports: seconds on a busy machine
    for path in CORPUS:
        if path.parent.name == name:
            began = time.process_time()
            kind, detail = fuzz.outcome_of(TARGETS[name], path.read_bytes())
            assert not kind.startswith("!"), (path.name, kind, detail)
            assert time.process_time() - began < 5 * fuzz.HANG_SECONDS, path.name


@pytest.mark.parametrize("name", [_marked(name) for name in TARGETS])
def test_a_fuzz_target_reads_valid_input(name: str) -> None:
    outcomes = [fuzz.outcome_of(TARGETS[name], seed) for seed in TARGETS[name].seeds]
    assert any(kind == "read" for kind, _ in outcomes), outcomes
    assert not any(kind.startswith("!") for kind, _ in outcomes), outcomes


def _divides(data: bytes) -> None:
    _ = 1 / (len(data) - 7)


def _never_ends(data: bytes) -> None:
    while data.startswith(b"["):
        pass


def _dies(data: bytes) -> None:
    if len(data) > 4:
        os._exit(3)


def _claims(data: bytes) -> None:
    bytearray(fuzz.ADDRESS_BYTES * (len(data) > 4))


def _refuses(data: bytes) -> None:
    raise PeerError("malformed", "as it should be")


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        (_divides, "!ZeroDivisionError"),
        (_never_ends, "!Hang"),
        (_dies, "!Died"),
        (_claims, "!MemoryError"),
        (_refuses, ""),
    ],
)
def test_the_fuzzer_finds_a_planted_bug(
    reader: Callable[[bytes], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "HANG_SECONDS", 0.02)
    figures = fuzz.fuzz(fuzz_target.Target("planted", reader, (b"{}", b"[1]")), 30, seed=0)
    assert {kind for kind, _, _ in figures["findings"]} == ({found} if found else set())
