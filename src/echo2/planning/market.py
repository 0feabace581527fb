"""Prices of the market: the newest that gpuhunt (dstack's catalogue) gave, else those that come with echo2.

Both are files of the same columns, with a date in each row. What a price list does not say is taken for the same
everywhere: how many machines there are, how fast their links are, and how long a spot machine lives.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from echo2.config.offers import COUNT_MAX, Offer
from echo2.config.rundir import write_atomically
from echo2.core.errors import UserError, write_failed
from echo2.planning.gpus import GPUS, several
from echo2.planning.renting import rent_command

#: Written by hand from pages of two providers' prices (docs/what-will-it-cost.md).
SHIPPED = Path(__file__).with_name("market.csv")
COLUMNS = ("date", "provider", "region", "gpu", "usd_per_hour", "spot")
#: Machines of each kind by default.
COUNT = 64
#: A spot machine is lost about as often, in hours, and replaced after so many seconds (examples/offers.toml).
SPOT_LIFE_HOURS, SPOT_REPLACE_SECONDS, SPOT_RELIABILITY = 4.0, 600.0, 0.98
#: Mbit/s of machines with GPUs for games, which stand anywhere, and of others.
HOME_MBPS, CENTRE_MBPS = 100.0, 1000.0
#: A GPU is the one of that name if its memory is, by this share.
_SAME_MEMORY = 0.1


@dataclass(frozen=True, slots=True)
class Price:
    """A price, in dollars an hour for a machine with one GPU of the data sheet. `seen`: the day, as 2026-11-20."""

    seen: str
    provider: str
    region: str
    gpu: str
    usd_per_hour: float
    spot: bool


@dataclass(frozen=True, slots=True)
class MachineFilter:
    """Which machines of the market count. `region`: a part of its name; "": any. `spot`: yes, no or any. `gpus` and
    `providers`: by name; none: all; 4xRTX-4090: machines with four of them, at four times the price of one.
    `memory_gb`: of one GPU, at least. `count`: how many of each kind there are taken to be.
    """

    region: str = ""
    spot: str = "any"
    gpus: tuple[str, ...] = ()
    count: int = COUNT
    memory_gb: float = 0.0
    providers: tuple[str, ...] = ()

    def takes(self, one: Price) -> bool:
        """Whether a machine counts. A price list has no reliability; `providers` are what stands for it."""
        return (
            (not self.region or one.region == "any" or self.region.lower() in one.region.lower())
            and self.spot in ("any", "yes" if one.spot else "no")
            and GPUS[one.gpu].memory_gb >= self.memory_gb
            and (not self.providers or one.provider.lower() in [name.strip().lower() for name in self.providers])
        )

    def __str__(self) -> str:
        gpus, providers = ",".join(self.gpus) or "all", ",".join(self.providers) or "all"
        memory = f", --memory-gb {self.memory_gb:g}" if self.memory_gb else ""
        return f"--region {self.region or 'any'}, --spot {self.spot}, --gpus {gpus}, --providers {providers}{memory}"


def cache_path() -> Path:
    """Where the newest prices are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "echo2" / "market.csv"


def known_prices() -> tuple[list[Price], str]:
    """Return the prices that are here, and where they are from: those that were kept, or, if these are damaged or there
    are none, those that came with echo2.
    """
    path, why = cache_path(), "--offers market asks for today's"
    try:
        prices, origin = _read(path) if path.is_file() else [], str(path)
    except UserError as error:
        prices, why = [], str(error)
    if not prices:
        prices, origin = _read(SHIPPED), f"with echo2; {why}"
    days = sorted({one.seen for one in prices})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return prices, f"prices of {dates}, {origin}"


def refresh() -> str:
    """Ask gpuhunt for today's prices and keep them; return why that was not possible, or ""."""
    try:
        from gpuhunt import default_catalog
    except ImportError:
        return "no new prices: pip install 'echo2[market]'"
    try:
        items = default_catalog().query(min_gpu_count=1, max_gpu_count=1)
    except Exception as error:  # of many providers, each fails in its own way
        return f"no new prices: {error}"
    prices = from_catalogue(items, datetime.now(UTC).date())
    if not prices:
        return "no new prices: the catalogue has no GPU that is known here"
    _write(cache_path(), prices)
    return ""


def from_catalogue(items: Iterable[Any], today: date) -> list[Price]:
    """Return the prices of gpuhunt's items that have one GPU with a known data sheet."""
    prices = []
    for item in items:
        name = _known_name(str(item.gpu_name or ""), float(item.gpu_memory or 0))
        if name and item.gpu_count == 1 and item.price > 0:
            price = Price(today.isoformat(), item.provider, item.location or "any", name, item.price, bool(item.spot))
            prices.append(price)
    return prices


def _known_name(name: str, memory_gb: float) -> str:
    """The catalogue writes names without hyphens or RTX, and the size of the memory apart."""
    plain = {gpu_name.replace("-", "").lower(): gpu_name for gpu_name in GPUS}
    for candidate in (f"{name}{memory_gb:g}GB", name, f"RTX{name}"):
        gpu_name = plain.get(candidate.replace("-", "").lower(), "")
        if gpu_name and abs(GPUS[gpu_name].memory_gb - memory_gb) <= _SAME_MEMORY * memory_gb:
            return gpu_name
    return ""


def market_offers(prices: Sequence[Price], machine_filter: MachineFilter) -> list[Offer]:
    """Return the cheapest machine of each provider, GPU, and spot or not, as an offer that SkyPilot rents if it can.

    Raises:
        UserError: nothing is left.
    """
    if not 1 <= machine_filter.count <= COUNT_MAX:
        raise UserError(f"--each {machine_filter.count} must be between 1 and {COUNT_MAX}.")
    named = [several(name, "--gpus") for name in machine_filter.gpus]
    cheapest = dict[tuple[str, str, bool, int], Price]()
    for one in sorted(prices, key=lambda one: one.usd_per_hour):
        counts = [count for count, _, card in named if GPUS[one.gpu] == card] if named else [1]
        if machine_filter.takes(one):
            for count in counts:
                cheapest.setdefault((one.provider, one.gpu, one.spot, count), one)
    if not cheapest:
        raise UserError(
            f"No machine of the market is left: {machine_filter}. It has "
            f"{', '.join(sorted({one.gpu for one in prices}))} of "
            f"{', '.join(sorted({one.provider for one in prices}))}."
        )
    return [_offer(one, machine_filter, cards) for (*_, cards), one in cheapest.items()]


def _offer(one: Price, wanted: MachineFilter, cards: int) -> Offer:
    mbps = HOME_MBPS if one.gpu.startswith("RTX") else CENTRE_MBPS
    times, usd = f"{cards}x" if cards > 1 else "", cards * one.usd_per_hour
    name = f"{times}{one.gpu.lower().replace('-', '')}-{one.provider}" + ("-spot" if one.spot else "")
    rent = rent_command(one.provider, one.region if wanted.region else "any", one.gpu, cards, one.spot, usd)
    return Offer(
        name=name,
        price_usd_per_hour=usd,
        gpu=times + one.gpu,
        count=wanted.count,
        up_mbps=mbps,
        down_mbps=mbps,
        reliability=SPOT_RELIABILITY if one.spot else 1.0,
        mean_life_hours=SPOT_LIFE_HOURS if one.spot else 0.0,
        replace_seconds=SPOT_REPLACE_SECONDS,
        rent=rent,
        release="sky down -y {name}" if rent else "",
    )


def _read(path: Path) -> list[Price]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        prices = [_price(row) for row in rows]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is not a list of prices ({error}); delete it") from error
    if not prices:
        raise UserError(f"{path} has no prices; delete it")
    return prices


def _price(row: dict[str, str]) -> Price:
    date.fromisoformat(row["date"])
    if row["gpu"] not in GPUS or not 0 < (usd := float(row["usd_per_hour"])) < 1e6:
        raise ValueError(f"{row['gpu']} at {row['usd_per_hour']}")
    return Price(row["date"], row["provider"], row["region"], row["gpu"], usd, row["spot"] == "yes")


def _write(path: Path, prices: Sequence[Price]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failed(error, f"Cannot write {path.parent}: {error.strerror}. Set XDG_CACHE_HOME.") from error
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in prices:
        writer.writerow((one.seen, one.provider, one.region, one.gpu, one.usd_per_hour, "yes" if one.spot else "no"))
    write_atomically(path, text.getvalue())
