"""TRL's own trainer, from the constructor to the last step, with the fleet as its worker; what it logged, as JSON.

Its attention is a kernel for one kind of GPU (FlashAttention 3). In its place stands the same sum in plain torch; all
else is TRL's.
"""

import json
import sys
from itertools import pairwise
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

import echo2.trl


class PlainAttention:
    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, ends_q: Any, ends_k: Any, max_q: int, max_k: int, softmax_scale: float,
        causal: bool, window_size: Any,
    ) -> Any:  # fmt: skip
        parts = []
        for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
            q, k, v = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
            k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], 0) for each in (k, v))
            num_q, num_k = q.shape[1], k.shape[1]
            seen = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)  # the last of both is the same token
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [
        sum(a == b for a, b in zip(text.strip(), right, strict=False)) / len(right)
        for text, right in zip(completions, answer, strict=True)
    ]


def failing(completions: list[str], **columns: Any) -> list[float]:
    raise LookupError("no answer is known")


def main(model: str, out: str, max_steps: int, reward: str) -> None:
    packing._flash_attn = lambda: PlainAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks the GPU for its name
    digits = [f"{number * 7919 % 100000:05d}" for number in range(256)]
    rows = [{"prompt": f"{each}=", "answer": "".join(sorted(each))} for each in digits]
    args = AsyncGRPOConfig(
        output_dir=f"{out}-trl",
        use_cpu=True,
        bf16=False,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        max_steps=max_steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        weight_sync_steps=2,
        num_generations=4,
        max_completion_length=8,
        token_budget=0,
        max_staleness=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        heartbeat_stale_after_s=60.0,
    )
    dataset = Dataset.from_list(rows)
    fleet = echo2.trl.RolloutFleet(model, dataset, globals()[reward], args, out=out, heldout=rows[:16])
    trainer = AsyncGRPOTrainer(model, args=args, train_dataset=dataset, rollout_worker=fleet, weight_transfer=fleet)
    trainer.train()
    print(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
