"""Stop strings: one rule for all engines, and for the head, which checks that a rollout ends with one.

A sample ends with the first token behind which a stop string stands in its text, special tokens by their names. Few
tokens can be that one: only behind these is anything decoded, and no more than the string could have.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from echo2.rollout.tokenizer import Tokenizer, tokens_with

#: Decoded before what the string could have: a character's first bytes, or the space that some decoders leave away.
MARGIN_TOKENS = 4


@dataclass(frozen=True, slots=True, eq=False)
class StopRule:
    """`tokens`: those that a sample can end with; `window`: how many of the last ones are decoded then."""

    strings: tuple[str, ...]
    tokens: frozenset[int]
    window: int
    tokenizer: Tokenizer

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a sample that has not ended before ends with the last of these tokens; `window` of them suffice."""
        if tokens[-1] not in self.tokens:
            return False
        size = len(self.tokenizer)
        known = [token for token in tokens[-self.window :] if token < size]
        text = self.tokenizer.decode(known, skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def length(self, tokens: array[int]) -> int | None:
        """How many of these tokens a sample has that ends where it is over; None: it is not over with them."""
        places = (at + 1 for at, token in enumerate(tokens) if token in self.tokens)
        return next((end for end in places if self.ends(tokens[max(0, end - self.window) : end])), None)


@lru_cache(maxsize=16)
def stop_rule(tokenizer: Tokenizer, strings: tuple[str, ...]) -> StopRule:
    """The rule of these strings, none of which is empty. As slow at first as `tokens_with`."""
    tokens = tokens_with(tokenizer, "".join(sorted({string[-1] for string in strings})), special=True)
    window = max(len(string.encode()) for string in strings) + MARGIN_TOKENS
    return StopRule(strings, tokens, window, tokenizer)
