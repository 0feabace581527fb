"""How fast a worker samples: measured over the time in which it holds leases, weighted by the share of slots in use, so
that a worker without work, or with little, does not look slow.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Batches of a worker between two measurements of its rate; the first measurement takes one batch.
BATCHES_PER_RATE = 4
#: Weight of a new rate in the running mean.
NEW_RATE = 0.5


@dataclass(slots=True)
class Throughput:
    """`rate`: rollouts per second while the worker has work, 0 until measured, and its variance. `num_unmeasured`:
    samples that it had when it joined: they began earlier and do not count. `num_done`: samples since the last
    measurement; `share`: of its slots that are in use, since `busy_since`, with `busy_before` seconds before that.
    """

    rate: float = 0.0
    variance: float = 0.0
    num_unmeasured: int = 0
    num_done: int = 0
    share: float = 0.0
    busy_before: float = 0.0
    busy_since: float | None = None

    def busy_seconds(self, now: float) -> float:
        """Seconds for which the worker was busy since its rate was last measured, weighted by the share of slots."""
        return self.busy_before + ((now - self.busy_since) * self.share if self.busy_since is not None else 0)

    def use(self, num_samples: int, num_slots: int, now: float) -> None:
        self.busy_before = self.busy_seconds(now)
        self.share = min(1.0, num_samples / num_slots)
        self.busy_since = now if num_samples else None

    def carry(self, num_samples: int) -> None:
        self.num_unmeasured += num_samples

    def deliver(self, num_samples: int, samples_per_batch: int, num_left: int, now: float) -> float:
        """Record delivered samples. Return the seconds of a batch if the rate was measured, else 0. `num_left`: samples
        that the worker still has under way where slots are refilled one by one, else 0.
        """
        batch_seconds = 0.0
        if self.num_unmeasured > 0:
            self.num_unmeasured -= num_samples
        else:
            self.num_done += num_samples
            if self.num_done < (BATCHES_PER_RATE if self.rate else 1) * samples_per_batch:
                return 0.0
            seconds = self.busy_seconds(now)
            if seconds > 0:
                # At first, slots started empty and their content is now half done on average; later both cancel out.
                begun = 0.0 if self.rate else min(num_left, samples_per_batch) / 2
                self._measure((self.num_done + begun) / seconds)
                batch_seconds = seconds * samples_per_batch / self.num_done
        self.num_done, self.busy_before = 0, 0.0
        self.busy_since = None if self.busy_since is None else now
        return batch_seconds

    def _measure(self, rate: float) -> None:
        is_measured, difference = self.rate > 0, rate - self.rate
        self.rate += difference * (NEW_RATE if is_measured else 1.0)
        if is_measured:
            self.variance = (1 - NEW_RATE) * (self.variance + NEW_RATE * difference**2)

    def current(self, assumed_rate: float, samples_per_batch: int, now: float) -> float:
        """Rollouts per second: as measured or assumed, or less if the current work already takes longer than that. A
        measured worker may have one batch and part of another in progress; one without results is at its first.
        """
        rate, seconds = self.rate or assumed_rate, self.busy_seconds(now)
        under_way = (2 if self.rate else 1) * samples_per_batch
        return min(rate, (self.num_done + under_way) / seconds) if seconds > 0 else rate
