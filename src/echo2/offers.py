"""Machines on offer: what `echo2 plan` may choose from. A TOML file with one `[[offers]]` for each kind of machine.

    [[offers]]
    name = "rtx5090"
    price_usd_per_hour = 0.35
    rollouts_per_second = 0.31      # rewarded rollouts; leave it out and `echo2 probe` on such a machine tells you
    count = 12

Every field, its meaning and its default: `Offer`. What may be unknown is the rate alone.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from echo2.documents import parse_toml
from echo2.errors import UserError, did_you_mean

#: Machines of one offer: a plan looks at each.
COUNT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Offer:
    """`count` equal machines. `spread`: standard deviation of the logarithm of one group's duration. `groups_per_batch`
    0: as the run has it. `reliability`: share of its rollouts that count. `mean_life_hours` 0: it stays until released;
    a lost one is back, or replaced, after `replace_seconds`. `rent` and `release`: commands, without a shell, that get
    one machine, start `echo2 worker {ticket} --offer {name}` there, and give it back.
    """

    name: str
    price_usd_per_hour: float
    rollouts_per_second: float | None = None
    spread: float = 0.2
    groups_per_batch: int = 0
    up_mbps: float = 100.0
    down_mbps: float = 100.0
    reliability: float = 1.0
    preemptible: bool = False
    mean_life_hours: float = 0.0
    replace_seconds: float = 300.0
    count: int = 1
    rent: str = ""
    release: str = ""

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
            raise UserError(_unknown_rate(self.name))
        return self.rollouts_per_second * self.reliability * self.availability


@dataclass(frozen=True, slots=True)
class _File:
    offers: list[Offer] = field(default_factory=list)


def load_offers(path: Path) -> list[Offer]:
    """Read an offers file.

    Raises:
        UserError: it is missing, not TOML, empty, or an offer in it is wrong; the message names the offer and the fix.
    """
    try:
        raw = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"Cannot read the offers file {path}: {error.strerror}. examples/offers.toml is one."
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    return parse_offers(raw, str(path))


def parse_offers(raw: Mapping[str, Any], where: str) -> list[Offer]:
    """Offers from plain values.

    Raises:
        UserError: as `load_offers`.
    """
    _refuse_unknown(raw, _File, where)
    tables = raw.get("offers", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise UserError(f"{where}: write each machine as a table of its own, under [[offers]].")
    if not tables:
        raise UserError(f"{where}: the pool is empty. Add at least one [[offers]] with name and price_usd_per_hour.")
    for number, table in enumerate(tables, 1):
        _refuse_unknown(table, Offer, f"{where}: {_label(table, number)}")
        for name in ("name", "price_usd_per_hour"):
            if name not in table:
                raise UserError(f"{where}: {_label(table, number)} lacks {name}.")
    try:
        offers = msgspec.convert(dict(raw), type=_File).offers
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_explain(error, tables)}.") from error
    for number, offer in enumerate(offers, 1):
        _check(offer, f"{where}: {_label({'name': offer.name}, number)}")
    names = [offer.name for offer in offers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: two offers are called {twice[0]!r}. Give each its own name, or one a larger count.")
    return offers


def _check(offer: Offer, where: str) -> None:
    if not offer.name:
        raise UserError(f"{where} has an empty name.")
    for entry in fields(Offer):
        value = getattr(offer, entry.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where}: {entry.name} = {value} is not a finite number.")
    positive = ("rollouts_per_second", "up_mbps", "down_mbps", "reliability", "count")
    for name in positive:
        value = getattr(offer, name)
        if value is not None and value <= 0:
            hint = " Leave it out if it is not known." if name == "rollouts_per_second" else ""
            raise UserError(f"{where}: {name} = {value} must be above 0.{hint}")
    for name in ("price_usd_per_hour", "spread", "groups_per_batch", "mean_life_hours", "replace_seconds"):
        if getattr(offer, name) < 0:
            raise UserError(f"{where}: {name} = {getattr(offer, name)} must not be negative.")
    if offer.count > COUNT_MAX:
        raise UserError(f"{where}: count = {offer.count} is more than {COUNT_MAX}. How many could you really get?")
    if offer.reliability > 1:
        raise UserError(f"{where}: reliability = {offer.reliability} is a share, at most 1.")
    for name in ("rent", "release"):
        try:
            shlex.split(getattr(offer, name))
        except ValueError as error:
            raise UserError(f"{where}: {name} is no command line: {error}.") from error
    if offer.rent and not offer.release:
        raise UserError(
            f"{where}: rent without release: nobody would give the machine back. Write `release = ...`, too."
        )
    if offer.preemptible and offer.mean_life_hours == 0:
        raise UserError(f"{where}: preemptible = true needs mean_life_hours: how long such a machine lasts on average.")


def _refuse_unknown(raw: Mapping[str, Any], kind: type[Any], where: str) -> None:
    known = [entry.name for entry in fields(kind)]
    for key in raw:
        if key not in known:
            hint = did_you_mean(key, known) or f" Known: {', '.join(known)}."
            raise UserError(f"{where}: unknown field {key!r}.{hint}")


def _explain(error: msgspec.ValidationError, tables: Sequence[Mapping[str, Any]]) -> str:
    """msgspec's ``Expected `float`, got `str` - at `$.offers[0].spread` `` with the offer's name and the value."""
    expected, _, path = str(error).partition(" - at `$.offers[")
    number, _, name = path.rstrip("`").partition("].")
    if not number.isdigit() or name not in tables[int(number)]:
        return str(error)
    table = tables[int(number)]
    return f"{_label(table, int(number) + 1)}: {name} = {table[name]!r}: {expected[0].lower()}{expected[1:]}"


def _label(table: Mapping[str, Any], number: int) -> str:
    return f"offer {number} ({table['name']!r})" if table.get("name") else f"offer {number}"


def _unknown_rate(name: str) -> str:
    return (
        f"offer {name!r} has no rollouts_per_second. Measure it: run `echo2 probe CONFIG --name {name}` on such a "
        "machine and copy the line that it prints, or estimate it."
    )
