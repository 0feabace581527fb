"""Adapters of many tenants on one learner: exact losses, no tenant in another's numbers, away and back bit for bit."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo2.config.sections import LoraConfig
from echo2.core.errors import UserError
from echo2.learner.core.adapters import load_base
from echo2.learner.core.datum import Datum
from echo2.learner.core.trainer import AdamParams
from echo2_service.decide.pass_size import PATIENCE_PASSES_MAX, PATIENCE_PASSES_MIN, PassSize
from echo2_service.learner.losses import CLIENT_LOSSES
from echo2_service.learner.tenants import Tenants
from learner_cases import VOCAB, model_directory

ADAM = AdamParams(1e-2, (0.9, 0.95), 1e-12)
PARAMS = {"ppo": {"clip_low_threshold": 0.9}, "dro": {"beta": 0.3}, "stable_reinforce": {"kl_coeff": 0.2}}


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(load_base(str(model_directory(tmp_path / "model")), "cpu"))


def datum(rng: random.Random, padded: int = 0) -> Datum:
    """Inputs, the next tokens as targets; the first `padded` targets are padding."""
    inputs = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
    length = len(inputs)
    padded = min(padded, length - 1)

    def column(code: str, draw: object) -> array[float]:
        assert callable(draw)
        return array(code, [0.0] * padded + [draw() for _ in range(length - padded)])

    targets = array("i", [0] * padded + [rng.randrange(VOCAB) for _ in range(length - padded)])
    return Datum(
        array("i", inputs[:1]),
        array("i", [*inputs[1:], targets[-1]]),
        b"\x01" * length,
        weights=array("d", [0.0] * padded + [1.0] * (length - padded)),
        advantages=column("d", lambda: rng.uniform(-2, 2)),
        behaviour_logprobs=column("f", lambda: rng.uniform(-4, -1)),
        targets=targets,
    )


def reference(logits: list[torch.Tensor], data: list[Datum], loss: str) -> float:
    """In float64, one sequence after the other, as the table in the documentation has it."""
    p = {**CLIENT_LOSSES[loss].defaults, **PARAMS.get(loss, {})}
    low, high = p.get("clip_low_threshold", 0.0), p.get("clip_high_threshold", math.inf)
    total = 0.0
    for logits_TV, one in zip(logits, data, strict=True):
        assert one.targets is not None
        assert one.weights is not None
        assert one.advantages is not None
        assert one.behaviour_logprobs is not None
        logp = [float(row[t]) for row, t in zip(logits_TV.double().log_softmax(-1), one.targets, strict=True)]
        counted = [i for i, weight in enumerate(one.weights) if weight > 0]
        mean = math.exp(sum(logp[i] - one.behaviour_logprobs[i] for i in counted) / len(counted))
        for i, lp in enumerate(logp):
            a, q, w = one.advantages[i], one.behaviour_logprobs[i], one.weights[i]
            r = mean if loss == "gspo" else math.exp(lp - q)
            own_low = low if one.clip_low is None else one.clip_low[i]
            own_high = high if one.clip_high is None else one.clip_high[i]
            cut = min(max(r, own_low), own_high)
            total += (
                w
                * {
                    "cross_entropy": -lp,
                    "importance_sampling": -r * a,
                    "ppo": -min(r * a, cut * a),
                    "gspo": -min(r * a, cut * a),
                    "cispo": -cut * lp * a,
                    "dro": -(lp * a - p.get("beta", 0.0) / 2 * (lp - q) ** 2),
                    "stable_reinforce": -min(r, own_high) * lp * a + p.get("kl_coeff", 0.0) / 2 * (lp - q) ** 2,
                }[loss]
            )
    return total


@pytest.mark.parametrize("loss", CLIENT_LOSSES)
def test_each_loss_is_the_sum_of_the_documented_formula(tenants: Tenants, loss: str, tmp_path: Path) -> None:
    rng = random.Random(loss)
    data = [datum(rng, padded=place % 3) for place in range(6)]
    for place in (1, 4):  # with bounds of their own
        low, high = (array("d", [rng.uniform(*span) for _ in data[place].tokens]) for span in ((0.0, 1.0), (1.0, 2.0)))
        data[place] = replace(data[place], clip_low=low, clip_high=high)
    tenants.add("a", LoraConfig(rank=3), seed=1)
    found = tenants.forward_backward("a", data, loss, PARAMS.get(loss, {}))
    module = load_base(str(model_directory(tmp_path / "again")), "cpu").policy.module.double()
    with torch.no_grad():
        logits = [module(torch.tensor([[*one.prompt_tokens, *one.tokens[:-1]]])).logits[0] for one in data]
    assert found.total == pytest.approx(reference(logits, data, loss), rel=1e-5)
    for one, logits_TV, logprobs in zip(data, logits, found.logprobs, strict=True):
        assert one.targets is not None
        expected = logits_TV.log_softmax(-1)[range(len(one.targets)), list(one.targets)]
        assert torch.allclose(torch.tensor(logprobs, dtype=torch.float64), expected, atol=1e-5)


def test_gradients_are_sums_and_padding_has_no_part_in_them(tenants: Tenants) -> None:
    rng = random.Random(3)
    data = [datum(rng, padded=2) for _ in range(4)]
    for name in ("once", "twice", "halves"):
        tenants.add(name, LoraConfig(rank=3), seed=1)
    norms = {}
    for name, calls in {"once": [data], "twice": [data, data], "halves": [data[:2], data[2:]]}.items():
        for call in calls:
            tenants.forward_backward(name, call, "ppo", {})
        norms[name] = tenants.optim_step(name, ADAM).grad_norm
    assert norms["twice"] == pytest.approx(2 * norms["once"], rel=1e-5)
    assert norms["halves"] == pytest.approx(norms["once"], rel=1e-5)
    assert not tenants.optim_step("once", ADAM).updated


def train(tenants: Tenants, name: str, steps: range) -> list[tuple[float, float]]:
    rows = []
    for step in steps:
        data = [datum(random.Random(f"{name} {step} {place}")) for place in range(4)]
        done = tenants.forward_backward(name, data, "importance_sampling", {})
        rows.append((done.total, tenants.optim_step(name, ADAM).grad_norm))
    return rows


def test_tenants_are_as_if_alone_bit_for_bit(tenants: Tenants, tmp_path: Path) -> None:
    loras = {"a": LoraConfig(rank=2), "b": LoraConfig(rank=5, alpha=1), "c": LoraConfig(rank=2, targets=["q_proj"])}
    for name, lora in loras.items():
        tenants.add(name, lora, seed=4)
    mixed: dict[str, list[tuple[float, float]]] = {name: [] for name in loras}
    for step in range(3):
        for name in loras:
            mixed[name] += train(tenants, name, range(step, step + 1))
    for name, lora in loras.items():
        alone = Tenants(load_base(str(tmp_path / "model"), "cpu"))
        alone.add(name, lora, seed=4)
        assert train(alone, name, range(3)) == mixed[name]


def test_a_tenant_that_left_memory_comes_back_as_it_was(tenants: Tenants, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2)
    tenants.add("stays", lora, 1)
    tenants.add("leaves", lora, 1)
    before = [train(tenants, name, range(2)) for name in ("stays", "leaves")]
    tenants.save("leaves", tmp_path / "away", {"step": 2})
    tenants.remove("leaves")
    assert "leaves" not in tenants
    assert train(tenants, "stays", range(2, 3)) != before[0]
    tenants.add("leaves", lora, 9)
    assert tenants.load("leaves", tmp_path / "away", with_optimizer=True) == {"step": 2}
    undisturbed = Tenants(load_base(str(tmp_path / "model"), "cpu"))
    undisturbed.add("leaves", lora, 1)
    assert train(tenants, "leaves", range(2, 4)) == train(undisturbed, "leaves", range(4))[2:]
    tenants.load("leaves", tmp_path / "away", with_optimizer=False)
    undisturbed.add("fresh", lora, 1)
    undisturbed.load("fresh", tmp_path / "away", with_optimizer=False)
    assert train(tenants, "leaves", range(2)) != train(undisturbed, "leaves", range(2))


def test_bad_data_leave_the_weights_as_they_were(tenants: Tenants, tmp_path: Path) -> None:
    tenants.add("bad", LoraConfig(rank=2), 1)
    broken = Datum(
        array("i", [1]), array("i", [2, 3]), b"\x01\x01", advantages=array("d", [math.nan, math.inf]),
        behaviour_logprobs=array("f", [0.0, 0.0]),
    )  # fmt: skip
    tenants.forward_backward("bad", [broken], "importance_sampling", {})
    with pytest.raises(UserError, match="not finite"):
        tenants.optim_step("bad", ADAM)
    with pytest.raises(UserError, match="datum 0 has a token outside"):
        tenants.passes([Datum(array("i", [1]), array("i", [VOCAB]), b"\x01")])
    with pytest.raises(UserError, match="the model's context is 256"):
        tenants.passes([Datum(array("i", [1] * 256), array("i", [1, 1]), b"\x01\x01")])
    with pytest.raises(UserError, match=r"no parameter 'clip'"):
        tenants.forward_backward("bad", [broken], "ppo", {"clip": 1.0})
    undisturbed = Tenants(load_base(str(tmp_path / "model"), "cpu"))
    undisturbed.add("bad", LoraConfig(rank=2), 1)
    assert train(tenants, "bad", range(2)) == train(undisturbed, "bad", range(2))


def test_a_forward_pass_alone_adds_nothing(tenants: Tenants) -> None:
    tenants.add("a", LoraConfig(rank=2), 1)
    data = [datum(random.Random(0))]
    first = tenants.forward_backward("a", data, "cross_entropy", {}, adds_gradients=False)
    assert not tenants.optim_step("a", ADAM).updated
    assert first == tenants.forward_backward("a", data, "cross_entropy", {})
    assert tenants.optim_step("a", ADAM).updated


# ---- memory that runs out --------------------------------------------------------------------------------------------


def test_out_of_memory_shrinks_the_passes_of_one_tenant_only(tenants: Tenants) -> None:
    """What one tenant's data take changes no bit of another's results, and does not last."""
    rng, asked = random.Random(3), list[int]()
    data = [datum(rng) for _ in range(6)]
    tenants.add("greedy", LoraConfig(rank=2), 0)
    tenants.add("other", LoraConfig(rank=2), 0)
    before = tenants.forward_backward("other", data, "cross_entropy", {})

    def ask(_module: object, args: tuple[torch.Tensor]) -> None:
        asked.append(args[0].numel())
        if is_short and asked[-1] > 20:
            raise MemoryError

    def sizes(name: str) -> list[int]:
        asked.clear()
        tenants.forward_backward(name, data, "cross_entropy", {})
        return list(asked)

    embedding = dict(tenants._base.policy.module.named_modules())["model.embed_tokens"]
    embedding.register_forward_pre_hook(ask)
    is_short = False
    whole = sizes("greedy")
    assert len(whole) == 1
    is_short = True
    tenants.forward_backward("greedy", data, "cross_entropy", {})
    is_short = False
    assert len(sizes("greedy")) > 1
    assert sizes("other") == whole
    assert tenants.forward_backward("other", data, "cross_entropy", {}) == before
    assert any(sizes("greedy") == whole for _ in range(40 * PATIENCE_PASSES_MIN))


@pytest.mark.parametrize("fits", [1, 100, 2048, 4096])
def test_trials_of_larger_passes_become_rare_and_the_size_returns_when_there_is_memory(fits: int) -> None:
    size, failures = PassSize(4096), list[int]()

    def make(number: int, memory: int) -> None:
        tokens = size.tokens
        while tokens > memory:
            tokens //= 2
        if tokens < size.tokens:
            failures.append(number)
        size.passed(tokens)
        assert 1 <= size.tokens <= 4096

    for number in range(20_000):
        make(number, fits)
    assert len(failures) <= 8 + 20_000 // PATIENCE_PASSES_MAX
    for number in range(14 * PATIENCE_PASSES_MAX):
        make(number, 4096)
    assert size.tokens == 4096
    make(0, 2048)
    for number in range(2 * PATIENCE_PASSES_MIN):
        make(number, 4096)
    assert size.tokens == 4096, "after a long time without failures the first patience holds again"
