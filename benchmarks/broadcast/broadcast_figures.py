"""What trials of broadcasts come to: ratios within one round, and how they are distributed, as a table and as JSON."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from broadcast_trial import Result, Scenario


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, 90th percentile (nearest rank), least and greatest of those that are known."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    p90 = known[math.ceil(0.9 * len(known)) - 1]
    return {"median": statistics.median(known), "p90": p90, "min": known[0], "max": known[-1]}


class Rounds:
    """The results of all rounds: in each, every scenario ran once with every setup, one after the other."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, str, str, int], Result] = {}
        self.failures: list[dict[str, Any]] = []

    def add(self, number: int, result: Result) -> None:
        self._results[number, result.scenario, result.setup, result.nth] = result

    def fail(self, number: int, scenario: str, setup: str, why: str) -> None:
        self.failures.append({"round": number, "scenario": scenario, "setup": setup, "why": why})

    def summary(self, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
        """One row for each scenario and setup: for the first broadcast of all trials, and one for all later ones."""
        kinds = list(dict.fromkeys((setup, _which(nth)) for _, _, setup, nth in self._results))
        rows = [self._row(scenario, setup, which) for scenario in scenarios for setup, which in kinds]
        return [row for row in rows if row is not None]

    def all(self) -> list[dict[str, Any]]:
        """Every single result."""
        return [
            {"round": number, **asdict(result), "last": result.last, "is_network_bound": result.is_network_bound}
            for (number, *_), result in self._results.items()
        ]

    def _row(self, scenario: Scenario, setup: str, which: str) -> dict[str, Any] | None:
        wanted = (scenario.name, setup, which)
        mine = [
            (number, result)
            for (number, name, by, nth), result in self._results.items()
            if (name, by, _which(nth)) == wanted
        ]
        if not mine:
            return None

        def each(value: Callable[[int, Result], float | None]) -> dict[str, float] | None:
            return spread(value(number, result) for number, result in mine)

        return {
            "scenario": scenario.name,
            "setup": setup,
            "which": which,
            "num_workers": len(scenario.workers),
            "broadcasts": len(mine),
            "last_seconds": each(lambda _, r: r.last),
            "quantile_seconds": each(lambda _, r: r.quantile),
            "over_alone": each(lambda number, r: self._over_alone(number, scenario, r)),
            "over_floor": each(lambda _, r: r.last / r.floor_seconds),
            "over_bound": each(lambda _, r: r.last / r.bound_seconds),
            "over_undisturbed_less_detection": each(lambda number, r: self._over_undisturbed(number, scenario, r)),
            "noticed_seconds": each(lambda _, r: r.noticed_seconds),
            "origin_sent_ratio": each(lambda _, r: r.origin_sent_ratio),
            "machine_busy_share": each(lambda _, r: r.machine_busy_share),
            "predicted_seconds": mine[0][1].predicted_seconds,
            "network_bound_broadcasts": sum(r.is_network_bound for _, r in mine),
        }

    def _over_alone(self, number: int, scenario: Scenario, result: Result) -> float | None:
        wanted = (number, scenario.alone, result.nth)
        alone = [r.last for (at, name, _, nth), r in self._results.items() if (at, name, nth) == wanted]
        return result.last / alone[0] if alone else None

    def _over_undisturbed(self, number: int, scenario: Scenario, result: Result) -> float | None:
        calm = self._results.get((number, scenario.undisturbed, result.setup, result.nth))
        if calm is None or result.noticed_seconds is None:
            return None
        return (result.last - result.noticed_seconds) / calm.last


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people: the median, in brackets the least, the 90th percentile and the greatest."""
    heads = (
        "scenario",
        "setup",
        "broadcasts",
        "last worker, s",
        "over alone",
        "over G/B_w",
        "over bound",
        "origin sent",
        "busy",
        "predicted, s",
    )
    keys = ("last_seconds", "over_alone", "over_floor", "over_bound", "origin_sent_ratio", "machine_busy_share")
    lines = [
        [
            row["scenario"],
            row["setup"],
            f"{row['broadcasts']} {row['which']}",
            *(_cell(row[key]) for key in keys),
            _predicted(row),
        ]
        for row in rows
    ]
    widths = [max(len(line[at]) for line in [list(heads), *lines]) for at in range(len(heads))]
    text = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in [heads, *lines]]
    faults = [row for row in rows if row["over_undisturbed_less_detection"] is not None]
    text += [
        f"{row['scenario']} {row['setup']}: noticed after {_cell(row['noticed_seconds'])} s; less that, "
        f"{_cell(row['over_undisturbed_less_detection'])} times undisturbed"
        for row in faults
    ]
    bound = [row for row in rows if row["network_bound_broadcasts"] < row["broadcasts"]]
    if bound:
        names = ", ".join(f"{row['scenario']} {row['setup']}" for row in bound)
        text.append(f"The machine was too busy in some rounds, whose times are its own, not the network's: {names}.")
    return "\n".join(text)


def network_stack() -> dict[str, Any]:
    """What moved the bytes: programs' versions, congestion control."""
    installed = {}
    for program in ("grpcio", "blake3"):
        try:
            installed[program] = version(program)
        except PackageNotFoundError:
            continue
    return {
        "programs": installed,
        "congestion_available": _kernel("tcp_available_congestion_control"),
        "congestion_default": _kernel("tcp_congestion_control"),
    }


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def one_line(result: Result) -> str:
    """A finished trial."""
    last = max(result.seconds.values())
    others = "" if last == result.last else f" (slow ones {last:.1f} s)"
    cpu = "  ".join(f"{who} {seconds:.1f}" for who, seconds in result.cpu_seconds.items())
    fault = "" if result.victim is None else f"  {result.victim} hit at {result.fault_seconds:.1f} s"
    verdict = "" if result.is_network_bound else "  MACHINE TOO BUSY"
    return (
        f"{result.scenario:12} {result.setup:14} {result.nth} {result.last:7.2f} s{others}{fault}"
        f"  {result.last / result.floor_seconds:.2f} G/B_w  origin sent {result.origin_sent_ratio:.2f} G"
        f"  cpu s: {cpu}  busy {result.machine_busy_share:.0%}{verdict}"
    )


def _which(nth: int) -> str:
    return "first" if nth == 1 else "later"


def _cell(value: dict[str, float] | None) -> str:
    if value is None:
        return "-"
    if value["min"] == value["max"]:
        return f"{value['median']:.2f}"
    return f"{value['median']:.2f} [{value['min']:.2f}, {value['p90']:.2f}, {value['max']:.2f}]"


def _predicted(row: dict[str, Any]) -> str:
    return "-" if row["predicted_seconds"] is None else f"{row['predicted_seconds']:.2f}"


def _kernel(name: str) -> str:
    return Path(f"/proc/sys/net/ipv4/{name}").read_text().strip()
