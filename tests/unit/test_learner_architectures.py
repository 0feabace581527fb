"""What is known of models is true of transformers' own: which give logprobs in tiles, which honour a mask of ours."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from echo2.learner.core.batch import Layout, collate
from echo2.learner.core.datum import Datum
from echo2.learner.core.model import MASKED_DECODERS, Policy
from learner_cases import VOCAB, data_of, random_group

#: What would be sizes of real models, or a sliding window, if it were not given.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
#: Models that make something of their output layer's products, or whose other parts are unlike Llama's.
OTHERS: dict[str, dict[str, Any]] = {
    "cohere": {**HEADS, "logit_scale": 0.25},
    "granite": {**HEADS, "logits_scaling": 3.0},
    "gemma2": {**HEADS, "final_logit_softcapping": 2.0, "sliding_window": 4},
    "phi": {},  # a bias
    "gpt_neox": {},
    "gpt_oss": {**HEADS, **EXPERTS, "sliding_window": 4, "rope_parameters": {"rope_type": "default"}},
    "mamba": {},
    "gpt2": GPT,
}


def policy_of(model_type: str, extra: dict[str, Any]) -> Policy:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **extra})
    return Policy(transformers.AutoModelForCausalLM.from_config(config).float(), {}, torch.device("cpu"))


def found(policy: Policy, data: list[Datum], layout: Layout) -> list[float]:
    """Logprobs of loss tokens in the data's order."""
    batch = collate(data, layout, 0.1).to(policy.device, torch.float32)
    logp_n = iter(policy.logprobs(batch, 0.7)[0].tolist())
    by_place = {place: [next(logp_n) for _ in range(data[place].loss_mask.count(1))] for place in batch.data_S}
    return [value for place in sorted(by_place) for value in by_place[place]]


def expected(policy: Policy, data: list[Datum]) -> list[float]:
    """One rollout at a time, from the logits that the model itself gives."""
    values: list[float] = []
    for datum in data:
        tokens = torch.tensor([[*datum.prompt_tokens, *datum.tokens]])
        logp_TV: Tensor = (policy.module(tokens, use_cache=False).logits[0].detach() / 0.7).log_softmax(-1)
        start = len(datum.prompt_tokens) - 1
        values += [float(logp_TV[start + t, token]) for t, token in enumerate(datum.tokens) if datum.loss_mask[t]]
    return values


def some_data() -> list[Datum]:
    rng = random.Random(1)
    return [datum for number in range(4) for datum in data_of(random_group(rng, number))]


@pytest.mark.parametrize("model_type", sorted(MASKED_DECODERS))
def test_decoders_that_honour_masks(model_type: str) -> None:
    heads = {} if model_type in ("phi3", "stablelm", "starcoder2") else HEADS
    experts = EXPERTS if model_type in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe") else {}
    policy, data = policy_of(model_type, {**heads, **experts}), some_data()
    assert policy.honours_masks
    assert policy.ends_with_output_layer
    alone = expected(policy, data)
    assert found(policy, data, "plain") == pytest.approx(alone, abs=3e-5)
    assert found(policy, data, "shared") == pytest.approx(alone, abs=3e-5)


@pytest.mark.parametrize("model_type", sorted(OTHERS))
def test_other_decoders_whose_logits_need_not_all_exist(model_type: str) -> None:
    policy, data = policy_of(model_type, OTHERS[model_type]), some_data()
    assert policy.ends_with_output_layer
    assert found(policy, data, "plain") == pytest.approx(expected(policy, data), abs=3e-5)


def test_a_model_with_extra_output_steps_holds_all_logits_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    extra = {"lm_head_multiplier": 0.5, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 4, "mamba_d_head": 8}
    policy, data = policy_of("falcon_h1", {**HEADS, **extra}), some_data()
    with caplog.at_level(logging.WARNING):
        assert not policy.ends_with_output_layer
    assert "A falcon_h1 makes more of its last hidden states than its output layer" in caplog.text
    assert found(policy, data, "plain") == pytest.approx(expected(policy, data), abs=3e-5)
