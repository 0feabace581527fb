"""What a head keeps in memory does not grow with the length of its run."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from echo2.head.decide import events as ev
from echo2.head.ledger import metrics
from echo2.head.serve import reading
from echo2.transport import wire_pb2 as wire
from echo2.weights.broadcast import origin, serving
from head_cases import LEARNER, OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END

RIGHT = [5, 7, END]
#: So often something happens until what is bounded is at its bound, and then as often again.
TIMES = 25
#: What is kept of each machine that ever came, here with a ticket of its own: its bill, and that it may come.
OF_EACH_MACHINE = {
    "head.books.costs.machines",
    "head.identity._members",
    "head.identity._members[]",
    "head.identity._of_ticket",
    "head.identity._of_ticket[]",
    "head.identity._own",
}


def kept(root: object) -> Counter[str]:
    """The items of all containers that `root` leads to through objects of echo2, by the place of the container."""
    # By their addresses, and kept: what another thread lets go meanwhile would give its address to something new.
    seen, waiting, found = dict[int, object](), deque([("head", root)]), Counter[str]()
    while waiting:
        place, one = waiting.popleft()
        if id(one) in seen or isinstance(one, type):
            continue
        seen[id(one)] = one
        if isinstance(one, dict | list | tuple | set | frozenset | deque):
            found[place] += len(one)
            items = [*one, *one.values()] if isinstance(one, dict) else one
            waiting += [(f"{place}[]", item) for item in items]
        elif type(one).__module__.startswith(("echo2.", "asyncio.queues")):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            own = {**getattr(one, "__dict__", {}), **{name: getattr(one, name, None) for name in slots}}
            waiting += [(f"{place}.{name}", value) for name, value in own.items()]
    return found


async def step(one: OpenHead, number: int) -> None:
    """Train a step, with everything that belongs to it. Its worker comes for it and goes away."""
    async with one.attending(version=number) as leases:
        await until(lambda: leases)
        await one.deliver(delivery(leases[0], [sample(RIGHT, number)] * 4))
        await until(lambda: len(one.fed) == number + 1)
    report = wire.StepReport(step=number, groups=[one.fed[-1].group.number], metrics_json="{}", epoch=one.epoch)
    await one.service.learner.report_step(LEARNER, report)
    await one.publish(number + 1)
    held = wire.CheckpointReport(version=number + 1, oldest_kept=number, versions=[number + 1], epoch=one.epoch)
    await one.service.learner.report_checkpoint(LEARNER, held)
    one.learn()


async def death(one: OpenHead, number: int, name: str = "w-1") -> None:
    """A worker comes with weights that nobody samples with any more, and dies."""
    async with one.attending(name, version=99):
        await until(lambda: one.head.planner.fleet.get(one.peer(name).peer_id))
    one.head.events.dispatch(ev.WorkerLeft(one.peer(name).peer_id, "silent for too long"))


async def newcomer(one: OpenHead, number: int) -> None:
    """A machine that never came before dies, and never comes back."""
    await death(one, number, f"w-{number}")


@pytest.mark.parametrize(("happens", "may_grow"), [(step, set()), (death, set()), (newcomer, OF_EACH_MACHINE)])
def test_a_heads_memory_does_not_grow(
    happens: Callable[[OpenHead, int], Coroutine[None, None, None]],
    may_grow: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = {reading: ("AHEAD", "KEPT"), metrics: ("KEPT_ROWS",)}
    for module, names in {**bounds, origin: ("FINISHED_MAX",)}.items():
        for name in names:
            monkeypatch.setattr(module, name, 4)
    monkeypatch.setattr(reading, "KEPT_PROMPT_TOKENS", 4 * reading.PROMPT_TOKENS)
    monkeypatch.setattr(serving, "RECENT_BYTES", 1000)
    found: list[Counter[str]] = []

    async def scenario() -> None:
        source = rows(tmp_path / "rows.jsonl", *(f"{number}=" for number in range(100, 200)))
        async with OpenHead(tmp_path, settings(source, run={"max_steps": 1000})) as one:
            for number in range(2 * TIMES):
                await happens(one, number)
                if number % TIMES == TIMES - 1:
                    await until(lambda: not (one.head.connections.workers or one.head.ending.background))
                    one.head.events._tell_alive()  # who was heard of last waits for the next half heartbeat
                    one.head.events._handle_waiting()
                    found.append(kept(one.head))

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
    # A row of metrics has columns for what happened to happen in its step: what grows by less than this, only varies.
    assert {place for place, num_more in (found[1] - found[0]).items() if num_more > TIMES // 2} == may_grow
