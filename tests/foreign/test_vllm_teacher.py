"""vLLM itself, on a CPU, as a teacher behind an endpoint: it says of each token what transformers says."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from echo2.core.errors import UserError
from echo2.engines.servers.vllm import CPU_VARIABLES, OWN_VARIABLES
from echo2.engines.tokenizer import Tokenizer, load_tokenizer
from echo2.learner.link.teacher_endpoint import TeacherAnswer, TeacherEndpoint, greeted
from real_runs import REPOSITORY, free_port
from rollout_cases import VOCAB, hf_logits, plain_tokenizer, tiny_module, tokenizer_files

INSTALLED = REPOSITORY / ".venv-vllm" / ".installed"
PYTHON = os.environ.get("ECHO2_ENGINE_PYTHON", str(INSTALLED.parent / "bin" / "python") if INSTALLED.exists() else "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="there is no .venv-vllm (`make vllm` makes it) and no ECHO2_ENGINE_PYTHON"),
    pytest.mark.timeout(500),
]
START_SECONDS = 400.0
#: As in `test_vllm.py`.
SIZES = {"head_dim": 32, "max_position_embeddings": 1024, "architectures": ["Qwen3ForCausalLM"], "eos_token_id": None}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What `vllm serve DIR` starts, whose command the build for CPUs lacks."""
    where, port = tmp_path_factory.mktemp("teacher"), free_port()
    tiny_module("qwen3", **SIZES).save_pretrained(where)
    for name, data in tokenizer_files().items():
        (where / name).write_bytes(data)
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(where), "--served-model-name", "tiny"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "256", "--max-num-seqs", "8"]
    environment = {name: text for name, text in os.environ.items() if name not in OWN_VARIABLES} | CPU_VARIABLES
    with (where / "log").open("wb") as log:
        server = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, where / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(0.5)


def said(
    url: str, tokenizer: Tokenizer, top_k: int, rows: list[tuple[list[int], list[int], bytes]]
) -> list[TeacherAnswer]:
    async def ask() -> list[TeacherAnswer]:
        teacher = TeacherEndpoint(url, VOCAB, top_k)
        try:
            await teacher.greet(tokenizer)
            assert teacher.max_positions == 255
            return await asyncio.gather(*(teacher.ask(*row) for row in rows))
        finally:
            await teacher.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("top_k", [0, 7])
def test_a_vllm_teacher_gives_the_logprobs_of_transformers(url: str, top_k: int) -> None:
    rng, module = random.Random(3), tiny_module("qwen3", **SIZES)
    rows = []
    for length in (1, 2, 9, 60):
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        rows.append(
            ([rng.randrange(VOCAB) for _ in range(5)], tokens, bytes([1] + [rng.randrange(2) for _ in tokens[1:]]))
        )
    for (prompt, tokens, mask), (logprobs, ids, tops) in zip(
        rows, said(url, plain_tokenizer(), top_k, rows), strict=True
    ):
        logp = hf_logits(module, [*prompt, *tokens]).log_softmax(-1)[len(prompt) - 1 : -1].numpy()
        counts = np.frombuffer(mask, np.uint8).astype(bool)
        expected = np.where(counts, logp[np.arange(len(tokens)), tokens], 0.0)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        likely = np.frombuffer(ids, np.int32).reshape(counts.sum(), top_k)
        best = -np.sort(-logp[counts], axis=1)[:, :top_k]
        np.testing.assert_allclose(np.frombuffer(tops, np.float32).reshape(likely.shape), best, atol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(logp[counts], likely, 1), best, atol=1e-4)


def test_an_unsupported_teacher_is_refused_before_the_first_step(url: str) -> None:
    assert asyncio.run(greeted(url, 20, plain_tokenizer(), 60.0)) == ""
    with pytest.raises(UserError, match="it serves tiny"):
        asyncio.run(greeted(f"{url}#large", 0, plain_tokenizer(), 60.0))
    with pytest.raises(UserError, match="--max-logprobs 21"):
        asyncio.run(greeted(url, 21, plain_tokenizer(), 60.0))
    swapped = tokenizer_files()
    swapped["tokenizer.json"] = swapped["tokenizer.json"].replace(b'"a":12', b'"a":13').replace(b'"b":13', b'"b":12')
    with pytest.raises(UserError, match="another tokenizer: number 12 is 'b' here, and 'a' there"):
        asyncio.run(greeted(url, 0, load_tokenizer(swapped), 60.0))


def test_a_row_may_be_as_long_as_it_says_and_no_longer(url: str) -> None:
    ((logprobs, _, _),) = said(url, plain_tokenizer(), 0, [([1] * 200, [2] * 55, bytes([1] * 55))])
    assert min(logprobs) < 0.0
    with pytest.raises(UserError, match=r"it reads 255 tokens, and a row has 200 \+ 56"):
        said(url, plain_tokenizer(), 0, [([1] * 200, [2] * 56, bytes([1] * 56))])
