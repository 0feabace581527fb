"""What the sections of benchmarks/gpu.py share: the device, the sizes, the clock, and the rows of the result."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef
from echo2.engines.hub_layout import text_module
from echo2.learner.core.model import DTYPES, Policy, with_dtype

Size = Literal["tiny", "smoke", "full"]
Row = dict[str, Any]

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
#: The shapes of published models.
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3,
    "1.7B": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # 2.5 B parameters, of which a token uses 1.1 B: Qwen3-30B-A3B with a quarter of its experts and of its layers.
    "mixture": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
}
TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
#: Logits of random weights are nearly equal. The last norm times this gives them a standard deviation of about 4.
SHARPNESS = 6.0


@dataclass(slots=True)
class Bench:
    """One measurement on one device. `ends_at`: when the section must have ended, by `time.monotonic`. `ceilings`:
    what the device can do, as the first section found it."""

    device: torch.device
    size: Size
    record: Callable[[Row], None]
    ends_at: float = float("inf")
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether the real sizes are measured."""
        return self.size == "full"

    def left(self) -> float:
        """Seconds that the section still has."""
        return self.ends_at - time.monotonic()

    def pick(self, full: Any, smoke: Any, tiny: Any) -> Any:
        """Return the value for this size."""
        return {"full": full, "smoke": smoke, "tiny": tiny}[self.size]

    def values(self, name: str) -> dict[str, Any]:
        """Return the values of config.json of a shape, smaller where this is not the full size."""
        values = dict(SHAPES[name])
        if self.size == "smoke":
            values["num_hidden_layers"] = 2
        elif self.size == "tiny":
            values |= TINY | (TINY_EXPERTS if "num_experts" in values else {})
        return values

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int = 5, warm_up: int = 2) -> float:
        """Return the median seconds of some work."""
        found = []
        for number in range(warm_up + repeats):
            self.sync()
            started = time.perf_counter()
            work()
            self.sync()
            if number >= warm_up:
                found.append(time.perf_counter() - started)
        return statistics.median(found)

    def forget_peak(self) -> None:
        """Free what nothing holds, and count the peak from here."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes that tensors took; 0 on a CPU, where nothing counts them."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def held(self) -> int:
        """Return the bytes of tensors that exist."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def policy(self, name: str, dtype: str = "float32", seed: int = 0, **changes: Any) -> Policy:
        """Make a policy of this shape with random weights, on the device. Its matrix products are bfloat16 where its
        weights are float32, as a learner's on a GPU."""
        from transformers import AutoConfig

        torch.manual_seed(seed)
        config = AutoConfig.for_model(**self.values(name) | changes)
        with self.device:
            module = text_module(config, DTYPES[dtype])
        with torch.no_grad():
            module.base_model.norm.weight.mul_(SHARPNESS)
        text = module.config.to_json_string(use_diff=False).encode()
        policy = Policy(module, {"config.json": with_dtype(text, dtype)}, self.device)
        policy.computes_in_bfloat16 = dtype == "float32"
        return policy


def snapshot_of(policy: Policy, version: int = 0, dtype: str = "bfloat16") -> Snapshot:
    """Return the policy's weights as workers get them; they are read from the device when they are used."""
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), policy.weights(DTYPES[dtype]), policy.files)
