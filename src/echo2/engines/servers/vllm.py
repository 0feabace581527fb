"""The engine `vllm`: sampling by `POST /inference/v1/generate`, and weights reloaded from a directory under requests.

A server started by the worker listens on a socket that only its user can reach: vLLM guards `/v1` and `/inference` with
an API key, but leaves the routes that load weights and call methods open to every client that can connect.

Source: vLLM 0.32.0, `entrypoints/scale_out/token_in_token_out` (requests and answers), `entrypoints/rl/online` and
`entrypoints/serve/dev` (pause, resume, sleep, versions, `collective_rpc`), `entrypoints/serve/lora`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from echo2.config.values import ServerPlace
from echo2.core.child import ChildProcess
from echo2.core.devices import nth_device
from echo2.core.endpoint import key_in
from echo2.core.errors import LinkError, PeerError, UserError
from echo2.engines.engine import Completion, SampleRequest, stream_keys
from echo2.engines.servers import guard
from echo2.engines.servers.answers import (
    NO_LOGPROB,
    Drawn,
    ServerLink,
    completion_of,
    decode,
    room_of,
    width_of,
)
from echo2.engines.servers.models import LINK, ServedModel
from echo2.transport.limits import SUPPORT_WIDTH_MAX

#: Seconds until a started server must answer: it loads torch and weights, and on a GPU captures its graphs.
START_SECONDS = 1800.0
START_POLL_SECONDS = 0.25
#: Seconds to load weights, and to answer a query that loads no weights but waits for the engine.
LOAD_SECONDS = 600.0
CHECK_SECONDS = 30.0
#: Seconds to wait for the end of the process after its connection broke.
EXIT_SECONDS = 3.0
#: The driver's list of GPUs.
GPUS = Path("/proc/driver/nvidia/gpus")
#: Name of the adapter at the server.
ADAPTER = "policy"
#: The maximum LoRA ranks that vLLM supports.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: Arguments by which a server rounds its weights.
ROUNDING_ARGUMENTS = ("--quantization", "-q", "--quantization-config")
#: Size limits of an answer in bytes: for each token, and for each candidate token in its place.
TOKEN_BYTES, CANDIDATE_BYTES = 512, 128
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that load weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
#: On a CPU: no pinned cores, since learner and workers share them; KV cache in GiB. The user's own values win.
CPU_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
#: Limits of the log excerpt in an error message.
LAST_LINES, LAST_CHARS = 6, 1200
LOG_BYTES_READ = 16 << 20
#: A message quotes the first error. Later lines (shutdown messages, stacks of other processes) say less.
ERROR_LINE = re.compile(rb"(?:^|[\])(] ?)(?:[\w.]*(?:Error|Exception)|error): ")
#: Variables of the worker's Python environment. They are not passed on: the server has other modules.
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float


class _Token(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct):
    version: str
    start: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str | None = None
    sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Weights(msgspec.Struct):
    weight_version: str


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None  # an adapter's card has none


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Results(msgspec.Struct):
    results: list[Any]


class ServerProcess:
    """One process of the server: a command, with these environment variables in addition to the worker's. Its output
    goes to `log_path`.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log_path: Path) -> None:
        """Raises: UserError, there is no such program."""
        if not os.access(command[0], os.X_OK):
            raise UserError(f"--engine-python {command[0]}: there is no such program. Name the Python of the server.")
        others = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log_path
        guarded = (sys.executable, "-S", guard.__file__, *command)
        environment = {**others, **variables}
        self.child = ChildProcess(guarded, log_path=log_path, environment=environment, has_lifeline=True)

    def check(self) -> None:
        """Raises LinkError if the process has ended, with its status and last output."""
        status = self.child.status
        if status is not None:
            how = f"signal {256 - status}" if status > 192 else f"status {status}"
            raise LinkError(f"its process has ended ({how}). {self.last_words()}")

    def last_words(self) -> str:
        """The last lines of its output, or the first error of this process."""
        lines = [line for line in self.child.log_tail(LOG_BYTES_READ).splitlines() if b" WARNING " not in line]
        first = next((place for place, line in enumerate(lines) if ERROR_LINE.search(line)), None)
        excerpt = lines[-LAST_LINES:] if first is None else lines[first : first + 1]
        text = b" | ".join(line.strip() for line in excerpt if line.strip()).decode(errors="replace")
        return f"Its log {self._log_path} says: {text[:LAST_CHARS]}"

    async def kill(self) -> None:
        """Kill the server and all processes that it started."""
        self.child.end_lifeline()
        await self.child.ended()


class VllmServer:
    """A server that the worker starts, or that runs at `place.url`. Methods are called from one event loop."""

    def __init__(self, place: ServerPlace, device: str, slots: int) -> None:
        self._place, self._slots = place, slots
        self._variables, self._on_gpu = _place_on(device)
        self._has_mask = False
        self._link: ServerLink | None = None
        self._process: ServerProcess | None = None
        self._sockets: Path | None = None

    @property
    def unties(self) -> bool:
        """Whether it loads new weights of a tied output layer only from a tensor of its own. On a CPU vLLM 0.32 packs a
        copy of the output layer when it starts, and a reload packs it again only if the checkpoint has it."""
        return not self._on_gpu and not self._place.url

    async def start(self, model: ServedModel) -> int:
        """Start the server with this model, or attach to it and load the model. Returns its context length in tokens.

        Raises:
            UserError: it cannot be started, or lacks a feature that echo2 needs; the message says what it reported.
            LinkError, PeerError: it does not answer, or refused.
        """
        if self._place.url:
            self._link = ServerLink(self._place.url, key=key_in("VLLM_API_KEY"))
            await self.load(model)
        else:
            if not self._on_gpu:
                _refuse_mixture(model)
            _refuse_rounding(self._place.arguments, model, self._on_gpu)
            await self._start_process(model)
            if model.adapter is not None:
                await self._load_adapter(model, model.adapter)
            await self._call("/update_weight_version", {"new_version": model.label}, LOAD_SECONDS)
        try:
            await self._look_at_abilities(model)
        except PeerError as error:
            if self._process is None:
                raise
            raise PeerError(error.reason, f"{error.detail}. {self._process.last_words()}") from error
        cards = decode(await self._call("/v1/models", None, CHECK_SECONDS, "GET"), _Cards)
        lengths = [card.max_model_len or model.max_positions for card in cards.data]
        if model.has_two_ropes and max(lengths) > model.max_positions:
            raise UserError(
                f"The vLLM server allows {max(lengths)} tokens, so it reads every text with this model's rotary "
                f"frequencies for long ones, and the learner does not. Start it with --max-model-len "
                f"{model.max_positions}."
            )
        return min(lengths)

    async def load(self, model: ServedModel) -> float:
        """Replace the old weights by these, between two tokens. Returns the seconds for which nothing could be sampled.

        Raises:
            LinkError, PeerError: as `start`; the server's weights are unknown then.
        """
        started = time.perf_counter()
        await self._call("/pause?mode=keep&clear_cache=false", None, LOAD_SECONDS)
        if model.adapter is not None:
            await self._load_adapter(model, model.adapter)
        else:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model.directory)}}
            await self._call("/collective_rpc", reload, LOAD_SECONDS)
        await self._call("/update_weight_version", {"new_version": model.label}, LOAD_SECONDS)
        await self._call("/resume", None, LOAD_SECONDS)
        return time.perf_counter() - started

    async def check(self, model: ServedModel) -> None:
        """Raises LinkError or PeerError if the server is dead, hangs, or has other weights. Their version comes from
        the computing process, not from the listening one."""
        if self._process is not None:
            self._process.check()
        try:
            version = decode(await self._call("/weight_info", None, CHECK_SECONDS, "GET"), _Weights).weight_version
        except LinkError:
            await self._check_exit()
            raise
        if version != model.label:
            raise PeerError("other_weights", f"it serves {version!r}, and should serve {model.label!r}")

    async def sample(self, request: SampleRequest, served: ServedModel, versions: Mapping[str, int]) -> Completion:
        """Sample one request. Cancelling aborts it. `versions`: of weights that were loaded, by label.

        Raises:
            LinkError: the server died, or is unreachable.
            PeerError: the server refused, or its answer is not valid.
        """
        num_candidates = self._num_candidates(request, served)
        body = {
            "token_ids": request.prompt_tokens.tolist(),
            "sampling_params": _sampling_params(request, served, num_candidates),
            "cache_salt": served.label,  # the prefix cache of other weights is not reused
            **({"model": ADAPTER} if served.adapter else {}),
        }
        room = room_of(request, served)
        bytes_max = TOKEN_BYTES * (room + 8) + CANDIDATE_BYTES * room * (num_candidates + width_of(request, served))
        if request.params.routes and served.routes is not None:
            bytes_max += served.routes.token_bytes * (len(request.prompt_tokens) + room)
        try:
            answer = decode(await self._running().call("/inference/v1/generate", body, None, bytes_max), _Answer)
        except LinkError:
            await self._check_exit()
            raise
        if len(answer.choices) != 1:
            raise PeerError("bad_answer", f"{len(answer.choices)} completions of one request")
        (choice,) = answer.choices
        if choice.finish_reason == "abort":
            raise LinkError("it has aborted the request")
        if len(choice.logprobs.content) != len(choice.token_ids):
            raise PeerError("bad_answer", "not as many logprobs as tokens")
        return completion_of(_drawn(choice, request), request, served, versions)

    async def sleep(self) -> None:
        """Take all tensors off the GPU: weights go to the machine's memory, keys and values are read again afterwards.
        Requests in the server wait. Raises LinkError or PeerError: it did not.
        """
        await self._call("/sleep?level=1&mode=keep", None, LOAD_SECONDS)

    async def wake_up(self) -> None:
        """Put the tensors back, and go on with the requests. Raises LinkError or PeerError: it did not."""
        await self._call("/wake_up", None, LOAD_SECONDS)

    async def stop(self) -> None:
        """End the process, if the worker started it, and close connections."""
        if self._process is not None:
            await self._process.kill()
        if self._link is not None:
            await self._link.close()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        self._process = self._link = self._sockets = None

    # ---- its process -------------------------------------------------------------------------------------------------

    async def _start_process(self, model: ServedModel) -> None:
        if not self._place.python and find_spec("vllm") is None:
            raise UserError(
                "There is no vLLM in this Python environment. Name the Python of one that has it with --engine-python "
                "PATH or ECHO2_ENGINE_PYTHON (`make vllm` makes one for CPUs), or a server that runs with --engine-url."
            )
        self._sockets = Path(tempfile.mkdtemp(prefix="echo2-"))  # short, and private (see above)
        socket = self._sockets / "vllm"
        log_path = model.directory.parent.with_suffix(".log")
        self._process = ServerProcess(self._command(model, socket), self._variables, log_path)
        self._link = ServerLink("http://vllm", str(socket))
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._process.check()
            try:
                await self._link.call("/health", None, CHECK_SECONDS, method="GET")
                return
            except LinkError as error:
                if time.monotonic() > deadline:
                    raise LinkError(f"no answer in {START_SECONDS:.0f} s: {self._process.last_words()}") from error
            await self._process.child.ended(START_POLL_SECONDS)

    async def _check_exit(self) -> None:
        """Raises LinkError if the process has ended: its status says more than a broken connection."""
        if (process := self._process) is not None:
            await process.child.ended(EXIT_SECONDS)
            process.check()

    def _command(self, model: ServedModel, socket: Path) -> list[str]:
        python = self._place.python or sys.executable
        rank = next((rank for rank in RANKS if rank >= model.rank), RANKS[-1])
        return [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.directory)),
            *("--uds", str(socket), "--tokens-only", "--enable-scale-out", "--skip-tokenizer-init"),
            *("--disable-uvicorn-access-log", "--disable-log-stats"),
            *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(SUPPORT_WIDTH_MAX)),
            *("--generation-config", "vllm", "--dtype", model.dtype, "--max-num-seqs", str(self._slots)),
            *(("--max-model-len", str(model.max_positions)) if model.has_two_ropes else ()),
            *(("--return-sampling-mask",) if self._on_gpu else ("--enforce-eager",)),
            *(("--enable-return-routed-experts",) if self._place.routes and model.routes is not None else ()),
            *(("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)) if model.adapter else ()),
            *(("--enable-mixed-moe-lora-format",) if model.adapts_experts else ()),
            *(("--enable-sleep-mode",) if self._place.takes_turns else ()),
            *self._place.arguments,
        ]

    async def _look_at_abilities(self, model: ServedModel) -> None:
        """Check the server's features by sampling one token with top_k = 1, whose logprob must be 0. A bias makes it
        the likeliest by far: top_k = 1 leaves all whose logits are equal, as in bfloat16 they often are.

        Raises:
            UserError: a feature is missing; the message names it.
        """
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logit_bias": {"0": 100.0}, "logprobs": 0}
        params |= {"detokenize": False}
        body = {"token_ids": [0], "sampling_params": params, **({"model": ADAPTER} if model.adapter else {})}
        answer = await self._call("/inference/v1/generate", body, LOAD_SECONDS)
        try:
            (choice,) = decode(answer, _Answer).choices
            (token,) = choice.logprobs.content
        except (PeerError, ValueError) as error:
            raise UserError(f"The vLLM server's answers are not those of vLLM 0.32 or newer: {error}.") from error
        if abs(token.logprob) > 1e-3:
            raise UserError(
                "The vLLM server gives logprobs before top-k and top-p: start it with --logprobs-mode "
                "processed_logprobs."
            )
        self._has_mask = choice.sampling_mask is not None

    async def _load_adapter(self, model: ServedModel, directory: Path) -> None:
        """Take this adapter for all requests, those under way too. A request keeps the path and the flags that the
        adapter had when it came: so each is loaded from one path, and the engine is told only to forget the old one.
        With `load_inplace` the requests would read their old path again before every token."""
        link = _link(directory)
        cards = decode(await self._call("/v1/models", None, CHECK_SECONDS, "GET"), _Cards).data
        roots = {card.root for card in cards if card.id == ADAPTER}
        if roots == {str(link)}:
            await self._forget_adapters()
            return
        if roots:
            await self._call("/v1/unload_lora_adapter", {"lora_name": ADAPTER}, LOAD_SECONDS)
        adapter: dict[str, Any] = {"lora_name": ADAPTER, "lora_path": str(link)}
        adapter |= {"is_3d_lora_weight": True} if model.adapts_experts else {}
        await self._call("/v1/load_lora_adapter", adapter, LOAD_SECONDS)

    async def _forget_adapters(self) -> None:
        """The engine reads them from their paths when it computes the next token."""
        answer = await self._call("/collective_rpc", {"method": "list_loras"}, LOAD_SECONDS)
        numbers = {
            int(number) for adapters in decode(answer, _Results).results for number in re.findall(r"\d+", str(adapters))
        }
        for number in sorted(numbers):
            await self._call("/collective_rpc", {"method": "remove_lora", "args": [number]}, LOAD_SECONDS)

    def _running(self) -> ServerLink:
        if self._link is None:
            raise LinkError("it is not running")
        return self._link

    async def _call(self, path: str, body: Any, seconds: float, method: str = "POST") -> bytes:
        return await self._running().call(path, body, seconds, method=method)

    def _num_candidates(self, request: SampleRequest, served: ServedModel) -> int:
        """Return how many likely tokens the server must report in place of each token: the whole support of narrowed
        requests, unless the server reports a sampling mask."""
        return width_of(request, served) if request.params.is_narrow and not self._has_mask else 0


def _refuse_mixture(model: ServedModel) -> None:
    """Raise UserError: on a CPU vLLM 0.32 packs experts when it starts, and a reload puts others there unpacked; with
    adapters over a mixture it dies at the first request."""
    if model.has_experts:
        raise UserError(
            "On a CPU, vLLM reloads a mixture's experts wrongly and has no adapters over them, so this worker would "
            'sample from another model after the first step. Set workers.engine = "transformers".'
        )


def _refuse_rounding(arguments: Sequence[str], model: ServedModel, on_gpu: bool) -> None:
    """Raise UserError: the server is to round its weights, and vLLM 0.32 cannot do that here (docs/engines.md)."""
    if not any(one.partition("=")[0].replace("_", "-") in ROUNDING_ARGUMENTS for one in arguments):
        return
    if not on_gpu:
        raise UserError(
            "On a CPU, no quantisation of vLLM 0.32 works for a worker: leave --quantization out of --engine-args. "
            "The engine llamacpp-q8_0 rounds weights there."
        )
    if model.dtype == "float32":
        raise UserError(
            "vLLM rounds weights of 16 bits alone, and this run publishes float32: set model.snapshot_dtype = "
            '"bfloat16", or leave --quantization out of --engine-args.'
        )


def _place_on(device: str) -> tuple[dict[str, str], bool]:
    """Return the environment variables for this device, and whether it is a GPU. "cuda": all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = visible if visible != [""] else [str(number) for number, _ in enumerate(GPUS.glob("*"))]
    kind, _, number = nth_device(device, len(gpus)).partition(":")
    if kind == "cpu":
        return VARIABLES | {name: os.environ.get(name, value) for name, value in CPU_VARIABLES.items()}, False
    if number and not (number.isdecimal() and int(number) < len(gpus)):
        raise UserError(f"--device {device}: there is no such GPU; this machine has {len(gpus)}.")
    return VARIABLES | {"CUDA_VISIBLE_DEVICES": gpus[int(number)] if number else ",".join(gpus)}, True


def _link(directory: Path) -> Path:
    """Point the path from which adapters are loaded at this directory."""
    link, new = directory.parent / LINK, directory.parent / f"{LINK}.new"
    new.unlink(missing_ok=True)
    new.symlink_to(directory.name)
    new.replace(link)
    return link


def _sampling_params(request: SampleRequest, served: ServedModel, num_candidates: int) -> dict[str, Any]:
    params = request.params
    (key,) = stream_keys([request.seed], [request.sample])
    top_k = width_of(request, served) if request.params.is_narrow else 0
    return {
        "max_tokens": room_of(request, served),
        "temperature": params.temperature,
        "top_k": top_k,
        "top_p": params.top_p if params.temperature > 0.0 else 1.0,
        "min_p": params.min_p if params.temperature > 0.0 else 0.0,
        "seed": int(key) >> 1,  # 63 bits: vLLM's is signed
        "logprobs": num_candidates,
        "stop_token_ids": sorted(served.end_tokens | request.stop_tokens),
        "ignore_eos": True,  # the snapshot's end tokens count, not those that vLLM reads from its files
        "detokenize": False,
    }


def _drawn(choice: _Choice, request: SampleRequest) -> Drawn:
    supports, content = choice.sampling_mask, choice.logprobs.content
    if request.params.is_narrow and supports is None:
        supports = [[one.token_id for one in token.top_logprobs if one.logprob > NO_LOGPROB] for token in content]
    return Drawn(
        choice.token_ids,
        [token.logprob for token in content],
        [(span.start, span.version) for span in choice.weight_versions],
        supports,
        choice.routed_experts,
    )
