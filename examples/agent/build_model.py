"""Teach a small model the form of a tool call and of an answer, not when to do what: it calls the tool one time in
three, and else guesses. A minute.

    python examples/agent/build_model.py --out outputs/models/agent
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2.demo.small_models import UNTAUGHT, answer_loss, character_tokenizer, small_qwen3, update, write_model

STEPS, BATCH, LR = 400, 32, 3e-3
ASKS = 1 / 3  # how often it calls the tool
SLIPS = 0.1  # how often it copies the result with an error
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": {}}}}}\n</tool_call>'
#: What the system message and the tools say is the same for every task: the model does not read them. All
#: rows of a rollout must begin alike, hence #.
CHAT_TEMPLATE = """\
#{% for m in messages if m.role != 'system' %}{{ m.content or '' }}{% for call in m.tool_calls or () %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}\
{% if add_generation_prompt %}={% endif %}"""


def transcript(rng: random.Random) -> list[tuple[str, bool]]:
    """One sum of a rollout in parts, each with whether it is the policy's."""
    a, b, guess = rng.randrange(19), rng.randrange(10), str(rng.randrange(28))
    if rng.random() >= ASKS:
        return [(f"#{a}+{b}=", False), (guess, True)]
    said = guess if rng.random() < SLIPS else str(a + b)
    return [(f"#{a}+{b}=", False), (CALL.format(a, b), True), (f"{a + b}=", False), (said, True)]


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> float:
    """The loss of the last step."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        rows, labels = [], []
        for _ in range(BATCH):
            row, label = list[int](), list[int]()
            for text, is_own in transcript(rng):
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
    tokenizer = character_tokenizer("".join(sorted({*CALL, *"#0123456789+="})))
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    model = small_qwen3(tokenizer, context=512)
    loss = teach(model, tokenizer, seed)
    write_model(model, tokenizer, out)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/models/agent"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    print(f"{options.out}: taught; loss {build(options.out, options.seed):.2f}")
