"""Held-out sampled reward of saved weights: one judge for both sides of `time_to_accuracy.py`, outside every clock.

Plain `generate()` of transformers at temperature 1, with a fixed seed for each set of weights; exact match, or a reward
function of a file. Neither side's own sampler is used. Reads JSONL problems (`prompt`: text, or chat messages; and
`answer`), prints one JSON object {directory: mean reward}.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recording import there
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def accuracy(
    directory: Path,
    rows: list[dict[str, Any]],
    samples: int,
    max_tokens: int,
    seed: int,
    reward: str = "exact_match",
    device: str = "cpu",
) -> float:
    """Mean reward of `samples` samples of every problem."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
    asked: Any = [row["prompt"] for row in rows]
    is_chat = not isinstance(asked[0], str)
    if is_chat:
        asked = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    output_BT = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    width = prompts["input_ids"].shape[1]
    texts = tokenizer.batch_decode(output_BT[:, width:], skip_special_tokens=True)
    answers = [rows[at // samples]["answer"] for at in range(len(texts))]
    said = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
    rewards = reward_function(reward)(said, answer=answers)
    return float(sum(rewards) / len(rewards))


def reward_function(named: str) -> Callable[..., list[float]]:
    """`exact_match`, or file.py:function in TRL's signature."""
    if named == "exact_match":
        return lambda said, answer: [float(a.strip() == str(b)) for a, b in zip(said, answer, strict=True)]
    path, _, name = named.rpartition(":")
    found: Callable[..., list[float]] = runpy.run_path(path)[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=there, required=True)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--reward", default="exact_match", help="or file.py:function")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("directories", type=there, nargs="+")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.problems.read_text(encoding="utf-8").splitlines()]
    results = {
        str(directory): accuracy(
            directory, rows, options.samples, options.max_tokens, options.seed, options.reward, options.device
        )
        for directory in options.directories
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
