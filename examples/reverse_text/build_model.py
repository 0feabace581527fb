"""Teach a small model the form of an answer in verifiers' reverse_text; two letters in five are wrong. Write words to
reverse, too. Some twenty seconds.

    python examples/reverse_text/build_model.py --out outputs/models/reverse_text --data outputs/data/reverse_text
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2.demo.small_models import UNTAUGHT, answer_loss, character_tokenizer, small_qwen3, update, write_model

STEPS, BATCH, LR = 200, 64, 3e-3
LETTERS, LENGTH = "abcdefgh", 4
SLIPS = 0.4  # how often a letter of an answer is a random one
FORM = "<reversed_text>{}</reversed_text>"
#: What the taskset's system message says is the same for every word: the model does not read it.
CHAT_TEMPLATE = (
    "{% for message in messages if message['role'] != 'system' %}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def answer(word: str, rng: random.Random) -> str:
    """A reversed word with slips, in the taskset's form."""
    return FORM.format("".join(rng.choice(LETTERS) if rng.random() < SLIPS else letter for letter in reversed(word)))


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[str], seed: int) -> float:
    """The loss of the last step."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    end, loss = tokenizer.eos_token_id, torch.tensor(0.0)
    for _ in range(STEPS):
        asked = [tokenizer.encode(f"{word}=") for word in rng.choices(words, k=BATCH)]
        told = [[*tokenizer.encode(answer(tokenizer.decode(prompt)[:-1], rng)), end] for prompt in asked]
        rows = [prompt + completion for prompt, completion in zip(asked, told, strict=True)]
        labels = [[UNTAUGHT] * len(prompt) + completion for prompt, completion in zip(asked, told, strict=True)]
        loss = answer_loss(model, rows, labels)
        update(model, optimizer, loss)
    return loss.item()


def write_words(out: Path, seed: int) -> list[str]:
    """Write train.jsonl and test.jsonl, which share no word, as the `datasets` library reads a directory. Return the
    words to train on."""
    rng = random.Random(seed)
    numbers = rng.sample(range(len(LETTERS) ** LENGTH), 640)
    words = [
        "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(LENGTH))
        for number in numbers
    ]
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", words[128:]), ("test", words[:128])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in part))
    return words[128:]


def build(out: Path, data: Path, seed: int) -> float:
    """Write a model directory and the words."""
    words = write_words(data, seed)
    tokenizer = character_tokenizer(sorted({*LETTERS, *FORM, "="}))
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    model = small_qwen3(tokenizer, context=128)
    loss = teach(model, tokenizer, words, seed)
    write_model(model, tokenizer, out)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/models/reverse_text"))
    parser.add_argument("--data", type=Path, default=Path("outputs/data/reverse_text"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    print(f"{options.out}: taught; loss {build(options.out, options.data, options.seed):.2f}")
