"""Base models and adapters in the weights' format: a name by content, and no adapter over another base than its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import weights_cases
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.format.manifest import Manifest, compose
from echo2.weights.format.segments import Encoder, base_model_of

CONFIG = b'{"model_type": "qwen3"}'
TENSORS = {"a": TensorBytes("F32", (4, 2), bytes(range(32))), "b": TensorBytes("BF16", (3,), b"abcdef")}
BASE = base_model_of(TENSORS, CONFIG)
OTHER = SnapshotRef("base-" + "0" * 16, 0, 0)
FILES = {"config.json": CONFIG, "tokenizer.json": b"words"}


def payload(target: Snapshot, base: Snapshot | None = None) -> weights_cases.Encoded:
    return weights_cases.payload(Encoder(target, base))


def adapter(version: int, base_model: SnapshotRef = BASE) -> Snapshot:
    tensors = {"layers.0.lora_A.weight": TensorBytes("F32", (2, 2), bytes([version] * 16))}
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, FILES, base_model)


def test_a_base_model_is_what_its_name_says() -> None:
    manifest, chunks = payload(Snapshot(BASE, TENSORS, FILES))
    content = weights_cases.new_content()
    content.apply(Manifest.from_wire(manifest.to_wire()), chunks.__getitem__)
    snapshot = content.snapshot()
    assert snapshot.ref == BASE == base_model_of(snapshot.tensors, snapshot.files["config.json"])
    assert BASE.is_base_model
    assert not SnapshotRef(RUN_POLICY, 0, 0).is_base_model


@given(st.sampled_from(sorted(TENSORS)), st.integers(0, 31), st.integers(1, 255))
def test_one_byte_makes_another_base_model(name: str, place: int, flips: int) -> None:
    old = TENSORS[name]
    data = bytearray(old.data)
    data[place % len(data)] ^= flips
    changed = {**TENSORS, name: replace(old, data=bytes(data))}
    assert base_model_of(changed, CONFIG) != BASE
    with pytest.raises(UserError, match="the name of another base model"):
        payload(Snapshot(BASE, changed, FILES))


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"c" if name == "a" else name: one for name, one in TENSORS.items()}, CONFIG),
        ({**TENSORS, "a": replace(TENSORS["a"], shape=(2, 4))}, CONFIG),
        ({**TENSORS, "b": replace(TENSORS["b"], dtype="F16")}, CONFIG),
        ({"a": TENSORS["a"]}, CONFIG),
        (TENSORS, CONFIG + b" "),
    ],
    ids=["name", "shape", "dtype", "fewer", "config"],
)
def test_names_shapes_and_the_configuration_are_in_the_name(tensors: dict[str, TensorBytes], config: bytes) -> None:
    assert base_model_of(tensors, config) != BASE


def test_an_adapter_names_its_base_model_through_every_payload() -> None:
    whole, chunks = payload(adapter(0))
    delta, more = payload(adapter(1), adapter(0))
    joined = compose([whole, delta])
    assert joined.base_model == BASE
    assert whole.root != payload(adapter(0, OTHER))[0].root
    content = weights_cases.new_content()
    content.apply(Manifest.from_wire(joined.to_wire()), {**chunks, **more}.__getitem__)
    assert content.snapshot().base_model == BASE


def test_no_delta_leads_from_one_base_model_to_another() -> None:
    whole, chunks = payload(adapter(0))
    foreign, more = payload(adapter(1, OTHER), adapter(0, OTHER))
    with pytest.raises(PeerError, match="another base model"):
        compose([whole, foreign])
    content = weights_cases.new_content()
    content.apply(whole, chunks.__getitem__)
    with pytest.raises(PeerError, match="cannot be applied"):
        content.apply(foreign, more.__getitem__)
    assert content.snapshot().base_model == BASE


def test_a_directory_without_a_base_model_is_refused() -> None:
    whole, _ = payload(adapter(0))
    with pytest.raises(UserError, match="which is not a base model"):
        replace(whole, base_model=SnapshotRef(RUN_POLICY, 0, 0))
    with pytest.raises(UserError, match="a base model and an adapter"):
        payload(Snapshot(BASE, TENSORS, FILES, OTHER))
