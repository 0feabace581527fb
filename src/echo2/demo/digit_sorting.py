"""The demo's model: a character tokenizer and a 7 M parameter Qwen3, warmed up until it sometimes sorts correctly.

    python -m echo2.demo.digit_sorting --out outputs/models/digit_sorting

Reinforcement learning needs a policy that is sometimes right. So the random model is first taught by examples (SFT:
AdamW, next-token loss on the answer), just until a quarter of its sampled answers to held-out prompts are exact. The
result is an ordinary Hugging Face directory. Same seed, same machine: same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import string
import sys
import time
from array import array
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2.core.errors import UserError
from echo2.core.printable import PlainLines
from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.demo.small_models import UNTAUGHT, answer_loss, character_tokenizer, small_qwen3, update
from echo2.engines.engine import Completion, Outcome, SampleRequest
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.tasks.digit_sorting import DigitSorting

CHARACTERS = string.digits + string.ascii_letters + "=+-*/()., :?!\n"
MIN_DIGITS, MAX_DIGITS = 5, 10
MAX_NEW_TOKENS = 12
NUM_HEADS = 15  # 7 M parameters: with fewer, two cores spend more on sampling than on training

TARGET_ACCURACY = 0.25
CHECK_EVERY_STEPS = 10
CHECK_PROBLEMS = 256
MAX_STEPS = 1000  # length of the cosine schedule; about 150 steps are needed
WARMUP_STEPS = 30
BATCH_ROWS = 64
PEAK_LR = 3e-3


def examples(
    tokenizer: PreTrainedTokenizerFast, tasks: DigitSorting, step: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return rows of prompt + answer + end token, and their labels: only answers count in the loss."""
    rows, labels = [], []
    for index in range(step * BATCH_ROWS, (step + 1) * BATCH_ROWS):
        task = tasks[index % len(tasks)]
        prompt = tokenizer.encode(task["prompt"])
        answer = [*tokenizer.encode(task["answer"]), tokenizer.eos_token_id]
        rows.append(prompt + answer)
        labels.append([UNTAUGHT] * len(prompt) + answer)
    return rows, labels


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (MAX_STEPS - WARMUP_STEPS)))


def sampled_accuracy(
    model: Qwen3ForCausalLM, files: dict[str, bytes], tasks: DigitSorting, temperature: float
) -> float:
    """Share of exact answers, with one sample a problem from echo2's own engine."""
    tokenizer = load_tokenizer(files)
    engine = make_engine("compact", "cpu")
    tensors = {
        name: TensorBytes("F32", tuple(tensor.shape), tensor.detach().numpy().tobytes())
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    snapshot = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), tensors, files)
    params = SamplingParams(temperature=temperature, max_tokens=MAX_NEW_TOKENS)
    problems = [tasks[index] for index in range(CHECK_PROBLEMS)]
    prompts = [array("i", tokenizer.encode(task["prompt"], add_special_tokens=True)) for task in problems]

    async def sampled() -> list[Outcome]:
        try:
            await engine.update_weights(snapshot)
            requests = [SampleRequest(prompt, seed, 0, params) for seed, prompt in enumerate(prompts)]
            return await asyncio.gather(*engine.submit_together(requests))
        finally:
            await engine.close()  # a decode thread that is alive when Python ends can abort the process

    num_exact = 0
    for problem, outcome in zip(problems, asyncio.run(sampled()), strict=True):
        assert isinstance(outcome, Completion)
        text = tokenizer.decode(outcome.tokens.tolist(), skip_special_tokens=True)
        num_exact += text == problem["answer"] and outcome.finish == "stop"
    return num_exact / CHECK_PROBLEMS


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, files: dict[str, bytes], seed: int, target: float
) -> tuple[int, float]:
    """Train on examples until the target accuracy is reached; returns (number of steps, accuracy)."""
    train = DigitSorting("train", MIN_DIGITS, MAX_DIGITS, seed=seed)
    held_out = DigitSorting("heldout", MIN_DIGITS, MAX_DIGITS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    columns = (TextColumn("Warm-up"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    accuracy, console = 0.0, Console(stderr=True)
    plain = PlainLines(console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("step 0", total=target)
        for step in range(MAX_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            loss = answer_loss(model, *examples(tokenizer, train, step))
            update(model, optimizer, loss)
            if (step + 1) % CHECK_EVERY_STEPS == 0:
                accuracy = sampled_accuracy(model, files, held_out, temperature=1.0)
            text = f"step {step + 1}  loss {loss.item():.2f}  held-out accuracy {accuracy:.2f} of {target}"
            progress.update(bar, completed=accuracy, description=text)
            plain.print_due(f"warm-up: {text}", is_last=accuracy >= target)
            if accuracy >= target:
                return step + 1, accuracy
    raise UserError(f"The warm-up ended after {MAX_STEPS} steps at accuracy {accuracy:.2f}; try another --seed.")


def build(out: Path, seed: int = 0, num_heads: int = NUM_HEADS, target: float = TARGET_ACCURACY) -> None:
    """Write the model directory, replacing an older one, and print the model's accuracy. Takes about a minute.

    Raises:
        UserError: `out` exists and is not a model directory, or this seed's model does not learn.
    """
    if out.exists() and any(out.iterdir()) and not (out / "tokenizer.json").is_file():
        raise UserError(f"{out} exists and is not a model directory. Name another, or remove it.")
    started = time.perf_counter()
    disable_progress_bar()  # transformers' own, for writing one small file
    torch.set_num_threads(1)  # a model this small is faster on one thread, and its sums come out the same everywhere
    torch.manual_seed(seed)
    # Written beside `out` and renamed at the end: an interrupted build leaves nothing that looks like a model.
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer = character_tokenizer(CHARACTERS, unknown="<unk>")
    tokenizer.save_pretrained(unfinished)
    model = small_qwen3(tokenizer, context=256, num_heads=num_heads)
    model.config.save_pretrained(unfinished)
    files = {path.name: path.read_bytes() for path in unfinished.iterdir()}
    num_steps, accuracy = warm_up(model, tokenizer, files, seed, target)
    greedy = sampled_accuracy(model, files, DigitSorting("heldout", MIN_DIGITS, MAX_DIGITS), temperature=0.0)
    model.save_pretrained(unfinished)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)
    size, seconds = sum(parameter.numel() for parameter in model.parameters()), time.perf_counter() - started
    print(
        f"{out}: Qwen3, {size:,} parameters, {num_steps} warm-up steps in {seconds:.0f} s; "
        f"held-out accuracy {accuracy:.2f} sampled, {greedy:.2f} greedy"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the digit-sorting demo's model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; an older model there is replaced")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the examples")
    parser.add_argument("--heads", type=int, default=NUM_HEADS, help="the model's width: 3 has 0.3 M parameters")
    parser.add_argument("--accuracy", type=float, default=TARGET_ACCURACY, help="at which the warm-up ends, sampled")
    options = parser.parse_args()
    try:
        build(options.out, options.seed, options.heads, options.accuracy)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:  # the caller prints what to do next
        sys.exit(130)
