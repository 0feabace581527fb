"""The curves of a model, one point an optimizer step: loss, gradient norm, tokens, and dollars of the session so far.

However long a run is, less than `limits.CURVE_POINTS_MAX` points of it are kept: of a longer run every second step,
then every fourth, and so on, and always the newest. What was trained since the last step is kept in memory: after a
restart of the service, the next point tells loss and tokens of the requests that ended since; dollars are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sql

from echo2_service import limits
from echo2_service.backend import TrainWork
from echo2_service.front.database import Database, Row, steps
from echo2_service.front.usage import Bills

#: The values of a point, in the order of columns.
COLUMNS = ("loss", "grad_norm", "tokens", "usd")
#: Metrics of an optimizer step that clients log: dollars of the session since the model's last step, and so far.
STEP_USD, SO_FAR_USD = "cost/step_usd", "cost/cum_usd"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a request trained: `num_counted` of its tokens count in the loss, whose sum is `loss`."""

    num_tokens: int = 0
    num_counted: int = 0
    loss: float = 0.0

    def __add__(self, other: Trained) -> Trained:
        counted = self.num_counted + other.num_counted
        return Trained(self.num_tokens + other.num_tokens, counted, self.loss + other.loss)


def trained(work: TrainWork, metrics: Mapping[str, float]) -> Trained:
    """Return what was trained."""
    return Trained(work.num_tokens, work.num_counted, metrics.get("loss:sum", 0.0))


class Curves:
    """The points of all models. For one event loop."""

    def __init__(self, database: Database, bills: Bills) -> None:
        self._database, self._bills = database, bills
        self._since_step: dict[str, Trained] = {}

    def trained(self, model: str, new: Trained) -> None:
        """Count what a request trained towards the model's next point."""
        self._since_step[model] = self._since_step.get(model, Trained()) + new

    def stepped(self, request: Row, metrics: Mapping[str, float], now: float) -> dict[str, float]:
        """Add a point for an optimizer step. Return the step's metrics, with what it cost if there are prices."""
        sums = self._since_step.get(request.target, Trained())
        self._database.when_stored(lambda: self._since_step.pop(request.target, None))
        newest = self._database.select(steps, "-step", 1, columns=["step", "usd"], model=request.target)
        step, before = (newest[0].step, newest[0].usd) if newest else (0, 0.0)
        usd = self._bills.of_session(request.session)
        self._database.insert(
            steps,
            model=request.target,
            step=step + 1,
            tenant=request.tenant,
            ended=now,
            tokens=sums.num_tokens,
            loss=sums.loss / sums.num_counted if sums.num_counted else None,
            grad_norm=metrics.get("grad_norm"),
            usd=usd,
        )
        self._thin_out(request.target, step + 1)
        if not self._bills.has_prices:
            return dict(metrics)
        return {**metrics, STEP_USD: max(0.0, usd - before), SO_FAR_USD: usd}

    def forget(self, model: str) -> None:
        """Forget what the model has trained since its last step."""
        self._since_step.pop(model, None)

    def of(self, model: str) -> dict[str, Any]:
        """Return the points of a model: their steps, seconds since the first one, and a column for each figure."""
        rows = self._database.select(steps, "step", model=model)
        seconds = [row.ended - rows[0].ended for row in rows]
        columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
        stride = stride_of(rows[-1].step) if rows else 1
        return {"steps": [row.step for row in rows], "seconds": seconds, "stride": stride, "columns": columns}

    def newest(self, models: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the newest point of each of these models that has one, with its step."""
        last = self._database.grouped(steps, ["model"], {"last": sql.func.max(steps.c.step)}, model=tuple(models))
        is_newest = sql.tuple_(steps.c.model, steps.c.step).in_([(row.model, row.last) for row in last])
        with self._database.transaction() as connection:
            rows = connection.execute(sql.select(steps).where(is_newest)) if last else ()
            return {row.model: {name: getattr(row, name) for name in ("step", *COLUMNS)} for row in rows}

    def _thin_out(self, model: str, newest: int) -> None:
        if (stride := stride_of(newest)) == 1:
            return
        is_between = sql.and_(steps.c.step < newest, steps.c.step % stride != 0)
        with self._database.transaction() as connection:
            connection.execute(sql.delete(steps).where(steps.c.model == model, is_between))


def stride_of(newest: int) -> int:
    """Return of how many steps one is kept once there are so many: 1, 2, 4, ..."""
    return 1 << ((newest - 1) // (limits.CURVE_POINTS_MAX - 1)).bit_length()
