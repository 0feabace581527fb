"""How far the divergence over a teacher's likely tokens, with the rest as one (`distill.divergence`), is from the one
over the whole vocabulary.

    make bench-joined_divergence ARGS='--students outputs/models/smollm2 --teachers DIR DIR --prompts FILE FILE'

Each student samples answers to the prompts. At each token that it drew, both divergences to each teacher are computed,
in float32. Figures of a pair: the mean of the whole divergence (nats), and by `top_k`

    share_of_divergence     the mean of the joined divergence, as a share of the whole one's
    logits_gradient_off     how far its gradient by the logits of all tokens drawn is from the whole one's, as a share
                            of that one's length
    weights_gradient_off    the same of the gradient by the weights of the student's last layers
    unbounded_gradient_off  of the forward form: the same as the line above, if the pull at the rest had no bound
    teacher_outside         the teacher's probability outside of the `top_k` tokens
    bounded_share           of the tokens, those where the forward form's pull at the rest meets its bound
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from recording import save, there
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo2.learner.core.losses import LOG_RATIO_LIMIT
from echo2.learner.grpo.teachers import TAIL_LEAST, joined_divergence

BETAS = (1.0, 0.5, 0.0)
TOP_KS = (16, 64, 256, 1024)
#: Tokens whose divergences are computed at once, and the student's last layers whose gradients are compared.
CHUNK, LAYERS = 32, 4
Divergence = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Answer:
    """One conversation: all of its tokens, and where the student's own begin."""

    tokens: Tensor
    start: int

    def logits(self, model: Any) -> Tensor:
        """The logits [n, V] from which each of the student's tokens was drawn."""
        found: Tensor = model(self.tokens[None], use_cache=False).logits[0, self.start - 1 : -1]
        return found.float()


def load_model(path: Path) -> Any:
    """The model; only its last layers have gradients, which bounds what is held for them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    model.model.layers[-LAYERS:].requires_grad_(True)
    return model


def sampled(model: Any, tokenizer: Any, prompts: list[Any], max_tokens: int) -> list[Answer]:
    """Answers that the model draws from its whole distribution."""
    torch.manual_seed(0)
    answers = []
    for prompt in prompts:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": max_tokens}
        answers.append(Answer(model.generate(ids, **drawn)[0], ids.shape[1]))
    return answers


def whole(beta: float) -> Divergence:
    """The divergence over the whole vocabulary, of logits."""

    def of(logits: Tensor, teacher: Tensor) -> Tensor:
        log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
        if beta in (0.0, 1.0):
            return ((log_p - log_q) * (log_p.exp() if beta else -log_q.exp())).sum(-1)
        log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
        parts = beta * log_q.exp() * (log_q - log_m) + (1.0 - beta) * log_p.exp() * (log_p - log_m)
        return parts.sum(-1)

    return of


def joined(beta: float, top_k: int) -> Divergence:
    """What the learner's loss has."""

    def of(logits: Tensor, teacher: Tensor) -> Tensor:
        top, ids = teacher.log_softmax(-1).topk(top_k)
        return joined_divergence(logits.log_softmax(-1).gather(1, ids), top, beta)

    return of


def unbounded(top_k: int) -> Divergence:
    """The forward form of the joined divergence, with whatever gradient it has."""

    def of(logits: Tensor, teacher: Tensor) -> Tensor:
        log_q, ids = teacher.log_softmax(-1).topk(top_k)
        log_p = logits.log_softmax(-1).gather(1, ids)
        rests = ((1.0 - part.exp().sum(-1, True)).clamp(min=TAIL_LEAST).log() for part in (log_p, log_q))
        log_p, log_q = (torch.cat([part, rest], 1) for part, rest in zip((log_p, log_q), rests, strict=True))
        return (log_q.exp() * (log_q - log_p)).sum(-1)

    return of


def by_logits(of: Divergence, logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence of each token, and its gradient by the logits."""
    values, grads = [], []
    for own, theirs in zip(logits.split(CHUNK), teacher.split(CHUNK), strict=True):
        leaf = own.detach().requires_grad_()
        value = of(leaf, theirs)
        grads.append(torch.autograd.grad(value.sum(), leaf)[0])
        values.append(value.detach())
    return torch.cat(values), torch.cat(grads)


def length(parts: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


def by_weights(model: Any, logits: list[Tensor], grads: Iterable[Tensor]) -> float:
    """The length of the gradient by the weights, from those by the logits of each answer."""
    total = torch.stack([(own * grad).sum() for own, grad in zip(logits, grads, strict=True)]).sum()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return length(torch.autograd.grad(total, weights, retain_graph=True))


def outside(logits: list[Tensor], teacher: list[Tensor], top_k: int) -> dict[str, float]:
    """What is outside of the teacher's likely tokens."""
    rests = []
    for own, theirs in zip(logits, teacher, strict=True):
        top, ids = theirs.log_softmax(-1).topk(top_k)
        policy = own.detach().log_softmax(-1).gather(1, ids)
        rests.append(torch.stack([(1.0 - part.exp().sum(-1)).clamp(min=1e-9) for part in (policy, top)]))
    own_rest, rest = torch.cat(rests, 1)
    bounded = (rest / own_rest > LOG_RATIO_LIMIT) & (rest > 1e-5)
    return {"teacher_outside": round(float(rest.mean()), 5), "bounded_share": round(float(bounded.float().mean()), 4)}


def cell(student: Any, teacher: Any, answers: list[Answer]) -> Iterator[dict[str, Any]]:
    """The figures of one pair on these answers, by form."""
    logits = [answer.logits(student) for answer in answers]
    with torch.no_grad():
        theirs = [answer.logits(teacher) for answer in answers]
    for beta in BETAS:
        exact = [by_logits(whole(beta), *pair) for pair in zip(logits, theirs, strict=True)]
        mean = float(torch.cat([values for values, _ in exact]).mean())
        grads = [grad for _, grad in exact]
        by_top_k = {}
        for top_k in TOP_KS:
            near = [by_logits(joined(beta, top_k), *pair) for pair in zip(logits, theirs, strict=True)]
            off = [found - grad for (_, found), grad in zip(near, grads, strict=True)]
            by_top_k[str(top_k)] = {
                "share_of_divergence": round(float(torch.cat([values for values, _ in near]).mean()) / mean, 4),
                "logits_gradient_off": round(length(off) / length(grads), 4),
                "weights_gradient_off": round(by_weights(student, logits, off) / by_weights(student, logits, grads), 4),
                **outside(logits, theirs, top_k),
            }
            if beta == 0.0:
                free = [by_logits(unbounded(top_k), *pair)[1] for pair in zip(logits, theirs, strict=True)]
                off = [found - grad for found, grad in zip(free, grads, strict=True)]
                share = by_weights(student, logits, off) / by_weights(student, logits, grads)
                by_top_k[str(top_k)]["unbounded_gradient_off"] = round(share, 4)
        yield {"beta": beta, "divergence": round(mean, 5), "by_top_k": by_top_k}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--students", type=there, nargs="+", required=True, help="model directories")
    parser.add_argument("--teachers", type=there, nargs="+", required=True, help="model directories")
    parser.add_argument("--prompts", type=there, nargs="+", required=True, help="rows with `prompt` or `question`")
    parser.add_argument("--rows", type=int, default=12, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for path, prompts in product(options.students, options.prompts):
        student, tokenizer = load_model(path), AutoTokenizer.from_pretrained(path)
        rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()[: options.rows]]
        asked = [row.get("prompt") or row["question"] for row in rows]
        answers = sampled(student, tokenizer, asked, options.max_tokens)
        num_tokens = sum(len(answer.tokens) - answer.start for answer in answers)
        for of_teacher in options.teachers:
            if of_teacher != path:
                named = {"student": path.name, "teacher": of_teacher.name, "prompts": prompts.name}
                for figures in cell(student, load_model(of_teacher), answers):
                    found.append({**named, "tokens": num_tokens, **figures})
                    print(json.dumps(found[-1]), flush=True)
    print(save("joined_divergence", {"rows": found}, options.out))


if __name__ == "__main__":
    main()
