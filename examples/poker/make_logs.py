"""Let a careless player play Kuhn poker, and log what it saw, did and got.

    python examples/poker/make_logs.py            # into outputs/data/hands.jsonl

The player moves at random, by habits that depend on its card. The log does not say so: no probabilities are logged, as
in logs that somebody else kept. With --logprobs they are.
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from kuhn import Decisions, play_hand

HANDS = 4000


def make_logs(out: Path, hands: int = HANDS, seed: int = 0, with_logprobs: bool = False) -> int:
    """Write the log; the number of its lines. The same arguments give the same file."""
    rng = random.Random(seed)
    lines = [line for hand in range(hands) for line in play_hand(rng, hand % 2)]
    if with_logprobs:
        habits = {row["prompt"]: row["habits"] for row in map(Decisions().__getitem__, range(12))}
        lines = [{**line, "logprob": math.log(habits[line["prompt"]][line["completion"]])} for line in lines]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/data/hands.jsonl"))
    parser.add_argument("--hands", type=int, default=HANDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logprobs", action="store_true", help="log the probability of each move too")
    options = parser.parse_args()
    print(f"{options.out}: {make_logs(options.out, options.hands, options.seed, options.logprobs)} decisions")
