"""An agent of the OpenAI agents SDK, as its authors wrote it, that adds three numbers with a tool; and its tasks. The
history is compacted: after the first sum only the agent's own result goes on. Used by agent.toml, which needs
`pip install openai-agents==0.24.0`.
"""

import random
from collections.abc import Mapping
from typing import Any

TURNS = 3  # of the agent for one sum


class ThreeNumbers:
    """Rows: three digits to add; those that begin with 7 are held out."""

    def __init__(self, split: str = "train", size: int = 4096, seed: int = 0) -> None:
        self.split, self.size, self.seed = split, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.split} {self.seed} {index}")
        first = 7 if self.split == "heldout" else rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 9])
        numbers = [first, rng.randrange(10), rng.randrange(10)]
        return {"prompt": f"{numbers[0]}+{numbers[1]}", "numbers": numbers, "answer": str(sum(numbers))}


class Adder:
    """One rollout: a row for the first sum, and one for the second."""

    def __init__(self, columns: Mapping[str, Any], seed: int) -> None:
        self.columns = columns

    async def run(self, policy: Any) -> float:
        """1 for the right sum."""
        from agents import (
            Agent,
            MaxTurnsExceeded,
            OpenAIChatCompletionsModel,
            Runner,
            function_tool,
            set_tracing_disabled,
        )
        from openai import AsyncOpenAI

        set_tracing_disabled(True)

        @function_tool
        def add(a: int, b: int) -> int:
            return a + b

        async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            model = OpenAIChatCompletionsModel("policy", client)
            agent = Agent(name="adder", instructions="Add with the tool.", tools=[add], model=model)
            first, *rest = self.columns["numbers"]
            total = str(first)
            for number in rest:
                try:
                    total = (await Runner.run(agent, f"{total}+{number}", max_turns=TURNS)).final_output
                except MaxTurnsExceeded:
                    return 0.0
        return float(total == self.columns["answer"])
