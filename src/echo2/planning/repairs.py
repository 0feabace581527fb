"""Flags with which a plan command that was refused may be valid: the fewest changes first. Who asks tries each."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import echo2
from echo2.config.rundir import RunDir
from echo2.core.errors import UserError
from echo2.learner.core.fitting import known_models, model_shape
from echo2.planning.gpus import several

#: A change of this name is the configuration file, which is not a flag.
CONFIG = "CONFIG"
#: Stands for the demo's configuration, which is always there.
DEMO = Path(echo2.__file__).parent / "demo" / "sort.toml"
#: Flags of a plan that have a value, and that it can do without.
DISPENSABLE = (
    *("--answer-tokens", "--train-seconds", "--reward-seconds", "--broadcast-seconds", "--snapshot-bytes"),
    *("--uplink-mbps", "--learner-memory-gb", "--max-idle", "--budget", "--each", "--region", "--spot", "--gpus"),
    *("--memory-gb", "--providers", "--from", "--learner"),
)
#: Ranks that are tried where no GPUs are named.
COUNTS = (8, 4, 2, 1)
#: So many changes are tried together.
CHANGES_MAX = 3
#: Groups of changes that are tried at most.
TRIES_MAX = 200
#: Billions of weights in a model's name.
_BILLIONS = re.compile(r"(\d+(?:\.\d+)?) ?[Bb](?![a-z])")


def repairs(options: argparse.Namespace, model: str | None) -> Iterator[dict[str, str]]:
    """Yield changes, by flag; "" takes one away. `model`: the path in the configuration; None: that is not readable."""
    needed = {**_of_config(options), **_of_model(model), **({} if options.here is None else {"--here": ""})}
    if needed:
        yield needed
    given = [word.partition("=")[0] for word in options.given]
    singles = [*_of_learner(options), *({flag: ""} for flag in DISPENSABLE if flag in given)]
    singles += [{word: ""} for word in given if word.startswith("--") and "." in word]
    singles += [{"--offers": "market"}] if str(options.offers) != "market" else []
    groups = (them for number in range(1, CHANGES_MAX + 1) for them in itertools.combinations(singles, number))
    for group in itertools.islice(groups, TRIES_MAX):
        changes = {flag: value for one in group for flag, value in one.items()}
        if len(changes) == sum(map(len, group)):  # no flag twice
            yield needed | changes


def _of_config(options: argparse.Namespace) -> dict[str, str]:
    if options.config is not None and options.config.exists():
        return {}
    own = RunDir(options.source).config if options.source else DEMO
    return {CONFIG: str(own if own.is_file() else DEMO)}


def _of_model(model: str | None) -> dict[str, str]:
    """Where the model has no sizes that are known, one that has."""
    return {} if model is None or model_shape(model) is not None else {"--model.path": _near(model)}


def _of_learner(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """As many ranks as GPUs, or with fewer of both; without known GPUs, other ranks than the configuration has."""
    try:
        count, name, _ = several(options.learner or "", "--learner")
    except UserError:
        yield from ({"--learner.ranks": str(count)} for count in COUNTS)
        return
    yield {"--learner.ranks": str(count)}
    while count > 1:
        count //= 2
        yield {"--learner": f"{count}x{name}", "--learner.ranks": str(count)}


def _near(model: str) -> str:
    """Return the model of known sizes that is nearest by the size in its name."""
    found = _BILLIONS.search(Path(model).name)
    billions = float(found[1]) if found else 1.0

    def distance(name: str) -> float:
        known = _BILLIONS.search(name)
        return abs(float(known[1]) / billions - 1) if known else 1e9

    return min(known_models(), key=distance)
