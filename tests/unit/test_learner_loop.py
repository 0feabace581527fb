"""The learner's loop against a head that forgets, drops answers and goes away.

The head here is a script at the other end of a Link: it keeps the little that a head must (recorded steps,
the fed groups, chunks) and refuses what the real one refuses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.errors import InvariantError, LinkError, PeerError, UserError
from echo2.learner import checkpoint
from echo2.learner.head_client import LearnerInfo
from echo2.learner.loop import LoopOptions, resume, run_learner
from echo2.learner.loss_stats import LossStats
from echo2.learner.model import load_policy
from echo2.learner.publication import PublishOptions
from echo2.learner.session import HeadSession
from echo2.learner.step_meter import StepMeter
from echo2.learner.trainer import StepStats, Trainer, TrainerOptions
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.types import PayloadId, RolloutGroup, Snapshot, SnapshotRef
from echo2.weights import Manifest, apply_delta, decode
from learner_cases import model_directory, random_group, tiny_policy

GROUPS_PER_STEP = 3
MICROBATCH = 2
OPTIONS = TrainerOptions(lr=1e-3, max_steps=5)


def step_groups(step: int) -> list[RolloutGroup]:
    rng = random.Random(step)
    return [with_step(random_group(rng, step * GROUPS_PER_STEP + i), step) for i in range(GROUPS_PER_STEP)]


def with_step(group: RolloutGroup, step: int, version: int | None = None) -> RolloutGroup:
    at = step if version is None else version
    rollouts = tuple(dataclasses.replace(r, version_spans=((0, at),)) for r in group.rollouts)
    return dataclasses.replace(group, step=step, rollouts=rollouts)


class ScriptedHead:
    """Implements Link. `fault(method, count)` is asked before and after each call ("before:X", "after:X"), with how
    often that happened; it may call `restart` and raise LinkError.
    """

    def __init__(self, max_steps: int = 5, fault: Callable[[ScriptedHead, str, int], None] = lambda *_: None) -> None:
        self.max_steps = max_steps
        self.fault = fault
        self.version, self.lineage = 0, 1
        self.knows_learner = False
        self.fed: dict[int, set[int]] = {}
        self.chunks: dict[bytes, bytes] = {}
        self.published: dict[int, Manifest] = {}
        self.payloads: list[str] = []
        self.snapshots: dict[SnapshotRef, Snapshot] = {}
        self.refuses_delta: Callable[[PayloadId], str] = lambda payload: ""
        self.log: list[str] = []
        self.counts: dict[str, int] = {}
        self.metrics: dict[int, dict[str, Any]] = {}
        self.checkpoints: list[tuple[int, int]] = []
        self.groups: Callable[[int], list[RolloutGroup]] = step_groups
        self.stop_at: int | None = None

    def restart(self) -> None:
        self.knows_learner, self.fed = False, {}

    def _meet(self, moment: str) -> None:
        self.counts[moment] = self.counts.get(moment, 0) + 1
        self.fault(self, moment, self.counts[moment])

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        self._meet(f"before:{method}")
        if method == "LearnerHello":
            answer = self._hello(request)
        else:
            if not self.knows_learner:
                raise PeerError("unknown_learner", "say LearnerHello first")
            answer = getattr(self, f"_{method}")(request)
        self._meet(f"after:{method}")
        return answer

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        assert method == "TakeGroups"
        self._meet("before:TakeGroups")
        if not self.knows_learner:
            raise PeerError("unknown_learner", "say LearnerHello first")
        if request.step != self.version:
            raise PeerError("refused", f"the run stands at {self.version}")
        if self.stop_at == request.step:
            yield wire.FedGroups(done=wire.StepDone(stop=True, reason="stopped by hand"))
            return
        self.fed[request.step] = set()
        for group in self.groups(request.step):
            self._meet("before:FedGroups")
            await asyncio.sleep(0)
            self.fed[request.step].add(group.group.number)
            yield wire.FedGroups(groups=[messages.encode_group(group)])
        yield wire.FedGroups(done=wire.StepDone(cursor=(request.step + 1) * 3, num_groups=3))

    async def close(self) -> None:
        self.log.append("close")

    def _hello(self, request: wire.LearnerHello) -> wire.LearnerWelcome:
        if request.version > self.version:
            raise PeerError("refused", f"the ledger knows {self.version} steps")
        if request.version < self.version:
            self.lineage += 1
            self.version = request.version
            self.published = {v: m for v, m in self.published.items() if v <= self.version}
        self.knows_learner = True
        return wire.LearnerWelcome(lineage=self.lineage, max_steps=self.max_steps, published=sorted(self.published))

    def _ReportStep(self, request: wire.StepReport) -> wire.Empty:
        if request.step < self.version:
            return wire.Empty()
        if request.step != self.version or set(request.groups) != self.fed.get(request.step):
            raise AssertionError(f"step {request.step} reported with {request.groups}, fed {self.fed}")
        self.version += 1
        self.metrics[request.step] = json.loads(request.metrics_json)
        self.log.append(f"trained {request.step}")
        return wire.Empty()

    def _OfferSnapshot(self, request: wire.PublishRequest) -> wire.MissingChunks:
        manifest = Manifest.from_bytes(request.delta or request.manifest)
        if manifest.base is not None:
            refusal = self.refuses_delta(manifest.payload) or ("" if manifest.base in self.snapshots else "base")
            if refusal:
                raise PeerError(refusal, "send the whole")
        return wire.MissingChunks(hashes=[name for name in manifest.hashes if name not in self.chunks])

    def _PutChunk(self, request: wire.Chunk) -> wire.Empty:
        self.chunks[request.hash] = request.data
        return wire.Empty()

    def _Publish(self, request: wire.PublishRequest) -> wire.Empty:
        assert request.version <= self.version, "published before its step was recorded"
        if request.lineage == self.lineage:
            manifest = Manifest.from_bytes(request.delta or request.manifest)
            self.published[request.version] = manifest
            self.payloads.append(str(manifest.payload))
            if manifest.base is None:
                self.snapshots[manifest.ref] = decode(manifest, lambda name: self.chunks[name])
            else:
                base = self.snapshots[manifest.base]
                self.snapshots[manifest.ref] = apply_delta(manifest, base, lambda name: self.chunks[name])
            self.log.append(f"published {request.version}")
        return wire.Empty()

    def _ReportCheckpoint(self, request: wire.CheckpointReport) -> wire.Empty:
        assert request.version <= self.version, "a checkpoint of a step that is not recorded"
        self.checkpoints.append((request.version, request.oldest_kept))
        self.log.append(f"checkpoint {request.version}")
        return wire.Empty()

    def _LearnerReport(self, request: wire.LearnerReport) -> wire.Empty:
        return wire.Empty()


def run(head: ScriptedHead, trainer: Trainer, root: Path, **options: Any) -> str:
    async def connect() -> ScriptedHead:
        head._meet("connect")
        return head

    resumed = resume(trainer, root)
    info = LearnerInfo("cpu", trainer.policy.vocab_size, resumed)
    patience, publishing = options.pop("patience_seconds", 20.0), options.pop("publishing", None)
    session = HeadSession(connect, trainer.version, info, patience_seconds=patience, publishing=publishing)
    try:
        return run_learner(trainer, session, LoopOptions(root, groups_per_microbatch=MICROBATCH, **options))
    finally:
        session.close()


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in trainer.policy.tensors().items()}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, bytes]:
    """The weights after five steps with a head that never fails: the verbs and nothing else."""
    trainer = Trainer(tiny_policy(), OPTIONS)
    for step in range(5):
        groups = step_groups(step)
        trainer.forward_backward(groups[:MICROBATCH])
        trainer.forward_backward(groups[MICROBATCH:])
        trainer.optim_step()
    return weights(trainer)


def test_five_steps(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    head, trainer = ScriptedHead(), Trainer(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path, checkpoint_every=2, publish_every=2, max_staleness=3) == "all steps are trained"
    assert weights(trainer) == undisturbed, "all groups are trained on; publishing and saving change nothing"
    assert sorted(head.published) == [0, 2, 4, 5]
    assert head.checkpoints == [(2, 2), (4, 2), (5, 4)]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_4", "step_5"]
    assert checkpoint.read_progress(tmp_path / "step_5") == checkpoint.Progress(5, 1, 15)
    for event in ("checkpoint 2", "published 2"):
        assert head.log.index("trained 1") < head.log.index(event)
    snapshot = head.snapshots[SnapshotRef(1, 5)]
    assert {name: bytes(tensor.data) for name, tensor in snapshot.tensors.items()} == {
        name: bytes(tensor.data) for name, tensor in trainer.policy.tensors(torch.float32).items()
    }


def bf16_trainer() -> Trainer:
    return Trainer(tiny_policy(), dataclasses.replace(OPTIONS, lr=1e-5, snapshot_dtype="bfloat16"))


def test_what_changed_is_published_and_now_and_then_the_whole(tmp_path: Path) -> None:
    head, trainer = ScriptedHead(), bf16_trainer()
    run(head, trainer, tmp_path, publishing=PublishOptions(deltas=True, anchor_every=3))
    deltas = [f"1.{version} over 1.{version - 1}" for version in range(1, 6)]
    assert head.payloads == ["1.0", *deltas[:3], "1.3", *deltas[3:]]
    assert content(head.snapshots[SnapshotRef(1, 5)]) == content(trainer)


def test_without_deltas_every_publication_is_whole(tmp_path: Path) -> None:
    head = ScriptedHead()
    run(head, bf16_trainer(), tmp_path, publishing=PublishOptions(deltas=False))
    assert head.payloads == [f"1.{version}" for version in range(6)]


@pytest.mark.parametrize("word", ["base", "corrupt"])
def test_a_delta_that_the_head_cannot_use_goes_whole(word: str, tmp_path: Path) -> None:
    head, trainer = ScriptedHead(), bf16_trainer()
    head.refuses_delta = lambda payload: word if payload.ref.version == 3 else ""
    run(head, trainer, tmp_path)
    assert head.payloads == ["1.0", "1.1 over 1.0", "1.2 over 1.1", "1.3", "1.4 over 1.3", "1.5 over 1.4"]
    assert content(head.snapshots[SnapshotRef(1, 5)]) == content(trainer)


class ForgetfulHead(ScriptedHead):
    """Throws away, while a version is being offered for the first time, what it had of it."""

    def _Publish(self, request: wire.PublishRequest) -> wire.Empty:
        if f"forgot {request.version}" not in self.log:
            self.log.append(f"forgot {request.version}")
            self.chunks.clear()
            raise PeerError("missing", "chunks are not here")
        return super()._Publish(request)


def test_what_the_head_threw_away_meanwhile_is_sent_again(tmp_path: Path) -> None:
    head, trainer = ForgetfulHead(), Trainer(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path, publish_every=2, max_staleness=3) == "all steps are trained"
    assert sorted(head.published) == [0, 2, 4, 5]


def test_a_learner_that_resumes_publishes_the_whole_first(tmp_path: Path) -> None:
    model = str(model_directory(tmp_path / "model"))
    head = ScriptedHead(max_steps=3)
    run(head, Trainer(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", checkpoint_every=2)
    head.max_steps = 5
    run(head, Trainer(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", checkpoint_every=2)
    assert [payload for payload in head.payloads if "over" not in payload] == ["1.0", "1.4"]


def test_training_does_not_wait_for_a_publication(tmp_path: Path) -> None:
    """The head takes its time over version 2: step 2 is trained meanwhile, and only version 3 has to wait."""
    trained_meanwhile: list[int] = []

    def fault(head: ScriptedHead, moment: str, count: int) -> None:
        if moment == "after:ReportStep" and head.version == 3:
            trained_meanwhile.append(len(head.payloads))

    head = SlowHead(fault=fault)
    run(head, bf16_trainer(), tmp_path, checkpoint_every=1)
    assert trained_meanwhile == [2], "step 2 was recorded while version 2 was still on its way"
    assert sorted(head.published) == list(range(6))
    assert head.metrics[2]["time/publish_wait"] >= 0.0


class SlowHead(ScriptedHead):
    """It holds its answer to the publication of version 2 back until step 2 is recorded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._step_2 = asyncio.Event()

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        if method == "Publish" and request.version == 2:
            await self._step_2.wait()
        answer = await super().call(method, request, timeout_seconds)
        if self.version == 3:
            self._step_2.set()
        return answer


def content(of: Trainer | Snapshot) -> dict[str, bytes]:
    tensors = of.tensors if isinstance(of, Snapshot) else of.save_weights_for_sampler()[0]
    return {name: bytes(memoryview(tensor.data)) for name, tensor in tensors.items()}


def test_metrics_of_a_step(tmp_path: Path) -> None:
    head = ScriptedHead(max_steps=1)
    run(head, Trainer(tiny_policy(), OPTIONS), tmp_path)
    row = head.metrics[0]
    rewards = [r.reward or 0.0 for g in step_groups(0) for r in g.rollouts]
    assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    lengths = [len(r.tokens) for g in step_groups(0) for r in g.rollouts]
    assert row["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert row["off_policy/max"] == 0
    parts = sum(row[f"time/{part}"] for part in ("wait_for_batch", "train", "publish", "publish_wait", "checkpoint"))
    assert 0 < parts <= row["time/step"] + 1e-9
    assert 0 <= row["learner/idle_ratio"] <= 1
    named = {"reward/std", "reward/frac_zero_std", "mismatch_kl/mean", "mismatch/abs_log_ratio", "ess", "optim/lr"}
    assert named | {"completions/clipped_ratio", "optim/grad_norm", "perf/tokens_per_s"} <= set(row)


@pytest.mark.parametrize(
    ("moment", "restarts"),
    [
        ("connect", False),
        ("before:FedGroups", True),
        ("before:FedGroups", False),
        ("before:ReportStep", True),
        ("before:ReportStep", False),
        ("after:ReportStep", True),
        ("after:ReportStep", False),
        ("before:TakeGroups", True),
        ("before:PutChunk", True),
        ("before:Publish", True),
        ("after:Publish", False),
        ("before:ReportCheckpoint", True),
        ("after:LearnerHello", True),
    ],
)
def test_a_head_that_goes_away_changes_nothing(
    moment: str, restarts: bool, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """The second time `moment` comes, the connection breaks there; with `restarts` the head forgets the learner too."""

    def fault(head: ScriptedHead, now: str, count: int) -> None:
        if now == moment and count == (1 if moment in ("connect", "after:LearnerHello") else 2):
            if restarts:
                head.restart()
            raise LinkError("gone")

    head, trainer = ScriptedHead(fault=fault), Trainer(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path, checkpoint_every=2) == "all steps are trained"
    assert weights(trainer) == undisturbed
    assert [event for event in head.log if event.startswith("trained")] == [f"trained {step}" for step in range(5)]
    assert head.lineage == 1, "nobody fell back"
    assert set(head.published) == set(range(6))


def test_patience_ends(tmp_path: Path) -> None:
    def fault(head: ScriptedHead, now: str, count: int) -> None:
        if now == "before:ReportStep":
            raise LinkError("gone for good")

    with pytest.raises(LinkError, match="ReportStep"):
        run(ScriptedHead(fault=fault), Trainer(tiny_policy(), OPTIONS), tmp_path, patience_seconds=0.3)


@pytest.mark.parametrize("died_at", ["before:ReportStep", "before:ReportCheckpoint", "before:PutChunk"])
def test_a_learner_that_died_resumes_from_its_checkpoint(died_at: str, tmp_path: Path) -> None:
    """The same model directory, a new Trainer: the weights after five steps are those of an undisturbed run."""
    model = str(model_directory(tmp_path / "model"))
    straight = Trainer(load_policy(model, "float32", "cpu"), OPTIONS)
    run(ScriptedHead(), straight, tmp_path / "straight", checkpoint_every=2)

    class Died(Exception):
        pass

    def fault(head: ScriptedHead, now: str, count: int) -> None:
        if now == died_at and head.version == 3:
            raise Died
        if died_at == "before:ReportCheckpoint" and now == died_at and count == 1:
            raise Died

    head = ScriptedHead(fault=fault)
    with pytest.raises(Died):
        run(head, Trainer(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", checkpoint_every=2)
    head.fault = lambda *_: None
    second = Trainer(load_policy(model, "float32", "cpu"), OPTIONS)
    run(head, second, tmp_path / "run", checkpoint_every=2)
    assert weights(second) == weights(straight)
    assert 5 in head.published
    assert head.checkpoints[-1][0] == 5


def test_stop_saves_and_ends(tmp_path: Path) -> None:
    head = ScriptedHead()
    head.stop_at = 3
    trainer = Trainer(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path) == "stopped by hand"
    assert checkpoint.latest(tmp_path) == tmp_path / "step_3"
    assert checkpoint.read_progress(tmp_path / "step_3").cursor == 9


# ---- several updates a round -----------------------------------------------------------------------------------------


def test_parts_of_a_round_are_updates_and_the_round_one_version(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    by_hand = Trainer(tiny_policy(), OPTIONS)
    for step in range(5):
        for group in step_groups(step):
            by_hand.forward_backward([group])
            by_hand.update()
        assert by_hand.optim_step().num_updates == GROUPS_PER_STEP
    head, trainer = ScriptedHead(), Trainer(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path, groups_per_update=1) == "all steps are trained"
    assert weights(trainer) == weights(by_hand) != undisturbed
    assert (trainer.version, sorted(head.published)) == (5, list(range(6)))
    assert {row["optim/updates"] for row in head.metrics.values()} == {GROUPS_PER_STEP}
    uneven = Trainer(tiny_policy(), OPTIONS)
    run(ScriptedHead(max_steps=1), uneven, tmp_path / "uneven", groups_per_update=2)  # 2 groups, and the 1 left over
    assert weights(uneven) != weights(trainer)


def test_the_whole_round_in_one_part_is_the_plain_step(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    trainer = Trainer(tiny_policy(), OPTIONS)
    run(ScriptedHead(), trainer, tmp_path, groups_per_update=GROUPS_PER_STEP)
    assert weights(trainer) == undisturbed


@pytest.mark.parametrize("moment", ["learner dies", "head restarts"])
def test_a_kill_within_a_round_changes_nothing(moment: str, tmp_path: Path) -> None:
    """The learner dies, or the head, when a step has had one update of three."""
    model, options = str(model_directory(tmp_path / "model")), {"checkpoint_every": 2, "groups_per_update": 1}
    straight, second = (Trainer(load_policy(model, "float32", "cpu"), OPTIONS) for _ in range(2))
    run(ScriptedHead(), straight, tmp_path / "straight", **options)

    def fault(head: ScriptedHead, now: str, count: int) -> None:
        if now == "before:FedGroups" and count == 11:
            if moment == "head restarts":
                head.restart()
                raise LinkError("gone")
            raise RuntimeError("dead")

    head = ScriptedHead(fault=fault)
    if moment == "learner dies":
        with pytest.raises(RuntimeError):
            run(head, Trainer(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", **options)
    run(head, second, tmp_path / "run", **options)
    assert weights(second) == weights(straight)


def test_a_stop_within_a_round_saves_nothing_that_is_no_version(tmp_path: Path) -> None:
    class StoppingHead(ScriptedHead):
        async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
            async for fed in super().stream(method, request):
                if request.step == 3 and fed.HasField("done"):
                    fed.done.stop = True
                yield fed

    head, trainer = StoppingHead(), Trainer(tiny_policy(), OPTIONS)
    run(head, trainer, tmp_path, checkpoint_every=2, groups_per_update=1)
    assert trainer.is_within_step
    assert checkpoint.latest(tmp_path) == tmp_path / "step_2"
    with pytest.raises(InvariantError, match="within step 3"):
        trainer.save_state(tmp_path / "step_3")
    trainer.load_state(tmp_path / "step_2")
    assert not trainer.is_within_step


def test_a_head_of_another_run_is_a_user_error(tmp_path: Path) -> None:
    trainer = Trainer(tiny_policy(), OPTIONS)
    trainer.version = 4
    trainer.save_state(tmp_path / "step_4")
    with pytest.raises(UserError, match="does not take this learner"):
        run(ScriptedHead(), trainer, tmp_path)


@pytest.mark.parametrize("version", [0, 4])
def test_too_stale_or_impossible_groups_are_never_trained_on(version: int, tmp_path: Path) -> None:
    """At step 3 with max_staleness 2: version 0 is too old, 4 does not exist yet."""
    head = ScriptedHead()
    head.groups = lambda step: [with_step(g, step, version if step == 3 else step) for g in step_groups(step)]
    trainer = Trainer(tiny_policy(), OPTIONS)
    with pytest.raises(InvariantError, match="max_staleness 2"):
        run(head, trainer, tmp_path, max_staleness=2)
    assert trainer.version == 3


def test_deterministic_mode_insists_on_order() -> None:
    meter = StepMeter(0, 1, in_order=True)
    first, second, _ = step_groups(0)
    meter.see(second)
    with pytest.raises(InvariantError, match="deterministic"):
        meter.see(first)


def test_metrics_of_an_empty_step_are_finite() -> None:
    row = StepMeter(0, 1, in_order=False).metrics(StepStats(1e-3, 0.0, 0, True, LossStats()))
    assert json.dumps(row, allow_nan=False)
