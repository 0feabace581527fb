"""A rollout worker that lies: the real worker, but for how it samples and what it sends. Started by `hostile.py`.

`drawn at random N` lies in every field that a worker fills, each drawn from the seed N: so `hostile.py --search` finds
what nobody listed. Half of its lies make sense as sampling (`Searched`), half are any values in any fields of the
messages, as wire.proto has them (`anything`): a field that is added there is lied in, too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from any_values import anything
from echo2.transport import wire_pb2 as wire
from echo2.worker import joining
from echo2.worker import worker_process as worker

#: Candidates of one token's support: 4 million.
WIDE_SUPPORT = 4 << 20

Lie = Callable[[wire.Delivery, random.Random], None]


def logprob(value: float, share: float = 0.0) -> Lie:
    """One token a group (or this share of all tokens) is said to have had this logprob."""

    def lie(delivery: wire.Delivery, source: random.Random) -> None:
        for number, rollout in enumerate(delivery.group.rollouts):
            values = array("f", rollout.logprobs)
            for place in range(len(values)):
                if (share and source.random() < share) or (not share and number == place == 0):
                    values[place] = value
            rollout.logprobs = values.tobytes()

    return lie


def random_tokens(delivery: wire.Delivery, source: random.Random) -> None:
    """Half the tokens are drawn by dice from those of the group, the last of each rollout aside; the logprobs are those
    of what the policy had drawn.
    """
    pool = [token for rollout in delivery.group.rollouts for token in array("i", rollout.tokens)[:-1]]
    for rollout in delivery.group.rollouts:
        tokens = array("i", rollout.tokens)
        for place in range(len(tokens) - 1):
            if source.random() < 0.5:
                tokens[place] = source.choice(pool)
        rollout.tokens = tokens.tobytes()


def copies(delivery: wire.Delivery, source: random.Random) -> None:
    """One rollout, as often as the group has places."""
    for rollout in delivery.group.rollouts[1:]:
        rollout.CopyFrom(delivery.group.rollouts[0])


def wide_support(delivery: wire.Delivery, source: random.Random) -> None:
    """The first token was drawn from four million candidates."""
    rollout = delivery.group.rollouts[0]
    first, rest = rollout.tokens[:4], array("i", rollout.tokens)[1:]
    rollout.support_tokens = first * WIDE_SUPPORT + rest.tobytes()
    rollout.support_offsets = array("i", [0, *range(WIDE_SUPPORT, WIDE_SUPPORT + len(rest) + 1)]).tobytes()


def versions(delivery: wire.Delivery, source: random.Random) -> None:
    """Sampled with a version that does not exist."""
    for rollout in delivery.group.rollouts:
        rollout.version_spans[0].version += 1000


def endless(delivery: wire.Delivery, source: random.Random) -> None:
    """Far more tokens than were leased."""
    rollout = delivery.group.rollouts[0]
    rollout.tokens, rollout.logprobs = rollout.tokens * 10_000, rollout.logprobs * 10_000
    rollout.loss_mask = rollout.loss_mask * 10_000


def empty(delivery: wire.Delivery, source: random.Random) -> None:
    """Nothing at all."""
    delivery.group.ClearField("rollouts")


LIES: dict[str, Lie] = {
    "logprob -3e38": logprob(-3e38),
    "logprob -1e15": logprob(-1e15),
    "logprob -99": logprob(-99.0),
    "logprob 0 everywhere": logprob(0.0, 1.0),
    "logprob nan": logprob(float("nan")),
    "half the tokens random": random_tokens,
    "copies": copies,
    "support 4 M wide": wide_support,
    "a version of tomorrow": versions,
    "120,000 tokens": endless,
    "empty groups": empty,
}

#: A lie whose fields are drawn from the seed that follows.
SEARCHED = "drawn at random "
#: Ways to do nothing: leases are held until they expire, or failed at once.
IDLE = ("holds its leases", "fails its leases")


class Searched(worker.WorkerProcess):
    """Lies in fields drawn at random. `source` is seeded with the lie's number. `anything`: of the messages that it
    sends, the share that have a field with any value."""

    source = random.Random()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        draw = self.source.choice
        self.anything, self.call = draw((0.0, 0.0, 0.1, 0.5)), self._link.call
        self._link.call = self._call  # type: ignore[method-assign, assignment]
        self.temperature, self.top_p = draw((1.0, 0.9, 0.7)), draw((1.0, 1.0, 0.9))
        self.tokens, self.spans = (
            draw((None, random_tokens, copies)),
            draw(("true", "each", "twice", "newer", "random")),
        )
        self.share, self.num_right = draw((1.0, 1.0, 0.3)), draw((0, 0, 8))
        self.delay_seconds, self.says = draw((0.0, 0.0, 3.0)), draw(("", "", "vllm"))
        self.shift = draw((0.0, 0.0, 0.3))

    def _hello(self) -> wire.WorkerHello:
        hello = super()._hello()
        hello.engine = self.says or hello.engine
        if self.source.random() < self.anything / 2:
            anything(hello, self.source)
        return hello

    async def _call(self, method: str, request: Any, seconds: float) -> Any:
        if isinstance(request, Message) and self.source.random() < self.anything:
            request = type(request).FromString(request.SerializeToString())
            anything(request, self.source)
        return await self.call(method, request, seconds)

    def _obey(self, order: wire.Order) -> None:
        for lease in order.leases.leases if order.HasField("leases") else ():
            lease.temperature, lease.top_p = self.temperature * lease.temperature, min(self.top_p, lease.top_p)
        super()._obey(order)

    async def _send(self, batch: wire.Deliveries) -> None:
        await asyncio.sleep(self.delay_seconds)
        for delivery in batch.items:
            self.num_right -= 1
            if self.num_right < 0 and self.source.random() < self.share:
                self._spoil(delivery)
        await super()._send(batch)

    def _spoil(self, delivery: wire.Delivery) -> None:
        if self.tokens is not None:
            self.tokens(delivery, self.source)
        if self.shift:
            logprob(-self.shift, 0.5)(delivery, self.source)
        for rollout in delivery.group.rollouts:
            rollout.ClearField("support_tokens")  # top-p in secret
            rollout.ClearField("support_offsets")
            first, length = rollout.version_spans[0].version, len(rollout.loss_mask)
            starts = {"each": range(1, length), "twice": (1,), "newer": (1,)}.get(self.spans, ())
            if self.spans == "random":
                starts = sorted(self.source.sample(range(1, length), min(2, length - 1)))
            for count, start in enumerate(start for start in starts if start < length):
                version = first + (count + 1 if self.spans in ("newer", "random") else 0)
                rollout.version_spans.append(wire.VersionSpan(start=start, version=version))


def lying(name: str, seed: int) -> type[worker.WorkerProcess]:
    """The worker's class, lying."""
    source = random.Random(seed)
    if name.startswith(SEARCHED):
        Searched.source = random.Random(name)
        return Searched

    class Lying(worker.WorkerProcess):
        async def _send(self, batch: wire.Deliveries) -> None:
            for delivery in batch.items:
                LIES[name](delivery, source)
            await super()._send(batch)

    class Idle(worker.WorkerProcess):
        async def _send(self, batch: wire.Deliveries) -> None:
            for delivery in batch.items:
                if name == "fails its leases":
                    await self._fail_lease(delivery.lease_id, "engine_failed", "so it says")

    return Idle if name in IDLE else Lying


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ticket")
    parser.add_argument("lie", help=f"one of {[*LIES, *IDLE]}, or '{SEARCHED}N'")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    joining.WorkerProcess = lying(options.lie, options.seed)  # type: ignore[attr-defined]
    joining.run_worker(options.ticket, options.state, worker.WorkerOptions(relays=False))


if __name__ == "__main__":
    main()
