"""Learner and workers that take turns on one card: whatever the order of their acts and whoever dies, the learner is
never on it beside a worker, and the run goes on to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from echo2.core.decide.card import QUIET_SECONDS, Act, learner_act, wants_card, worker_act

STEPS, GROUPS = 4, 3
#: Acts of each process after which a run must be over, whatever came before: it takes a dozen a step.
ROUNDS = 40 * STEPS


@dataclass
class Process:
    """`on_card`: its tensors are there."""

    has_wish: bool = False
    has_card: bool = False
    on_card: bool = False

    def die(self) -> None:
        self.has_wish = self.has_card = self.on_card = False


@dataclass
class Run:
    """A run with the system's locks. Groups of steps up to `version + staleness` may be sampled."""

    staleness: int
    workers: list[Process]
    learner: Process = field(default_factory=Process)
    version: int = 0
    sampled: int = 0
    is_starting: bool = True
    quiet: float = 0.0

    def learner_acts(self) -> None:
        it, has_all = self.learner, self.sampled >= (self.version + 1) * GROUPS
        if it.on_card and self.is_starting:
            self.is_starting = False
        elif it.on_card and has_all and self.version < STEPS:
            self.version, self.quiet = self.version + 1, 0.0
        else:
            self.quiet += QUIET_SECONDS / 2
            wants = self.is_starting or wants_card(has_all, it.has_card, self.quiet, self.staleness)
            match learner_act(wants and self.version < STEPS, it.has_wish, it.has_card):
                case Act.WISH:
                    it.has_wish = True
                case Act.TAKE if not any(one.has_card for one in self.workers):
                    it.has_card = it.on_card = True
                case Act.LEAVE:
                    it.die()

    def worker_acts(self, it: Process) -> None:
        most = GROUPS * min(STEPS, self.version + self.staleness + 1)
        if it.on_card and not self.learner.has_wish and self.sampled < most:
            self.sampled += 1
            return
        match worker_act(self.learner.has_wish, it.has_card):
            case Act.TAKE if not self.learner.has_card:
                it.has_card = True
                it.on_card = not self.learner.has_wish
            case Act.LEAVE:
                it.die()

    def step(self, number: int) -> None:
        if number == 0:
            self.learner_acts()
        else:
            self.worker_acts(self.workers[(number - 1) % len(self.workers)])
        on_card = [it.on_card for it in self.workers]
        assert not (self.learner.on_card and any(on_card))
        assert all(it.has_card for it in [self.learner, *self.workers] if it.on_card)

    def kill(self, number: int) -> None:
        if number == 0:
            self.learner.die()
            self.is_starting = True
        else:
            self.workers[(number - 1) % len(self.workers)].die()


@given(
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["acts", "acts", "acts", "dies"])), max_size=120),
    st.lists(st.permutations(range(4)), min_size=1, max_size=8),
)
def test_no_process_shares_the_card_with_the_learner_or_waits_forever(
    staleness: int, num_workers: int, history: list[tuple[int, str]], orders: list[list[int]]
) -> None:
    run = Run(staleness, [Process() for _ in range(num_workers)])
    for number, what in history:
        run.kill(number) if what == "dies" else run.step(number)
    for round_number in range(ROUNDS):
        for number in orders[round_number % len(orders)]:
            run.step(number)
    assert run.version == STEPS
