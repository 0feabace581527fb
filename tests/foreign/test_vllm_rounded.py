"""What vLLM makes of weights that it rounds itself (`--quantization`, docs/engines.md), in its own process. On a CPU a
worker refuses them; what is tried here is the code that rounds again after a reload, which a GPU runs, too."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from house import REPOSITORY
from rollout_cases import hf_logits, tiny_module

INSTALLED = REPOSITORY / ".venv-vllm" / ".installed"
PYTHON = os.environ.get("ECHO2_ENGINE_PYTHON", str(INSTALLED.parent / "bin" / "python") if INSTALLED.exists() else "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="there is no .venv-vllm (`make vllm` makes it) and no ECHO2_ENGINE_PYTHON"),
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM multiplies with fp8 by AMX"),
    pytest.mark.slow,
    pytest.mark.timeout(500),
]
#: Heads, rows and columns that the products take.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
PROMPTS = [[5, 9, 11 + number] for number in range(4)]
#: Run by vLLM's interpreter: tokens and logprobs with old weights, with new ones after a reload, and with new ones from
#: the start.
SAMPLER = """
import json, sys
import torch
from vllm import LLM, SamplingParams

def opened(path, kind):
    sizes = dict(max_model_len=64, max_num_seqs=4, logprobs_mode="processed_logprobs")
    return LLM(path, quantization=kind, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, **sizes)

def sampled(llm):
    llm.reset_prefix_cache()
    params = [SamplingParams(max_tokens=16, seed=n, logprobs=0, detokenize=False, ignore_eos=True) for n in range(4)]
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(sys.argv[4])]
    ends = [one.outputs[0] for one in llm.generate(asked, params, use_tqdm=False)]
    return [[(t, one[t].logprob) for t, one in zip(end.token_ids, end.logprobs)] for end in ends]

torch.cpu._init_amx()  # else the first product with AMX ends the process
llm = opened(sys.argv[1], "fp8_per_block")
found = {"old": sampled(llm)}
llm.collective_rpc("reload_weights", kwargs={"weights_path": sys.argv[2]})
found["reloaded"] = sampled(llm)
found["fresh"] = sampled(opened(sys.argv[2], "fp8_per_block"))
try:
    opened(sys.argv[1], "fp8")
except Exception as error:
    found["fp8"] = str(error)
json.dump(found, open(sys.argv[3], "w"))
"""


def test_a_reload_rounds_the_new_weights_as_a_start_does(tmp_path: Path) -> None:
    """If the last line fails, vLLM has fp8 by tensors on CPUs."""
    modules = [tiny_module("qwen3", seed, **SIZES).to(torch.bfloat16) for seed in (0, 1)]
    for number, module in enumerate(modules):
        module.save_pretrained(tmp_path / str(number))
    out, variables = tmp_path / "out.json", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [PYTHON, "-c", SAMPLER, str(tmp_path / "0"), str(tmp_path / "1"), str(out), json.dumps(PROMPTS)]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**others, **variables, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["reloaded"] == found["fresh"]
    assert 0.02 < distance(modules[1].float(), found["reloaded"]) < 0.3
    assert distance(modules[0].float(), found["reloaded"]) > 1.0
    assert "static_scaled_fp8_quant" in found["fp8"]


def distance(module: Any, sampled: list[list[tuple[int, float]]]) -> float:
    """The mean |log ratio| to this model, in nats."""
    ratios: list[float] = []
    for prompt, drawn in zip(PROMPTS, sampled, strict=True):
        scores = hf_logits(module, [*prompt, *(token for token, _ in drawn)])[len(prompt) - 1 : -1].log_softmax(-1)
        ratios += [abs(float(scores[t, token]) - logprob) for t, (token, logprob) in enumerate(drawn)]
    return sum(ratios) / len(ratios)
