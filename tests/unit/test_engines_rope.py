"""A row's logprobs do not depend on its neighbours, with any rotary embedding: in the learner and in the engine."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest
import torch

from echo2.core.decide.model_config import context_length
from echo2.engines.hf_engine import HfModel
from echo2.engines.hub_layout import identity_layout
from echo2.learner.core.batch import Layout, collate
from echo2.learner.core.datum import Datum
from echo2.learner.core.model import MASKED_DECODERS, Policy
from learner_cases import VOCAB

LONGEST, ORIGINAL = 48, 12
HALF = 4  # of the head's size
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * HALF,
        "long_factor": [1.0, 4.0, 9.0, 20.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}
#: Of these, the rotary part is not half of the head, or rotary embeddings have no settings.
OWN_ROTATION = {"ernie4_5", "glm", "glm4", "stablelm"}
#: Beside the decoders that take masks: windows, and layers of several kinds.
OTHERS = {"gemma2", "gpt_oss", "cohere2"}
CASES = [("llama", kind) for kind in ROPES]
CASES += [(family, "longrope") for family in sorted((MASKED_DECODERS | OTHERS) - OWN_ROTATION)]
CASES += [(family, "dynamic") for family in sorted((MASKED_DECODERS | OTHERS) - OWN_ROTATION - {"phi3"})]


def policy_of(family: str, rope: dict[str, Any]) -> Policy:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2 * HALF,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=LONGEST,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=None if family in MASKED_DECODERS else 8,
        original_max_position_embeddings=ORIGINAL,  # Phi-3 has it here
        rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, **rope},
    )
    return Policy(transformers.AutoModelForCausalLM.from_config(config).float(), {}, torch.device("cpu"))


def rows(context: int) -> list[list[int]]:
    """Two short rows, and one that fills the context."""
    return [
        [3 + (7 * row + place) % (VOCAB - 3) for place in range(length)] for row, length in enumerate((5, context, 9))
    ]


def learned(policy: Policy, texts: list[list[int]], layout: Layout) -> list[list[float]]:
    data = [Datum(array("i", text[:2]), array("i", text[2:]), b"\x01" * (len(text) - 2)) for text in texts]
    batch = collate(data, layout, 0.1).to(policy.device, torch.float32)
    logp_n = iter(policy.logprobs(batch, 1.0)[0].tolist())
    by_place = {place: [next(logp_n) for _ in data[place].tokens] for place in batch.data_S}
    return [by_place[place] for place in range(len(data))]


def decoded(policy: Policy, text: list[int], other: list[int]) -> list[float]:
    """The engine's logprobs of `text`, read token by token, beside the prompt `other`."""
    model = HfModel(policy.module, (2,), identity_layout(policy.module))
    cache = model.prefill([array("i", other), array("i", text[:1])])
    found = []
    for before, token in pairwise(text[1:]):
        logits_BV = model.step(cache, torch.tensor([before] * 2))
        found.append(float(logits_BV[-1].log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize(("family", "kind"), CASES)
@torch.no_grad()
def test_a_row_has_the_same_logprobs_alone_and_beside_others(family: str, kind: str) -> None:
    policy = policy_of(family, ROPES[kind])
    context = policy.max_positions
    assert context == HfModel(policy.module, (2,), identity_layout(policy.module)).limits.max_positions
    assert context == (ORIGINAL if kind == "longrope" else LONGEST)
    texts = rows(context)
    alone = [learned(policy, [text], "plain")[0] for text in texts]
    layouts: list[Layout] = ["plain", "shared"] if policy.honours_masks else ["plain"]
    for layout in layouts:
        beside = learned(policy, texts, layout)
        for text, expected in zip(beside, alone, strict=True):
            assert text == pytest.approx(expected, abs=3e-5)
    for text, expected in zip(texts, alone, strict=True):
        other = texts[1][: max(1, context - len(text))]  # with as many tokens more, it fills the context
        assert decoded(policy, text, other) == pytest.approx(expected, abs=3e-5)


def test_the_context_ends_where_rotary_frequencies_change() -> None:
    long = {"long_factor": [1.0], "original_max_position_embeddings": 4096}
    assert context_length({"max_position_embeddings": 131072}) == 131072
    assert context_length({"max_position_embeddings": 131072, "rope_parameters": {"factor": 32.0}}) == 131072
    assert context_length({"max_position_embeddings": 131072, "rope_parameters": long}) == 4096
    old = {"rope_scaling": {"type": "su", "long_factor": [1.0]}, "original_max_position_embeddings": 4096}
    assert context_length({"max_position_embeddings": 131072, **old}) == 4096
    by_layer = {"rope_parameters": {"full_attention": long, "sliding_attention": {"rope_type": "default"}}}
    assert context_length({"text_config": {"max_position_embeddings": 131072, **by_layer}}) == 4096
    assert context_length({"vocab_size": 3}) is None
