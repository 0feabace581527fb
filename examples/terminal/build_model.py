"""Teach a small model to work in a shell, not what to do there: it runs one of six programs on the file that the task
names, whichever comes to mind, and says that it is done. Half a minute.

    python examples/terminal/build_model.py --out outputs/models/terminal
"""

import argparse
import random
import re
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2.demo.small_models import UNTAUGHT, answer_loss, character_tokenizer, small_qwen3, update, write_model

STEPS, BATCH, LR = 250, 32, 3e-3
TASKS = Path(__file__).parent / "tasks"
PROGRAMS = (
    "wc -l < {}",
    "wc -c < {}",
    "sort {} | head -1",
    "sort {} | tail -1",
    "uniq {} | wc -w",
    "awk '{{s += $1}} END {{print s}}' {}",
)
#: What the system message says is the same for every task: the model does not read it.
CHAT_TEMPLATE = (
    "{% for message in messages if message['role'] != 'system' %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
DONE = "Done."


def transcript(instruction: str, rng: random.Random) -> list[tuple[str, bool]]:
    """A rollout in parts, each with whether it is the policy's."""
    (file,) = re.findall(r"\w+\.txt", instruction.replace("answer.txt", ""))
    command = f"```bash\n{rng.choice(PROGRAMS).format(file)} > answer.txt\n```"
    return [(f"{instruction}>", False), (command, True), ("[exit status 0]>", False), (DONE, True)]


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, instructions: list[str], seed: int) -> float:
    """The loss of the last step."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        rows, labels = [], []
        for _ in range(BATCH):
            row, label = list[int](), list[int]()
            for text, is_own in transcript(rng.choice(instructions), rng):
                tokens = tokenizer.encode(text) + [tokenizer.eos_token_id] * is_own
                row += tokens
                label += tokens if is_own else [UNTAUGHT] * len(tokens)
            rows.append(row)
            labels.append(label)
        loss = answer_loss(model, rows, labels)
        update(model, optimizer, loss)
    return loss.item()


def build(out: Path, seed: int) -> float:
    """Write a model directory."""
    instructions = [path.read_text() for path in sorted(TASKS.glob("*/instruction.md"))]
    characters = "".join(sorted({*"".join([*instructions, *PROGRAMS, DONE, "```bash\n[exit status 0123456789]:>"])}))
    tokenizer = character_tokenizer(characters)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    model = small_qwen3(tokenizer, context=512)
    loss = teach(model, tokenizer, instructions, seed)
    write_model(model, tokenizer, out)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/models/terminal"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    print(f"{options.out}: taught; loss {build(options.out, options.seed):.2f}")
