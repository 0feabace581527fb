"""The verbs, used as the built-in loop does not: supervised, preferences, several policies, data cut anywhere."""

from __future__ import annotations

import itertools
import operator
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echo2.core.errors import InvariantError, UserError
from echo2.learner.core import batch
from echo2.learner.core.batch import collate, microbatches, num_tokens_run
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import LossTokens
from echo2.learner.core.model import load_policy
from echo2.learner.core.trainer import AdamParams, Trainer
from learner_cases import data_of, random_group, tiny_policy
from seeds import examples

ADAM = AdamParams(lr=1e-2)


def cross_entropy(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, float]:
    """-log pi of each token; gives back its weighted sum."""
    return -logp_n, float((-logp_n.detach() * tokens.weight_n).sum())


def text(prompt: Sequence[int], tokens: Sequence[int], weights: Sequence[float] | None = None) -> Datum:
    """Tokens to imitate, none sampled by anybody."""
    weight = None if weights is None else array("d", weights)
    return Datum(array("i", prompt), array("i", tokens), b"\x01" * len(tokens), weight)


def flat_gradient(trainer: Trainer, name: str) -> Tensor:
    parameters = trainer._policy(name).parameters.values()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


def bits(trainer: Trainer, name: str) -> dict[str, bytes]:
    lent = trainer.save_weights_for_sampler(name, "float64")
    lent.release()
    return {key: bytes(tensor.read(0, tensor.num_bytes)) for key, tensor in lent.tensors.items()}


def made(*names: str, tokens: int = 1000, seed: int = 0) -> Trainer:
    trainer = Trainer(tokens)
    for name in names:
        trainer.add(name, tiny_policy(seed))
    return trainer


def random_data(rng: random.Random) -> list[Datum]:
    return [d for n in range(4) for d in data_of(random_group(rng, n), [rng.uniform(-1, 1) for _ in range(4)])]


def test_supervised_training_learns_its_text_and_its_loss_is_that_of_the_logprobs() -> None:
    trainer, data = made("sft"), [text([1, 2], [3, 4, 5]), text([6], [7, 8], [2.0, 0.5])]
    losses = []
    for _ in range(60):
        done = trainer.forward_backward("sft", data, cross_entropy)
        weights = [d.weights or [1.0] * len(d.tokens) for d in data]
        by_hand = -sum(sum(map(operator.mul, *pair)) for pair in zip(weights, done.logprobs, strict=True))
        assert sum(done.outputs) == pytest.approx(by_hand)
        losses.append(sum(done.outputs))
        assert trainer.optim_step("sft", ADAM, divisor=6.5).updated
    assert losses[-1] < 0.05 * losses[0]


def test_the_gradient_is_the_weighted_sum_of_the_tokens_gradients() -> None:
    """Against the model called in the simplest way; what is not masked in is read and has no gradient."""
    trainer = made("p")
    datum = Datum(array("i", [1, 2]), array("i", [3, 4, 5]), b"\x01\x00\x01", array("d", [2.0, 9.0, -0.5]))
    found = trainer.forward_backward("p", [datum], cross_entropy).logprobs[0]
    module = tiny_policy().module
    logp = module(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0].log_softmax(-1)
    (-(2.0 * logp[1, 3] - 0.5 * logp[3, 5])).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(flat_gradient(trainer, "p"), expected, rtol=1e-9, atol=1e-11)
    assert list(found) == pytest.approx([logp[1, 3].item(), 0.0, logp[3, 5].item()])


def test_policies_share_nothing() -> None:
    """Two policies with calls of one between those of the other, each as if it were alone, bit for bit."""
    data = {"a": random_data(random.Random(1)), "b": random_data(random.Random(2))}

    def trained(trainer: Trainer, order: Sequence[str]) -> None:
        for name in order:
            trainer.forward_backward(name, data[name][:5], cross_entropy)
        for name in order:
            trainer.forward_backward(name, data[name][5:], cross_entropy)
            trainer.optim_step(name, AdamParams(lr=1e-2 if name == "a" else 3e-3, weight_decay=0.1), divisor=7.0)

    together, alone = made("a", "b"), {name: made(name) for name in data}
    for _ in range(3):
        trained(together, ["a", "b"])
        for name, trainer in alone.items():
            trained(trainer, [name])
    for name, trainer in alone.items():
        assert bits(together, name) == bits(trainer, name)
    assert bits(together, "a") != bits(together, "b")
    together.forward_backward("a", data["a"], cross_entropy)
    before = bits(together, "b")
    assert not together.optim_step("b", ADAM).updated, "b has no gradient, whatever a has"
    assert (bits(together, "b"), float(flat_gradient(together, "a").norm()) > 0) == (before, True)


def test_preferences_learned_from_logprobs_alone() -> None:
    """DPO as a client makes it: two forwards, its own autograd over logprobs, then weighted cross-entropy."""
    trainer = made("policy")
    trainer.add("reference", tiny_policy(), is_trained=False)
    better, worse = text([1, 2], [3, 4, 5]), text([1, 2], [3, 6])
    data, losses = [better, worse], []
    for _ in range(30):
        reference = [sum(row) for row in trainer.forward("reference", data)]
        rows = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in trainer.forward("policy", data)]
        margin = (rows[0].sum() - reference[0]) - (rows[1].sum() - reference[1])
        loss = -torch.nn.functional.logsigmoid(0.5 * margin)
        loss.backward()
        losses.append(loss.item())
        weighted = [
            text(d.prompt_tokens, d.tokens, (-row.grad).tolist())  # type: ignore[operator]
            for d, row in zip(data, rows, strict=True)
        ]
        trainer.forward_backward("policy", weighted, cross_entropy)
        if len(losses) == 1:
            found, direct = flat_gradient(trainer, "policy"), made("policy")

            def dpo(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, None]:
                sums = logp_n.new_zeros(2).index_add_(0, tokens.sequence_n, logp_n - tokens.reference_n)
                first = tokens.sequence_n.new_zeros(len(logp_n)).double()
                first[0] = 1.0  # the pair's loss, on one of its tokens
                sign = 1.0 if len(logp_n[tokens.sequence_n == 0]) == 3 else -1.0
                return -torch.nn.functional.logsigmoid(0.5 * sign * (sums[0] - sums[1])) * first, None

            with_reference = [
                Datum(d.prompt_tokens, d.tokens, d.loss_mask, reference_logprobs=lp)
                for d, lp in zip(data, trainer.forward("reference", data), strict=True)
            ]
            direct.forward_backward("policy", with_reference, dpo)
            torch.testing.assert_close(flat_gradient(direct, "policy"), found, rtol=1e-8, atol=1e-10)
        trainer.optim_step("policy", ADAM)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.1


@given(st.integers(0, 10**6), st.integers(1, 60), st.data())
@examples(15)
def test_gradients_do_not_depend_on_how_data_are_cut(seed: int, tokens: int, drawn: Any) -> None:
    """A group over several micro-batches, several groups in one, calls cut anywhere: one sum; logprobs in order."""
    data = random_data(random.Random(seed))
    whole, cut = made("p"), made("p", tokens=tokens)
    expected = whole.forward_backward("p", data, cross_entropy).logprobs
    at = drawn.draw(st.integers(0, len(data)))
    found = [lp for part in (data[:at], data[at:]) for lp in cut.forward_backward("p", part, cross_entropy).logprobs]
    torch.testing.assert_close(flat_gradient(cut, "p"), flat_gradient(whole, "p"), rtol=1e-9, atol=1e-11)
    for left, right in zip(found, expected, strict=True):
        assert list(left) == pytest.approx(list(right), abs=1e-9)
    for left, right in zip(cut.forward("p", data), expected, strict=True):
        assert list(left) == pytest.approx(list(right), abs=1e-9)


@given(st.integers(0, 10**6), st.integers(1, 80), st.booleans())
def test_a_microbatch_runs_no_more_tokens_than_allowed_unless_it_is_one_datum(
    seed: int, tokens: int, shares_prompts: bool
) -> None:
    data = random_data(random.Random(seed))
    parts = microbatches(data, tokens, shares_prompts)
    assert [datum for part in parts for datum in part] == data
    for part in parts:
        assert num_tokens_run(part, shares_prompts) <= tokens or len(part) == 1
    for before, after in itertools.pairwise(parts):
        assert num_tokens_run([*before, after[0]], shares_prompts) > tokens, "no part is cut short"
    for part in parts:
        packed = collate(part, "auto" if shares_prompts else "plain", 0.01, tokens)
        assert packed.tokens_BT.numel() <= tokens or len(part) == 1 or packed.ends_BT is not None


@given(st.integers(0, 10**6), st.integers(3, 30))
def test_no_row_with_a_mask_is_longer_than_allowed_unless_it_is_one_datum(seed: int, most: int) -> None:
    """A mask takes the square of its row, so the bound in tokens is one in bytes a token."""
    data = random_data(random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SHARED_ROW_TOKENS", most)
        parts = microbatches(data, 200, shares_prompts=True)
        assert [datum for part in parts for datum in part] == data
        for part in parts:
            packed = collate(part, "shared", 0.01)
            assert packed.tokens_BT.shape[1] <= max(most, *(len(d.prompt_tokens) + d.num_inputs for d in part))


def test_a_long_group_is_split_where_it_was_one_pass_before() -> None:
    """Eight rollouts of 128 tokens: logits of at most 256 positions at once instead of 1,024."""
    rng = random.Random(0)
    data = [text([1] * 10, [rng.randrange(13) for _ in range(128)]) for _ in range(8)]
    sizes = [len(part) for part in microbatches(data, 276, shares_prompts=True)]
    assert sizes == [2, 2, 2, 2]
    assert max(len(collate(part, "auto", 0.01, 276).predict_u) for part in microbatches(data, 276, True)) <= 256


def test_a_checkpoint_has_the_state_at_the_save_while_training_goes_on(tmp_path: Path) -> None:
    data, trainer = random_data(random.Random(3)), made("p")
    trainer.forward_backward("p", data, cross_entropy)
    trainer.optim_step("p", ADAM)
    before = bits(trainer, "p")
    saving = trainer.save_state("p", tmp_path / "step_1", {"note": 7})
    trainer.forward_backward("p", data, cross_entropy)  # reads the weights, as the writer does
    trainer.optim_step("p", ADAM)  # waits for the writer
    assert saving.done()
    after = bits(trainer, "p")
    assert trainer.load_state("p", tmp_path / "step_1") == {"note": 7}
    assert bits(trainer, "p") == before
    trainer.forward_backward("p", data, cross_entropy)
    trainer.optim_step("p", ADAM)
    assert bits(trainer, "p") == after, "the moments came back too"


def test_the_error_names_wrong_uses() -> None:
    trainer = made("p")
    trainer.add("frozen", tiny_policy(), is_trained=False)
    with pytest.raises(UserError, match=r"no policy 'q'; there are \['frozen', 'p'\]"):
        trainer.forward("q", [])
    with pytest.raises(UserError, match="already"):
        trainer.add("p", tiny_policy())
    with pytest.raises(InvariantError, match="not trained"):
        trainer.forward_backward("frozen", [text([1], [2])], cross_entropy)
    with pytest.raises(InvariantError, match="empty prompt"):
        trainer.forward("p", [text([], [2])])


def test_a_non_finite_gradient_changes_nothing() -> None:
    trainer, data = made("p"), [text([1], [2, 3])]
    before = bits(trainer, "p")

    def broken(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, None]:
        return logp_n * float("nan"), None

    trainer.forward_backward("p", data, broken)
    with pytest.raises(UserError, match="not finite"):
        trainer.optim_step("p", ADAM)
    assert bits(trainer, "p") == before
    trainer.forward_backward("p", data, cross_entropy)
    assert trainer.optim_step("p", ADAM).updated, "the broken gradient is forgotten"


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "Mamba"])
def test_models_without_fused_attention_are_loaded_and_trained(name: str, tmp_path: Path) -> None:
    """Gemma 2 and gpt-oss cap or sink their attention scores, Mamba has none: transformers says which to use."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2}
    if name != "Mamba":
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
    if name == "GptOss":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "float32", "cpu")
    assert not policy.honours_masks
    trainer = Trainer(100)
    trainer.add("p", policy)
    trainer.forward_backward("p", [text([1, 2], [3, 4]), text([1], [5, 6, 7])], cross_entropy)
    assert trainer.optim_step("p", ADAM).grad_norm > 0
