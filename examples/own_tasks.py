"""Tasks of one's own: 123= -> 321. Used by own_class.toml."""

import random


class Reversal:
    """Rows are made when they are asked for. The same index must always give the same row."""

    def __init__(self, digits: int, size: int, seed: int = 0, split: str = "train") -> None:
        self.digits = digits
        self.size = size
        self.seed = seed  # the run's, where params give none
        self.split = split

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, str]:
        rng = random.Random(f"{self.seed} {self.split} {index}")
        number = "".join(rng.choices("0123456789", k=self.digits))
        return {"prompt": f"{number}=", "answer": number[::-1]}
