"""Teach a small model the form of a rollout of calculator.toml, not when to do what: it asks the calculator one time
in three, and else guesses. Some fifteen seconds.

    python examples/calculator/build_model.py --out outputs/models/calculator
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2.demo.small_models import UNTAUGHT, answer_loss, character_tokenizer, small_qwen3, update, write_model

sys.path.insert(0, str(Path(__file__).parent))
from calculator import Sums

STEPS, BATCH, LR = 250, 64, 3e-3
ASKS = 1 / 3  # how often it asks the calculator
SLIPS = 0.1  # how often it copies the result with an error


def transcript(row: dict[str, str], rng: random.Random) -> tuple[str, list[bool]]:
    """A rollout, and which characters are the policy's."""
    guess = f"{rng.randrange(100):02d}"
    if rng.random() >= ASKS:
        parts = [(row["prompt"], False), (f"{guess}\n", True)]
    else:
        said = guess if rng.random() < SLIPS else row["answer"]
        call = f"?{row['prompt'].removesuffix('=')}\n"
        parts = [(row["prompt"], False), (call, True), (f"{row['answer']}\n", False), (f"{said}\n", True)]
    return "".join(text for text, _ in parts), [own for text, own in parts for _ in text]


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> float:
    """The loss of the last step."""
    rows, rng = Sums(seed=seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        texts, labels = [], []
        for _ in range(BATCH):
            text, own = transcript(rows[rng.randrange(len(rows))], rng)
            tokens = tokenizer.encode(text)
            texts.append(tokens)
            labels.append([token if is_own else UNTAUGHT for token, is_own in zip(tokens, own, strict=True)])
        loss = answer_loss(model, texts, labels)
        update(model, optimizer, loss)
    return loss.item()


def build(out: Path, seed: int) -> float:
    """Write a model directory."""
    tokenizer = character_tokenizer("0123456789+*=?\n")
    torch.manual_seed(seed)
    model = small_qwen3(tokenizer, context=128)
    loss = teach(model, tokenizer, seed)
    write_model(model, tokenizer, out)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/models/calculator"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    print(f"{options.out}: taught; loss {build(options.out, options.seed):.2f}")
