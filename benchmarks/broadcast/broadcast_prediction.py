"""What the simulator says of the scenarios it can model, beforehand: no loss, faults or congestion control."""

from __future__ import annotations

from functools import cache

from broadcast_trial import ORIGIN, Scenario
from dissemination import DisseminationSpec, NodeSpec, disseminate
from wan.net import AccessLink

from echo2.weights.format.segments import chunk_bytes_for

BYTES_PER_MBIT = 125_000.0


@cache
def _predicted(links: tuple[AccessLink, ...], counted: tuple[bool, ...], scheme: str, fan_out: int, size: int) -> float:
    nodes = tuple(
        NodeSpec(
            up=link.up_mbit * BYTES_PER_MBIT,
            down=link.down_mbit * BYTES_PER_MBIT,
            latency_seconds=link.delay_ms / 1000.0,
            is_dialable=not link.is_closed,
        )
        for link in links
    )
    outcome = disseminate(DisseminationSpec(nodes[1:], nodes[0], size, chunk_bytes_for(size), scheme, fan_out))
    pairs = zip(outcome.seconds, counted, strict=True)
    return max(seconds for seconds, is_counted in pairs if is_counted and seconds is not None)


def predicted_seconds(scenario: Scenario, scheme: str, fan_out: int, num_bytes: int) -> float | None:
    """When the last worker that is not slow will be done; None for what the simulator does not model."""
    links = (scenario.links[ORIGIN], *(scenario.links[name] for name in scenario.workers))
    if scenario.fault or scenario.congestion or any(link.loss_percent for link in links):
        return None
    counted = tuple(name not in scenario.slow for name in scenario.workers)
    return _predicted(links, counted, scheme, fan_out, num_bytes)
