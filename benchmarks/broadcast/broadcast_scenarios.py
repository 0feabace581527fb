"""The networks on which broadcasts are compared. Round trips are 100 ms between any two nodes, everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from broadcast_trial import ORIGIN, Fault, Scenario
from wan.net import AccessLink

UNEVEN_UP_MBIT = (100.0, 100.0, 50.0, 50.0, 20.0, 20.0, 10.0, 10.0)


def even(name: str, num_workers: int, link: AccessLink, alone: str = "alone") -> Scenario:
    """All nodes, the origin too, behind the same link."""
    links = {ORIGIN: link, **{f"w{at:02}": link for at in range(1, num_workers + 1)}}
    return Scenario(name, links, alone=alone)


def with_links(scenario: Scenario, name: str, changed: dict[str, AccessLink], slow: Iterable[str] = ()) -> Scenario:
    return replace(scenario, name=name, links={**scenario.links, **changed}, slow=frozenset(slow))


def scenarios() -> list[Scenario]:
    """In the order in which they are run. Whatever is held against another one comes after it."""
    fast, modest = AccessLink(100.0, 100.0), AccessLink(40.0, 40.0)
    lossy = replace(fast, loss_percent=0.5)  # at either end: 1 % of the packets between two nodes
    hardly = replace(fast, loss_percent=0.05)
    eight = even("even-8", 8, fast)
    uneven = {f"w{at:02}": AccessLink(up, 100.0) for at, up in enumerate(UNEVEN_UP_MBIT, start=1)}
    return [
        even("alone", 1, fast),
        even("even-2", 2, fast),
        even("even-4", 4, fast),
        eight,
        even("alone-40", 1, modest, "alone-40"),
        even("even-8-40", 8, modest, "alone-40"),
        even("even-16", 16, modest, "alone-40"),
        with_links(eight, "slow-8", {"w05": AccessLink(10.0, 10.0)}, ["w05"]),
        even("alone-loss", 1, lossy, "alone-loss"),
        even("loss-8", 8, lossy, "alone-loss"),
        replace(eight, name="kill-8", fault=Fault("kill"), undisturbed="even-8"),
        replace(eight, name="hole-8", fault=Fault("hole"), undisturbed="even-8"),
        with_links(even("", 6, fast), "closed-6", {name: replace(fast, is_closed=True) for name in ("w02", "w05")}),
        replace(even("alone-cubic", 1, fast, "alone-cubic"), congestion="cubic"),
        replace(even("cubic-8", 8, fast, "alone-cubic"), congestion="cubic"),
        with_links(eight, "uneven-8", uneven),
        even("loss-4", 4, lossy, "alone-loss"),
        replace(even("cubic-4", 4, fast, "alone-cubic"), congestion="cubic"),
        replace(even("alone-40-cubic", 1, modest, "alone-40-cubic"), congestion="cubic"),
        replace(even("cubic-16", 16, modest, "alone-40-cubic"), congestion="cubic"),
        even("even-5", 5, fast),
        with_links(even("uneven-5", 5, fast), "uneven-5", {f"w{at:02}": uneven[f"w{at + 2:02}"] for at in range(1, 6)}),
        replace(even("alone-cubic-loss", 1, hardly, "alone-cubic-loss"), congestion="cubic"),
        replace(even("cubic-loss-8", 8, hardly, "alone-cubic-loss"), congestion="cubic"),
    ]


#: Not run unless asked for: those for the comparison with other programs, and one that takes an hour.
EXTRA = ("loss-4", "cubic-4", "alone-40-cubic", "cubic-16", "even-5", "uneven-5", "alone-cubic-loss", "cubic-loss-8")


def chosen(only: Sequence[str]) -> list[Scenario]:
    """Those asked for, with what they are held against. Nothing asked for: all but the extra ones.

    Raises:
        ValueError: there is no such scenario.
    """
    known = {scenario.name: scenario for scenario in scenarios()}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = set(only or (name for name in known if name not in EXTRA))
    for name in sorted(wanted):
        wanted |= {known[name].alone, known[name].undisturbed}
    return [scenario for name, scenario in known.items() if name in wanted]
