"""The client of service_beside_skyrl.py, run by a Python that has an SDK: the same requests to each side, in turn.

    python service_client.py KEY ROUNDS VOCABULARY NAME=URL=PROCESS_ID ...

Prints a line of JSON for each thing done: which, on which side, seconds, and CPU seconds of that side's processes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import tinker
from cpu_time import cpu_seconds
from tinker import types


class Side:
    """A server, a trainer and a sampler there."""

    def __init__(self, text: str, key: str, vocabulary: int) -> None:
        self.name, url, process = text.split("=")
        self.process, self.vocabulary, self.rng = int(process), vocabulary, random.Random(0)
        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        self.trainer: Any = self.service.create_lora_training_client(base_model="echo2/tiny", rank=8)
        self.sampler: Any = self.trainer.save_weights_and_get_sampling_client()

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, self.vocabulary) for _ in range(count)]

    def step(self) -> None:
        """8 x 128 tokens, and AdamW; both submitted before the first is waited for."""
        data = []
        for _ in range(8):
            tokens = self.tokens(129)
            inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * 128}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        futures = [self.trainer.forward_backward(data, "cross_entropy")]
        futures.append(self.trainer.optim_step(types.AdamParams(learning_rate=1e-4)))
        for future in futures:
            future.result()

    def sample(self, concurrent: int) -> None:
        """So many requests at once, each of 64 tokens behind 32."""
        params = types.SamplingParams(max_tokens=64, temperature=1.0, stop=[])
        prompts = [types.ModelInput.from_ints(self.tokens(32)) for _ in range(concurrent)]
        futures = [self.sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
        for future in futures:
            future.result()

    def new_sampler(self) -> None:
        """The weights as they are, and a token from them."""
        self.sampler = self.trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=1, stop=[])
        prompt = types.ModelInput.from_ints(self.tokens(32))
        self.sampler.sample(prompt, num_samples=1, sampling_params=params).result()


def main() -> None:
    key, rounds, vocabulary, *texts = sys.argv[1:]
    sides = [Side(text, key, int(vocabulary)) for text in texts]
    kinds: dict[str, Callable[[Side], None]] = {
        "step_8x128": Side.step,
        "sample_1": lambda side: side.sample(1),
        "sample_16": lambda side: side.sample(16),
        "sample_64": lambda side: side.sample(64),
        "new_sampler": Side.new_sampler,
    }
    for number in range(int(rounds) + 1):
        for kind, action in kinds.items():
            for side in sides if number % 2 else reversed(sides):
                cpu, began = cpu_seconds(side.process), time.perf_counter()
                action(side)
                seconds = time.perf_counter() - began
                told = {"kind": kind, "side": side.name, "round": number, "seconds": seconds}
                print(json.dumps({**told, "cpu": cpu_seconds(side.process) - cpu}), flush=True)
                print(f"{number} {kind} {side.name} {seconds:.3f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
