"""Held-out sampled accuracy of saved weights: one judge for both sides of `time_to_accuracy.py`, outside every clock.

Plain `generate()` of transformers at temperature 1, with a fixed seed for each set of weights; exact match. Neither
side's own sampler is used. Reads JSONL problems (`prompt`, `answer`), prints one JSON object {directory: accuracy}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def accuracy(directory: Path, rows: list[dict[str, Any]], samples: int, max_tokens: int, seed: int) -> float:
    """Share of right answers among `samples` samples of every problem."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
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
    right = sum(text.strip() == str(rows[at // samples]["answer"]) for at, text in enumerate(texts))
    return float(right / len(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("directories", type=Path, nargs="+")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.problems.read_text(encoding="utf-8").splitlines()]
    results = {
        str(directory): accuracy(directory, rows, options.samples, options.max_tokens, options.seed)
        for directory in options.directories
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
