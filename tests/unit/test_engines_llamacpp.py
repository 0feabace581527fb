"""llama.cpp's own library samples what `compact` reads: forms, swaps, adapters, cells that run out, models refused."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, Assignment, GroupRef, Lease, RolloutGroup, SamplingParams, SnapshotRef
from echo2.engines import llamacpp
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, PrefillRequest
from echo2.engines.torch_engine import TorchDecoder
from echo2.rollouts.generate import sample_group
from echo2.rollouts.verification import Verdict, check_group
from rollout_cases import Hooked, load, plain_tokenizer, requests, run, snapshot_of, tiny_module

pytest.importorskip("llama_cpp", reason="pip install 'echo2[llamacpp]'")
pytest.importorskip("gguf", reason="pip install 'echo2[llamacpp]'")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it

from echo2.engines.llamacpp import LlamaCppDecoder  # noqa: E402
from test_engines_adapter import PROMPT, adapted, base_of  # noqa: E402

FITS: dict[str, Any] = {"intermediate_size": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": False}),
    ("qwen2", {}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "rope_parameters": LLAMA3}),
]


def reader(*snapshots: Any) -> Any:
    """A machine of the owner that checks, and holds these."""
    decoder = TorchDecoder(build_compact, "cpu")
    engine = DecodeLoop(decoder)
    for snapshot in snapshots:
        if snapshot.base_model is None:
            decoder.load(snapshot)
        decoder._checks = True
    return engine


def distance(engine: Any, asked: Any, found: list[Completion], form: str) -> float:
    """Mean |reported - computed logprob|, nats."""
    pairs = [
        PrefillRequest(one.prompt_tokens, each.tokens, one.params, each.version_spans, form=form)
        for one, each in zip(asked, found, strict=True)
    ]
    prefills = asyncio.run(engine.prefill(engine.installed, pairs))
    said = torch.cat([torch.tensor(one.logprobs, dtype=torch.float64) for one in found])
    return float((said - torch.cat([torch.tensor(one.logprobs) for one in prefills])).abs().mean())


@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_the_form_that_is_sampled_is_the_one_that_compact_reads(family: str, changes: dict[str, Any]) -> None:
    snapshot = snapshot_of(tiny_module(family, **FITS, **changes))
    asked, checker = requests(0, samples=8, max_tokens=24), reader(snapshot)
    for form, other in (("q8_0", "q4_0"), ("q4_0", "q8_0")):
        engine = DecodeLoop(LlamaCppDecoder(form, "cpu", 8), 8)
        load(engine, snapshot)
        found = run(engine, asked)
        near = distance(checker, asked, found, form)
        assert near < 0.06
        assert distance(checker, asked, found, other) > 2 * near
        asyncio.run(engine.close())


def judged(engine: Any, checker: Any, form: str, ref: SnapshotRef) -> tuple[RolloutGroup, Verdict]:
    lease = Lease(1, GroupRef(RUN_POLICY, "train", 0), 0, 0, 8, 0, None, 60.0, 60.0, 5)
    asked = Assignment(lease, array("i", PROMPT), SamplingParams(max_tokens=24))
    group = asyncio.run(sample_group(engine, plain_tokenizer(), asked, "worker"))
    assert isinstance(group, RolloutGroup)
    return group, asyncio.run(check_group(checker, ref, asked, group, form=form))


def test_open_rows_continue_with_new_weights_and_the_check_replays_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few cells that the sequences move to more of them on the way, too."""
    monkeypatch.setattr(llamacpp, "FIRST_CELLS", 64)
    old, new = (snapshot_of(tiny_module("llama", seed=seed, **FITS), seed) for seed in (0, 1))
    decoder = LlamaCppDecoder("q8_0", "cpu", 8)
    decoder.load(old)
    engine = DecodeLoop(Hooked(decoder, lambda step: step != 6 or decoder.load(new)), 8)  # type: ignore[arg-type]
    checker = reader(old, new)
    group, verdict = judged(engine, checker, "q8_0", new.ref)
    assert {rollout.version_spans for rollout in group.rollouts} >= {((0, 0), (5, 1))}
    assert (verdict.fault, verdict.num_skipped) == ("", 0)
    asyncio.run(engine.close())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_adapter_is_over_the_rounded_base_model(family: str) -> None:
    module = tiny_module(family, **FITS)
    adapters = [adapted(module, version, seed=version)[1] for version in range(2)]
    decoder, reading = LlamaCppDecoder("q8_0", "cpu", 8), TorchDecoder(build_compact, "cpu")
    reading._checks = True
    for one in (decoder, reading):
        one.load(adapters[0], base_of(module))
    reading.load(adapters[1])
    engine = DecodeLoop(Hooked(decoder, lambda step: step != 6 or decoder.load(adapters[1])), 8)  # type: ignore[arg-type]
    group, verdict = judged(engine, DecodeLoop(reading), "q8_0", adapters[1].ref)
    assert {rollout.version_spans for rollout in group.rollouts} >= {((0, 0), (5, 1))}
    assert (verdict.fault, verdict.num_skipped) == ("", 0)
    asyncio.run(engine.close())


def test_aborted_rollouts_leave_their_sequences_to_others() -> None:
    engine = DecodeLoop(decoder := LlamaCppDecoder("q8_0", "cpu", 2), 2)
    load(engine, snapshot_of(tiny_module("qwen3", **FITS)))

    async def scenario() -> None:
        for _ in range(4):
            futures = [engine.submit(one) for one in requests(0, samples=4, max_tokens=50)]
            await asyncio.sleep(0)
            futures[0].cancel()
            await asyncio.gather(*futures[1:])
        await engine.close()

    asyncio.run(scenario())
    assert decoder._sequences is not None
    decoder._sequences._sweep()
    assert len(decoder._sequences._lengths) <= 2


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"intermediate_size": 48}, "rows of 48 items in model.layers.0.mlp.down_proj.weight"),
        ("qwen3", {"attention_bias": True}, "attention_bias in a qwen3 model"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope_type = 'llama3' in a qwen2 model"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_a_model_that_llama_cpp_has_no_place_for_is_refused(family: str, changes: dict[str, Any], said: str) -> None:
    engine = DecodeLoop(LlamaCppDecoder("q8_0", "cpu"))
    with pytest.raises(UserError, match=f"llamacpp does not support {said}.*--engine auto"):
        load(engine, snapshot_of(tiny_module(family, **(FITS | changes))))
    assert engine.installed is None


def test_an_engine_with_rounded_weights_checks_no_rollouts() -> None:
    engine: Any = DecodeLoop(LlamaCppDecoder("q8_0", "cpu"))
    load(engine, snapshot_of(tiny_module("qwen3", **FITS)))
    asked = requests(0)
    for form, said in (("", "cannot check rollouts: it holds rounded weights"), ("q8_0", "does not round weights")):
        with pytest.raises(PeerError, match=said):
            distance(engine, asked, run(engine, asked), form)


def test_weights_that_are_not_finite_are_refused_and_the_old_ones_stay() -> None:
    engine = DecodeLoop(LlamaCppDecoder("q8_0", "cpu"))
    load(engine, good := snapshot_of(tiny_module("qwen3", **FITS)))
    module = tiny_module("qwen3", seed=1, **FITS)
    module.model.norm.weight.data[0] = float("nan")
    with pytest.raises(PeerError, match="NaN"):
        load(engine, replace(snapshot_of(module), ref=replace(good.ref, version=1)))
    assert engine.installed == good.ref
    assert run(engine, requests(0))
