"""Teach a copy of the demo's model to play as the careless player whose hands are logged. Some ten seconds.

    python examples/poker/build_model.py            # outputs/models/digit_sorting -> outputs/models/poker

Importance weights correct how likely the policy does what a log did. A policy that never does it has weights of zero
and learns nothing from them. So this one is taught the log's habits first, as offline learning mostly begins.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2.demo.small_models import UNTAUGHT, answer_loss, update

sys.path.insert(0, str(Path(__file__).parent))
from kuhn import Decisions

MOST_STEPS = 600
LR = 2e-3
ENOUGH = 0.02  # nats an answer above what habits leave open


def all_answers(tokenizer: PreTrainedTokenizerFast) -> tuple[list[list[int]], list[list[int]], Tensor, float]:
    """Either move of every decision: rows of prompt + move + <eos>, their labels, how often each answer is given
    [rows], and how many nats that leaves open."""
    rows, labels, chances = [], [], []
    for decision in map(Decisions().__getitem__, range(12)):
        prompt = tokenizer.encode(decision["prompt"])
        for move, chance in decision["habits"].items():
            answer = [*tokenizer.encode(move), tokenizer.eos_token_id]
            rows.append(prompt + answer)
            labels.append([UNTAUGHT] * len(prompt) + answer)
            chances.append(chance / 12)
    return rows, labels, torch.tensor(chances), -sum(chance * math.log(12 * chance) for chance in chances)


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[int, float]:
    """Until it answers as the careless player does: steps done, and nats an answer too many."""
    rows, labels, chances_B, least = all_answers(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    nats = math.inf
    for step in range(1, MOST_STEPS + 1):
        loss_BT = answer_loss(model, rows, labels, reduction="none")
        loss = (loss_BT.sum(dim=1) * chances_B).sum()
        nats = loss.item() - least
        if nats < ENOUGH:
            return step, nats
        update(model, optimizer, loss)
    raise SystemExit(f"After {MOST_STEPS} steps an answer still has {nats:.2f} nats too many.")


def build(source: Path, out: Path) -> tuple[int, float]:
    """A taught copy of the model at `source`."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = Qwen3ForCausalLM.from_pretrained(source).float()
    taught = teach(model, tokenizer)
    shutil.copytree(source, out, dirs_exist_ok=True)
    model.save_pretrained(out)
    return taught


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("outputs/models/digit_sorting"))
    parser.add_argument("--out", type=Path, default=Path("outputs/models/poker"))
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    if not (options.source / "config.json").is_file():
        sys.exit(f"error: no model in {options.source}; `make demo` builds it.")
    steps, nats = build(options.source, options.out)
    print(f"{options.out}: taught the moves in {steps} steps; {nats:.3f} nats an answer from the habits")
