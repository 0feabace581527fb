"""A teacher behind an endpoint: a server of vLLM on a machine of the owner's (`vllm serve MODEL`), or one that answers
like it. It is asked for no text, but for how likely it finds the policy's tokens:

    POST /v1/completions    token ids as the prompt, `prompt_logprobs` = k: at each position the token's logprob and the
                            k most likely. The one token that it must generate is not read
    POST /detokenize        the text of token ids, for a comparison of the tokenizers
    GET  /v1/models         the names that it serves, and how many tokens it reads

The logprobs are those at temperature 1 over the whole vocabulary; others cannot be asked for (`config/rules.py`).

Everything that it says is checked: that it read our tokens, the number of positions, that logprobs are finite, at most
0, and those of one position together no more than 1, and its bytes. What fails `core/endpoint.py` too often stops the
run, which can be resumed: a token without its teacher's logprobs is never trained on as if there were one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from echo2.config.values import endpoint_and_model
from echo2.core.background import together
from echo2.core.endpoint import BACKOFF, TRIES_MAX, Endpoint, FailedTries, RefusedRequest, UnfitAnswer, key_in
from echo2.core.errors import UserError
from echo2.core.printable import printable, shown
from echo2.core.types import Backoff
from echo2.engines.tokenizer import Tokenizer

log = logging.getLogger(__name__)
T = TypeVar("T")

#: The environment variable with the key of a server that wants one.
KEY_VARIABLE = "ECHO2_TEACHER_KEY"
#: Limit of one request: of a long rollout on a server that computes several.
REQUEST_SECONDS = 300.0
#: How long a dry run waits for a teacher.
LOOK_SECONDS = 30.0
#: Requests at once: as many rollouts as a server computes together.
REQUESTS_MAX = 32
#: Maximum bytes of an answer: this many, and more for each token that it names; these have texts.
ANSWER_BYTES_MAX, BYTES_PER_TOKEN = 1 << 20, 512
#: Tokens whose texts are compared by one request.
COMPARED_TOKENS = 2048
#: Above 0, and above 1 in all, that rounding in a few bits makes of a logprob, and of the probability of a position.
LOGPROB_SLACK, MASS_SLACK = 1e-3, 1e-2

#: What a teacher said of a row: each token's logprob 'd' [T], 0 where none is predicted, and of its loss tokens the k
#: most likely 'i' and their logprobs 'f', row by row, -inf where there are fewer.
TeacherAnswer = tuple["array[float]", bytes, bytes]


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Text(msgspec.Struct):
    prompt: str


class TeacherEndpoint:
    """A teacher for one event loop. `where`: as in `distill.teacher`; `num_tokens`: size of the policy's vocabulary;
    `top_k`: of the most likely tokens, as many are asked for. `greet` it before it is asked.

    Raises:
        UserError: as `key_in`.
    """

    def __init__(
        self, where: str, num_tokens: int, top_k: int, seconds: float = REQUEST_SECONDS, backoff: Backoff = BACKOFF
    ) -> None:
        self._where, self._num_tokens, self._top_k = where, num_tokens, min(top_k, num_tokens)
        url, self._model = endpoint_and_model(where)
        key = key_in(KEY_VARIABLE)
        about_key = f"the key is that of ${KEY_VARIABLE}" if key else f"${KEY_VARIABLE} has no key"
        self._endpoint = Endpoint(
            url,
            "the teacher",
            "training",
            seconds=seconds,
            limit="the limit",
            key=key,
            about_key=about_key,
            max_concurrency=REQUESTS_MAX,
            backoff=backoff,
        )
        self.max_positions: int | None = None

    @property
    def trouble(self) -> str:
        """Why it is not asked at the moment; empty: it is."""
        return self._endpoint.trouble

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

    async def greet(self, tokenizer: Tokenizer) -> None:
        """Wait until it answers, and find out whether it can teach the policy that has this tokenizer.

        Raises:
            UserError: it cannot: it serves no such model, or one of other tokens, or gives fewer likely ones.
        """
        models = await self._persisting("/v1/models", None, ANSWER_BYTES_MAX, lambda data: _read(data, _Models).data)
        served = {one.id: one for one in models}
        if (self._model or len(served) != 1) and self._model not in served:
            names = printable(", ".join(served)) or "nothing"
            raise self._error(f"it serves {names}. Name one behind the address: {self._where.partition('#')[0]}#NAME.")
        self._model = self._model or next(iter(served))
        lengths = [one.max_model_len for one in models if one.max_model_len is not None]  # an adapter's card has none
        self.max_positions = min(lengths) - 1 if lengths else None  # it must generate one
        last = array("i", [self._num_tokens - 1] * 2)
        few = f"Start it with --max-logprobs {self._top_k} or more, or train on fewer likely tokens."
        other = f"The policy has {self._num_tokens} tokens: take a teacher of the same family."
        for top_k, remedy in {0: other, self._top_k: few if self._top_k else other}.items():
            await self._scored(last, top_k, remedy)
        await self._compare(tokenizer)

    async def ask(self, prompt: Sequence[int], tokens: Sequence[int], loss_mask: bytes) -> TeacherAnswer:
        """Return what it says of the tokens that the mask names. It reads the prompt, and the tokens before the last.

        Raises:
            UserError: it refuses, or its answers cannot be used.
        """
        num_read = loss_mask.rindex(1) + 1
        if self.max_positions is not None and len(prompt) + num_read > self.max_positions:
            raise self._error(f"it reads {self.max_positions} tokens, and a row has {len(prompt)} + {num_read}.")
        table = await self._scored(array("i", [*prompt, *tokens[:num_read]]), self._top_k)
        logprobs, ids, tops = array("d", bytes(8 * len(tokens))), array("i"), array("f")
        for at in (at for at in range(num_read) if loss_mask[at]):
            position = table[len(prompt) + at]
            logprobs[at] = position[tokens[at]]
            ranked = sorted((-logprob, token) for token, logprob in position.items())[: self._top_k]
            # Tokens that only the teacher has are a part of the rest.
            likely = [(token, -cost) for cost, token in ranked if token < self._num_tokens]
            missing = self._top_k - len(likely)
            ids.extend([*(token for token, _ in likely), *[0] * missing])
            tops.extend([*(logprob for _, logprob in likely), *[-math.inf] * missing])
        return logprobs, ids.tobytes(), tops.tobytes()

    async def _scored(self, read: array[int], top_k: int, remedy: str = "") -> list[Mapping[int, float]]:
        """Return the logprobs at each position that was read. `remedy`: what to do about a refusal, which is one at
        once then."""
        body = {
            "model": self._model,
            "prompt": read.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
            "return_token_ids": True,
        }
        bytes_max = ANSWER_BYTES_MAX + BYTES_PER_TOKEN * len(read) * (top_k + 2)
        data = msgspec.json.encode(body)
        return await self._persisting(
            "/v1/completions", data, bytes_max, lambda answer: positions(answer, read, top_k), remedy
        )

    async def _compare(self, tokenizer: Tokenizer) -> None:
        """Compare the texts of all tokens of the policy. Spaces do not count: versions of decoders tidy them up in
        different ways; so a tokenizer with the same tokens in which only spaces differ is not found out.

        Raises:
            UserError: some are others there.
        """
        ids = sorted(tokenizer.get_vocab().values())
        blocks = [ids[at : at + COMPARED_TOKENS] for at in range(0, len(ids), COMPARED_TOKENS)]
        async with together() as group:
            differences = [group.create_task(self._differs(tokenizer, block)) for block in blocks]
        block = next((block for block, task in zip(blocks, differences, strict=True) if task.result()), [])
        while len(block) > 1:
            half = block[: len(block) // 2]
            block = half if await self._differs(tokenizer, half) else block[len(half) :]
        if block:
            text_here = shown(tokenizer.decode(block, skip_special_tokens=False))
            raise self._error(
                f"it has another tokenizer: number {block[0]} is {text_here} here, and "
                f"{shown(await self._text(block))} there. A teacher scores the policy's own tokens: "
                "take one of the same family."
            )

    async def _differs(self, tokenizer: Tokenizer, ids: list[int]) -> bool:
        here, there = tokenizer.decode(ids, skip_special_tokens=False), await self._text(ids)
        return here.replace(" ", "") != there.replace(" ", "")

    async def _text(self, ids: list[int]) -> str:
        body = msgspec.json.encode({"model": self._model, "tokens": ids})
        return await self._persisting("/detokenize", body, ANSWER_BYTES_MAX, lambda data: _read(data, _Text).prompt)

    async def _persisting(
        self, path: str, body: bytes | None, bytes_max: int, read: Callable[[bytes], T], remedy: str = ""
    ) -> T:
        """Make a request until it has an answer that can be read. Raises UserError: it never has."""

        async def make() -> T:
            try:
                data, _ = await self._endpoint.request(path, body, bytes_max, self._look)
                if len(data) > bytes_max:
                    raise UnfitAnswer(f"its answer has more than {bytes_max} bytes")
                return read(data)
            except RefusedRequest as error:
                if remedy:
                    raise self._error(f"{error}. {remedy}") from error
                raise

        try:
            return await self._endpoint.persist(make, lambda problem: log.warning("%s: %s", self._where, problem))
        except FailedTries as error:
            raise self._error(
                f"{path} failed {TRIES_MAX} times: {error}. Mend it, and continue with --resume."
            ) from error

    async def _look(self) -> None:
        """Find out whether it answers."""
        await self._endpoint.exchange("/v1/models", None, ANSWER_BYTES_MAX)

    def _error(self, problem: str) -> UserError:
        return UserError(f"distill.teacher = {self._where!r}: {problem}")


async def greeted(where: str, top_k: int, tokenizer: Tokenizer, seconds: float = LOOK_SECONDS) -> str:
    """Greet a teacher before a run, if it answers within this time. Return why it does not; empty: it does.

    Raises:
        UserError: as `TeacherEndpoint.greet`.
    """
    teacher = TeacherEndpoint(where, max(tokenizer.get_vocab().values()) + 1, top_k)
    try:
        async with asyncio.timeout(seconds):
            await teacher.greet(tokenizer)
    except TimeoutError:
        return teacher.trouble or f"it needs more than {seconds:g} s"
    finally:
        await teacher.close()
    return ""


def positions(data: bytes, read: array[int], top_k: int) -> list[Mapping[int, float]]:
    """Return from an answer the logprobs of some tokens at each position of what was read: of the token that is there,
    and of the `top_k` most likely. The first position has none.

    Raises:
        UnfitAnswer: it is not a possible answer.
    """
    choices = _read(data, _Completion).choices
    logprobs_by_position = choices[0].prompt_logprobs if len(choices) == 1 else None
    if logprobs_by_position is None or choices[0].prompt_token_ids is None:
        raise UnfitAnswer("its answer has no prompt_logprobs or no prompt_token_ids, as vLLM's has")
    if choices[0].prompt_token_ids != read.tolist():
        raise UnfitAnswer("it read other tokens than it was sent")
    if len(logprobs_by_position) != len(read):
        raise UnfitAnswer(f"its answer has {len(logprobs_by_position)} positions of {len(read)}")
    table: list[Mapping[int, float]] = [{}]
    for at, (token, position) in enumerate(zip(read[1:], logprobs_by_position[1:], strict=True), 1):
        logprobs = {number: one.logprob for number, one in (position or {}).items()}
        if token not in logprobs or not max(1, top_k) <= len(logprobs) <= top_k + 1:
            raise UnfitAnswer(f"position {at}: {len(logprobs)} tokens, or not the one that is there")
        wrong = next((x for x in logprobs.values() if not -math.inf < x <= LOGPROB_SLACK), None)
        if wrong is not None or min(logprobs) < 0:
            raise UnfitAnswer(f"position {at}: a logprob is {wrong}, or a token is {min(logprobs)}")
        if (mass := math.fsum(map(math.exp, logprobs.values()))) > 1.0 + MASS_SLACK:
            raise UnfitAnswer(f"position {at}: probabilities that make {mass:g} in all. Is --logprobs-mode set?")
        table.append({number: min(0.0, logprob) for number, logprob in logprobs.items()})
    return table


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UnfitAnswer(f"its answer cannot be read: {printable(str(error))}") from error
