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
from weights_cases import apply_delta, decode

from echo2.core.errors import InvariantError, LinkError, PeerError, UserError
from echo2.core.types import RUN_POLICY, PayloadId, RolloutGroup, Snapshot, SnapshotRef
from echo2.learner.core import checkpoint
from echo2.learner.core.model import DTYPES, load_policy
from echo2.learner.core.publication import Publisher
from echo2.learner.grpo.loop import GrpoClient, train
from echo2.learner.grpo.step_meter import StepMeter
from echo2.learner.grpo.trained_policy import RunPosition
from echo2.learner.link.head_client import LearnerInfo
from echo2.learner.link.session import HeadSession
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.weights.format.manifest import Manifest
from learner_cases import config_of, model_directory, random_group, tiny_policy

GROUPS_PER_STEP = 3
#: Every datum is a micro-batch of its own, so that the sums are the same however a step's groups come together.
OPTIONS = config_of(lr=1e-3, max_steps=5, groups_per_step=GROUPS_PER_STEP, tokens_per_microbatch=1)


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
        self.epoch = 0
        self.orders: asyncio.Queue[wire.LearnerWelcome]
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
        self.best: set[int] = set()
        self.groups: Callable[[int], list[RolloutGroup]] = step_groups
        self.stop_at: int | None = None
        self.publish_every = lambda step: 0  # as the run was set
        self.session: HeadSession | None = None

    def restart(self) -> None:
        self.knows_learner, self.fed = False, {}

    def _meet(self, moment: str) -> None:
        self.counts[moment] = self.counts.get(moment, 0) + 1
        self.fault(self, moment, self.counts[moment])

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        self._meet(f"before:{method}")
        self._know(method, request)
        answer = getattr(self, f"_{method}")(request)
        self._meet(f"after:{method}")
        return answer

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        self._meet(f"before:{method}")
        if method == "LearnerHello":
            welcome, orders = self._hello(request), self.orders
            self._meet("after:LearnerHello")
            yield welcome
            while not (order := await orders.get()).stop:
                yield order
            yield order
            return
        self._know(method, request)
        if request.step != self.version:
            raise PeerError("refused", f"the run stands at {self.version}")
        if self.stop_at == request.step:
            yield wire.FedGroups(done=wire.StepDone(stop=True, reason="stopped by hand"))
            return
        fed = self.fed
        fed[request.step] = set()
        for group in self.groups(request.step):
            self._meet("before:FedGroups")
            await asyncio.sleep(0)
            self._lives_on(fed)
            fed[request.step].add(group.group.number)
            yield wire.FedGroups(groups=[messages.encode_group(group)])
        self._lives_on(fed)
        yield wire.FedGroups(
            done=wire.StepDone(cursor=(request.step + 1) * 3, publish_every=self.publish_every(request.step))
        )

    def _lives_on(self, fed: dict[int, set[int]]) -> None:
        """A stream ends with the head that it began with: another call may have met a restart meanwhile."""
        if self.fed is not fed:
            raise LinkError("the head was restarted")

    def _know(self, method: str, request: Any) -> None:
        if not self.knows_learner or request.epoch != self.epoch:
            raise PeerError("unknown_learner", "say LearnerHello first")

    async def close(self) -> None:
        self.log.append("close")

    def _hello(self, request: wire.LearnerHello) -> wire.LearnerWelcome:
        if request.version > self.version:
            raise PeerError("refused", f"the ledger knows {self.version} steps")
        if request.version < self.version:
            self.lineage += 1
            self.version = request.version
            self.published = {v: m for v, m in self.published.items() if v <= self.version}
        assert request.epoch in (0, self.epoch)
        self.knows_learner, self.orders = True, asyncio.Queue()
        self.epoch += 1
        return wire.LearnerWelcome(
            lineage=self.lineage, max_steps=self.max_steps, published=sorted(self.published), epoch=self.epoch
        )

    def _ReportStep(self, request: wire.StepReport) -> wire.Empty:
        if request.step < self.version:
            return wire.Empty()
        if request.step != self.version or set(request.groups) != self.fed.get(request.step):
            raise AssertionError(f"step {request.step} reported with {request.groups}, fed {self.fed}")
        self.version += 1
        self.metrics[request.step] = json.loads(request.metrics_json)
        self.log.append(f"trained {request.step}")
        return wire.Empty()

    def _OfferChunks(self, request: wire.ChunkOffer) -> wire.MissingChunks:
        return wire.MissingChunks(hashes=[name for name in request.hashes if name not in self.chunks])

    def _PutChunk(self, request: wire.OfferedChunk) -> wire.Empty:
        self.chunks[request.hash] = request.data
        return wire.Empty()

    def _Publish(self, request: wire.PublishRequest) -> wire.Empty:
        manifest = Manifest.from_bytes(request.manifest)
        assert manifest.ref.version <= self.version, "published before its step was recorded"
        if manifest.base is not None:
            refusal = self.refuses_delta(manifest.payload) or ("" if manifest.base in self.snapshots else "base")
            if refusal:
                raise PeerError(refusal, "send the whole")
        if manifest.ref.lineage == self.lineage:
            self.published[manifest.ref.version] = manifest
            self.payloads.append(str(manifest.payload))
            if manifest.base is None:
                self.snapshots[manifest.ref] = decode(manifest, lambda name: self.chunks[name])
            else:
                base = self.snapshots[manifest.base]
                self.snapshots[manifest.ref] = apply_delta(manifest, base, lambda name: self.chunks[name])
            self.log.append(f"published {manifest.ref.version}")
        return wire.Empty()

    def _ReportCheckpoint(self, request: wire.CheckpointReport) -> wire.CheckpointReply:
        assert request.version <= self.version, "a checkpoint of a step that is not recorded"
        self.checkpoints.append((request.version, request.oldest_kept))
        self.log.append(f"checkpoint {request.version}")
        return wire.CheckpointReply(spared=self.best & set(request.versions))

    def _LearnerReport(self, request: wire.LearnerReport) -> wire.Empty:
        return wire.Empty()


def run(head: ScriptedHead, trainer: GrpoClient, root: Path, **options: Any) -> str:
    async def connect() -> ScriptedHead:
        head._meet("connect")
        return head

    patience_seconds, card = options.pop("patience_seconds", 20.0), options.pop("card", None)
    trainer.config = config_of(trainer.config, **options)
    trainer.resume(root)
    info = LearnerInfo("cpu", trainer.policy.vocab_size)
    publisher = Publisher(root / "learner")
    session = HeadSession(connect, trainer.version, info, publisher, patience_seconds, on_group=trainer.prepare)
    head.session = session
    try:
        return train(trainer, session, root, card)
    finally:
        session.close()


def weights(trainer: GrpoClient) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in trainer.policy.tensors().items()}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, bytes]:
    """The weights after five steps with a head that never fails: the verbs and nothing else."""
    trainer = GrpoClient(tiny_policy(), OPTIONS)
    for step in range(5):
        trainer.forward_backward(step_groups(step))
        trainer.optim_step()
    return weights(trainer)


def test_the_loop_trains_five_steps(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    head, trainer = ScriptedHead(), GrpoClient(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path, checkpoint_every=2, publish_every=2, max_staleness=3) == "all steps are trained"
    assert weights(trainer) == undisturbed, "all groups are trained on; publishing and saving change nothing"
    assert sorted(head.published) == [0, 2, 4, 5]
    assert head.checkpoints == [(2, 2), (4, 2), (5, 4)]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_4", "step_5"]
    assert checkpoint.read_client(tmp_path / "step_5") == dataclasses.asdict(RunPosition(5, 1, 15))
    for event in ("checkpoint 2", "published 2"):
        assert head.log.index("trained 1") < head.log.index(event)
    snapshot = head.snapshots[SnapshotRef(RUN_POLICY, 1, 5)]
    assert {name: bytes(tensor.read(0, tensor.num_bytes)) for name, tensor in snapshot.tensors.items()} == {
        name: bytes(tensor.data) for name, tensor in trainer.policy.tensors(torch.float32).items()
    }


def bf16_trainer() -> GrpoClient:
    return GrpoClient(tiny_policy(), config_of(OPTIONS, lr=1e-5, snapshot_dtype="bfloat16"))


def test_changes_are_published_and_sometimes_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, trainer = ScriptedHead(), bf16_trainer()
    monkeypatch.setattr("echo2.weights.format.manifest.MAX_DELTAS", 3)
    run(head, trainer, tmp_path)
    deltas = [f"policy@1.{version} over policy@1.{version - 1}" for version in range(1, 6)]
    assert head.payloads == ["policy@1.0", *deltas[:3], "policy@1.3", *deltas[3:]]
    assert content(head.snapshots[SnapshotRef(RUN_POLICY, 1, 5)]) == content(trainer)


def test_a_delta_that_the_head_cannot_use_goes_whole(tmp_path: Path) -> None:
    head, trainer = ScriptedHead(), bf16_trainer()
    head.refuses_delta = lambda payload: "base" if payload.ref.version == 3 else ""
    run(head, trainer, tmp_path)
    versions = ["1.0", "1.1 over 1.0", "1.2 over 1.1", "1.3", "1.4 over 1.3", "1.5 over 1.4"]
    assert [payload.replace("policy@", "") for payload in head.payloads] == versions
    assert content(head.snapshots[SnapshotRef(RUN_POLICY, 1, 5)]) == content(trainer)


class ForgetfulHead(ScriptedHead):
    """Throws away, while a version is being offered for the first time, what it had of it."""

    def _Publish(self, request: wire.PublishRequest) -> wire.Empty:
        version = Manifest.from_bytes(request.manifest).ref.version
        if f"forgot {version}" not in self.log:
            self.log.append(f"forgot {version}")
            self.chunks.clear()
            raise PeerError("missing", "chunks are not here")
        return super()._Publish(request)


def test_chunks_that_the_head_dropped_are_sent_again(tmp_path: Path) -> None:
    head, trainer = ForgetfulHead(), GrpoClient(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path, publish_every=2, max_staleness=3) == "all steps are trained"
    assert sorted(head.published) == [0, 2, 4, 5]


def test_a_learner_that_resumes_publishes_the_whole_first(tmp_path: Path) -> None:
    model = str(model_directory(tmp_path / "model"))
    head = ScriptedHead(max_steps=3)
    run(head, GrpoClient(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", checkpoint_every=2)
    head.max_steps = 5
    run(head, GrpoClient(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", checkpoint_every=2)
    assert head.payloads[0] == "policy@1.0"
    assert "policy@1.4" in head.payloads
    assert "policy@1.4 over policy@1.3" not in head.payloads


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
        if method == "Publish" and Manifest.from_bytes(request.manifest).ref.version == 2:
            await self._step_2.wait()
        answer = await super().call(method, request, timeout_seconds)
        if self.version == 3:
            self._step_2.set()
        return answer


def content(of: GrpoClient | Snapshot) -> dict[str, bytes]:
    dtype = None if isinstance(of, Snapshot) else DTYPES[of.config.model.snapshot_dtype]
    tensors = of.tensors if isinstance(of, Snapshot) else of.policy.tensors(dtype)
    return {name: bytes(tensor.read(0, tensor.num_bytes)) for name, tensor in tensors.items()}


def test_metrics_of_a_step(tmp_path: Path) -> None:
    head = ScriptedHead(max_steps=1)
    run(head, GrpoClient(tiny_policy(), OPTIONS), tmp_path)
    row = head.metrics[0]
    rewards = [r.reward or 0.0 for g in step_groups(0) for r in g.rollouts]
    assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    lengths = [len(r.tokens) for g in step_groups(0) for r in g.rollouts]
    assert row["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert row["off_policy/max"] == 0
    parts = sum(row[f"time/{part}"] for part in ("wait_for_batch", "train", "publish_wait", "checkpoint"))
    assert 0 < parts <= row["time/step"] + 1e-9
    assert 0 <= row["learner/idle_ratio"] <= 1
    named = {"reward/std", "reward/frac_zero_std", "mismatch_kl/mean", "mismatch/abs_log_ratio", "ess", "optim/lr"}
    assert named | {"completions/clipped_ratio", "optim/grad_norm", "perf/tokens_per_s"} <= set(row)


@pytest.mark.parametrize(
    ("moment", "restarts"),
    [
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
        if now == moment and count == (1 if moment == "after:LearnerHello" else 2):
            if restarts:
                head.restart()
            raise LinkError("gone")

    head, trainer = ScriptedHead(fault=fault), GrpoClient(tiny_policy(), OPTIONS)
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
        run(ScriptedHead(fault=fault), GrpoClient(tiny_policy(), OPTIONS), tmp_path, patience_seconds=0.3)


@pytest.mark.parametrize("died_at", ["before:ReportStep", "before:ReportCheckpoint", "before:PutChunk"])
def test_a_learner_that_died_resumes_from_its_checkpoint(died_at: str, tmp_path: Path) -> None:
    """The same model directory, a new GrpoClient: the weights after five steps are those of an undisturbed run."""
    model = str(model_directory(tmp_path / "model"))
    straight = GrpoClient(load_policy(model, "float32", "cpu"), OPTIONS)
    run(ScriptedHead(), straight, tmp_path / "straight", checkpoint_every=2)

    class Died(Exception):
        pass

    def fault(head: ScriptedHead, now: str, count: int) -> None:
        if now == died_at and head.version >= 3:  # what is sent of version 3 may be later than the report of step 3
            raise Died
        if died_at == "before:ReportCheckpoint" and now == died_at and count == 1:
            raise Died

    head = ScriptedHead(fault=fault)
    with pytest.raises(Died):
        run(head, GrpoClient(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", checkpoint_every=2)
    head.fault = lambda *_: None
    second = GrpoClient(load_policy(model, "float32", "cpu"), OPTIONS)
    run(head, second, tmp_path / "run", checkpoint_every=2)
    assert weights(second) == weights(straight)
    assert 5 in head.published
    assert head.checkpoints[-1][0] == 5


# ---- several updates a round -----------------------------------------------------------------------------------------


def test_parts_of_a_round_are_updates_and_the_round_one_version(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    by_hand = GrpoClient(tiny_policy(), OPTIONS)
    for step in range(5):
        for group in step_groups(step):
            by_hand.forward_backward([group])
            by_hand.optim_step(ends_step=False)
        assert by_hand.optim_step().num_updates == GROUPS_PER_STEP
    head, trainer = ScriptedHead(), GrpoClient(tiny_policy(), OPTIONS)
    assert run(head, trainer, tmp_path, updates_per_step=GROUPS_PER_STEP) == "all steps are trained"
    assert weights(trainer) == weights(by_hand) != undisturbed
    assert (trainer.version, sorted(head.published)) == (5, list(range(6)))
    assert {row["optim/updates"] for row in head.metrics.values()} == {GROUPS_PER_STEP}
    uneven = GrpoClient(tiny_policy(), OPTIONS)
    run(
        ScriptedHead(max_steps=1), uneven, tmp_path / "uneven", groups_per_step=4, updates_per_step=2
    )  # 2 groups, and the 1 left over
    assert weights(uneven) != weights(trainer)


def test_the_whole_round_in_one_part_is_the_plain_step(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    trainer = GrpoClient(tiny_policy(), OPTIONS)
    run(ScriptedHead(), trainer, tmp_path, updates_per_step=1)
    assert weights(trainer) == undisturbed


@pytest.mark.parametrize("moment", ["learner dies", "head restarts"])
def test_a_kill_within_a_round_changes_nothing(moment: str, tmp_path: Path) -> None:
    """The learner dies, or the head, when a step has had one update of three."""
    model, options = (
        str(model_directory(tmp_path / "model")),
        {"checkpoint_every": 2, "updates_per_step": GROUPS_PER_STEP},
    )
    straight, second = (GrpoClient(load_policy(model, "float32", "cpu"), OPTIONS) for _ in range(2))
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
            run(head, GrpoClient(load_policy(model, "float32", "cpu"), OPTIONS), tmp_path / "run", **options)
    run(head, second, tmp_path / "run", **options)
    assert weights(second) == weights(straight)


def test_a_head_of_another_run_is_a_user_error(tmp_path: Path) -> None:
    trainer = GrpoClient(tiny_policy(), OPTIONS)
    trainer.version = 4
    trainer.save_state(tmp_path / "step_4").result()
    with pytest.raises(UserError, match="refuses this learner"):
        run(ScriptedHead(), trainer, tmp_path)


@pytest.mark.parametrize("version", [0, 4])
def test_too_stale_or_impossible_groups_are_never_trained_on(version: int, tmp_path: Path) -> None:
    """At step 3 with max_staleness 2: version 0 is too old, 4 does not exist yet."""
    head = ScriptedHead()
    head.groups = lambda step: [with_step(g, step, version if step == 3 else step) for g in step_groups(step)]
    trainer = GrpoClient(tiny_policy(), OPTIONS)
    with pytest.raises(InvariantError, match="max_staleness 2"):
        run(head, trainer, tmp_path, max_staleness=2)
    assert trainer.version == 3


def test_deterministic_mode_insists_on_order() -> None:
    meter = StepMeter(0, config_of(deterministic=True))
    first, second, _ = step_groups(0)
    meter.see(second)
    with pytest.raises(InvariantError, match="deterministic"):
        meter.see(first)
