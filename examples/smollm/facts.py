"""Facts in a sentence, to be written as JSON: the rows, and the reward.

    python examples/smollm/facts.py --out outputs/data/facts   # train.jsonl, heldout.jsonl; `make smollm` does this

    Anna is 23 years old and lives in Oslo. Write this as JSON with keys name and age.
    {"name": "Anna", "age": 23}

Held-out rows have names and cities that no training row has, and one form of sentence.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: Of each split, here and in answered.py.
NAMES = {
    "train": (
        "Anna",
        "Ben",
        "Carla",
        "David",
        "Emma",
        "Frank",
        "Grace",
        "Henry",
        "Isla",
        "Jack",
        "Kate",
        "Liam",
        "Mia",
        "Noah",
        "Olive",
        "Paul",
        "Quinn",
        "Rosa",
        "Sam",
        "Tina",
    ),
    "heldout": ("Uma", "Victor", "Wendy", "Xavier", "Yara", "Zoe"),
}
CITIES = (
    "Paris",
    "London",
    "Rome",
    "Berlin",
    "Madrid",
    "Vienna",
    "Oslo",
    "Dublin",
    "Cairo",
    "Lima",
    "Tokyo",
    "Delhi",
    "Boston",
    "Chicago",
    "Toronto",
    "Sydney",
)
FORMS = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "In {city} there lives {name}, who is {age}.",
    "{name} of {city} is {age} years old.",
)
#: Rows, names, cities and forms of each split.
SPLITS: dict[str, tuple[int, Sequence[str], Sequence[str], Sequence[str]]] = {
    "train": (600, NAMES["train"], CITIES[:12], FORMS[:3]),
    "heldout": (96, NAMES["heldout"], CITIES[12:], FORMS[1:]),
}
KEYS = (("name", "age"), ("name", "city"))
SYSTEM = {"role": "system", "content": "You write JSON on one line."}
#: For JSON that says something else: it tells the form from the facts.
OTHER_JSON = 0.2


def rows(split: str, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Rows {"prompt", "answer"}, each sentence once."""
    rng = random.Random(f"facts {seed} {split}")
    num_rows, names, cities, forms = SPLITS[split]
    seen: set[str] = set()
    while len(seen) < num_rows:
        facts = {"name": rng.choice(names), "age": rng.randint(11, 89), "city": rng.choice(cities)}
        keys = rng.choice(KEYS)
        asked = f"{rng.choice(forms).format(**facts)} Write this as JSON with keys {' and '.join(keys)}."
        if asked not in seen:
            seen.add(asked)
            answer = json.dumps({key: facts[key] for key in keys})
            yield {"prompt": [SYSTEM, {"role": "user", "content": asked}], "answer": answer}


def same_json(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for JSON that says what the answer says, 0.2 for another JSON object, else 0."""
    return [
        judged(completion[0]["content"], json.loads(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def judged(text: str, right: Any) -> float:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if said == right else OTHER_JSON * isinstance(said, dict)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/data/facts"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        (options.out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(split)))
