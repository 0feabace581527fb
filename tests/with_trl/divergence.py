"""Run by TRL's environment: TRL's divergences of two distributions, ours of all tokens, and how far they differ."""

from __future__ import annotations

import json

import torch
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from echo2.learner.grpo.teachers import joined_divergence

NUM_TOKENS, VOCAB = 5, 40


def main() -> None:
    torch.manual_seed(0)
    student, teacher = (2.0 * torch.randn(NUM_TOKENS, VOCAB) for _ in range(2))
    to_logits = torch.eye(VOCAB)
    found = {}
    for beta in (0.0, 0.3, 0.5, 1.0):
        logits = student.clone().requires_grad_()
        theirs, _ = ChunkedDivergenceFunction.apply(logits, to_logits, None, teacher, to_logits, None, beta)
        own = joined_divergence(logits.log_softmax(-1), teacher.log_softmax(-1), beta)
        grads = [torch.autograd.grad(each.sum(), logits)[0] for each in (theirs, own)]
        found[beta] = {
            "divergence": float(theirs.detach().mean()),
            "off": float((theirs - own).detach().abs().max()),
            "gradient": float(grads[0].abs().max()),
            "gradient_off": float((grads[0] - grads[1]).abs().max()),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
