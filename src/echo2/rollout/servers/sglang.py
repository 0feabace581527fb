"""The engine `sglang`, for a server that its owner has started: sampling by `POST /generate`, and weights that the
server reads from disk while requests are paused.

Source: SGLang 0.5.23, `srt/managers/io_struct.py` (requests), `srt/managers/tokenizer_manager.py` (answers),
`srt/entrypoints/http_server.py` (routes).
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec

from echo2.config.engines import ServerPlace
from echo2.errors import LinkError, PeerError, UserError
from echo2.rollout.engine import Completion, SampleRequest
from echo2.rollout.random_streams import stream_keys
from echo2.rollout.servers.answers import Drawn, Served, completion_of, decode, room_of, width_of
from echo2.rollout.servers.http import ServerLink
from echo2.rollout.servers.models import ServedModel

LOAD_SECONDS = 600.0
CHECK_SECONDS = 30.0
TOKEN_BYTES, CANDIDATE_BYTES = 256, 64
#: [logprob, token id, text]
Scored = tuple[float, int, str | None]


class _Span(msgspec.Struct):
    version: str
    start: int


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    weight_versions: list[_Span]
    output_token_logprobs: list[Scored]
    finish_reason: _Finish
    output_top_logprobs: list[list[Scored]] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class _Info(msgspec.Struct):
    weight_version: str


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class SglangServer:
    """A `TokenServer` at `place.url`."""

    unties = False

    def __init__(self, place: ServerPlace) -> None:
        self._place = place
        self._link: ServerLink | None = None

    async def start(self, model: ServedModel) -> int:
        """See `TokenServer.start`."""
        if not self._place.url:
            raise UserError("echo2 does not start SGLang: name a server that runs with --engine-url (docs/engines.md).")
        if model.adapter is not None:
            raise UserError("The engine sglang cannot load adapters: set lora.rank = 0, or use vllm.")
        self._link = ServerLink(self._place.url, key=os.environ.get("SGLANG_API_KEY", ""))
        await self.load(model)
        return model.max_positions

    async def load(self, model: ServedModel) -> float:
        """See `TokenServer.load`."""
        started = time.perf_counter()
        await self._call("/pause_generation", {"mode": "in_place"}, LOAD_SECONDS)
        update = {"model_path": str(model.directory), "weight_version": model.label, "flush_cache": False}
        updated = decode(await self._call("/update_weights_from_disk", update, LOAD_SECONDS), _Updated)
        if not updated.success:
            raise PeerError("load_failed", updated.message[:500])
        await self._call("/continue_generation", {}, LOAD_SECONDS)
        return time.perf_counter() - started

    async def check(self, model: ServedModel) -> None:
        """See `TokenServer.check`. Samples a token too: the listening process knows the version even if the computing
        process hangs."""
        await self._call("/health_generate", None, CHECK_SECONDS, "GET")
        found = decode(await self._call("/model_info", None, CHECK_SECONDS, "GET"), _Info).weight_version
        if found != model.label:
            raise PeerError("other_weights", f"it serves {found!r}, and should serve {model.label!r}")

    async def sample(self, request: SampleRequest, served: Served) -> Completion:
        """See `TokenServer.sample`."""
        params, narrow = request.params, request.params.is_narrow
        (key,) = stream_keys([request.seed], [request.sample])
        body = {
            "input_ids": request.prompt_tokens.tolist(),
            "sampling_params": {
                "max_new_tokens": room_of(request, served),
                "temperature": params.temperature,
                "top_k": width_of(request, served) if narrow else -1,
                "top_p": params.top_p if params.temperature > 0.0 else 1.0,
                "min_p": params.min_p if params.temperature > 0.0 else 0.0,
                "stop_token_ids": sorted(served.end_tokens | request.stop_tokens),
                "ignore_eos": False,  # true would ignore the stop tokens too
                "sampling_seed": int(key) >> 33,  # 31 bits
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "top_logprobs_num": 0 if narrow else params.top_logprobs,
            "return_sampling_mask": narrow,
            "extra_key": served.label,  # the prefix cache of other weights is not reused
        }
        room = room_of(request, served)
        bytes_max = TOKEN_BYTES * (room + 8) + CANDIDATE_BYTES * room * (
            params.top_logprobs + width_of(request, served)
        )
        answer = decode(await self._running().call("/generate", body, None, bytes_max), _Answer)
        if answer.meta_info.finish_reason.type == "abort":
            raise LinkError("it has aborted the request")
        return completion_of(_drawn(answer, request), request, served)

    async def stop(self) -> None:
        """See `TokenServer.stop`. Only closes connections: the server belongs to its owner."""
        if self._link is not None:
            await self._link.close()
        self._link = None
        await asyncio.sleep(0)

    def _running(self) -> ServerLink:
        if self._link is None:
            raise LinkError("it is not connected")
        return self._link

    async def _call(self, path: str, body: Any, seconds: float, method: str = "POST") -> bytes:
        return await self._running().call(path, body, seconds, method=method)


def make_server(place: ServerPlace, device: str, slots: int) -> SglangServer:
    """Make the server for `rollout/engines.py`. `device` and `slots` are ignored: the server has its own."""
    return SglangServer(place)


def _drawn(answer: _Answer, request: SampleRequest) -> Drawn:
    meta, narrow = answer.meta_info, request.params.is_narrow
    logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
    if narrow:  # logprobs after narrowing; `output_token_logprobs` are those before
        logprobs = meta.output_token_sampling_logprobs or []
    tops = meta.output_top_logprobs
    return Drawn(
        answer.output_ids,
        logprobs,
        [(span.start, span.version) for span in meta.weight_versions],
        meta.output_token_sampling_mask,
        None if tops is None else [[(token, logprob) for logprob, token, _ in top] for top in tops],
    )
