"""What of an answer may be told while it is drawn: its text so far, without what later tokens may take back.

It holds back half of a character, what may become a stop string, and, if the call names tools, all from what may become
a tool call on, with the whitespace before it: a message with tool calls is stripped. What is told is always the
beginning of the message that the whole answer becomes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from echo2.core.errors import UserError
from echo2.engines.tokenizer import BROKEN, Tokenizer, decoded

#: Begins what may be a tool call (`chat_forms.TOOL_CALL`).
TOOL_MARK = "<tool_call>"
#: So many tokens without a whole character are not text, and decoding them again with each token would become slow. The
#: rest is streamed at the end.
BROKEN_TOKENS_MAX = 64


class Telling:
    """The text of one answer as it grows. `tell` gets it piece by piece. For one event loop."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], has_tools: bool, tell: Callable[[str], None]) -> None:
        self._tokenizer, self._has_tools, self._tell = tokenizer, has_tools, tell
        self._marks = (*stop, TOOL_MARK) if has_tools else tuple(stop)
        self._sent_texts: list[str] = []
        self._pending = ""
        # Of these tokens, which are decoded together, the first have been: decoders treat the first of a text apart.
        self._tokens, self._num_decoded = array("i"), 0

    def take(self, token: int) -> None:
        """Take the next token that was drawn, and tell what is certain now."""
        if len(self._tokens) - self._num_decoded >= BROKEN_TOKENS_MAX:
            return
        self._tokens.append(token)
        before = decoded(self._tokenizer, self._tokens[: self._num_decoded])
        text = decoded(self._tokenizer, self._tokens)
        if len(text) <= len(before) or text.endswith(BROKEN):
            return
        self._pending += text[len(before) :]
        self._tokens, self._num_decoded = self._tokens[self._num_decoded :], len(self._tokens) - self._num_decoded
        if length := self._certain():
            self._say(self._pending[:length])
            self._pending = self._pending[length:]

    def end(self, content: str) -> None:
        """Tell the rest of the message's text.

        Raises:
            UserError: the tokenizer changes the beginning of a text when more tokens follow.
        """
        sent = "".join(self._sent_texts)
        if not content.startswith(sent):
            detail = f"{content[:80]!r} does not begin with {sent[:80]!r}, which was sent"
            raise UserError(f"This model's tokenizer rewrites text, so call without `stream`: {detail}.")
        self._say(content[len(sent) :])

    def _say(self, text: str) -> None:
        if text:
            self._sent_texts.append(text)
            self._tell(text)

    def _certain(self) -> int:
        """Return how many of the characters that are held back can be told."""
        pending = self._pending
        length = min((_before(pending, mark) for mark in self._marks), default=len(pending))
        if not self._has_tools:
            return length
        is_stripped = not self._sent_texts and pending[:1].isspace()  # if there will be a tool call
        return 0 if is_stripped else len(pending[:length].rstrip())


def _before(text: str, mark: str) -> int:
    """Return the number of characters before the mark, or before what may become it at the text's end."""
    if (at := text.find(mark)) >= 0:
        return at
    beginnings = range(max(0, len(text) - len(mark) + 1), len(text))
    return next((at for at in beginnings if mark.startswith(text[at:])), len(text))
