"""The TRL side of `time_to_accuracy.py`: GRPOTrainer on a local model and a file of prompts, on the CPU or a GPU.

Runs in TRL's own Python environment and imports nothing of echo2. Writes the weights every few steps to
`OUT/weights/step_N/` and one line a saved step to `OUT/clock.jsonl`: `step`, and `seconds` of training since the
start of the first step, with the time for saving weights taken out. `OUT/start.json` holds the seconds from the start
of the process to that moment, and the versions in use.

The settings are what a TRL user would write for this job: one batch a step, one update a batch, no KL term, no
gradient checkpointing, nothing but training inside the clock; float32 on the CPU, bfloat16 products on a GPU.
"""

from __future__ import annotations

import time

PROCESS_STARTED = time.monotonic()  # before the heavy imports: they are what start-up is made of

import argparse  # noqa: E402
import json  # noqa: E402
import runpy  # noqa: E402
import zlib  # noqa: E402
from importlib.metadata import version  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Clock(TrainerCallback):
    """Counts training time and saves weights outside it."""

    def __init__(self, out: Path, save_every: int, save: Any) -> None:
        self.out, self.save_every, self.save = out, save_every, save
        self.started: float | None = None
        self.paused_seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first step's rollouts are generated after this call, inside the clock."""
        if self.started is None:
            self.started = time.monotonic()
            start = {"startup_seconds": self.started - PROCESS_STARTED, "versions": versions()}
            (self.out / "start.json").write_text(json.dumps(start))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.save_every:
            return
        assert self.started is not None
        now = time.monotonic()
        seconds = now - self.started - self.paused_seconds
        self.save(self.out / "weights" / f"step_{state.global_step}")
        row = {"step": state.global_step, "seconds": seconds, "cpu_seconds": time.process_time()}
        with (self.out / "clock.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.paused_seconds += time.monotonic() - now


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("trl", "torch", "transformers", "accelerate", "datasets")}


def exact_match(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the completion is the answer."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def reward_function(named: str) -> Any:
    """`exact_match`, or file.py:function in TRL's signature, which imports nothing that is not here."""
    if named == "exact_match":
        return exact_match
    path, _, name = named.rpartition(":")
    return runpy.run_path(path)[name]


def settings(options: argparse.Namespace) -> GRPOConfig:
    """One optimizer step = `prompts` x `group` rollouts, generated at once, trained on once."""
    rollouts = options.prompts * options.group
    return GRPOConfig(
        output_dir=str(options.out),
        seed=options.seed,
        max_steps=options.steps,
        per_device_train_batch_size=rollouts // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        num_generations=options.group,
        max_completion_length=options.max_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards=options.scale_rewards,
        learning_rate=options.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup_steps,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        shuffle_dataset=False,  # the file is already in the order in which echo2 takes the same prompts
        gradient_checkpointing=False,
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        save_strategy="no",
        report_to=[],
        logging_steps=10,
        disable_tqdm=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts-file", type=Path, required=True, help="JSONL with prompt and answer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--reward", default="exact_match", help="or file.py:function")
    parser.add_argument("--scale-rewards", choices=("group", "none"), default="group")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.prompts_file.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward_function(options.reward),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        args=settings(options),
    )

    def save(directory: Path) -> None:
        trainer.model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    trainer.add_callback(Clock(options.out, options.save_every, save))
    trainer.train()
    digest = zlib.crc32(b"".join(p.detach().cpu().numpy().tobytes() for p in trainer.model.parameters()))
    print(f"done: {options.steps} steps, {time.process_time():.1f} cpu-s, weights crc32 {digest:08x}")


if __name__ == "__main__":
    main()
