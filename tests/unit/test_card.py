"""Taking turns on one card: locks between processes, tensors that are put away and come back as they were, and engines
that sleep in the middle of rollouts. On a CPU the machine's memory is both places."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo2.core.child import PACKAGE_ROOT
from echo2.core.file_lock import FileLock
from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef
from echo2.engines.compact import build_compact
from echo2.engines.compact_cache import CompactCache
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, SampleRequest
from echo2.engines.hf_engine import build_transformers
from echo2.engines.parking import Parked
from echo2.engines.torch_engine import BuildModel, TorchDecoder
from echo2.learner.core.losses import make_loss
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.grpo.loop import GrpoLoss
from learner_cases import data_of, random_group, tiny_module
from rollout_cases import tiny_module as family_module

CPU = torch.device("cpu")
HOLD = """
import sys
from pathlib import Path
from echo2.core.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]))
print(lock.take(shared=sys.argv[2] == "shared"), flush=True)
sys.stdin.read()
"""


def holder(path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path), how]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={"PYTHONPATH": PACKAGE_ROOT}, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_a_lock_is_free_when_its_holder_is_killed_and_workers_share_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "card" / "card.lock")
    with holder(tmp_path / "card" / "card.lock", "shared") as other:
        assert lock.take(shared=True)
        assert not lock.is_taken()
        lock.take(shared=True)
        assert not lock.take()
        assert not lock.is_held
        other.kill()
        other.wait()
        assert lock.take()
        lock.give_back()
    with holder(tmp_path / "card" / "card.lock", "alone") as other:
        assert lock.is_taken()
        assert not lock.take(shared=True)
        other.kill()
        other.wait()
        assert not lock.is_taken()
    lock.close()


def held_bytes(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_tensors_in_many_objects_with_slots_are_all_found() -> None:
    """A list of an object's slots, which lives for a moment, had the address of the one before, and passed for seen."""

    class Holder:
        __slots__ = ("tensor",)

        def __init__(self) -> None:
            self.tensor = torch.ones(3)

    holders = [Holder() for _ in range(100)]
    parked = Parked(CPU, holders)
    assert held_bytes(*(one.tensor for one in holders)) == 0
    parked.fetch()


def test_tensors_return_unchanged_with_all_references_to_them() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 32))
    weight.grad = torch.randn(64, 32)
    other, view = torch.randn(7), weight.detach()[3:5]
    wanted = weight.detach().clone(), weight.grad.clone(), other.clone()
    parked = Parked(CPU, {"a": [weight, view]}, {"b": (other, None, "name", len)})
    assert held_bytes(weight, weight.grad, other) == 0
    assert parked.num_bytes == 4 * (2 * 64 * 32 + 7)
    parked.fetch()
    assert torch.equal(weight, wanted[0])
    assert torch.equal(weight.grad, wanted[1])
    assert torch.equal(other, wanted[2])
    weight.data[3, 0] = 5.0
    assert view[0, 0] == 5.0


def test_tensors_stay_where_they_are_if_the_machine_has_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(9) for _ in range(3)]
    wanted, made, room = [one.clone() for one in tensors], torch.UntypedStorage, iter(range(2))

    def storage(num_bytes: int) -> Any:
        if next(room, None) is None:
            raise MemoryError("no room")
        return made(num_bytes)

    monkeypatch.setattr(torch, "UntypedStorage", storage)
    with pytest.raises(MemoryError):
        Parked(CPU, tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))


def trained(turns: bool, offloaded: str = "", in_8_bits: bool = False) -> dict[str, Tensor]:
    """Weights after three steps, between which the tensors are put away or not."""
    policy, rng = Policy(tiny_module(hidden=64, vocab=128), {"config.json": b"{}"}, CPU), random.Random(1)
    trainer = Trainer(256)
    trainer.add("it", policy, in_8_bits=in_8_bits, offloaded=offloaded)
    for step in range(3):
        trainer.forward_backward("it", data_of(random_group(rng, step)), GrpoLoss(make_loss("dppo"), 0.0))
        trainer.optim_step("it", AdamParams(1e-2))
        if turns:
            parked = Parked(CPU, trainer.tensors())
            assert held_bytes(*policy.module.parameters()) == 0
            optimizer = trainer._policies["it"].optimizer
            moments = [each for state in optimizer.state.values() for each in state.values()] if optimizer else []
            assert moments
            assert held_bytes(*(each for each in moments if isinstance(each, Tensor))) == 0
            assert parked.num_bytes >= 3 * held_bytes(*policy.module.parameters())
            parked.fetch()
    return {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}


@pytest.mark.parametrize("offloaded", ["", "moments"])
def test_a_learner_that_puts_its_tensors_away_trains_to_the_same_bits(offloaded: str) -> None:
    with_turns, without = trained(True, offloaded), trained(False, offloaded)
    assert all(torch.equal(with_turns[name], without[name]) for name in without)


def test_moments_of_8_bits_come_back_too() -> None:
    pytest.importorskip("bitsandbytes")
    with_turns, without = trained(True, in_8_bits=True), trained(False, in_8_bits=True)
    assert all(torch.equal(with_turns[name], without[name]) for name in without)


def snapshot(version: int, seed: int) -> Snapshot:
    module: Any = family_module("qwen3", seed, eos_token_id=None)  # rollouts of 24 tokens
    files = {"config.json": module.config.to_json_string(use_diff=False).encode()}
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), Policy(module, files, CPU).tensors(), files)


class Watched(TorchDecoder):
    """Calls `on_step` after each token."""

    def __init__(self, build: BuildModel) -> None:
        super().__init__(build, "cpu")
        self.num_steps = 0
        self.on_step: dict[int, Any] = {}

    def step(self, added: Any, dropped: Any) -> Any:
        ended = super().step(added, dropped)
        self.num_steps += 1
        if (call := self.on_step.get(self.num_steps)) is not None:
            call()
        return ended

    def tensors(self) -> list[Tensor]:
        assert self._current is not None
        found = [part for places in self._current[1].places.values() for part in places]  # type: ignore[attr-defined]
        cache: Any = self._cache
        return [*found, cache.kv if isinstance(cache, CompactCache) else cache.past.layers[0].keys]


def until_asleep(engine: DecodeLoop) -> None:
    """Wait until the engine was asked to sleep: on a slow machine all tokens could be there before."""
    while not engine._is_asleep:
        pass


def requests(count: int) -> list[SampleRequest]:
    rng = random.Random(0)
    params = SamplingParams(temperature=1.0, max_tokens=24)
    return [SampleRequest(array("i", [rng.randrange(2, 20) for _ in range(5)]), 7, at, params) for at in range(count)]


@pytest.mark.parametrize("build", [build_compact, build_transformers])
@pytest.mark.parametrize("swaps", [False, True])
def test_an_engine_sleeps_in_the_middle_of_rollouts_and_goes_on(build: BuildModel, swaps: bool) -> None:
    """`swaps`: it has other weights when it goes on; rows keep what they read, as at any swap."""

    async def sampled(sleeps: bool) -> list[Completion]:
        decoder = Watched(build)
        engine, loop, reached = DecodeLoop(decoder), asyncio.get_running_loop(), asyncio.Event()
        stops = asyncio.Event()

        def stop() -> None:
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(stops.wait(), loop).result()

        decoder.on_step[9] = stop
        try:
            await engine.update_weights(snapshot(0, 1))
            running = [asyncio.ensure_future(each) for each in engine.submit_together(requests(4))]
            await reached.wait()
            if sleeps:
                sleeping = asyncio.create_task(engine.sleep())
                await asyncio.to_thread(until_asleep, engine)
                stops.set()
                await sleeping
                assert held_bytes(*decoder.tensors()) == 0
                later = engine.submit(requests(5)[4])
                await engine.sleep()
                await engine.wake_up()
                await engine.wake_up()
            else:
                later = engine.submit(requests(5)[4])
            if swaps:
                await engine.update_weights(snapshot(1, 2))
            stops.set()
            return [one for one in await asyncio.gather(*running, later) if isinstance(one, Completion)]
        finally:
            stops.set()
            await engine.close()

    slept = asyncio.run(sampled(True))
    assert len(slept) == 5
    if not swaps:
        assert slept == asyncio.run(sampled(False))


def test_an_engine_that_cannot_put_its_tensors_away_goes_on() -> None:
    class Full(Watched):
        def sleep(self) -> None:
            raise MemoryError("no room")

    async def sampled() -> None:
        engine = DecodeLoop(Full(build_compact))
        await engine.update_weights(snapshot(0, 1))
        for _ in range(2):
            with pytest.raises(MemoryError):
                await engine.sleep()
        assert isinstance(await engine.submit(requests(1)[0]), Completion)
        await engine.close()

    asyncio.run(sampled())


@pytest.mark.parametrize("has_rows", [False, True])
def test_an_engine_that_sleeps_can_be_closed(has_rows: bool) -> None:
    async def closed() -> None:
        engine = DecodeLoop(TorchDecoder(build_compact, "cpu"))
        await engine.update_weights(snapshot(0, 1))
        await engine.sleep()
        left = engine.submit_together(requests(2)) if has_rows else []
        await asyncio.sleep(0)
        await engine.close()
        assert all(future.cancelled() for future in left)

    asyncio.run(closed())
