"""Machines on offer, from which `echo2 plan` chooses. A TOML file with one `[[offers]]` for each kind of machine.

    [[offers]]
    name = "rtx5090"
    price_usd_per_hour = 0.35
    rollouts_per_second = 0.31      # without the reward; leave it out and `echo2 probe` on such a machine tells you
    count = 12

Every field, its meaning and its default: `Offer`. What may be unknown is the rate alone. A rate that was measured with
another model says with which (`parameters`, `max_tokens`), and is scaled to the run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from echo2.config.values import FORMS
from echo2.core.documents import read_tables, refuse_unknown
from echo2.core.errors import UserError

#: Machines of one offer: a plan looks at each.
COUNT_MAX = 10_000
#: No price, rate or duration of a machine is larger; infinity means no bound.
NUMBER_MAX = 1e9

#: A smaller model is not faster: starting a decoding step then takes longer than reading its weights.
PARAMETERS_MIN = 1e8

Amount = Annotated[float, Meta(ge=0.0, le=NUMBER_MAX)]
Positive = Annotated[float, Meta(gt=0.0, le=NUMBER_MAX)]


@dataclass(frozen=True, slots=True)
class Offer:
    """`count` equal machines. `spread`: standard deviation of the logarithm of one group's duration. `groups_per_batch`
    0: as the run has it. `reliability`: share of its rollouts that count. `mean_life_hours` 0: it stays until released;
    a lost one is back, or replaced, after `replace_seconds`. `memory_gb`: of the GPU that a worker has there, or of the
    machine without one; 0: not known. `parameters` and `max_tokens`: of the model that the rate is for, and of its
    answers; 0: those of the run. `gpu`: its name in `echo2 plan`'s data sheet, or 4xRTX-4090 for four that hold one
    model together, from which a rate that is not known is estimated. `form`: to which its workers round the weights
    (`values.FORMS`); empty: not at all. `rent` and `release`: commands, without a shell, that get one machine, start
    `echo2 worker {ticket} --offer {name}` there, and give it back.
    """

    name: Annotated[str, Meta(min_length=1)]
    price_usd_per_hour: Amount
    rollouts_per_second: Positive | None = None
    spread: Amount = 0.2
    groups_per_batch: Annotated[int, Meta(ge=0)] = 0
    up_mbps: Positive = 100.0
    down_mbps: Positive = 100.0
    reliability: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    mean_life_hours: Amount = 0.0
    replace_seconds: Amount = 300.0
    count: Annotated[int, Meta(ge=1, le=COUNT_MAX)] = 1
    memory_gb: Amount = 0.0
    parameters: Annotated[float, Meta(ge=0.0, le=1e15)] = 0.0
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    gpu: str = ""
    form: str = ""
    rent: str = ""
    release: str = ""

    def scaled_to(self, parameters: float | None, max_tokens: int) -> Offer:
        """Return the offer with its rate for a model of so many parameters (None: unknown), whose answers have at most
        so many tokens. A guess: each token reads all weights once."""
        rate = self.rollouts_per_second
        if rate is None:
            return self
        if self.max_tokens:
            rate *= self.max_tokens / max_tokens
        if self.parameters and parameters:
            rate *= max(self.parameters, PARAMETERS_MIN) / max(parameters, PARAMETERS_MIN)
        others = 0.0 if parameters else self.parameters
        return replace(self, rollouts_per_second=min(NUMBER_MAX, rate), parameters=others, max_tokens=0)

    @property
    def availability(self) -> float:
        """Share of the time that it works, of the time that somebody looks after it."""
        life = self.mean_life_hours * 3600
        return life / (life + self.replace_seconds) if life > 0 else 1.0

    @property
    def effective_usd_per_hour(self) -> float:
        """What it costs on average: a machine that is gone is not paid for."""
        return self.price_usd_per_hour * self.availability

    @property
    def effective_rate(self) -> float:
        """Rollouts per second that reach the learner, on average.

        Raises:
            UserError: the rate is not known.
        """
        if self.rollouts_per_second is None:
            raise UserError(
                f"offer {self.name!r} has no rollouts_per_second. Measure it: run `echo2 probe CONFIG --name "
                f"{self.name}` on such a machine and copy the line that it prints, or estimate it."
            )
        return self.rollouts_per_second * self.reliability * self.availability


def load_offers(path: Path) -> list[Offer]:
    """Read an offers file.

    Raises:
        UserError: it is missing, not TOML, empty, or an offer in it is wrong; the message names the offer and the fix.
    """
    return parse_offers(read_tables(path, "the offers file (examples/offers.toml is one)"), str(path))


def parse_offers(raw: Mapping[str, Any], where: str) -> list[Offer]:
    """Offers from plain values.

    Raises:
        UserError: as `load_offers`.
    """
    tables = raw.get("offers", [])
    if set(raw) - {"offers"} or not isinstance(tables, list) or not all(isinstance(one, Mapping) for one in tables):
        raise UserError(f"{where}: write each machine as a table of its own, under [[offers]], and nothing else.")
    if not tables:
        raise UserError(f"{where}: it has no offers. Add at least one [[offers]] with name and price_usd_per_hour.")
    offers = [_parse(table, f"{where}: offer {number}") for number, table in enumerate(tables, 1)]
    names = [offer.name for offer in offers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: two offers are called {twice[0]!r}. Give each its own name, or one a larger count.")
    return offers


def _parse(table: Mapping[str, Any], where: str) -> Offer:
    where += f" ({table['name']!r})" if table.get("name") else ""
    refuse_unknown(table, [entry.name for entry in fields(Offer)], where)
    try:
        offer = msgspec.convert(dict(table), type=Offer)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        value = f"{name} = {table[name]!r}: " if name in table else ""
        hint = " Leave it out if it is not known." if name == "rollouts_per_second" else ""
        raise UserError(f"{where}: {value}{expected[0].lower()}{expected[1:]}.{hint}") from error
    for name in ("rent", "release"):
        try:
            shlex.split(getattr(offer, name))
        except ValueError as error:
            raise UserError(f"{where}: {name} is not a command line: {error}.") from error
    if offer.form and offer.form not in FORMS.values():
        raise UserError(f"{where}: form = {offer.form!r} is none. Give one of {', '.join(FORMS.values())}.")
    if offer.rent and not offer.release:
        raise UserError(f"{where}: `rent` without `release`: the machine would never be returned. Add `release = ...`.")
    return offer
