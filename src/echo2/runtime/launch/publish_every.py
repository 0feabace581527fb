"""`schedule.publish_every = "auto"`: finds the number with which a run starts or resumes, and the reason.

The rule needs the seconds of a step and of a broadcast, as measured by the resumed run, or by another run that the user
names. Without measurements the number is 1, which any staleness bound allows. It is settled before any process starts
and is written to config.json, so that head and learner never differ, and no step follows two rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from echo2.config import Config
from echo2.control.capacity.formulas import choose_publish_every, staleness_bound
from echo2.errors import UserError
from echo2.planning.past_run import PastRun, read_past_run
from echo2.rundir import RunDir, read_metrics


@dataclass(frozen=True, slots=True)
class Settled:
    """A configuration with a number. `reason`: for display; empty if the number was configured."""

    config: Config
    reason: str = ""


def settle(config: Config, where: Path, resume: bool, like: Path | None) -> Settled:
    """Return the configuration with a number. `where`: the run's directory; `like`: a run whose measured times to use.

    Raises:
        UserError: `like` lacks the measurements, or no number keeps the staleness bound with these times.
    """
    bound = config.schedule.max_staleness
    if config.schedule.publish_every != "auto":
        return Settled(config)
    if bound == 0:
        return _with(config, 1, "max_staleness = 0 allows no other")
    if like is not None:
        other = read_past_run(like)
        if other.broadcast_seconds is None:
            raise UserError(f"{like} has measured no broadcast yet: --from needs a run with published snapshots.")
        return _measured(config, other, other.broadcast_seconds, str(like))
    before = _before(where) if resume else None
    past = _past(where) if resume else None
    if past is None or past.broadcast_seconds is None:
        told = "nothing is measured yet; --resume or --from DIR will know more"
        return _with(config, 1, told) if before is None else _with(config, before, f"as before: {told}")
    try:
        return _measured(config, past, past.broadcast_seconds, "this run")
    except UserError as error:
        if before is None or before > bound + 1:
            raise
        return _with(config, before, f"as before. {error}")


def _measured(config: Config, past: PastRun, broadcast_seconds: float, source: str) -> Settled:
    bound, train = config.schedule.max_staleness, past.train_seconds
    found = choose_publish_every(bound, train, broadcast_seconds)
    told = f"{source} has T_train {train:.3g} s, T_bcast {broadcast_seconds:.3g} s: staleness is at most"
    return _with(config, found, f"{told} {staleness_bound(found, train, broadcast_seconds)}, {bound} is allowed")


def _before(where: Path) -> int | None:
    """Return the number that the run had; None if it has not begun."""
    rundir = RunDir(where)
    found = rundir.read_config().schedule.publish_every if rundir.config.is_file() else "auto"
    return None if found == "auto" else found


def _past(where: Path) -> PastRun | None:
    """Return the run's measurements; None before its first step."""
    has_trained = any("time/train" in row for row in read_metrics(RunDir(where).metrics, refuses_damage=True))
    return read_past_run(where) if has_trained else None


def _with(config: Config, publish_every: int, reason: str) -> Settled:
    return Settled(replace(config, schedule=replace(config.schedule, publish_every=publish_every)), reason)
