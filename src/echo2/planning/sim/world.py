"""Time in a simulation: a priority queue of (time, sequence, actor, event) and a virtual clock.

Events at the same time happen in the order of posting. An actor that dies and restarts has a new *life*; events on
their way to the old life are dropped, as a kernel drops packets for a closed socket.

Links between the head and all other parties, and between workers, have latency, bandwidth, loss, and cuts. There are
two kinds of exchange, as in `transport/`. A *call* has a request and an answer, and either may be lost: the caller gets
`TimedOut` and cannot know which. A *stream* of orders arrives in order until it breaks; then both ends notice after a
while, at different times. The messages are here, too.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from echo2.core.decide.machine import Event
from echo2.core.types import Attachment, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev

#: Events after which a simulation counts as endless.
MAX_EVENTS = 500_000_000
#: Seconds until a call without an answer counts as failed, unless its link is still receiving then: its answer may be
#: behind what comes.
CALL_SECONDS = 5.0
#: Seconds until either end of a dead connection notices (keepalive).
KEEPALIVE_SECONDS = 4.0
#: Bytes of a message that carries no payload.
SMALL_BYTES = 500
HEAD = "head"
LEARNER = "learner"
#: Bytes of a rollout: 4 that represent its tokens, and the number of its sample.
_ROLLOUT_BYTES = 8


class Kill(Event):
    """kill -9."""


class Start(Event):
    """The process starts (again), with its durable state only."""


class Actor(ABC):
    """A process: up or down, with a name and a number of lives so far."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.up = False
        world.actors[name] = self

    def post(self, delay_seconds: float, event: object) -> None:
        """Schedule an event for this actor; it is dropped if the actor dies before."""
        self.world.post(delay_seconds, self.name, event)

    @abstractmethod
    def handle(self, event: object) -> None:
        """Handle one event at `world.now`."""

    def starts(self) -> None:
        """Begin a new life. Events for the old life are dropped."""
        self.life += 1
        self.up = True

    def dies(self) -> None:
        """End this life. Events for it are dropped."""
        self.life += 1
        self.up = False


class SimWorld:
    """The clock, the queue, the actors, and the only source of randomness. `check` is called with each state machine of
    the deciders after each of the machine's events.
    """

    def __init__(self, seed: int, check: Callable[[object], None] = lambda machine: None) -> None:
        self.now = 0.0
        self.check = check
        self.rng = random.Random(seed)
        self.actors: dict[str, Actor] = {}
        self.num_events = 0
        self._queue: list[tuple[float, int, str, int | None, object]] = []
        self._sequence = 0

    def post(self, delay_seconds: float, actor: str, event: object) -> None:
        """Schedule `event` for the current life of `actor` after a delay (never before now)."""
        self._push(delay_seconds, actor, self.actors[actor].life, event)

    def post_always(self, delay_seconds: float, actor: str, event: object) -> None:
        """Likewise, for whatever life the actor is in by then: a fault that strikes the machine."""
        self._push(delay_seconds, actor, None, event)

    def _push(self, delay_seconds: float, actor: str, life: int | None, event: object) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_seconds), self._sequence, actor, life, event))

    def step(self) -> bool:
        """Handle the next event. Return False if none is left, or after `MAX_EVENTS`."""
        if not self._queue or self.num_events >= MAX_EVENTS:
            return False
        self.now, _, name, life, event = heapq.heappop(self._queue)
        self.num_events += 1
        actor = self.actors[name]
        if life in (None, actor.life) and actor.up != isinstance(event, Start):
            if isinstance(event, Start):
                actor.starts()
            actor.handle(event)
        return True

    @property
    def next_at(self) -> float:
        """Time of the next event, in seconds; infinity if none is left."""
        return self._queue[0][0] if self._queue else float("inf")

    def soon(self, mean_seconds: float) -> float:
        return self.rng.expovariate(1.0 / mean_seconds)

    def around(self, median_seconds: float, spread: float) -> float:
        """Return a log-normal duration; `spread` is the standard deviation of its logarithm."""
        return median_seconds * self.rng.lognormvariate(0.0, spread)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def stalls(self, share: float, seconds: float) -> float:
        """Return how long an answer is late that stalls so often, each time for so long."""
        late = 0.0
        while self.chance(share):
            late += seconds
        return late


@dataclass(slots=True)
class SimLink:
    """One party's link to the head. `loss`: probability that a message breaks it."""

    latency_seconds: float
    bytes_per_second: float
    loss: float = 0.0
    cut_until: float = 0.0
    up_free_at: float = 0.0
    down_free_at: float = 0.0


class HeadCall(Event):
    """A call arrives at the head."""

    sender: str
    sender_life: int
    number: int
    body: object


class Answered(Event):
    """A call's answer arrives at the caller."""

    number: int
    value: object


class TimedOut(Event):
    """A call had no answer; it is unknown whether the call arrived."""

    number: int


class Ordered(Event):
    """An item of the head's stream to one party arrives."""

    epoch: int
    body: object


class StreamBroke(Event):
    """One end notices that the stream `epoch` of `party` is dead."""

    party: str
    epoch: int


class PeerAsked(Event):
    """A worker's request to another worker."""

    sender: str
    body: object


class PeerGave(Event):
    """A worker's message to another worker: the answer to `body`, or an unsolicited one."""

    sender: str
    body: object
    value: object


class PeerBroke(Event):
    """The connection to this worker broke."""

    sender: str


class Hello(Event):
    """A worker opens its stream of orders."""

    epoch: int
    event: ev.WorkerJoined


class Take(Event):
    """The learner opens the stream of a step's groups."""

    epoch: int
    step: int


class Publish(Event):
    """The learner's snapshot; `digest` represents its weights."""

    ref: SnapshotRef
    digest: bytes


class Welcome(Event):
    """The answer to a learner that joined."""

    lineage: int
    published: tuple[int, ...]


class Check(Event):
    """To a machine of the owner: check a group that this worker delivered."""

    command: do.CheckGroup
    sampled_by: str


class Fed(Event):
    """One group for the learner; `data`: its rollouts as delivered."""

    number: int
    data: bytes


class StepDone(Event):
    """The step has all its groups."""

    step: int
    num_groups: int
    publish_every: int


class Refused(Event):
    """The head's refusal of a call, with the reason."""

    reason: str


class SampledBatch(Attachment):
    """A group's rollouts, and how many groups were sampled together (including this one)."""

    __slots__ = ("num_groups",)

    def __init__(self, data: bytes, num_groups: int) -> None:
        super().__init__(data)
        self.num_groups = num_groups


def of_samples(digest: bytes, samples: Iterable[int]) -> bytes:
    """The bytes of these rollouts of a lease, whose tokens the digest represents."""
    return b"".join(digest[:4] + sample.to_bytes(4, "big") for sample in samples)


def rollouts_in(data: bytes) -> list[bytes]:
    """The rollouts of a group."""
    return [data[at : at + _ROLLOUT_BYTES] for at in range(0, len(data), _ROLLOUT_BYTES)]


class SimNetwork:
    """All links, by the name of the party at their far end."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.links: dict[str, SimLink] = {}
        self.askers: dict[str, dict[str, None]] = {}
        self._num_calls = 0
        self._dead: set[tuple[str, int]] = set()

    def call(self, sender: str, body: object, num_bytes: int = SMALL_BYTES) -> int:
        """Ask the head; the number comes back in `Answered` or `TimedOut`."""
        self._num_calls += 1
        number = self._num_calls
        self.world.post(CALL_SECONDS + num_bytes / self.links[sender].bytes_per_second, sender, TimedOut(number))
        if not self.world.chance(self.links[sender].loss):
            request = HeadCall(sender, self.world.actors[sender].life, number, body)
            self.world.post(self._up_seconds(sender, num_bytes), HEAD, request)
        return number

    def receives_for(self, party: str) -> float:
        """Return the seconds until all has arrived that is on its way to this party; 0: its link is free."""
        link = self.links[party]
        busy = link.down_free_at - self.world.now
        return busy + 2 * link.latency_seconds if busy > 0 else 0.0

    def answer(self, request: HeadCall, value: object, num_bytes: int = SMALL_BYTES) -> None:
        """Send a call's answer; it may be lost."""
        if not self.world.chance(self.links[request.sender].loss):
            self.world.post(
                self._down_seconds(request.sender, num_bytes), request.sender, Answered(request.number, value)
            )

    def order(self, party: str, epoch: int, body: object) -> None:
        """Send one item of the head's stream to `party`; no item arrives after a lost one."""
        if (party, epoch) in self._dead:
            return
        if self.world.chance(self.links[party].loss):
            self.broke(party, epoch)
        else:
            self.world.post(self._down_seconds(party, SMALL_BYTES), party, Ordered(epoch, body))

    def broke(self, party: str, epoch: int) -> None:
        """Break a stream; each end notices in its own time."""
        self._dead.add((party, epoch))
        for end in (party, HEAD):
            self.world.post(self.world.rng.uniform(0.1, 1.0) * KEEPALIVE_SECONDS, end, StreamBroke(party, epoch))

    def reset(self, party: str, epoch: int) -> None:
        """Let the far end report that it does not know this stream (any more)."""
        self.world.post(self.links[party].latency_seconds, HEAD, StreamBroke(party, epoch))

    def cut(self, party: str, epoch: int, seconds: float) -> None:
        """Cut a link for `seconds`. Messages sent meanwhile arrive afterwards, if a receiver still waits for them."""
        self.links[party].cut_until = self.world.now + seconds
        if seconds > KEEPALIVE_SECONDS:
            self.broke(party, epoch)

    def ask_peer(self, sender: str, target: str, body: object) -> None:
        """Send a worker's request to another. A lost message breaks their connection; a dead worker never answers."""
        self.askers.setdefault(target, {})[sender] = None
        if self._is_lost(sender, target):
            self._peer_broke(sender, target)
        else:
            seconds = self._up_seconds(sender, SMALL_BYTES) + self.links[target].latency_seconds
            self.world.post(seconds, target, PeerAsked(sender, body))

    def give_peer(self, sender: str, asker: str, body: object, value: object, num_bytes: int) -> None:
        """Send a worker's answer to the asker, through both links."""
        if self._is_lost(sender, asker):
            self._peer_broke(asker, sender)
        else:
            seconds = self._up_seconds(sender, num_bytes + SMALL_BYTES)
            seconds += self._down_seconds(asker, num_bytes + SMALL_BYTES)
            self.world.post(seconds, asker, PeerGave(sender, body, value))

    def peer_died(self, name: str) -> None:
        """Break the connections of all workers that asked this one; each notices in its own time."""
        for asker in self.askers.pop(name, {}):
            self._peer_broke(asker, name)

    def _peer_broke(self, asker: str, peer: str) -> None:
        self.world.post(self.world.rng.uniform(0.1, 1.0) * KEEPALIVE_SECONDS, asker, PeerBroke(peer))

    def _is_lost(self, one: str, other: str) -> bool:
        return self.world.chance(self.links[one].loss) or self.world.chance(self.links[other].loss)

    def _up_seconds(self, party: str, num_bytes: int) -> float:
        """Return the seconds of an upload. Calls run in parallel, so jitter may reorder them."""
        link, now = self.links[party], self.world.now
        link.up_free_at = max(now, link.up_free_at, link.cut_until) + num_bytes / link.bytes_per_second
        return link.up_free_at - now + link.latency_seconds * self.world.rng.uniform(1.0, 2.0)

    def _down_seconds(self, party: str, num_bytes: int) -> float:
        """Return the seconds of a download. A stream's items, and answers between them, arrive in order."""
        link, now = self.links[party], self.world.now
        link.down_free_at = max(now, link.down_free_at, link.cut_until) + num_bytes / link.bytes_per_second
        return link.down_free_at - now + link.latency_seconds
