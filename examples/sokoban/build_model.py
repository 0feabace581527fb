"""Build the model of sokoban.toml: a tokenizer of the characters of levels and moves, and a 0.3 M parameter Qwen3 with
random weights. It has not seen a level, nor a move: all that it learns, it learns by playing.

    python examples/sokoban/build_model.py --out outputs/models/sokoban
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from echo2.demo.small_models import character_tokenizer, small_qwen3, write_model

sys.path.insert(0, str(Path(__file__).parent))
from sokoban import MOVES, SYMBOLS


def build(out: Path, seed: int) -> None:
    """Write a model directory."""
    tokenizer = character_tokenizer([*SYMBOLS, *MOVES, "\n"])
    torch.manual_seed(seed)
    write_model(small_qwen3(tokenizer, context=512), tokenizer, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/models/sokoban"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    disable_progress_bar()  # transformers' own, for writing one small file
    build(options.out, options.seed)
