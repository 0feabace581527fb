"""What vLLM reads of an adapter on a mixture's experts: its own loader and its own conversion, which need no GPU. The
build for CPUs refuses to compute with such an adapter, so this is how far it can be tried."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echo2.config.sections import LoraConfig
from echo2.core.types import Snapshot, SnapshotRef
from echo2.engines.servers.models import ModelDirectories
from echo2.learner.core.adapters import Adapter, load_merged, load_trained
from echo2.learner.core.model import load_policy
from house import REPOSITORY
from hub_models import hub_model
from learner_cases import config_of
from rollout_cases import tokenizer_files

INSTALLED = REPOSITORY / ".venv-vllm" / ".installed"
PYTHON = os.environ.get("ECHO2_ENGINE_PYTHON", str(INSTALLED.parent / "bin" / "python") if INSTALLED.exists() else "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="there is no .venv-vllm (`make vllm` makes it) and no ECHO2_ENGINE_PYTHON"),
    pytest.mark.timeout(300),
]

#: Run by vLLM's interpreter: the weights that it adds to each expert's, as files of safetensors have them.
READER = """
import json, sys
from types import SimpleNamespace
import torch
from safetensors.torch import save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper

adapter, out, num_experts, architecture = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
helper = PEFTHelper.from_local_dir(adapter, None)
places = ("gate_proj", "up_proj", "down_proj")
expected = {"experts", *(f"experts.{n}.{place}" for n in range(num_experts) for place in places)}
model = LoRAModel.from_local_checkpoint(adapter, expected, helper, lora_model_id=1, device="cpu", dtype=torch.float32)
names = sorted(name for name in model.loras if name.endswith(".experts"))
manager = SimpleNamespace(
    model=SimpleNamespace(config=SimpleNamespace(architectures=[architecture])),
    _get_lora_layer_weights=lambda lora, name: lora.get_lora(name),
)
part = SimpleNamespace(local_num_experts=num_experts, global_num_experts=num_experts, ep_rank=0)
added = {}
for name in names:
    LoRAModelManager._convert_3d_to_2d_moe_lora(manager, model, part, name)
    layer = model.loras[name]
    for place, a_ERI, b_EOR in zip(("gate_proj", "down_proj", "up_proj"), layer.lora_a, layer.lora_b):
        for expert in range(num_experts):
            product = layer.scaling * b_EOR[expert] @ a_ERI[expert]
            added[f"{name}.{expert}.{place}.weight"] = product.contiguous()
save_file(added, out)
"""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_vllm_adds_to_each_expert_what_the_learner_adds(family: str, tmp_path: Path) -> None:
    hub = hub_model(tmp_path / "hub", family)
    values = json.loads((hub / "config.json").read_text())
    config = replace(config_of(), lora=LoraConfig(rank=2, targets=["experts"]))
    policy = load_trained(replace(config, model=replace(config.model, path=str(hub))), "cpu")
    assert isinstance(policy, Adapter)
    torch.manual_seed(1)
    with torch.no_grad():
        for factor in policy.trained_parameters().values():
            factor.normal_(std=0.3)
    files = {**policy.files, **tokenizer_files()}
    snapshot = Snapshot(SnapshotRef("policy", 1, 1), policy.tensors(), files, policy.base.snapshot.ref)
    base = replace(policy.base.snapshot, files={**policy.base.snapshot.files, **tokenizer_files()})
    served = ModelDirectories(tmp_path / "served").write(snapshot, base, None)
    assert served.adapts_experts
    assert served.adapter is not None

    count = values.get("num_experts", values.get("num_local_experts"))
    command = [PYTHON, "-c", READER, str(served.adapter), str(tmp_path / "added"), str(count)]
    done = subprocess.run([*command, values["architectures"][0]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    added = load_file(tmp_path / "added")
    before, merged = (load_policy(str(hub), "float32", "cpu"), load_merged(str(hub), served.adapter, "cpu"))
    part = next(name for name, module in before.module.named_modules() if name.endswith(".experts"))
    old, new = (one.module.get_submodule(part) for one in (before, merged))
    up_EIO, down_EIO = ((getattr(new, name) - getattr(old, name)).detach() for name in ("gate_up_proj", "down_proj"))
    if family == "gpt_oss":  # inputs before outputs, and gate and up values in turn
        gate_EOI, up_EOI, down_EOI = up_EIO[..., ::2].mT, up_EIO[..., 1::2].mT, down_EIO.mT
    else:
        (gate_EOI, up_EOI), down_EOI = up_EIO.chunk(2, dim=1), down_EIO
    for expert in range(count):
        for place, expected_EOI in (("gate_proj", gate_EOI), ("up_proj", up_EOI), ("down_proj", down_EOI)):
            vllms = added[f"{part}.{expert}.{place}.weight"]
            assert expected_EOI[expert].abs().max() > 0.1
            torch.testing.assert_close(vllms, expected_EOI[expert], rtol=1e-4, atol=1e-5)
