"""The service's sampler: many adapters in one batch as each alone, frozen for ever; prompts scored; stops; seeds."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2.config.sections import LoraConfig
from echo2.core import frames
from echo2.core.errors import PeerError, UserError
from echo2.core.types import Snapshot
from echo2.engines import decode_loop
from echo2.engines.compact import CompactModel
from echo2.learner.core.adapters import load_base
from echo2.learner.core.datum import Datum
from echo2.learner.core.trainer import AdamParams
from echo2.weights.format.model_files import read_base_model
from echo2_service.backend import Answer, Request, SampleCall, SampledSequence, SampleOutput, SampleSpec
from echo2_service.calling import frame
from echo2_service.learner.tenants import Tenants
from echo2_service.sampler import sample_calls as process
from echo2_service.sampler.sample_calls import BaseSampler, SampleCalls, base_sampler
from rollout_cases import END, VOCAB, tiny_directory, tiny_module

PROMPT = array("i", [5, 6, 7, 8, 9])
SPEC = SampleSpec(PROMPT, max_tokens=12, seed=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("service") / "base")


@pytest.fixture(scope="module")
def tenants(model: Path) -> Tenants:
    """Four trained adapters of different ranks and targets."""
    tenants = Tenants(load_base(str(model), "cpu"))
    for number in range(4):
        targets = ["q_proj", "down_proj"] if number == 1 else ["all-linear"]
        tenants.add(f"{number}", LoraConfig(rank=number + 1, alpha=32, targets=targets), number)
        train(tenants, f"{number}")
    return tenants


@pytest.fixture
def sampler(model: Path) -> Iterator[BaseSampler]:
    sampler = base_sampler(str(model), "cpu")
    yield sampler
    asyncio.run(sampler.close())


def train(tenants: Tenants, name: str) -> None:
    rng = random.Random(name)
    tokens = array("i", [rng.randrange(VOCAB) for _ in range(20)])
    tenants.forward_backward(name, [Datum(tokens[:1], tokens[1:], b"\x01" * 19)], "cross_entropy", {})
    tenants.optim_step(name, AdamParams(3e-2, eps=1e-12))


def published(tenants: Tenants, path: Path) -> list[str]:
    for number in range(4):
        tenants.publish(f"{number}", path / f"{number}")
    return ["", *(str(path / f"{number}") for number in range(4))]


def sampled(sampler: BaseSampler, snapshots: list[str], spec: SampleSpec = SPEC) -> list[SampleOutput]:
    async def all_at_once() -> list[SampleOutput]:
        return await asyncio.gather(*(sampler.sample(snapshot, spec) for snapshot in snapshots))

    return asyncio.run(all_at_once())


def of_one(sampler: BaseSampler, spec: SampleSpec, snapshot: str = "") -> SampledSequence:
    return sampled(sampler, [snapshot], spec)[0].sequences[0]


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The prompt tokens that were read before the first step, by call. The engine keeps what it has, however slow the
    machine is."""
    monkeypatch.setattr(decode_loop, "LINGER_SECONDS", 3600.0)
    counted, prefill = list[int](), CompactModel.prefill

    def counts(model: CompactModel, prompts: Sequence[array[int]], known: Sequence[Any], keeps_routes: bool) -> Any:
        firsts = [one.longest if one else 0 for one in known]
        counted.append(sum(len(prompt) - first for prompt, first in zip(prompts, firsts, strict=True)))
        return prefill(model, prompts, known, keeps_routes)

    monkeypatch.setattr(CompactModel, "prefill", counts)
    return counted


def test_a_tenant_s_conversation_reads_only_what_is_new(
    sampler: BaseSampler, tenants: Tenants, tmp_path: Path, num_read: list[int]
) -> None:
    """And nobody's call is faster, for what another tenant, or the same one with another adapter, has asked."""
    adapter = published(tenants, tmp_path)[1]
    spec = replace(SPEC, prompt=array("i", range(2, 22)), max_tokens=4, stop_tokens=(), ends_with_model=False)

    async def talk() -> tuple[SampleOutput, array[int]]:
        said = (await sampler.sample(adapter, replace(spec, owner="tina"))).sequences[0].tokens
        longer = spec.prompt + said + array("i", [3, 2, 4])
        for owner, snapshot in (("tom", adapter), ("tina", ""), ("tina", adapter)):
            found = await sampler.sample(snapshot, replace(spec, owner=owner, prompt=longer))
        await sampler.sample(adapter, replace(spec, owner="tina", prompt=spec.prompt[:15] + array("i", [2, 3])))
        return found, longer

    found, longer = asyncio.run(talk())
    # The last token of a prompt is read by the first step, and the last one that was said had not been read.
    assert num_read == [19, 26, 26, 3, 1]
    alone = of_one(sampler, replace(spec, owner="tim", prompt=longer), adapter)
    assert found.sequences[0].tokens == alone.tokens
    assert found.sequences[0].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_many_policies_in_one_batch_are_as_each_alone(sampler: BaseSampler, tenants: Tenants, tmp_path: Path) -> None:
    snapshots = published(tenants, tmp_path)
    spec = replace(SPEC, num_samples=3, max_tokens=20)
    together = sampled(sampler, snapshots, spec)
    alone = [sampled(sampler, [snapshot], spec)[0] for snapshot in snapshots]
    for one, other in zip(together, alone, strict=True):
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            assert mine.tokens == its.tokens
            assert list(mine.logprobs) == pytest.approx(list(its.logprobs), abs=1e-5)
    assert len({one.sequences[0].tokens.tobytes() for one in together}) == 5


def test_logprobs_are_those_of_the_learner(sampler: BaseSampler, tenants: Tenants, tmp_path: Path) -> None:
    spec = replace(SPEC, prompt_logprobs=True, top_prompt_logprobs=3)
    for number, output in enumerate(sampled(sampler, published(tenants, tmp_path)[1:], spec)):
        sequence = output.sequences[0]
        whole = PROMPT + sequence.tokens
        datum = Datum(whole[:1], whole[1:], b"\x01" * (len(whole) - 1))
        expected = tenants.forward_backward(f"{number}", [datum], "cross_entropy", {}, adds_gradients=False).logprobs[0]
        found = [*output.prompt_logprobs[1:], *sequence.logprobs]
        assert found == pytest.approx(list(expected), abs=1e-4)
        assert math.isnan(output.prompt_logprobs[0])
        assert len(output.top_prompt_tokens) == len(output.top_prompt_logprobs) == 3 * len(PROMPT)
        assert output.top_prompt_tokens[:3] == array("i", [-1, -1, -1])
        rows = [output.top_prompt_logprobs[at : at + 3] for at in range(3, 3 * len(PROMPT), 3)]
        assert all(list(row) == sorted(row, reverse=True) for row in rows)
        for at in range(1, len(PROMPT)):
            ids = list(output.top_prompt_tokens[3 * at : 3 * at + 3])
            if PROMPT[at] in ids:
                assert rows[at - 1][ids.index(PROMPT[at])] == pytest.approx(output.prompt_logprobs[at], abs=1e-6)


def test_tokens_other_than_the_prompts_are_scored(sampler: BaseSampler, tenants: Tenants, tmp_path: Path) -> None:
    """Against a softmax over the most likely tokens, of which all are asked for."""
    snapshot = published(tenants, tmp_path)[3]
    cells = (array("i", [1, 1, 3, 4]), array("i", [5, 9, VOCAB - 1, 5]))
    spec = replace(SPEC, top_prompt_logprobs=VOCAB, target_places=cells[0], target_tokens=cells[1])
    spec = replace(spec, num_alternatives=400, temperature=0.5, top_sample_logprobs=VOCAB, num_samples=2)
    output, again = sampled(sampler, [snapshot, snapshot], spec)
    tables = [
        dict(zip(tokens, logprobs, strict=True))
        for tokens, logprobs in zip(
            rows_of(output.top_prompt_tokens, VOCAB), rows_of(output.top_prompt_logprobs, VOCAB), strict=True
        )
    ]
    assert list(output.target_logprobs) == pytest.approx([tables[at][token] for at, token in zip(*cells, strict=True)])
    assert output.alternative_tokens == again.alternative_tokens
    assert len(output.alternative_tokens) == 400 * (len(PROMPT) - 1)
    for table, tokens, logprobs in zip(
        tables[1:], rows_of(output.alternative_tokens, 400), rows_of(output.alternative_logprobs, 400), strict=True
    ):
        assert logprobs == pytest.approx([table[token] for token in tokens])
        tempered = {token: math.exp(logprob / 0.5) for token, logprob in table.items()}
        shares = {token: tempered[token] / sum(tempered.values()) for token in tempered}
        likely = max(shares, key=lambda token: shares[token])
        assert tokens.count(likely) / 400 == pytest.approx(shares[likely], abs=0.1)
    for sequence in output.sequences:
        tops = rows_of(sequence.top_tokens, VOCAB), rows_of(sequence.top_logprobs, VOCAB)
        for token, logprob, ids, row in zip(sequence.tokens, sequence.logprobs, *tops, strict=True):
            assert row[ids.index(token)] == pytest.approx(logprob, abs=1e-4)
            assert sum(map(math.exp, row)) == pytest.approx(1.0)
    greedy = sampled(sampler, [snapshot], replace(spec, temperature=0.0))[0]
    assert [len(set(row)) for row in rows_of(greedy.alternative_tokens, 400)] == [1] * (len(PROMPT) - 1)


def rows_of(values: Sequence[Any], width: int) -> list[list[Any]]:
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


def test_published_weights_are_frozen(sampler: BaseSampler, tenants: Tenants, tmp_path: Path) -> None:
    snapshots = published(tenants, tmp_path / "first")
    before = sampled(sampler, snapshots)
    train(tenants, "0")
    later = published(tenants, tmp_path / "second")
    mixed = sampled(sampler, [later[1], snapshots[1]])
    assert mixed[1].sequences[0].tokens == before[1].sequences[0].tokens
    assert mixed[0].sequences[0].logprobs != before[1].sequences[0].logprobs
    assert sampled(sampler, snapshots)[1].sequences[0].tokens == before[1].sequences[0].tokens


def test_stops_are_the_last_of_the_tokens(sampler: BaseSampler) -> None:
    whole = of_one(sampler, replace(SPEC, ends_with_model=False, max_tokens=30))
    assert (whole.finish, len(whole.tokens)) == ("length", 30)
    third = whole.tokens[2]
    by_token = of_one(sampler, replace(SPEC, ends_with_model=False, stop_tokens=(third,), max_tokens=30))
    first = whole.tokens.index(third)
    assert (by_token.finish, by_token.tokens) == ("stop", whole.tokens[: first + 1])
    letters = dict(enumerate("0123456789abcdefghijklmnop=+?", 2))
    place = next(at for at in range(3, 29) if all(token in letters for token in whole.tokens[at : at + 2]))
    text = "".join(letters[token] for token in whole.tokens[place : place + 2])
    spec = replace(SPEC, ends_with_model=False, stop_strings=("never", text), max_tokens=30)
    by_string = of_one(sampler, spec)
    assert by_string.finish == "stop"
    assert by_string.tokens == whole.tokens[: len(by_string.tokens)]
    assert "".join(letters.get(token, "_") for token in by_string.tokens).find(text) == len(by_string.tokens) - 2
    ended = [of_one(sampler, replace(SPEC, seed=seed, max_tokens=40)) for seed in range(8)]
    assert all((one.tokens[-1] == END) == (one.finish == "stop") for one in ended)


def test_seeds_and_greedy(sampler: BaseSampler) -> None:
    spec = replace(SPEC, num_samples=4)
    once, again, other = (sampled(sampler, [""], each)[0].sequences for each in (spec, spec, replace(spec, seed=8)))
    assert [each.tokens for each in once] == [each.tokens for each in again]
    assert [each.tokens for each in once] != [each.tokens for each in other]
    assert len({each.tokens.tobytes() for each in once}) == 4
    greedy = sampled(sampler, [""], replace(spec, temperature=0.0))[0].sequences
    assert len({each.tokens.tobytes() for each in greedy}) == 1


def test_a_request_that_cannot_be_sampled_gets_an_error_and_harms_no_other(
    sampler: BaseSampler, tmp_path: Path
) -> None:
    for bad, words in (
        (replace(SPEC, prompt=array("i")), "no tokens"),
        (replace(SPEC, prompt=array("i", [VOCAB])), "outside"),
        (replace(SPEC, prompt=array("i", [2] * 64), prompt_logprobs=True), "context is 64"),
        (replace(SPEC, num_samples=10**6), "num_samples"),
        (replace(SPEC, target_places=array("i", [1]), target_tokens=array("i", [VOCAB])), "outside"),
        (replace(SPEC, top_p=0.0), "top_p"),
    ):
        with pytest.raises(UserError, match=words):
            sampled(sampler, [""], bad)
    with pytest.raises(UserError, match="has no complete checkpoint"):
        sampled(sampler, [str(tmp_path / "none")])
    assert len(of_one(sampler, SPEC).tokens) > 0


def test_an_adapter_over_another_base_is_refused(sampler: BaseSampler, tmp_path: Path) -> None:
    tiny_module("qwen3", seed=1).save_pretrained(tmp_path / "other")
    tenants = Tenants(load_base(str(tmp_path / "other"), "cpu"))
    tenants.add("a", LoraConfig(rank=2), 0)
    tenants.publish("a", tmp_path / "a")
    with pytest.raises(PeerError, match="not over"):
        sampled(sampler, [str(tmp_path / "a")])


def test_an_owner_with_many_waiting_calls_does_not_hold_up_another(model: Path) -> None:
    sampler, ended = base_sampler(str(model), "cpu", slots=4), list[str]()

    async def one(owner: str, seed: int) -> None:
        await sampler.sample("", replace(SPEC, seed=seed, owner=owner, ends_with_model=False))
        ended.append(owner)

    async def all_of_them() -> None:
        many = [asyncio.create_task(one("many", seed)) for seed in range(60)]
        await asyncio.sleep(0)
        gone = asyncio.create_task(one("gone", 1))
        few = [asyncio.create_task(one("few", seed)) for seed in range(4)]
        await few[0]
        gone.cancel()
        await asyncio.gather(*many, *few)
        await sampler.close()

    asyncio.run(all_of_them())
    assert max(place for place, owner in enumerate(ended) if owner == "few") < 24
    assert ended.count("many") == 60


def test_an_owner_that_uses_all_slots_for_long_leaves_one_in_sixteen(model: Path) -> None:
    sampler = base_sampler(str(model), "cpu", slots=16)
    ended: list[str] = []

    async def sample(owner: str, num_samples: int, max_tokens: int) -> None:
        spec = replace(SPEC, owner=owner, num_samples=num_samples, max_tokens=max_tokens, ends_with_model=False)
        await sampler.sample("", spec)
        ended.append(owner)

    async def both() -> None:
        busy = asyncio.create_task(sample("busy", 32, 40))
        while len(sampler._slots._used) < 1:  # noqa: ASYNC110  # nobody tells it
            await asyncio.sleep(0)
        await sample("late", 1, 2)
        await busy
        await sampler.close()

    asyncio.run(both())
    assert ended == ["late", "busy"]


def test_an_unsendable_answer_becomes_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = base_sampler(str(model), "cpu")
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 500)

    async def sampler_of(base: str) -> BaseSampler:
        return sampler

    async def run() -> dict[int, Answer]:
        told: dict[int, Answer] = {}
        both = asyncio.Event()

        def tell(answer: Answer) -> None:
            frame(answer)
            if not answer.has_begun:
                told[answer.number] = answer
            if len(told) == 2:
                both.set()

        calls = SampleCalls(sampler_of, tell)
        for number, most in ((1, 200), (2, 2)):
            calls.take(Request(number, SampleCall("", "", replace(SPEC, max_tokens=most, ends_with_model=False))))
        await both.wait()
        await sampler.close()
        return told

    told = asyncio.run(run())
    assert (told[1].is_ours, "cannot be sent: oversized" in told[1].fault) == (True, True)
    assert told[2].sampled is not None


def test_an_adapter_that_could_not_be_read_once_is_read_again(
    sampler: BaseSampler, tenants: Tenants, tmp_path: Path, model: Path
) -> None:
    """Memory was short at that moment."""
    name = published(tenants, tmp_path)[1]
    base, errors = read_base_model(model), [MemoryError(), RuntimeError("CUDA out of memory")]

    async def read(snapshot: str) -> Snapshot:
        if errors:
            raise errors.pop()
        return process.published(snapshot, base.ref)

    async def run() -> list[Any]:
        short = BaseSampler(base, "cpu", read)
        found = [await asyncio.gather(short.sample(name, SPEC), return_exceptions=True) for _ in range(3)]
        await short.close()
        return [one for (one,) in found]

    first, second, third = asyncio.run(run())
    assert (type(first), type(second)) == (RuntimeError, MemoryError)
    assert third.sequences[0].tokens == of_one(sampler, SPEC, name).tokens
