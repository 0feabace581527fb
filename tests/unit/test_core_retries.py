"""Pauses between tries: they grow, have a longest, begin again after a success, and end with the patience."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from echo2.core import retries
from echo2.core.endpoint import retry_after
from echo2.core.retries import Retries
from echo2.core.types import Backoff


def test_pauses_grow_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.after(count) for count in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.after(10**9) == 3.0
    assert Backoff(0.2, 10.0, growth=1.25).after(3) == 0.2 * 1.25**2


def test_patience_begins_again_after_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: now))
    never, patient = Retries(Backoff(0.0, 0.0), math.inf), Retries(Backoff(0.0, 0.0), 60.0)
    assert not patient.failed()
    now = 59.0
    assert not patient.failed()
    patient.succeeded()
    now = 61.0
    assert not patient.failed()
    now = 120.0
    assert not patient.failed()
    now = 121.0
    assert patient.failed()
    assert not never.failed()
    now = 1e9
    assert not never.failed()


def test_jitter_shortens_pauses_and_lengthens_none() -> None:
    waited: list[float] = []

    class Loop(asyncio.SelectorEventLoop):
        def call_later(self, delay: float, callback: object, *args: object, context: object = None) -> object:  # type: ignore[override]
            waited.append(delay)
            return super().call_later(0.0, callback, *args)  # type: ignore[arg-type]

    async def tries() -> None:
        spread = Retries(Backoff(1.0, 4.0), spread=0.5)
        for _ in range(20):
            await spread.pause()

    loop = Loop()
    loop.run_until_complete(tries())
    loop.close()
    longest = [1.0, 2.0, *[4.0] * 18]
    assert all(most / 2 <= seconds <= most for seconds, most in zip(waited, longest, strict=True))
    assert len({round(seconds, 6) for seconds in waited}) > 10


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("7", 7.0),
        ("1.5", 1.5),  # of OpenAI's servers
        ("Wed, 21 Oct 2026 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
        ("soon", 0.0),
        ("-1", 0.0),
        ("nan", 0.0),
        ("", 0.0),
    ],
)
def test_a_busy_endpoint_may_say_seconds_or_a_moment(told: str, seconds: float) -> None:
    """A moment by its own clock, whatever that of this machine says."""
    headers = {"date": "Wed, 21 Oct 2026 07:28:00 GMT", "retry-after": told}
    assert retry_after(headers) == seconds
    assert retry_after({"retry-after": told}) == (0.0 if "GMT" in told else seconds)
