"""Stop strings: one rule for all engines, and for the head, which checks that a rollout ends with one.

A sample ends with the first token that completes a stop string in its text, where special tokens stand as their names.
Few tokens can complete a stop string. Text is decoded only behind these, and only as far back as the string can reach.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from echo2.rollout.tokenizer import Tokenizer, is_known, tokens_with

#: Tokens decoded before the string's: for the first bytes of a character, and the first space that some decoders drop.
MARGIN_TOKENS = 4
#: Tokens of a whole rollout that are decoded at a time.
BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class StopRule:
    """`tokens`: those that can complete a stop string; `window`: how many of the last tokens are decoded then."""

    strings: tuple[str, ...]
    tokens: frozenset[int]
    window: int
    tokenizer: Tokenizer

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a sample that has not ended before ends with the last of these tokens. The last `window` suffice."""
        return tokens[-1] in self.tokens and self._is_in(tokens[-self.window :])

    def length(self, tokens: array[int]) -> int | None:
        """Return the number of tokens up to the first that completes a stop string; None if there is none. However many
        tokens may complete one: those of a block are looked at one by one only if the block has a stop string.
        """
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            block = range(begin, min(begin + BLOCK_TOKENS, len(tokens)))
            ends = [at + 1 for at in block if tokens[at] in self.tokens]
            if len(ends) < 2 or self._is_in(tokens[max(0, begin - self.window) : block.stop]):
                for end in ends:
                    if self.ends(tokens[max(0, end - self.window) : end]):
                        return end
        return None

    def _is_in(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these tokens has a stop string."""
        known = [token for token in tokens if is_known(self.tokenizer, token)]
        text = self.tokenizer.decode(known, skip_special_tokens=False)
        return any(string in text for string in self.strings)


@lru_cache(maxsize=16)
def stop_rule(tokenizer: Tokenizer, strings: tuple[str, ...]) -> StopRule:
    """Return the rule of these strings, none of which may be empty. The first call is as slow as `tokens_with`."""
    tokens = tokens_with(tokenizer, "".join(sorted({string[-1] for string in strings})), special=True)
    window = max(len(string.encode()) for string in strings) + MARGIN_TOKENS
    return StopRule(strings, tokens, window, tokenizer)
