"""New weights where there is no room for them beside the old ones: copied over these, between two tokens."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from echo2.core.errors import PeerError, UserError
from echo2.core.types import Snapshot, TensorBytes
from echo2.engines import adapter
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import OutOfMemoryError
from echo2.engines.torch_engine import TorchDecoder
from engine_builders import BUILDERS
from rollout_cases import Hooked, hooked, load, requests, run, snapshot_of, tiny_module

NORM = "model.norm.weight"


def tokens_of(completions: Any) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


def cramped(name: str, error: Exception, from_version: int = 1) -> TorchDecoder:
    """Has no room for a policy of this version or a later one, other than where one is already."""

    def build(snapshot: Snapshot, device: torch.device) -> Any:
        if snapshot.ref.version >= from_version and device.type != "meta":
            raise error
        return BUILDERS[name](snapshot, device)

    return TorchDecoder(build, "cpu")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_a_first_policy_that_does_not_fit_raises_out_of_memory(error: Exception) -> None:
    engine = DecodeLoop(cramped("compact", error, from_version=0))
    with pytest.raises(OutOfMemoryError, match="no room"):
        load(engine, snapshot_of(tiny_module("qwen3"), 0))
    assert engine.installed is None


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True}])
def test_weights_without_room_beside_the_old_ones_are_copied_over_them_between_two_tokens(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of an engine that had room, and what runs is held up for no longer than it says."""
    monkeypatch.setattr(adapter, "PACK_ITEMS", 1)
    old, new = (snapshot_of(tiny_module("qwen3", seed=seed, **changes), seed) for seed in (0, 1))
    asked, found, pauses = requests(0, samples=8, max_tokens=40), [], []
    for decoder in (cramped(name, MemoryError()), TorchDecoder(BUILDERS[name], "cpu")):
        decoder.load(old)
        engine = DecodeLoop(Hooked(decoder, lambda step, to=decoder: step != 6 or pauses.append(to.load(new))))  # type: ignore[misc]
        found.append(tokens_of(run(engine, asked)))
        assert engine.installed == new.ref
    assert found[0] == found[1]
    assert pauses[0] > 0.0 == pauses[1]


def test_swaps_in_place_come_through_while_tokens_are_sampled() -> None:
    decoder = cramped("compact", MemoryError())
    engine = DecodeLoop(decoder)
    load(engine, snapshot_of(tiny_module("qwen3"), 0))

    async def swap_often() -> Any:
        futures = [engine.submit(one) for one in requests(0, samples=8, max_tokens=58)]
        pauses = [await engine.update_weights(snapshot_of(tiny_module("qwen3", seed=seed), seed)) for seed in (1, 2, 3)]
        return pauses, await asyncio.gather(*futures)

    pauses, found = asyncio.run(swap_often())
    assert all(pause > 0.0 for pause in pauses)
    for completion in found:
        versions = [version for _, version in completion.version_spans]
        assert versions == sorted(set(versions))
    assert engine.installed is not None
    assert engine.installed.version == 3


@pytest.mark.parametrize("name", [*BUILDERS, "fake"])
@pytest.mark.parametrize("in_turns", [False, True])
def test_requests_that_name_a_version_end_with_its_weights_while_others_begin_with_newer(
    name: str, in_turns: bool
) -> None:
    """Beside each other, as alone: the tokens are those of an engine that never swapped."""
    weights = [snapshot_of(tiny_module("qwen3", seed=seed), seed) for seed in range(3)]
    asked = [replace(one, in_turns=in_turns) for one in requests(0, samples=4, max_tokens=40)]
    alone = [run(engine_with(name, one), asked) for one in weights]

    async def beside() -> list[list[Any]]:
        found, reached = [], asyncio.Event()
        loop = asyncio.get_running_loop()
        engine, _ = hooked(name, lambda step: step != 6 or loop.call_soon_threadsafe(reached.set), weights[0], 8)

        def submitted(version: int) -> list[asyncio.Future[Any]]:
            return [engine.submit(replace(one, version=version)) for one in asked]

        first = submitted(0)
        await reached.wait()
        assert await engine.update_weights(weights[1]) >= 0.0
        found += [submitted(1), submitted(0)]  # a later turn of what began before
        found = [await asyncio.gather(*futures) for futures in (first, *found)]
        await engine.update_weights(weights[2])
        (failure,) = {await future for future in submitted(0)}
        assert failure.reason == "snapshot_gone"
        found += [await asyncio.gather(*submitted(version)) for version in (1, 2)]
        await engine.sleep()
        await engine.wake_up()
        return found

    found = asyncio.run(beside())
    assert [[one.version_spans for one in part] for part in found] == [[((0, at),)] * 4 for at in (0, 1, 0, 1, 2)]
    assert [tokens_of(part) for part in found] == [tokens_of(alone[at]) for at in (0, 1, 0, 1, 2)]


def test_without_room_for_two_versions_the_old_one_stays_until_nothing_needs_it() -> None:
    old, new = (snapshot_of(tiny_module("qwen3", seed=seed), seed) for seed in (0, 1))
    asked = [replace(one, version=0) for one in requests(0, samples=4, max_tokens=40)]

    async def cramped_one() -> Any:
        engine = DecodeLoop(cramped("compact", MemoryError()))
        await engine.update_weights(old)
        futures = [engine.submit(one) for one in asked]
        with pytest.raises(OutOfMemoryError, match="beside those that rollouts under way began with"):
            await engine.update_weights(new)
        found = await asyncio.gather(*futures)
        await engine.update_weights(new)
        return found, engine.installed

    found, installed = asyncio.run(cramped_one())
    assert installed == new.ref
    assert tokens_of(found) == tokens_of(run(engine_with("compact", old), requests(0, samples=4, max_tokens=40)))


@pytest.mark.parametrize("names_version", [False, True])
def test_rollouts_that_keep_their_weights_cost_a_second_set_from_the_first_swap_on(names_version: bool) -> None:
    """As the forecast of a stranger's memory has it (`learner/core/fitting.py: worker_need`)."""
    engine = DecodeLoop(TorchDecoder(BUILDERS["compact"], "cpu"))
    load(engine, snapshot_of(tiny_module("qwen3"), 0))
    held = [num_bytes_held(engine)]
    for version in (0, 1):
        asked = [replace(one, version=version) if names_version else one for one in requests(0)]
        run(engine, asked)
        load(engine, snapshot_of(tiny_module("qwen3", seed=1), version + 1))
        held.append(num_bytes_held(engine))
    assert held == [held[0], *(2 * [(1 + names_version) * held[0]])]


def num_bytes_held(engine: DecodeLoop) -> int:
    """Of weights, each tensor once."""
    gc.collect()
    decoders: list[Any] = engine._decoders()
    models = [one[1] for decoder in decoders for one in (decoder._current, decoder._before) if one]
    tensors = [tensor for model in models for several in model.places.values() for tensor in several]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def engine_with(name: str, snapshot: Snapshot) -> DecodeLoop:
    engine, _ = hooked(name, lambda step: None, snapshot)
    return engine


class TornBytes(TensorBytes):
    """Can be read as often as `reads` says."""

    reads = 1

    def read(self, start: int, stop: int) -> memoryview:
        type(self).reads -= 1
        if self.reads < 0:
            raise PeerError("missing", "the disk is gone")
        return super().read(start, stop)


def test_an_aborted_copy_leaves_no_weights_until_others_arrive() -> None:
    decoder = cramped("compact", MemoryError())
    engine = DecodeLoop(decoder)
    old, new, newer = (snapshot_of(tiny_module("qwen3", seed=seed), seed) for seed in (0, 1, 0))
    load(engine, old)
    before = run(engine, requests(0))
    last = new.tensors[NORM]
    torn = replace(new, tensors={**new.tensors, NORM: TornBytes(last.dtype, last.shape, last.data)})
    with pytest.raises(PeerError, match="disk is gone"):
        load(engine, torn)
    assert engine.installed is None
    with pytest.raises(UserError, match="no weights"):
        run(engine, requests(0))
    load(engine, newer)
    assert tokens_of(run(engine, requests(0))) == tokens_of(before)
