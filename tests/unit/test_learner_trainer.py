"""The verbs: streamed equals batch, shared equals plain, resume goes on bit for bit."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from door_cases import peak_bytes
from echo2.config import Config
from echo2.core.errors import InvariantError, UserError
from echo2.learner.core import checkpoint
from echo2.learner.core.batch import collate
from echo2.learner.core.model import Policy, load_policy
from echo2.learner.grpo.loop import GrpoClient
from learner_cases import (
    config_of,
    data_of,
    gradient_of,
    gradients,
    group,
    in_float64,
    model_directory,
    random_group,
    rollout,
    steps,
    tiny_module,
    tiny_policy,
    weights,
)
from seeds import examples


@given(st.integers(0, 10**6), st.sampled_from(["dppo", "ppo"]), st.booleans(), st.data())
@examples(12)
def test_streamed_gradient_equals_batch_gradient_in_both_layouts(seed: int, loss: str, top_k: bool, data: Any) -> None:
    rng = random.Random(seed)
    groups = [random_group(rng, number, top_k=4 if top_k else 0) for number in range(6)]
    whole = gradient_of([groups], loss=loss, layout="plain", temperature=0.7)
    order = data.draw(st.permutations(groups))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    calls = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    for layout in ("plain", "shared", "auto"):
        streamed = gradient_of(calls, loss=loss, layout=layout, temperature=0.7)
        torch.testing.assert_close(streamed, whole, rtol=1e-9, atol=1e-11)


@given(st.integers(0, 10**6), st.sampled_from([0, 3]))
@examples(15)
def test_logprobs_equal_one_rollout_at_a_time(seed: int, top_k: int) -> None:
    """Against the model called in the simplest way, with a log-softmax over the support written out."""
    rng = random.Random(seed)
    policy = tiny_policy()
    groups = [random_group(rng, number, top_k=top_k) for number in range(3)]
    kept = [datum for g in groups for datum in data_of(g)]
    expected = []
    for datum in kept:
        logits = policy.module(input_ids=torch.tensor([[*datum.prompt_tokens, *datum.tokens]])).logits[0].detach() / 0.7
        for t, token in enumerate(datum.tokens):
            if datum.loss_mask[t]:
                row = logits[len(datum.prompt_tokens) + t - 1]
                allowed = list(range(len(row)))
                if datum.support_tokens is not None and datum.support_offsets is not None:
                    allowed = list(datum.support_tokens[datum.support_offsets[t] : datum.support_offsets[t + 1]])
                entropy = torch.distributions.Categorical(logits=row[sorted(set(allowed))]).entropy()
                expected.append((float(row[token] - row[allowed].logsumexp(0)), float(entropy)))
    for layout in ("shared", "plain"):
        batch = collate(kept, layout, policy.pair_cost).to(torch.device("cpu"), torch.float64)
        found = policy.logprobs(batch, 0.7)[:2]
        for ours, theirs in zip(found, zip(*expected, strict=True), strict=True):
            assert sorted(ours.tolist()) == pytest.approx(sorted(theirs), abs=1e-8)


def test_logprobs_of_likely_tokens_are_those_of_the_whole_vocabulary() -> None:
    policy, made = tiny_policy(), group(0, [1, 2], [rollout([5, 6, 9], loss_mask=b"\1\0\1"), rollout([8])])
    taught, other = data_of(made)
    logprobs = array("f", [-1.0, -1.5, -2.0, -0.25])
    taught = replace(taught, top_tokens=array("i", [3, 7, 0, 4]), top_logprobs=logprobs)
    batch = collate([taught, other], "plain", policy.pair_cost).to(policy.device, torch.float64)
    logits = policy.module(input_ids=torch.tensor([[1, 2, 5, 6, 9]])).logits[0]
    expected = (logits / 0.7).log_softmax(-1)
    found = policy.logprobs(batch, 0.7)[2]
    rows = batch.loss_tokens.top_teacher_nk.isfinite().all(1)
    torch.testing.assert_close(found[rows], torch.stack([expected[1, [3, 7]], expected[3, [0, 4]]]), rtol=0, atol=1e-9)
    assert batch.loss_tokens.top_teacher_nk[rows].tolist() == [[-1.0, -1.5], [-2.0, -0.25]]
    assert rows.sum() == 2  # nothing is known of the second rollout's


def test_a_distribution_of_one_token_is_certain() -> None:
    sure = group(0, [1, 2], [rollout([5, 6], support=[[5], [6]], logprobs=[0.0, 0.0])])
    policy = tiny_policy()
    batch = collate(data_of(sure), "auto", 0.01).to(policy.device, torch.float64)
    assert policy.logprobs(batch, 1.0)[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_one_wide_support_does_not_widen_the_others() -> None:
    """The tables hold at most twice what was sent, whoever has the widest support."""
    narrow, wide = [[5, 6]] * 500, [list(range(5, 1005))]
    batch = collate(data_of(group(0, [1], [rollout([5] * 501, support=[*narrow, *wide])])), "auto", 0.01)
    sizes = sorted(tuple(support.tokens_mW.shape) for support in batch.supports)
    assert sizes == [(1, 1000), (500, 2)]
    assert sorted(row for support in batch.supports for row in support.rows_m.tolist()) == list(range(501))


def test_prefix_tree_runs_shared_tokens_once() -> None:
    # Inputs after the prompt: [5 6], [5 6], [5 7]; so the tree holds 5, 6, 7: six tokens with the prompt.
    made = group(0, [1, 2, 3], [rollout(tokens) for tokens in ([5, 6, 9], [5, 6, 8], [5, 7, 9])])
    batch = collate(data_of(made), "shared", 0.01)
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 5, 6, 7]]
    assert batch.positions_BT is not None
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 4]]
    assert batch.ends_BT is not None
    assert batch.ends_BT.tolist() == [[6, 6, 6, 6, 5, 6]], "7 does not see 6, whose descendants end before it"
    assert len(batch.candidates_nW) == 9
    assert len(batch.predict_u) == 4


def test_long_rollouts_run_plain() -> None:
    rng = random.Random(0)
    long = [rollout([rng.randrange(13) for _ in range(60)]) for _ in range(8)]
    data = data_of(group(0, [1], long))
    assert collate(data, "auto", 1.0).ends_BT is None
    assert collate(data, "auto", 1e-9).ends_BT is not None


def test_zero_variance_groups_are_skipped_but_counted() -> None:
    rng = random.Random(3)
    groups = [random_group(rng, number) for number in range(3)]
    flat = group(9, [1, 2], [rollout([3, 4, 5], reward=1.0), rollout([4], reward=1.0)])
    trainer = GrpoClient(tiny_policy(), config_of(loss="ppo", lr=1e-3))
    trainer.forward_backward([*groups, flat])
    assert trainer.forward_backward([flat]).tokens == 0
    with_flat = gradients(trainer)
    torch.testing.assert_close(with_flat, gradient_of([groups], loss="ppo"), rtol=1e-10, atol=1e-12)
    counted = sum(r.loss_mask.count(1) for g in [*groups, flat, flat] for r in g.rollouts)
    step = trainer.optim_step()
    assert step.num_tokens == counted
    assert not step.skipped
    assert step.grad_norm == pytest.approx(float(with_flat.norm()) / counted)


def test_a_step_without_loss_tokens_increments_only_the_version() -> None:
    trainer = GrpoClient(tiny_policy(), config_of(lr=1e-3))
    before = weights(trainer)
    trainer.forward_backward([group(0, [1], [rollout([2], 1.0), rollout([3], 1.0)])])
    step = trainer.optim_step()
    assert step.skipped
    assert trainer.version == 1
    assert weights(trainer) == before


def test_gradients_are_divided_once_and_clipped_afterwards() -> None:
    """One SGD-like check of AdamW's first step is its sign; so compare norms: N scales the reported norm exactly."""
    rng = random.Random(5)
    groups = [random_group(rng, number) for number in range(4)]
    one, two = (GrpoClient(tiny_policy(), config_of(grad_clip=1e-3, lr=1e-3)) for _ in range(2))
    one.forward_backward(groups)
    two.forward_backward(groups)
    two.forward_backward(groups)
    first, second = one.optim_step(), two.optim_step()
    assert second.num_tokens == 2 * first.num_tokens
    assert second.grad_norm == pytest.approx(first.grad_norm)


def test_learning_rate_schedule_and_ess_scaling() -> None:
    rng = random.Random(6)
    groups = [random_group(rng, number) for number in range(4)]
    options = config_of(lr=1.0e-3, lr_schedule="linear", warmup_steps=2, max_steps=6)
    trainer = GrpoClient(tiny_policy(), options)
    assert [trainer.optim_step().lr for _ in range(7)] == pytest.approx(
        [5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0], abs=1e-12
    )
    cosine = GrpoClient(tiny_policy(), config_of(lr=1e-3, lr_schedule="cosine", max_steps=4))
    assert [cosine.optim_step().lr for _ in range(5)] == pytest.approx(
        [1e-3, 8.5355339e-4, 5e-4, 1.4644661e-4, 0.0], abs=1e-9
    )
    scaled = GrpoClient(tiny_policy(), config_of(lr=1e-3))
    stats = scaled.forward_backward(groups)
    assert 0 < stats.ess_ratio < 1
    assert scaled.optim_step().lr == pytest.approx(1e-3 * stats.ess_ratio**0.5)


def test_an_empty_prompt_is_our_bug() -> None:
    trainer = GrpoClient(tiny_policy(), Config())
    with pytest.raises(InvariantError, match="prompt"):
        trainer.forward_backward([group(0, [], [rollout([1], 1.0), rollout([2], 0.0)])])


@pytest.mark.parametrize("name", ["Qwen2", "Llama", "Mistral"])
def test_prefix_trees_on_other_decoders(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    settings_of = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    extra = {"num_key_value_heads": 1, "intermediate_size": 32, "initializer_range": 0.3}
    if name == "Mistral":
        extra["sliding_window"] = None  # type: ignore[assignment]
    config = getattr(transformers, f"{name}Config")(**settings_of, **extra)
    module = in_float64(getattr(transformers, f"{name}ForCausalLM")(config))
    policy = Policy(module, {}, torch.device("cpu"))
    assert policy.honours_masks
    rng = random.Random(1)
    groups = [random_group(rng, number) for number in range(4)]
    found = []
    for layout in ("plain", "shared"):
        module.zero_grad()
        trainer = GrpoClient(policy, Config(), layout)  # type: ignore[arg-type]
        trainer.forward_backward(groups)
        found.append(gradients(trainer))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def test_unknown_architectures_and_sliding_windows_run_plain() -> None:
    import transformers

    torch.manual_seed(0)
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=13, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ).double()
    policy = Policy(gpt, {}, torch.device("cpu"))
    assert not policy.honours_masks
    trainer = GrpoClient(policy, Config(), "shared")
    assert trainer.forward_backward([random_group(random.Random(0), 0)]).tokens > 0
    mistral = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=13,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_key_value_heads=1,
            sliding_window=4,
        )
    )
    assert not Policy(mistral, {}, torch.device("cpu")).honours_masks


def test_snapshot_tensors_hold_tied_weights_once_and_cast() -> None:
    policy = Policy(tiny_module(), {}, torch.device("cpu"))
    names = set(policy.tensors())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in Policy(tiny_module(tied=False), {}, torch.device("cpu")).tensors()
    tensor = policy.tensors(torch.bfloat16)["model.embed_tokens.weight"]
    expected = policy.module.model.embed_tokens.weight.detach().bfloat16()
    assert tensor.dtype == "BF16"
    assert tensor.shape == (13, 16)
    assert torch.equal(torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).view(13, 16), expected)
    kept = bytes(policy.tensors()["model.norm.weight"].data)
    snapshot = policy.tensors()
    with torch.no_grad():
        policy.module.model.norm.weight.add_(1.0)
    assert bytes(snapshot["model.norm.weight"].data) == kept, "a snapshot must not follow later training"


RESUME = """
import sys; from pathlib import Path
sys.path[:0] = {paths!r}
import torch; from test_learner_trainer import *
trainer = GrpoClient(load_policy({model!r}, "float32", "cpu"), config_of(lr=1e-3, weight_decay=0.1))
progress = trainer.load_state(Path({source!r}))
assert (progress.version, progress.lineage, progress.cursor) == (3, 2, 12), progress
steps(trainer, range(3, 6))
trainer.save_state(Path({target!r}), lineage=2, cursor=24).result()
"""


def test_resume_in_a_new_process_is_bit_exact(tmp_path: Path) -> None:
    options = config_of(lr=1e-3, weight_decay=0.1)
    model = model_directory(tmp_path / "model")
    straight = GrpoClient(load_policy(str(model), "float32", "cpu"), options)
    steps(straight, range(3))
    straight.save_state(tmp_path / "step_3", lineage=2, cursor=12).result()
    steps(straight, range(3, 6))
    straight.save_state(tmp_path / "straight", lineage=2, cursor=24).result()
    code = RESUME.format(
        paths=[str(Path(__file__).parent), *sys.path],
        model=str(model),
        source=str(tmp_path / "step_3"),
        target=str(tmp_path / "resumed"),
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name
    assert (tmp_path / "step_3" / "model.safetensors").read_bytes() != (
        tmp_path / "resumed" / "model.safetensors"
    ).read_bytes()


def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = GrpoClient(load_policy(str(model_directory(tmp_path / "model")), "float32", "cpu"), config_of(lr=1e-2))
    steps(trainer, range(2))
    trainer.save_state(tmp_path / "step_2").result()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_2")
    assert loaded.dtype == torch.float32
    for name, parameter in trainer.policy.module.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    assert (tmp_path / "step_2" / "chat_template.jinja").is_file()


def test_latest_passes_over_torn_checkpoints_and_prune_keeps_the_newest(tmp_path: Path) -> None:
    trainer = GrpoClient(tiny_policy(), Config())
    for version in (1, 2, 3, 4):
        trainer.version = version
        trainer.save_state(checkpoint.step_directory(tmp_path, version)).result()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_4"
    (tmp_path / "step_4" / "state.json").unlink()
    weights_file = tmp_path / "step_3" / "model.safetensors"
    data = bytearray(weights_file.read_bytes())
    data[-1] ^= 1
    weights_file.write_bytes(data)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_2"
    with pytest.raises(UserError, match="complete checkpoint"):
        trainer.load_state(tmp_path / "step_3")
    assert checkpoint.versions(tmp_path) == [3, 2, 1]
    checkpoint.prune(tmp_path, keep=1, spared=[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3", "step_4"]
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    trainer = GrpoClient(tiny_policy(), config_of(lr=1e-2))
    target = tmp_path / "step_0"
    trainer.save_state(target).result()
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    steps(trainer, range(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match="out of room"):
            trainer.save_state(target).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["step_0"]


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing", "echo2-tests/no-such-model"])
def test_the_error_names_a_missing_model(path: str) -> None:
    with pytest.raises(UserError, match=path):
        load_policy(path, "float32", "cpu")


def test_the_error_names_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        load_policy(str(tmp_path), "float32", "cpu")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    files = {"config.json": b'{"model_type": "llama"}'}
    other = GrpoClient(Policy(tiny_module(layers=1), files, torch.device("cpu")), Config())
    other.save_state(tmp_path / "step_0").result()
    with pytest.raises(UserError, match=r"model_type is llama, that of model\.path is not given"):
        GrpoClient(tiny_policy(), Config()).load_state(tmp_path / "step_0")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
def test_a_checkpoint_is_verified_in_little_memory(tmp_path: Path) -> None:
    checkpoint.write_checkpoint(tmp_path / "step_0", {}, {"big": bytes(128 << 20)}, {})
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak_bytes(os.getpid())
    assert checkpoint.is_whole(tmp_path / "step_0")
    assert peak_bytes(os.getpid()) - before < 48 << 20
