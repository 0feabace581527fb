"""MLX's own library samples what `compact` reads: forms, swaps, adapters, 16 bits, models refused. What `mlx` has in
common with the other engines, their tests try (`engine_builders.py`)."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from echo2.core.errors import PeerError, UserError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    TensorBytes,
)
from echo2.engines import forms
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.mlx import MlxBuilder, MlxModel
from echo2.engines.registry import AutoBuilder, EngineChoice
from echo2.engines.torch_engine import TorchDecoder
from echo2.rollouts.generate import sample_group
from echo2.rollouts.verification import Verdict, check_group
from engine_builders import HAS_MLX
from rollout_cases import FAMILIES, Hooked, load, plain_tokenizer, requests, run, snapshot_of, tiny_module
from seeds import pairs
from test_engines_adapter import PROMPT, adapted, base_of

if not HAS_MLX:
    pytest.skip("pip install 'echo2[mlx]'", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it

FITS: dict[str, Any] = {"intermediate_size": 64}
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def decoder_of(form: str = "", cramped_from: int = 1 << 30) -> TorchDecoder:
    """An engine that rounds to this form; it has no room for this version beside the one before."""
    builder = MlxBuilder(form, "cpu")

    def build(snapshot: Snapshot, device: torch.device) -> Any:
        if snapshot.ref.version >= cramped_from and device.type != "meta":
            raise MemoryError
        return builder(snapshot, device)

    return TorchDecoder(build, "cpu")


def checker(*snapshots: Snapshot) -> Any:
    """A machine of the owner, which holds the last two of these."""
    decoder = TorchDecoder(build_compact, "cpu")
    decoder._checks = True
    for snapshot in snapshots:
        decoder.load(snapshot)
    return DecodeLoop(decoder)


def group_of(engine: Any) -> tuple[Assignment, RolloutGroup]:
    lease = Lease(1, GroupRef(RUN_POLICY, "train", 0), 0, 0, 8, 0, None, 60.0, 60.0, 5)
    asked = Assignment(lease, array("i", PROMPT), SamplingParams(max_tokens=24))
    group = asyncio.run(sample_group(engine, plain_tokenizer(), asked, "worker"))
    assert isinstance(group, RolloutGroup)
    asyncio.run(engine.close())
    return asked, group


def verdict_of(by: Any, asked: Assignment, group: RolloutGroup, form: str) -> Verdict:
    return asyncio.run(check_group(by, by.installed, asked, group, form=form))


def in_dtype(snapshot: Snapshot, dtype: str) -> Snapshot:
    """The same weights, stored in this dtype."""
    tensors: dict[str, TensorBytes] = {}
    for name, tensor in snapshot.tensors.items():
        values = torch.frombuffer(bytearray(tensor.read(0, tensor.num_bytes)), dtype=torch.float32).to(FLOATS[dtype])
        tensors[name] = TensorBytes(dtype, tuple(tensor.shape), values.view(torch.uint8).numpy().tobytes())
    return replace(snapshot, tensors=tensors)


def hard_to_round(rows: int, columns: int) -> torch.Tensor:
    """Halves between two steps, zeros of both signs, groups of one sign or one value, and tiny ones."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    steps = torch.arange(columns) % 32
    special = [
        0.0 * steps,
        -0.0 * steps,
        0.5 * steps,
        -1.0 * steps,
        steps - 15.5,
        0.25 + 0.0 * steps,
        -0.7 + 0.0 * steps,
    ]
    special += [values[7].abs(), -values[8].abs(), 1e-8 * values[9], 1e-6 * values[10], (8 * values[11]).round() / 2]
    values[: len(special)] = torch.stack(special)
    return values


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize("kind", forms.AFFINE_BITS)
def test_torch_rounds_as_mlx_does(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit: what MLX would store, and what that stands for."""
    import mlx.core as mx

    sizes = {"group_size": 32, "bits": forms.AFFINE_BITS[kind]}
    for rows, columns in ((12, 32), (131, 96), (1031, 64), (40, 8224)):
        weight = hard_to_round(rows, columns).to(dtype)
        words, steps, edges = mx.quantize(mx.array(weight), **sizes)
        q, step, edge = forms.affine(weight, kind)
        assert forms.packed(q, kind).numpy().tobytes() == np.array(words).tobytes()
        for ours, theirs in ((step, steps), (edge, edges)):
            assert ours.dtype is dtype
            assert ours.float().numpy().tobytes() == np.array(theirs.astype(mx.float32)).tobytes()
        stands_for = mx.dequantize(words, steps.astype(mx.float32), edges.astype(mx.float32), **sizes)
        assert np.array_equal(forms.rounded(weight, kind).numpy(), np.array(stands_for))


@pytest.mark.parametrize("kind", forms.AFFINE_BITS)
def test_a_group_of_weights_does_not_depend_on_other_rounded_groups(kind: str) -> None:
    values = torch.randn(3 * forms.PIECE_ITEMS // 2, generator=torch.Generator().manual_seed(0))
    whole = forms.rounded(values, kind)
    assert torch.equal(whole, torch.cat([forms.rounded(part, kind) for part in values.split(96)]))
    assert (whole - values).abs().max() < values.abs().max() * {"mlx-q8": 0.008, "mlx-q4": 0.14}[kind]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize(("family", "form"), pairs(FAMILIES, forms.AFFINE_BITS))
def test_the_form_that_is_sampled_is_the_one_that_compact_reads(family: str, form: str, dtype: str) -> None:
    """In 16 bits, 8 bits cannot be told from the published weights."""
    snapshot = in_dtype(snapshot_of(tiny_module(family, **FITS, initializer_range=0.1)), dtype)
    engine, by = DecodeLoop(decoder_of(form)), checker(snapshot)
    load(engine, snapshot)
    asked, group = group_of(engine)
    verdict = verdict_of(by, asked, group, form)
    assert (verdict.fault, verdict.num_skipped) == ("", 0)
    assert verdict.worst_logprob < (2e-5 if dtype == "F32" else 0.2)
    (other,) = forms.AFFINE_BITS.keys() - {form}
    assert verdict_of(by, asked, group, other).mean_logprob > 3 * verdict.mean_logprob


@pytest.mark.parametrize("cramped_from", [1, 2])
@pytest.mark.parametrize("form", ["", "mlx-q8"])
def test_open_rows_continue_with_new_weights_and_the_check_replays_the_swap(form: str, cramped_from: int) -> None:
    """Loaded beside the old ones, or over them."""
    old, new = (snapshot_of(tiny_module("llama", seed=seed, **FITS), seed) for seed in (0, 1))
    decoder, pauses = decoder_of(form, cramped_from), list[float]()
    decoder.load(old)
    hook = lambda step: step != 6 or pauses.append(decoder.load(new))  # noqa: E731
    asked, group = group_of(DecodeLoop(Hooked(decoder, hook), 8))  # type: ignore[arg-type]
    assert (pauses[0] > 0.0) == (cramped_from == 1)
    assert {rollout.version_spans for rollout in group.rollouts} >= {((0, 0), (5, 1))}
    verdict = verdict_of(checker(old, new), asked, group, form)
    assert (verdict.fault, verdict.num_skipped) == ("", 0)
    assert verdict.worst_logprob < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_over_the_rounded_base_model(family: str) -> None:
    module = tiny_module(family, **FITS)
    adapters = [adapted(module, version, seed=version)[1] for version in range(2)]
    decoder, reading = decoder_of("mlx-q4"), TorchDecoder(build_compact, "cpu")
    reading._checks = True
    for one in (decoder, reading):
        one.load(adapters[0], base_of(module))
    reading.load(adapters[1])
    engine = DecodeLoop(Hooked(decoder, lambda step: step != 6 or decoder.load(adapters[1])), 8)  # type: ignore[arg-type]
    asked, group = group_of(engine)
    assert {rollout.version_spans for rollout in group.rollouts} >= {((0, 0), (5, 1))}
    verdict = verdict_of(DecodeLoop(reading), asked, group, "mlx-q4")
    assert (verdict.fault, verdict.num_skipped) == ("", 0)
    assert verdict.worst_logprob < 5e-5


def test_aborted_rollouts_disturb_no_others() -> None:
    engine = DecodeLoop(decoder_of("mlx-q8"), 4)
    load(engine, snapshot_of(tiny_module("qwen3", **FITS)))
    asked = requests(0, samples=8, max_tokens=40)
    alone = run(engine, asked)

    async def scenario() -> list[Any]:
        futures = [engine.submit(one) for one in asked]
        await asyncio.sleep(0)
        futures[0].cancel()
        futures[5].cancel()
        return list(await asyncio.gather(*futures, return_exceptions=True))

    found = asyncio.run(scenario())
    assert [at for at, one in enumerate(found) if isinstance(one, asyncio.CancelledError)] == [0, 5]
    for at in set(range(8)) - {0, 5}:
        assert found[at].tokens == alone[at].tokens
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("mlx-q8", {}, "no form mlx-q8 of this model: rows of 48 items in .*down_proj.weight.*--engine mlx"),
        ("", {"hidden_act": "gelu"}, "mlx does not support hidden_act = 'gelu'.*--engine compact or transformers"),
    ],
)
def test_a_model_that_has_no_form_or_that_mlx_does_not_compute_is_refused(
    form: str, changes: dict[str, Any], said: str
) -> None:
    engine = DecodeLoop(decoder_of(form))
    with pytest.raises(UserError, match=said):
        load(engine, snapshot_of(tiny_module("qwen3", **changes)))
    assert engine.installed is None


def test_an_engine_with_rounded_weights_checks_no_rollouts_and_an_exact_one_rounds_no_weights() -> None:
    snapshot = snapshot_of(tiny_module("qwen3", **FITS))
    engine: Any = DecodeLoop(decoder_of())
    load(engine, snapshot)
    asked, group = group_of(engine)
    for form, read_as, said in (
        ("mlx-q8", "", "cannot check rollouts: it holds rounded weights"),
        ("", "mlx-q8", "does not round weights to the form mlx-q8"),
    ):
        by: Any = DecodeLoop(decoder_of(form))
        load(by, snapshot)
        with pytest.raises(PeerError, match=said):
            verdict_of(by, asked, group, read_as)


def test_the_engine_auto_builds_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.engines.registry.in_worker", lambda config: EngineChoice("mlx", "this is a Mac"))
    engine = DecodeLoop(TorchDecoder(builder := AutoBuilder("cpu"), "cpu"))
    load(engine, snapshot := snapshot_of(tiny_module("qwen3", **FITS)))
    assert isinstance(builder(snapshot, torch.device("cpu")), MlxModel)
    assert run(engine, requests(0))
