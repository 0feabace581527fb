"""One reader of config.json: what it says of the text model, nested or not, stated or left to transformers' class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from echo2.core.decide.model_config import context_length, text_part
from echo2.core.types import Snapshot, SnapshotRef, StoredTensor
from echo2.engines.fake_engine import FakeDecoder
from echo2.engines.model_values import all_values, read_context, text_values
from echo2.engines.servers.models import HEAD, ModelDirectories
from echo2.learner.core.fitting import model_config
from echo2.trl import _vocab_size
from echo2.weights.format.model_files import read_base_model
from hub_models import FAMILIES

READ = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "max_position_embeddings")
#: google/gemma-3-4b-it leaves the vocabulary, the context, heads and ties to the class.
GEMMA3_ON_THE_HUB: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}


def written(model_type: str, directory: Path) -> dict[str, Any]:
    transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type]).save_pretrained(directory)
    values: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return values


def bare(model_type: str, directory: Path) -> dict[str, Any]:
    """A configuration that leaves all to the class."""
    values = written(model_type, directory)
    left = {"model_type": model_type}
    return (
        {**left, "text_config": {"model_type": values["text_config"]["model_type"]}}
        if "text_config" in values
        else left
    )


def theirs(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What transformers takes for a text model of this configuration."""
    (directory / "config.json").write_text(json.dumps(values))
    config = transformers.AutoConfig.from_pretrained(directory)
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in READ}
    return {**found, "tie_word_embeddings": config.tie_word_embeddings}


@pytest.mark.parametrize("config", [written, bare])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_readers_see_the_sizes_that_transformers_takes(model_type: str, config: Any, tmp_path: Path) -> None:
    values = config(model_type, tmp_path)
    expected = theirs(values, tmp_path)

    ours = all_values(values)
    assert {name: ours.get(name) for name in READ} == expected
    assert text_values(values)["vocab_size"] == expected["vocab_size"] == _vocab_size(tmp_path)
    files = {"config.json": json.dumps(values).encode()}
    assert read_context(files) == context_length(ours) == expected["max_position_embeddings"]


def model(values: dict[str, Any], **names: tuple[int, ...]) -> Snapshot:
    tensors = {
        name.replace("__", "."): StoredTensor(
            "F32", shape, 4 * int(np.prod(shape)), lambda start, stop: bytes(stop - start)
        )
        for name, shape in names.items()
    }
    return Snapshot(SnapshotRef("", 0, 1), tensors, {"config.json": json.dumps(values).encode()})


def test_a_gemma_3_as_the_hub_has_it_is_served_and_imitated(tmp_path: Path) -> None:
    snapshot = model(GEMMA3_ON_THE_HUB, language_model__model__embed_tokens__weight=(4, 2))

    served = ModelDirectories(tmp_path / "served").write(snapshot, None, None)
    assert (served.vocab_size, served.max_positions, served.end_tokens) == (262_208, 131_072, {1, 106})

    engine = FakeDecoder()
    engine.load(snapshot)
    assert engine._policy()[1:3] == (262_208, 131_072)


def test_the_text_model_counts_before_the_whole_and_ties_and_ends_after() -> None:
    text = {"vocab_size": 80, "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 7}
    values = {"text_config": text, "vocab_size": 99, "tie_word_embeddings": False, "eos_token_id": 1}
    assert text_values(values) == {**text, "tie_word_embeddings": False, "eos_token_id": 1}


@pytest.mark.parametrize("nested", [False, True])
def test_an_untied_model_for_a_server_says_so_at_every_level(nested: bool, tmp_path: Path) -> None:
    sizes = {"vocab_size": 4, "max_position_embeddings": 8, "tie_word_embeddings": True}
    name = "model__language_model__embed_tokens__weight" if nested else "model__embed_tokens__weight"
    snapshot = model({"text_config": sizes} if nested else sizes, **{name: (4, 2)})

    served = ModelDirectories(tmp_path, unties=True).write(snapshot, None, None)

    said = json.loads((served.directory / "config.json").read_text())
    assert said["tie_word_embeddings"] is False
    assert said.get("text_config", said)["tie_word_embeddings"] is False
    assert HEAD.encode() in (served.directory / "model.safetensors").read_bytes()


def test_a_tied_head_is_left_out_of_a_nested_model_too(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    weights = np.zeros((4, 2), np.float32)
    save_file({"model.embed_tokens.weight": weights, HEAD: weights}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    assert set(read_base_model(tmp_path).tensors) == {"model.embed_tokens.weight"}


def test_a_model_that_transformers_does_not_know_is_read_as_far_as_it_says(tmp_path: Path) -> None:
    values = {"model_type": "of_next_year", "vocab_size": 5, "text_config": {"max_position_embeddings": 6}}
    assert all_values(values) == text_values(values) == text_part(values)
    assert (all_values(values)["vocab_size"], context_length(values)) == (5, 6)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert model_config(str(tmp_path)) == values
