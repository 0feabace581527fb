"""A training loop of a real SDK that prints each step's loss and a sample; the service is killed under it.

python tests/sdk/training.py tinker|logits URL KEY STEPS
"""

from __future__ import annotations

import sys

from conformance import ADAM, Client, datum, loss, now, sample


def main() -> None:
    facade, url, key, num_steps = sys.argv[1:]
    trainer = Client(facade, url, key).trainer(seed=5)
    for step in range(int(num_steps)):
        future = trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(ADAM)
        path = trainer.save_state(f"step_{step}").result().path
        sampler = now(trainer.save_weights_and_get_sampling_client())
        tokens = [list(sequence.tokens) for sequence in sample(sampler, 2, seed=step)]
        print(loss(future.result()).hex(), path.split("/")[-1], tokens, flush=True)


if __name__ == "__main__":
    main()
