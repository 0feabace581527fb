"""Build the model of sokoban.toml: a tokenizer of the characters of levels and moves, and a 0.3 M parameter Qwen3 with
random weights. It has not seen a level, nor a move: all that it learns, it learns by playing.

    python examples/sokoban/build_model.py --out outputs/models/sokoban
"""

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
from sokoban import MOVES, SYMBOLS


def build(out: Path, seed: int) -> None:
    """Write a model directory."""
    vocab = {token: number for number, token in enumerate(("<pad>", "<eos>", *SYMBOLS, *MOVES, "\n"))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    Qwen3ForCausalLM(config).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/models/sokoban"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    disable_progress_bar()  # transformers' own, for writing one small file
    build(options.out, options.seed)
