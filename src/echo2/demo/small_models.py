"""Small character models for the demo and the examples, made without a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<pad>", "<eos>"
UNTAUGHT = -100  # label of a token that does not count in the loss


def character_tokenizer(characters: Sequence[str], unknown: str = PAD) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a character, in this order after padding and end; decoding restores the text."""
    names = dict.fromkeys((PAD, END, unknown, *characters))
    vocabulary = {name: number for number, name in enumerate(names)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=unknown, clean_up_tokenization_spaces=False
    )


def small_qwen3(tokenizer: PreTrainedTokenizerFast, context: int, num_heads: int = 3) -> Qwen3ForCausalLM:
    """Make a Qwen3 with random weights, 0.3 M of them with 3 heads; head_dim 32 is vLLM's minimum."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32 * num_heads,
        intermediate_size=256 * num_heads // 3,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Stack rows into a tensor [rows, longest], padded on the right with `value`."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def answer_loss(
    model: Qwen3ForCausalLM, rows: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], reduction: str = "mean"
) -> Tensor:
    """Next-token cross-entropy in nats, without labels `UNTAUGHT`: the mean; with reduction "none", that of each token
    [rows, longest - 1], 0 where the label is `UNTAUGHT`."""
    logits_BTV = model(input_ids=padded(rows, 0), use_cache=False).logits[:, :-1]
    return cross_entropy(logits_BTV.transpose(1, 2), padded(labels, UNTAUGHT)[:, 1:], reduction=reduction)


def write_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a model directory."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def update(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one optimizer step on this loss, with the gradient clipped at norm 1."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
