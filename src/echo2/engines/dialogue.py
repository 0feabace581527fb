"""A dialogue with one model; its answers are streamed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from echo2.core.errors import UserError
from echo2.core.types import Message, Task
from echo2.engines.model_values import read_context
from echo2.engines.tokenizer import BROKEN, Tokenizer, encode_prompt
from echo2.weights.format.snapshot_files import end_tokens


class Dialogue:
    """The conversation with one model, with the system prompt `system` before it if that is not empty. Without a chat
    template, each message is a text that the model continues.

    Raises:
        UserError: there is a system prompt, but no chat template that could place it.
    """

    def __init__(
        self, module: Any, tokenizer: Tokenizer, files: Mapping[str, bytes], temperature: float, system: str = ""
    ) -> None:
        self._module, self._tokenizer, self._temperature = module, tokenizer, temperature
        self._ends, self._context = end_tokens(files), read_context(files)
        self.is_chat = bool(tokenizer.chat_template)
        if system and not self.is_chat:
            raise UserError("--system: the model has no chat template that says where a system prompt goes. Omit it.")
        self._system = (Message("system", system),) if system else ()
        self.reset()

    def reset(self) -> None:
        """Forget the conversation so far, except the system prompt."""
        self._messages: tuple[Message, ...] = self._system

    def answer(self, message: str, max_tokens: int, tell: Callable[[str], None]) -> dict[str, Any]:
        """Generate an answer and pass its text to `tell` piece by piece. Returns the text, how it ended (stop, length,
        interrupted) and the number of tokens. Ctrl-C ends the answer.

        Raises:
            UserError: the text is empty, leaves no room in the model's context, or the chat template refuses it.
        """
        messages = (*self._messages, Message("user", message))
        prompt = encode_prompt(Task(0, messages if self.is_chat else message), self._tokenizer)
        room = max_tokens if self._context is None else min(max_tokens, self._context - len(prompt))
        if not prompt:
            raise UserError("The tokenizer makes no tokens of this text.")
        if room < 1:
            detail = f"{len(prompt)} tokens so far, and the model's context is {self._context}"
            raise UserError(f"{detail}: start again with /reset.")
        words = _Words(self._tokenizer, tell)
        finish = "interrupted"
        try:
            self._generate(prompt, room, words)
            finish = "stop" if words.tokens and words.tokens[-1] in self._ends else "length"
        except KeyboardInterrupt:
            pass  # the answer so far counts
        words.end()  # transformers does not call it for an interrupted answer
        self._messages = (*messages, Message("assistant", words.text))
        return {"answer": words.text, "finish": finish, "tokens": len(words.tokens)}

    def _generate(self, prompt: array[int], room: int, words: _Words) -> None:
        ids = torch.tensor([prompt], device=self._module.device)
        how: dict[str, Any] = {"do_sample": False}
        if self._temperature:
            how = {"do_sample": True, "temperature": self._temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            self._module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room,
                eos_token_id=list(self._ends) or None,
                pad_token_id=self._ends[0] if self._ends else 0,
                streamer=words,
                **how,
            )


class _Words(BaseStreamer):
    """A streamer for transformers, which passes the prompt first and then each token."""

    def __init__(self, tokenizer: Tokenizer, tell: Callable[[str], None]) -> None:
        self._tokenizer, self._tell = tokenizer, tell
        self._has_prompt = False
        self.tokens: list[int] = []
        self.text = ""

    def put(self, value: Any) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.tokens += value.flatten().tolist()
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith(BROKEN):  # half of a character
            self._say(text)

    def end(self) -> None:
        """Pass on the rest of the text: no more tokens follow."""
        self._say(self._tokenizer.decode(self.tokens, skip_special_tokens=True))

    def _say(self, text: str) -> None:
        if new := text[len(self.text) :]:
            self.text = text
            self._tell(new)
