"""A worker's leases at the engine: each ends by itself, an abort frees its slots at once, a broken engine fails what is
in it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, Assignment, GroupRef, Lease, SamplingParams, Task
from echo2.engines.tokenizer import load_tokenizer
from echo2.worker.decide import messages as ev
from echo2.worker.sampling import LeaseSampler
from rollout_cases import assigned, hooked, snapshot_of, tiny_module, until

SNAPSHOT = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)


def assignment(lease_id: int, samples: int = 4, max_tokens: int = 50, **more: Any) -> Assignment:
    lease = Lease(lease_id, GroupRef(RUN_POLICY, "train", lease_id), 7, 1, samples, 4, None, 99.0, 30.0, lease_id)
    return assigned(lease, Task(1, "53=", {}), SamplingParams(max_tokens=max_tokens), **more)


class Bench:
    """A sampler with the fake engine, and what it told."""

    def __init__(self, before: Any = lambda step: None, slots: int = 8, **environments: Any) -> None:
        self.engine, _ = hooked("fake", before, SNAPSHOT, slots)
        self.events: list[ev.Event] = []
        self.errors: list[BaseException] = []
        self.sampler = LeaseSampler(self.engine, "w1", environments, self.events.append, self.errors.append)
        self.sampler.tokenizer = load_tokenizer(SNAPSHOT.files)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event.lease_id for event in self.events if isinstance(event, kind)]


def scenario(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story(), 60.0))


def test_the_ends_of_rollouts_are_reported_before_the_group() -> None:
    async def story() -> None:
        bench = Bench()
        bench.sampler.start(assignment(1))
        bench.sampler.start(assignment(2, samples=2))
        await until(lambda: len(bench.of(ev.GroupProduced)) == 2)
        assert sorted(bench.of(ev.RolloutEnded)) == [1] * 4 + [2] * 2
        groups = [event.result for event in bench.events if isinstance(event, ev.GroupProduced)]
        assert sum(group.generate_seconds for group in groups) <= bench.sampler.busy_seconds + 0.01
        assert bench.sampler.num_tokens == sum(group.num_tokens for group in groups)
        await until(lambda: bench.sampler.doing == "waiting")
        await bench.sampler.close()

    scenario(story)


def test_an_aborted_lease_leaves_the_engine_at_the_next_token() -> None:
    go_on, steps = threading.Event(), []

    def before(step: int) -> None:
        steps.append(step)
        if step == 2:
            go_on.wait(60)

    async def story() -> None:
        bench = Bench(before)
        bench.sampler.start(assignment(1, max_tokens=60))
        await until(lambda: 2 in steps)
        bench.sampler.abort(1)
        await until(lambda: bench.sampler.doing == "waiting")
        go_on.set()  # the engine has been told, and no step has been made since
        await until(lambda: bench.engine.free_slots == 8)
        assert len(steps) <= 3
        assert bench.of(ev.GroupProduced) == bench.of(ev.LeaseAbandoned) == []
        await bench.sampler.close()

    scenario(story)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError, IndexError])
def test_a_broken_engine_fails_what_is_in_it_and_goes_on(kind: type[Exception]) -> None:
    def out_of_memory(step: int) -> None:
        if step == 1:
            raise kind("CUDA out of memory")

    async def story() -> None:
        bench = Bench(out_of_memory)
        bench.sampler.start(assignment(1))
        await until(lambda: bool(bench.of(ev.LeaseAbandoned)))
        (failed,) = [event for event in bench.events if isinstance(event, ev.LeaseAbandoned)]
        assert (failed.failure, "CUDA out of memory" in failed.detail) == ("engine_failed", True)
        bench.sampler.start(assignment(2))
        await until(lambda: bench.of(ev.GroupProduced) == [2])
        assert bench.errors == []
        await bench.sampler.close()

    scenario(story)


def test_an_environment_that_this_worker_does_not_run_fails_its_lease() -> None:
    async def story() -> None:
        bench = Bench()
        bench.sampler.start(assignment(1, environment="chess.py:Chess"))
        await until(lambda: bench.of(ev.LeaseAbandoned) == [1])
        await bench.sampler.close()

    scenario(story)


def test_a_user_error_ends_the_worker() -> None:
    async def story() -> None:
        bench = Bench()
        await bench.sampler.close()
        bench.sampler.start(assignment(1))
        await until(lambda: bool(bench.errors))
        assert isinstance(bench.errors[0], UserError)

    scenario(story)


def test_closing_starts_nothing_more() -> None:
    """The slots of what is aborted would go to leases that wait."""
    go_on, steps = threading.Event(), []

    def before(step: int) -> None:
        steps.append(step)
        if step == 1:
            go_on.wait(60)

    async def story() -> None:
        bench = Bench(before)
        waiting = [assignment(2)]
        bench.sampler._dispatch = lambda event: bench.sampler.start(waiting.pop()) if waiting else None
        bench.sampler.start(assignment(1))
        await until(lambda: 1 in steps)
        closing = asyncio.ensure_future(bench.sampler.close())
        asyncio.get_running_loop().call_soon(go_on.set)  # no rollout ends before the close has begun
        await closing
        await until(lambda: bench.sampler.doing == "waiting")
        assert bench.errors == []

    scenario(story)


def test_a_unit_goes_on_when_one_of_its_leases_is_aborted_before_the_start() -> None:
    async def story() -> None:
        bench = Bench()
        bench.sampler.start_unit([assignment(1), assignment(2)])
        bench.sampler.abort(1)
        await until(lambda: bench.of(ev.GroupProduced) == [2])
        await bench.sampler.close()

    scenario(story)


def test_each_part_is_closed_whatever_becomes_of_the_others() -> None:
    closed: list[str] = []

    class Failing:
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    async def story() -> None:
        bench = Bench(one=Failing("one"), other=Failing("other"))
        with pytest.raises(OSError, match=r"one|other"):
            await bench.sampler.close()
        assert sorted(closed) == ["one", "other"]
        with pytest.raises(UserError, match="closed"):
            await bench.engine.update_weights(SNAPSHOT)

    scenario(story)
