"""The engine `transformers` runs what the learner trains, also models without fused attention, and the two agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef
from echo2.engines.hf_engine import make_engine
from echo2.learner.core.model import load_policy
from rollout_cases import END, VOCAB, load, requests, run, tokenizer_files


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "Mamba", "Mamba2", "Bamba", "GPTNeoX"])
def test_tokens_have_the_logprobs_that_the_learner_computes(name: str, tmp_path: Path) -> None:
    """Prompts of unlike lengths share three slots, so rows are padded, dropped and joined."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    if not name.startswith("Mamba"):
        sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
    if name in ("Gemma2", "GptOss"):
        sizes |= {"num_key_value_heads": 1, "head_dim": 16}
    if name == "GptOss":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default"}}
    if name == "Mamba2":
        sizes |= {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    if name == "Bamba":  # recurrent layers and one of attention
        sizes |= {"num_key_value_heads": 1, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 8}
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": END}
    config = getattr(transformers, f"{name}Config")(**sizes, **ends, initializer_range=0.3)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "float32", "cpu")
    engine = make_engine("cpu", 3)
    files = {**policy.files, **tokenizer_files()}
    load(engine, Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(), files))
    asked = [one for seed, length in enumerate((2, 9, 20, 3)) for one in requests(seed, length, 2, max_tokens=9)]
    for request, completion in zip(asked, run(engine, asked), strict=True):
        tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens]])
        with torch.no_grad():
            logprobs_TV = policy.module(tokens, use_cache=False).logits[0].log_softmax(-1)
        start = len(request.prompt_tokens) - 1
        expected = [float(logprobs_TV[start + at, token]) for at, token in enumerate(completion.tokens)]
        assert list(completion.logprobs) == pytest.approx(expected, abs=2e-5)


def test_a_model_that_keeps_rows_in_its_modules_is_refused(tmp_path: Path) -> None:
    """RecurrentGemma's recurrent layers have one state: two batches by turns would read each other's."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.RecurrentGemmaConfig(vocab_size=VOCAB, lru_width=32, attention_window_size=8, **sizes)
    transformers.RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "float32", "cpu")
    content = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(), {**policy.files, **tokenizer_files()})
    with pytest.raises(UserError, match=r"keeps (recurrent_states|conv1d_state) of the rows that it read last"):
        load(make_engine("cpu", 3), content)


def test_a_model_that_would_pass_over_its_cache_is_refused(tmp_path: Path) -> None:
    """The first GPT takes any argument and knows no cache: step by step it would read each token alone."""
    import transformers

    config = transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "float32", "cpu")
    content = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(), {**policy.files, **tokenizer_files()})
    with pytest.raises(UserError, match="OpenAIGPTLMHeadModel: its forward method takes no cache"):
        load(make_engine("cpu", 3), content)
