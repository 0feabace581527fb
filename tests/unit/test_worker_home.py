"""What a machine at home samples with, what it tells its owner, and how it steps back for the owner's programs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2.config.values import AUTO, FORMS, LLAMACPP_FORMS
from echo2.core.background import Background
from echo2.core.errors import UserError
from echo2.core.types import Hardware
from echo2.engines import forms
from echo2.engines import registry as engines
from echo2.engines.registry import EngineChoice
from echo2.learner.decide.memory import FORM_BITS, GB
from echo2.learner.decide.model_shape import ModelShape, read_shape
from echo2.planning.gpus import GPUS
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.worker import joining
from echo2.worker.at_home import SESSION_NICE, Delivered, Measurement, OwnersPrograms, attended_at_home
from echo2.worker.decide.home import SLOTS_MIN, EngineCandidate, SamplingNeed, choose, slots_in
from echo2.worker.worker_process import WorkerOptions
from head_cases import OpenHead, rows, settings, until
from memory_links import MemoryLink
from test_head_joining import stranger_of

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


WITHOUT_PROC = """
from pathlib import Path
assert not Path("/proc/meminfo").exists()
from echo2.core.devices import available_memory_bytes, this_machine
from echo2.core.errors import UserError
from echo2.engines.registry import make_engine
from echo2.worker import joining
from echo2.worker.at_home import OwnersPrograms, give_cores
from rollout_cases import load, requests, run, snapshot_of, tiny_module
assert 0 < available_memory_bytes() <= this_machine().memory_bytes
give_cores(at_home=True, max_cores=0)
try:
    OwnersPrograms()
except UserError as error:
    print(error)
engine = make_engine("auto", "cpu", 4)
load(engine, snapshot_of(tiny_module("qwen3")))
print(len(run(engine, requests(0))))
"""


def shape_of(config: dict[str, Any]) -> ModelShape:
    shape = read_shape(config)
    assert shape is not None
    return shape


ADAPTERS = SamplingNeed(shape_of(QWEN3_8B), slots=64, length=640, value_bytes=2, has_adapter=True)
WHOLE = replace(ADAPTERS, has_adapter=False)


def candidates(gigabytes: float, **obstacles: str) -> list[EngineCandidate]:
    memory = int(gigabytes * GB)
    return [
        EngineCandidate(engine, form, memory, obstacles.get(form, ""))
        for engine, form in ((AUTO, ""), *((engine, FORMS[engine]) for engine in LLAMACPP_FORMS))
    ]


def test_bits_of_a_form_are_those_of_its_blocks() -> None:
    assert set(FORM_BITS) == set(FORMS.values())
    sizes = {**forms.BLOCK_BYTES, **{form: bits * forms.BLOCK / 8 + 4 for form, bits in forms.AFFINE_BITS.items()}}
    assert {form: 8 * size / forms.BLOCK for form, size in sizes.items()} == FORM_BITS
    assert [FORM_BITS[form] // 4 for form in FORMS.values()] == sorted(
        (FORM_BITS[form] // 4 for form in FORMS.values()), reverse=True
    )


@pytest.mark.parametrize(
    ("asked", "gigabytes", "engine", "slots"),
    [
        (ADAPTERS, 30.0, AUTO, 64),  # 16.4 GB of weights, 64 rollouts of .094 GB
        (ADAPTERS, 18.0, AUTO, 11),
        (ADAPTERS, 16.0, "llamacpp-q8_0", 22),  # 8.7 GB, and three times the keys and values
        (ADAPTERS, 8.0, "llamacpp-q4_0", 6),  # 5.2 GB
        (WHOLE, 16.0, "llamacpp-q4_0", 16),  # two versions at once
    ],
)
def test_published_weights_come_first_and_fewer_bits_where_memory_is_short(
    asked: SamplingNeed, gigabytes: float, engine: str, slots: int
) -> None:
    chosen = choose(asked, candidates(gigabytes))
    assert (chosen.engine, chosen.slots) == (engine, slots)
    assert f"of {gigabytes:.1f} GB" in chosen.why
    assert (f"{AUTO}: it needs" in chosen.why) == (engine != AUTO)


@pytest.mark.parametrize(("total_gb", "given_gb"), [(16.0, 9.6), (24.0, 14.4), (64.0, 43.2)])
def test_a_mac_gives_what_its_gpu_may_have_as_plan_says(
    monkeypatch: pytest.MonkeyPatch, total_gb: float, given_gb: float
) -> None:
    monkeypatch.setattr(joining, "this_machine", lambda: Hardware(int(total_gb * GB)))
    options = WorkerOptions()
    assert joining.given_bytes(options)[0] == int(0.9 * int(total_gb * GB))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert joining.given_bytes(options)[0] / GB == pytest.approx(given_gb, abs=0.01)
    names = {16.0: "M4-16GB", 24.0: "M4-Pro-24GB", 64.0: "M4-Max-64GB"}
    assert joining.given_bytes(options)[0] / GB == pytest.approx(0.9 * GPUS[names[total_gb]].memory_gb, rel=0.01)
    assert joining.given_bytes(replace(options, at_home=True))[0] / GB == pytest.approx(total_gb / 2)
    assert joining.given_bytes(replace(options, max_memory_gb=12.0))[0] == 12 * GB  # the owner says it


def test_more_memory_never_means_fewer_bits_and_of_one_engine_never_fewer_rollouts() -> None:
    order = [one.engine for one in candidates(1.0)]
    found = [choose(ADAPTERS, candidates(gigabytes / 4)) for gigabytes in range(30, 120)]
    for small, large in itertools.pairwise(found):
        assert order.index(large.engine) <= order.index(small.engine)
        assert large.engine != small.engine or large.slots >= small.slots
    for one in candidates(18.0):
        assert slots_in(ADAPTERS, one) in {0, *range(SLOTS_MIN, ADAPTERS.slots + 1)}


def test_an_engine_without_room_is_refused_with_the_next_that_has_it() -> None:
    words = r"q8_0: it needs .* for 4 rollouts, and may use 8.0 GB\. --engine llamacpp-q4_0 would do: it needs \d\.\d "
    with pytest.raises(UserError, match=words):
        choose(ADAPTERS, candidates(8.0), "llamacpp-q8_0")
    with pytest.raises(UserError, match="None of its engines has room"):
        choose(ADAPTERS, candidates(8.0, q4_0="not installed"), "llamacpp-q8_0")
    with pytest.raises(UserError, match=r"llamacpp-q4_0: not installed\. .*--engine auto would do"):
        choose(ADAPTERS, candidates(30.0, q4_0="not installed"), "llamacpp-q4_0")
    with pytest.raises(UserError, match=r"auto: it needs .*; llamacpp-q8_0: not here; .*--max-memory-gb"):
        choose(ADAPTERS, candidates(4.0, q8_0="not here"))


# ---- with a head -----------------------------------------------------------------------------------------------------


async def settled(open_head: OpenHead, peer: Peer, options: WorkerOptions) -> WorkerOptions:
    return await joining.settled(MemoryLink(open_head.service.handlers(), peer), options)


@pytest.mark.parametrize(
    ("machine_gb", "workers", "is_own", "options", "engine"),
    [
        (64, {}, True, {}, AUTO),
        (17, {}, True, {}, "llamacpp-q8_0"),
        (30, {}, True, {"at_home": True}, "llamacpp-q8_0"),
        (64, {}, True, {"max_memory_gb": 8.0}, "llamacpp-q4_0"),
        (17, {"forms": ["q8_0"]}, False, {}, "llamacpp-q8_0"),
        (17, {"engine": "llamacpp-q4_0"}, True, {}, "llamacpp-q4_0"),
        (2, {"engine": "transformers"}, True, {}, AUTO),
        (2, {}, True, {"engine": "compact"}, "compact"),
    ],
)
def test_a_worker_chooses_by_its_memory_and_what_the_head_allows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine_gb: int,
    workers: dict[str, Any],
    is_own: bool,
    options: dict[str, Any],
    engine: str,
) -> None:
    monkeypatch.setattr(joining, "this_machine", lambda: Hardware(machine_gb * GB))
    monkeypatch.setattr(engines, "PACKAGES", {"echo2.engines.llamacpp": ()})

    async def scenario() -> None:
        async with open_run(tmp_path, workers) as open_head:
            peer = open_head.peer("w") if is_own else stranger_of(open_head, tmp_path)
            found = await settled(open_head, peer, WorkerOptions(**options))
            assert found.engine == engine

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def open_run(tmp_path: Path, workers: dict[str, Any]) -> OpenHead:
    """A run of adapters over a model whose config.json the head has."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_8B))
    lora = {"rank": 8}
    model = {"path": str(tmp_path / "model"), "snapshot_dtype": "bfloat16"}
    raw = settings(rows(tmp_path / "rows.jsonl", "53="), workers=workers, model=model, lora=lora)
    return OpenHead(tmp_path, raw)


@pytest.mark.parametrize(
    ("workers", "is_own", "options", "said"),
    [
        ({}, False, {}, r"llamacpp-q8_0: the run does not let this machine round to q8_0 \(workers.forms\)"),
        ({}, True, {"engine": "llamacpp-q8_0", "max_memory_gb": 8.0}, "--engine llamacpp-q4_0 would do"),
    ],
)
def test_a_worker_without_room_is_refused_before_it_joins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: dict[str, Any],
    is_own: bool,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(joining, "this_machine", lambda: Hardware(12 * GB))
    monkeypatch.setattr(engines, "PACKAGES", {"echo2.engines.llamacpp": ()})

    async def scenario() -> None:
        async with open_run(tmp_path, workers) as open_head:
            peer = open_head.peer("w") if is_own else stranger_of(open_head, tmp_path)
            with pytest.raises(UserError, match=said):
                await settled(open_head, peer, WorkerOptions(**options))

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_the_line_about_the_choice_names_the_engine_that_auto_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "this_machine", lambda: Hardware(64 * GB))
    caplog.set_level("INFO")

    async def scenario() -> None:
        async with open_run(tmp_path, {}) as open_head:
            assert (await settled(open_head, open_head.peer("w"), WorkerOptions())).engine == AUTO

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
    (line,) = [record.getMessage() for record in caplog.records if record.name == joining.__name__]
    assert re.match(
        r"engine auto, \d+ rollouts at once: compact, since it knows qwen3 models; it needs .* of .* GB", line
    )


@pytest.mark.parametrize(("inside", "can_check"), [("compact", True), ("transformers", False), ("mlx", False)])
def test_the_head_counts_a_machine_whose_auto_reads_no_rounded_weights_as_no_checker_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, can_check: bool
) -> None:
    """As on a Mac that takes MLX. It would be given each such check, and answer that it knows no form."""
    monkeypatch.setattr(joining, "this_machine", lambda: Hardware(64 * GB))
    monkeypatch.setattr(engines, "in_worker", lambda config: EngineChoice(inside, "the test says so"))

    async def scenario() -> None:
        async with open_run(tmp_path, {"forms": ["q8_0"]}) as open_head:
            found = await settled(open_head, open_head.peer("w"), WorkerOptions())
            async with open_head.attending("w", engine=found.engine) as leases:
                await until(lambda: leases)
                (worker,) = open_head.head.planner.fleet.own()
                assert (worker.can_check(), worker.can_check("q8_0")) == (True, can_check)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


@pytest.mark.parametrize(
    ("engine", "has_package", "said"),
    [
        (
            "llamacpp-q8_0",
            False,
            r"no_such_package not installed \(pip install 'echo2\[llamacpp\]'\).*--engine auto would do",
        ),
        ("mlx-q8", False, r"no_such_package not installed \(pip install 'echo2\[mlx\]'\).*--engine auto would do"),
        ("mlx-q8", True, r"there is no GPU that MLX uses \(Metal\).*--engine \S+ would do"),
    ],
)
def test_a_worker_whose_engine_is_not_here_is_refused_before_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, has_package: bool, said: str
) -> None:
    """The last one as on a Mac without Metal."""
    packages = () if has_package else ("no_such_package",)
    monkeypatch.setattr(engines, "PACKAGES", dict.fromkeys(("echo2.engines.llamacpp", "echo2.engines.mlx"), packages))
    monkeypatch.setattr(engines, "is_mac", lambda: has_package)
    monkeypatch.setattr(engines, "has_metal", lambda: False)

    async def scenario() -> None:
        async with open_run(tmp_path, {}) as open_head:
            peer = open_head.peer("w")
            with pytest.raises(UserError, match=said) as refused:
                await settled(open_head, peer, WorkerOptions(engine=engine, max_memory_gb=100.0))
            assert "\n" not in str(refused.value)
            assert open_head.head.planner.fleet.get("w") is None

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_without_the_package_an_engine_names_what_to_install() -> None:
    assert engines.obstacle("llamacpp-q8_0", QWEN3_8B) in (
        "",
        "llama_cpp and gguf not installed (pip install 'echo2[llamacpp]')",
    )


def test_a_model_that_llama_cpp_has_no_place_for_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PACKAGES", {"echo2.engines.llamacpp": ()})
    assert "rows of 12289 items" in engines.obstacle("llamacpp-q8_0", QWEN3_8B | {"intermediate_size": 12289})
    assert engines.obstacle("llamacpp-q8_0", QWEN3_8B) == ""


# ---- stepping back ---------------------------------------------------------------------------------------------------


def test_a_worker_at_home_gives_back_its_leases_before_it_stops_and_begins_again_later() -> None:
    told: list[str] = []
    story = [(0.0, False), (0.0, True), (0.0, True), (0.0, False), (0.0, False), (0.0, False)]

    async def attend() -> None:
        told.append("attends")
        try:
            await asyncio.Event().wait()
        finally:
            told.append("ends")

    async def step_back(why: str) -> bool:
        told.append(f"steps back: {why}")
        return len(told) > 2  # at first its engine is being made

    async def measured() -> AsyncIterator[Measurement]:
        for at, (share, on_battery) in enumerate(story):
            yield share, on_battery, 40.0 * at
            await asyncio.sleep(0)

    async def scenario() -> None:
        background = Background(lambda error: told.append(f"failed: {error}"))
        await attended_at_home(attend, step_back, background, measured())
        await background.close()

    asyncio.run(scenario())
    why = "steps back: the machine is on battery"
    assert told == ["attends", why, why, "ends", "attends", "ends"]


def test_use_by_the_workers_own_programs_is_not_the_owners() -> None:
    """A child that has ended counts, too."""
    programs = OwnersPrograms()
    before = programs._read()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    total, busy, own = (now - then for now, then in zip(programs._read(), before, strict=True))
    assert own >= 0.25
    assert total >= busy - 1e-6  # sums of seconds: on a full machine both are the same but for rounding
    assert 0.0 <= programs.share() <= 1.0


def test_a_worker_samples_where_proc_is_hidden_as_on_a_mac_and_at_home_says_what_it_lacks() -> None:
    hide = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /proc && exec "$@"',
        "sh",
    ]
    if not shutil.which("unshare") or subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("this user may not hide /proc")
    script = f"import sys; sys.path[:0] = {[str(Path(__file__).parent.parent)]}\n{WITHOUT_PROC}"
    done = subprocess.run([*hide, sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2].startswith("--at-home: this system does not say what other programs use")
    assert done.stdout.splitlines()[-1] == "3"


@pytest.mark.parametrize(("at_home", "max_cores", "threads"), [(False, 0, 1), (False, 1, 1), (True, 0, None)])
def test_a_worker_computes_on_the_cores_that_it_is_given(at_home: bool, max_cores: int, threads: int | None) -> None:
    code = (
        "import os; from echo2.worker.at_home import give_cores; from echo2.core.devices import num_cores\n"
        f"before = num_cores(); give_cores({at_home}, {max_cores})\n"
        "print(before, num_cores(), os.environ['OMP_NUM_THREADS'], os.nice(0))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, given, nice = map(int, done.stdout.split())
    assert given == (threads or max(1, before // 2))
    assert after == (before if not (at_home or max_cores) else given) or sys.platform == "darwin"
    assert nice == (10 + os.nice(0) if at_home else os.nice(0))


@pytest.mark.skipif(not SESSION_NICE.exists(), reason="this system does not group processes by session")
def test_the_session_of_a_worker_at_home_comes_after_its_owners() -> None:
    """On desktops, `nice` alone ranks only the processes of one terminal."""
    code = (
        "from echo2.worker.at_home import SESSION_NICE, give_cores\n"
        "give_cores(at_home=True, max_cores=0); print(SESSION_NICE.read_text())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "10"


def test_a_worker_earns_nothing_while_it_is_paused() -> None:
    times = iter([0.0, 3600.0, 36_000.0, 37_800.0])
    delivered = Delivered(2.0, lambda: next(times))
    assert str(delivered).endswith("in 0.00 hours, at most 0.00 dollars")
    delivered.begin()
    delivered.end()
    delivered.end()
    assert str(delivered).endswith("in 1.00 hours, at most 2.00 dollars")
    delivered.begin()
    assert str(delivered).endswith("in 1.50 hours, at most 3.00 dollars")


def test_deliveries_are_reported_with_their_price() -> None:
    delivered = Delivered(0.0)
    delivered.add(wire.Delivery(group={"rollouts": [{"tokens": bytes(4 * 7)}, {"tokens": bytes(4)}]}))
    assert str(delivered) == "delivered 1 group, 2 rollouts, 8 tokens in 0.00 hours"
    assert str(Delivered(2.0)).endswith("hours, at most 0.00 dollars")
