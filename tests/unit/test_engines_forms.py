"""Weights rounded to a form: the blocks are llama.cpp's, and `compact` computes with what they stand for."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from echo2.core.errors import PeerError, UserError
from echo2.core.types import Snapshot, TensorBytes
from echo2.engines import forms
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, PrefillRequest, SampleRequest
from echo2.engines.hf_engine import build_transformers
from echo2.engines.llamacpp import library
from echo2.engines.registry import make_engine
from echo2.engines.torch_engine import TorchDecoder
from rollout_cases import load, requests, run, snapshot_of, tiny_module

FITS = {"intermediate_size": 64}


def test_a_block_of_8_bits_has_a_step_and_whole_numbers() -> None:
    """By hand: the largest is 254, so the step is 2; halves are rounded away from 0."""
    values = torch.zeros(32)
    values[:5] = torch.tensor([254.0, -254.0, 3.0, -3.0, 0.9])
    blocks = forms.encode(values, "q8_0")
    assert blocks.shape == (1, 34)
    assert blocks[0, :2].view(torch.float16).item() == 2.0
    assert blocks[0, 2:].view(torch.int8)[:6].tolist() == [127, -127, 2, -2, 0, 0]
    assert forms.decode(blocks, "q8_0")[0, :6].tolist() == [254.0, -254.0, 4.0, -4.0, 0.0, 0.0]


def test_a_block_of_4_bits_gives_the_value_of_largest_size_exactly() -> None:
    """By hand: the largest is -16, so the step is 2 and 0 stands for -16; a block keeps items 0 and 16 in one byte."""
    values = torch.zeros(32)
    values[0], values[1], values[16], values[17] = -16.0, 14.0, 3.1, 15.5
    blocks = forms.encode(values, "q4_0")
    assert blocks.shape == (1, 18)
    assert blocks[0, :2].view(torch.float16).item() == 2.0
    read = forms.decode(blocks, "q4_0")[0]
    assert [read[at].item() for at in (0, 1, 2, 16, 17)] == [-16.0, 14.0, 0.0, 4.0, 14.0]


@pytest.mark.parametrize("kind", forms.BLOCK_BYTES)
def test_a_block_does_not_depend_on_other_rounded_blocks(kind: str) -> None:
    """More items than are rounded at once, some blocks of zeros, and some so small that their step is 0."""
    values = torch.randn(3 * forms.PIECE_ITEMS // 2, generator=torch.Generator().manual_seed(0))
    values[:64], values[64:96] = 0.0, 1e-41
    whole = forms.encode(values, kind)
    assert torch.equal(whole, torch.cat([forms.encode(part, kind) for part in values.split(96)]))
    assert torch.equal(forms.rounded(values, kind), forms.decode(whole, kind).view(-1))
    assert forms.decode(whole, kind)[:3].abs().max() == 0.0
    assert (forms.rounded(values, kind) - values).abs().max() < values.abs().max() * {"q8_0": 0.005, "q4_0": 0.13}[kind]


@pytest.mark.parametrize("kind", forms.BLOCK_BYTES)
def test_blocks_are_those_of_the_package_of_llama_cpp(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert forms.encode(values, kind).view(64, -1).numpy().tobytes() == theirs.tobytes()


def rounded_snapshot(snapshot: Snapshot, form: str) -> Snapshot:
    """What the form stands for, published as it is."""
    tensors: dict[str, TensorBytes] = {}
    for name, tensor in snapshot.tensors.items():
        values = torch.frombuffer(bytearray(tensor.read(0, tensor.num_bytes)), dtype=torch.float32)
        kind = forms.format_of(name, form)
        values = forms.rounded(values, kind) if kind else values
        tensors[name] = TensorBytes("F32", tuple(tensor.shape), values.numpy().tobytes())
    return replace(snapshot, tensors=tensors)


def reads(request: SampleRequest, found: Completion, form: str) -> PrefillRequest:
    return PrefillRequest(request.prompt_tokens, found.tokens, request.params, found.version_spans, form=form)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_compact_reads_a_form_as_its_dequantised_weights(family: str) -> None:
    snapshot = snapshot_of(tiny_module(family, **FITS))
    checker, asked = DecodeLoop(TorchDecoder(build_compact, "cpu")), requests(0)
    load(checker, snapshot)
    for form in forms.OF_TOKENS:
        sampler = DecodeLoop(TorchDecoder(build_compact, "cpu"))
        load(sampler, rounded_snapshot(snapshot, form))
        found = run(sampler, asked)
        prefills = asyncio.run(
            checker.prefill(snapshot.ref, [reads(*pair, form) for pair in zip(asked, found, strict=True)])
        )
        plain = asyncio.run(
            checker.prefill(snapshot.ref, [reads(*pair, "") for pair in zip(asked, found, strict=True)])
        )
        for one, as_form, as_published in zip(found, prefills, plain, strict=True):
            assert as_form.bits == 16 < as_published.bits
            assert abs(torch.tensor(one.logprobs) - torch.tensor(as_form.logprobs)).max() < 1e-4
            assert abs(torch.tensor(one.logprobs) - torch.tensor(as_published.logprobs)).max() > 1e-4


def test_a_form_belongs_to_the_current_weights() -> None:
    """Weights that are copied over the old ones leave no form of these behind."""
    old, new = (snapshot_of(tiny_module("qwen3", seed=seed, **FITS), seed) for seed in (0, 1))
    decoder = TorchDecoder(build_compact, "cpu")
    decoder._load_beside = lambda *given: decoder.installed is None and TorchDecoder._load_beside(decoder, *given)  # type: ignore[method-assign]
    request = requests(0)[0]
    decoder.load(old)
    found = run(DecodeLoop(decoder), [request])[0]
    before = decoder.prefill(old.ref, [reads(request, found, "q8_0")])[0]
    assert decoder.load(new) > 0.0
    as_new = reads(request, replace(found, version_spans=((0, 1),)), "q8_0")
    after = decoder.prefill(new.ref, [as_new])[0]
    other = TorchDecoder(build_compact, "cpu")
    other.load(new)
    assert after.logprobs.tolist() == pytest.approx(other.prefill(new.ref, [as_new])[0].logprobs.tolist(), abs=1e-5)
    assert after.logprobs.tolist() != pytest.approx(before.logprobs.tolist(), abs=1e-2)


def test_the_error_says_that_an_engine_has_no_forms() -> None:
    snapshot, request = snapshot_of(tiny_module("qwen3", **FITS)), requests(0)[0]
    engine: Any = DecodeLoop(TorchDecoder(build_transformers, "cpu"))
    load(engine, snapshot)
    found = run(engine, [request])[0]
    with pytest.raises(PeerError, match="does not round weights to the form q8_0"):
        asyncio.run(engine.prefill(snapshot.ref, [reads(request, found, "q8_0")]))


def test_without_llama_cpp_its_engines_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a lease is taken: the worker makes its engine when it has heard the run's settings."""
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match=r"needs llama.cpp, .* pip install 'echo2\[llamacpp\]'"):
        make_engine("llamacpp-q8_0", "cpu", 4)


def test_without_mlx_its_engines_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm.models.cache", None)
    with pytest.raises(UserError, match=r"needs MLX and mlx-lm, .* pip install 'echo2\[mlx\]'"):
        make_engine("mlx-q8", "cpu", 4)


def test_a_model_whose_rows_do_not_fit_has_no_such_form() -> None:
    """A stranger may say any form of any model."""
    snapshot, request = snapshot_of(tiny_module("qwen3", intermediate_size=48)), requests(0)[0]
    engine: Any = DecodeLoop(TorchDecoder(build_compact, "cpu"))
    load(engine, snapshot)
    found = run(engine, [request])[0]
    for form in ("q8_0", "mlx-q8"):
        with pytest.raises(PeerError, match=f"no form {form} of this model: .* not a multiple of 32"):
            asyncio.run(engine.prefill(snapshot.ref, [reads(request, found, form)]))
