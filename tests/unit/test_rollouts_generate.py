"""From leases to groups: tokens as the tokenizer made them, seeds of the leases, one answer per lease."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from echo2.core.errors import PeerError, UserError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    Message,
    RolloutGroup,
    SamplingParams,
    SnapshotRef,
    Task,
)
from echo2.engines.engine import RequestFailure, SampleRequest
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import decoded, decoded_all, encode_prompt, load_tokenizer, with_texts
from echo2.rollouts.generate import in_lockstep, sample_group, sample_groups
from rollout_cases import END, assigned, hooked, load, requests, run, snapshot_of, tiny_module, tokenizer_files, until

TEMPLATE = (
    b"{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    b"{{ m.role[0] }}={{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def task(cursor: int, prompt: Any = "53=") -> Task:
    return Task(cursor, prompt, {"answer": "35"})


def assignment(number: int, prompt: Any = "53=", samples: int = 3, max_tokens: int = 6, seed: int = 11) -> Assignment:
    group = GroupRef(RUN_POLICY, "train", number)
    lease = Lease(number + 100, group, 7, number + 50, samples, 4, None, 99.0, 30.0, seed)
    return assigned(lease, task(number + 50, prompt), SamplingParams(max_tokens=max_tokens))


def engine_and_tokenizer() -> Any:
    snapshot = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine = make_engine("compact", "cpu")
    load(engine, snapshot)
    return engine, load_tokenizer(snapshot.files)


def collect(engine: Any, tokenizer: Any, assignments: list[Assignment]) -> Any:
    groups: dict[int, RolloutGroup] = {}
    failures: dict[int, RequestFailure] = {}
    ticks = count()
    sampling = sample_groups(
        engine,
        tokenizer,
        assignments,
        worker_id="w1",
        on_group=lambda group, lease: groups.__setitem__(lease.lease_id, group),
        on_failed=lambda lease, failure: failures.__setitem__(lease.lease_id, failure),
        clock=lambda: float(next(ticks)),
    )
    asyncio.run(sampling)
    return groups, failures


def test_a_group_is_the_completions_of_its_lease() -> None:
    engine, tokenizer = engine_and_tokenizer()
    groups, failures = collect(engine, tokenizer, [assignment(0, "53="), assignment(1, "9876=", samples=2, seed=12)])
    assert failures == {}
    group = groups[101]
    assert (group.group, group.step, group.lineage, group.cursor) == (GroupRef(RUN_POLICY, "train", 1), 7, 2, 51)
    assert group.worker_id == "w1"
    assert group.generate_seconds > 0
    assert group.prompt_tokens == array("i", [11, 10, 9, 8, 28])
    assert not group.is_scored
    assert {rollout.text for rollout in group.rollouts} == {""}
    params = SamplingParams(max_tokens=6)
    completions = run(engine, [SampleRequest(group.prompt_tokens, 12, sample, params) for sample in range(2)])
    for rollout, completion in zip(with_texts(group.rollouts, tokenizer), completions, strict=True):
        assert rollout.tokens == completion.tokens
        assert rollout.logprobs.tolist() == pytest.approx(completion.logprobs.tolist(), abs=1e-5)
        assert rollout.loss_mask == b"\x01" * len(rollout.tokens)
        assert rollout.version_spans == ((0, 5),)
        plain = [token for token in rollout.tokens if token not in (0, END)]
        assert rollout.text == "".join("0123456789abcdefghijklmnop=+?"[token - 2] for token in plain)


def test_every_lease_gets_one_answer_and_bad_ones_do_not_hurt_the_others() -> None:
    engine, tokenizer = engine_and_tokenizer()
    assignments = [assignment(0), assignment(1, "1" * 64), assignment(3, "")]
    groups, failures = collect(engine, tokenizer, assignments)
    assert list(groups) == [100]
    assert {lease: failure.reason for lease, failure in failures.items()} == {
        101: "prompt_too_long",
        103: "engine_failed",
    }


def test_a_prompt_of_chat_messages_needs_a_chat_template() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        encode_prompt(task(3, (Message("user", "x"),)), load_tokenizer(tokenizer_files()))


@pytest.mark.parametrize("later", [SnapshotRef(RUN_POLICY, 3, 4), SnapshotRef("another", 2, 6)])
def test_a_group_that_outlived_its_lineage_or_policy_is_given_up(later: SnapshotRef) -> None:
    def other_weights_after_two_tokens(step: int) -> None:
        if step == 3:
            decoder.load(replace(snapshot_of(tiny_module("qwen3", seed=1), version=4), ref=later))

    snapshot = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine, decoder = hooked("compact", other_weights_after_two_tokens, snapshot)
    _, failures = collect(engine, load_tokenizer(snapshot.files), [assignment(1, samples=8, max_tokens=12)])
    assert failures[101].reason == "snapshot_gone"


def test_cancelling_a_group_aborts_its_rollouts() -> None:
    engine, tokenizer = engine_and_tokenizer()

    async def cancelled() -> None:
        group = asyncio.ensure_future(sample_group(engine, tokenizer, assignment(0, max_tokens=60), "w1"))
        await asyncio.sleep(0)  # the group begins
        await asyncio.sleep(0)  # its rollouts are submitted
        assert engine.free_slots == 61
        group.cancel()
        await asyncio.wait([group])
        await until(lambda: engine.free_slots == 64)  # at the next token
        assert group.cancelled()

    asyncio.run(asyncio.wait_for(cancelled(), 60.0))
    assert collect(engine, tokenizer, []) == ({}, {})


@pytest.mark.parametrize("name", ["compact", "fake"])
def test_the_same_leases_in_lockstep_give_the_same_bits_beside_any_others(name: str) -> None:
    snapshot = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine, tokenizer = make_engine(name, "cpu"), load_tokenizer(snapshot.files)
    load(engine, snapshot)
    unit = [assignment(number, "53="[number:], samples=4, max_tokens=9, seed=number) for number in range(3)]
    unit = [*unit, assignment(4, "1" * 64)]  # it can't be sampled, and nobody waits for it

    async def sampled(order: list[int], others: int) -> dict[int, Any]:
        lockstep = in_lockstep(engine, unit)
        beside = [engine.submit(one) for one in requests(9, samples=others, max_tokens=30)]
        groups = [sample_group(lockstep, tokenizer, unit[at], "w1", on_rollout=lockstep.leave) for at in order]
        found = dict(zip(order, await asyncio.gather(*groups), strict=True))
        await asyncio.gather(*beside)
        return found

    first = asyncio.run(sampled([0, 1, 2, 3], 0))
    assert isinstance(first[3], RequestFailure)
    for order, others in (([3, 2, 1, 0], 5), ([1, 0, 3, 2], 1)):
        again = asyncio.run(sampled(order, others))
        assert again == first  # the logprobs too, to the last bit


def test_other_groups_of_a_lockstep_go_on_when_one_is_cancelled() -> None:
    engine, tokenizer = engine_and_tokenizer()
    unit = [assignment(number, samples=4, max_tokens=20, seed=number) for number in range(2)]

    async def sampled(cancel: bool) -> Any:
        lockstep = in_lockstep(engine, unit)
        groups = [
            asyncio.ensure_future(sample_group(lockstep, tokenizer, one, "w1", on_rollout=lockstep.leave))
            for one in unit
        ]
        for _ in range(3):
            await asyncio.sleep(0)
        if cancel:
            groups[0].cancel()
        return await groups[1]

    assert asyncio.run(asyncio.wait_for(sampled(True), 60.0)) == asyncio.run(sampled(False))


def test_chat_messages_go_through_the_template_with_the_assistants_turn_opened() -> None:
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": TEMPLATE})
    tokens = encode_prompt(task(0, (Message("fan", "53"), Message("cook", "1"))), tokenizer)
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == "f=53<eos>c=1<eos>a="
    with pytest.raises(UserError, match=r"Task 3.*no such role"):
        encode_prompt(task(3, (Message("bad", "53"),)), tokenizer)


def test_a_start_token_is_added_once() -> None:
    files = tokenizer_files()
    files["tokenizer_config.json"] = files["tokenizer_config.json"].replace(b"}", b', "bos_token": "<pad>"}')
    tokenizer = load_tokenizer(files)
    assert encode_prompt(task(0, "<pad>5"), tokenizer).tolist() == [0, 7]
    assert encode_prompt(task(0, "5"), tokenizer).tolist() == [7]  # this tokenizer adds none by itself


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": b"{", "tokenizer_config.json": b"{}"},
        {"../tokenizer.json": b"{}"},
        {"/tmp/x.json": b"{}"},
    ],
)
def test_files_that_hold_no_tokenizer_are_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(PeerError):
        load_tokenizer(files)


@pytest.mark.parametrize("name", ["BertweetTokenizer", "PegasusTokenizer", "NoSuchTokenizer"])
def test_a_tokenizer_class_that_fails_in_its_own_way_is_refused_like_the_others(name: str) -> None:
    with pytest.raises(PeerError, match="no tokenizer that transformers reads"):
        load_tokenizer({"tokenizer_config.json": f'{{"tokenizer_class": "{name}"}}'.encode()})


def test_ids_beyond_the_tokenizer_decode_to_nothing() -> None:
    tokenizer = load_tokenizer(tokenizer_files())
    assert decoded(tokenizer, array("i", [7, len(tokenizer), 5, 2**31 - 1, END])) == "53"
    assert decoded(tokenizer, array("i")) == ""


WORDS = {"<pad>": 0, "<s>": 1, "a": 2, "b": 3, ",": 4, "##c": 5, ".": 6}


@pytest.mark.parametrize("cleans_up", [True, False])
@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_texts_are_those_of_transformers_for_any_writer(kind: str, cleans_up: bool) -> None:
    """Wrapped tokenizers of WordPiece take the space before a comma away; byte-level ones never do."""
    if kind == "words":
        core = Tokenizer(models.WordPiece(WORDS, unk_token="<pad>"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    else:
        vocab = {
            "<pad>": 0,
            "<s>": 1,
            **{sign: 2 + i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
        }
        core = Tokenizer(models.BPE(vocab, []))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", clean_up_tokenization_spaces=cleans_up
    )
    tokenizer.model_ends = ()
    for text in ("a , b ac .", "a", ""):
        tokens = encode_prompt(Task(0, text), tokenizer)
        assert tokens.tolist() == tokenizer.encode(text, add_special_tokens=True)
        assert tokens[0] == 1
        longer = array("i", [*tokens, *tokens])
        wanted = [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in (tokens, longer)]
        assert decoded_all(tokenizer, (tokens, longer)) == wanted
    text = decoded(tokenizer, encode_prompt(Task(0, "a , b"), tokenizer))
    assert text == ("a, b" if cleans_up and kind == "words" else "a , b")
