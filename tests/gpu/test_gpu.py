"""What only a GPU can show; each test is skipped where there is none. `python -m pytest tests/gpu`.

The models have a few thousand parameters: the tests are of where tensors are and in which order streams run, not of
speed (benchmarks/gpu.py).
"""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2.config.sections import LoraConfig
from echo2.core.devices import compute_deterministically, free_memory_bytes, is_out_of_memory, pick_device, this_machine
from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, PrefillRequest, SampleRequest
from echo2.engines.registry import make_engine
from echo2.learner.core.adapters import BaseModel
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import make_loss
from echo2.learner.core.model import DTYPES, Policy
from echo2.learner.core.output_layer import GPU_TILE, Choice, OutputLayer, plain_scores, tiled_scores
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.grpo.loop import GrpoClient, GrpoLoss
from learner_cases import VOCAB, config_of, data_of, random_group, tiny_module
from rollout_cases import FAMILIES
from rollout_cases import tiny_module as family_module

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

CUDA = torch.device("cuda:0")


def policy_on(device: torch.device, module: torch.nn.Module | None = None) -> Policy:
    """The same weights on every device."""
    module = module or tiny_module(hidden=32, layers=2)
    config: Any = module.config
    config.eos_token_id = 1
    return Policy(module, {"config.json": config.to_json_string(use_diff=False).encode()}, device)


def snapshot_of(policy: Policy, version: int = 0, dtype: str = "float32") -> Snapshot:
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), policy.weights(DTYPES[dtype]), policy.files)


def requests(count: int, temperature: float = 1.0, **narrow: Any) -> list[SampleRequest]:
    rng = random.Random(0)
    params = SamplingParams(temperature=temperature, max_tokens=24, **narrow)
    prompts = [array("i", [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 9))]) for _ in range(count)]
    return [SampleRequest(prompt, 7, number, params) for number, prompt in enumerate(prompts)]


def sampled(engine_name: str, device: str, snapshot: Snapshot, wanted: list[SampleRequest]) -> list[Completion]:
    engine = make_engine(engine_name, device)

    async def together() -> list[Any]:
        try:
            await engine.update_weights(snapshot)
            return await asyncio.gather(*engine.submit_together(wanted))
        finally:
            await engine.close()

    return asyncio.run(together())


def forward(policy: Policy, wanted: list[SampleRequest], done: list[Completion]) -> np.ndarray[Any, Any]:
    trainer = Trainer(512)
    trainer.add("it", policy, is_trained=False)
    data = [
        Datum(
            request.prompt_tokens,
            each.tokens,
            b"\x01" * len(each.tokens),
            support_tokens=each.support_tokens,
            support_offsets=each.support_offsets,
        )
        for request, each in zip(wanted, done, strict=True)
    ]
    return np.concatenate([np.array(logprobs) for logprobs in trainer.forward("it", data)])


def of_engine(done: list[Completion]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.array(each.logprobs, dtype=np.float64) for each in done])


@pytest.mark.parametrize("engine", ["compact", "transformers"])
@pytest.mark.parametrize("narrow", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_the_engine_and_the_learner_have_the_same_logprobs(engine: str, narrow: dict[str, Any]) -> None:
    policy, wanted = policy_on(CUDA), requests(12, **narrow)
    done = sampled(engine, "cuda", snapshot_of(policy), wanted)
    assert np.abs(forward(policy, wanted, done) - of_engine(done)).max() < 1e-4


def test_tiled_scores_in_bfloat16_are_close() -> None:
    policy, wanted = policy_on(CUDA), requests(12)
    done = sampled("compact", "cuda", snapshot_of(policy, dtype="bfloat16"), wanted)
    policy.computes_in_bfloat16 = True
    assert np.abs(forward(policy, wanted, done) - of_engine(done)).mean() < 0.05


@pytest.mark.parametrize("engine", ["compact", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_draws_the_tokens_that_a_cpu_draws(engine: str, family: str) -> None:
    """In float32 the sums differ in the last bits, and a token only where its bounds lie that close to the number."""
    module, wanted = family_module(family), requests(16)
    here = policy_on(torch.device("cpu"), module)
    snapshot = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), here.tensors(), here.files)
    on_cpu, on_gpu = (sampled(engine, device, snapshot, wanted) for device in ("cpu", "cuda"))
    assert [each.tokens for each in on_gpu] == [each.tokens for each in on_cpu]
    assert np.abs(of_engine(on_gpu) - of_engine(on_cpu)).max() < 1e-4


def test_an_engine_checks_on_a_gpu_what_it_drew() -> None:
    policy, wanted = policy_on(CUDA), requests(6)
    snapshot, engine = snapshot_of(policy), make_engine("compact", "cuda")
    assert isinstance(engine, DecodeLoop)

    async def checked() -> list[Any]:
        try:
            await engine.update_weights(snapshot)
            done: list[Any] = await asyncio.gather(*engine.submit_together(wanted))
            ask = [
                PrefillRequest(one.prompt_tokens, each.tokens, one.params, each.version_spans)
                for one, each in zip(wanted, done, strict=True)
            ]
            return list(zip(done, await engine.prefill(snapshot.ref, ask), strict=True))
        finally:
            await engine.close()

    for drawn, found in asyncio.run(checked()):
        assert np.abs(found.logprobs - np.array(drawn.logprobs)).max() < 1e-4
        assert (found.low < found.high).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_has_the_weights_of_the_moment_it_was_lent(dtype: str) -> None:
    """It is read beside work that the device still has to do, and an update waits for the reader."""
    policy = policy_on(CUDA, tiny_module(hidden=256, layers=4, vocab=2048))
    trainer, rng = Trainer(512), random.Random(0)
    trainer.add("it", policy)
    data = data_of(random_group(rng, 0))
    trainer.forward_backward("it", data, GrpoLoss(make_loss("dppo"), 0.0))
    trainer.optim_step("it", AdamParams(1e-2))  # queued work that the reading must follow
    lent = trainer.save_weights_for_sampler("it", dtype)
    read = {name: bytes(tensor.read(0, tensor.num_bytes)) for name, tensor in lent.tensors.items()}
    lent.release()
    torch.cuda.synchronize()
    expected = policy.tensors(DTYPES[dtype])
    assert read == {name: bytes(tensor.data) for name, tensor in expected.items()}


def test_an_engine_takes_new_weights_while_it_samples() -> None:
    policies = [policy_on(CUDA, tiny_module(seed, hidden=32)) for seed in range(3)]
    engine = make_engine("compact", "cuda")
    wanted = [replace(each, params=replace(each.params, max_tokens=200)) for each in requests(8)]

    async def swapped() -> list[Any]:
        try:
            await engine.update_weights(snapshot_of(policies[0], 0))
            futures = [engine.submit(each) for each in wanted]
            for version in (1, 2):
                await engine.update_weights(snapshot_of(policies[version], version))
            await asyncio.gather(*futures)
            return await asyncio.gather(*engine.submit_together(requests(8)))
        finally:
            await engine.close()

    done = asyncio.run(swapped())
    assert {span for each in done for span in each.version_spans} == {(0, 2)}
    assert np.abs(forward(policies[2], requests(8), done) - of_engine(done)).max() < 1e-4


@pytest.mark.parametrize("layout", ["plain", "shared"])
def test_a_gpu_trains_as_a_cpu_does(layout: Any) -> None:
    """Full weights in float32: gradients, and the weights after two steps."""
    updated = []
    for device in (torch.device("cpu"), CUDA):
        client = GrpoClient(policy_on(device), config_of(compute_dtype="float32", lr=1e-3), layout)
        for step in range(2):
            rng = random.Random(step)
            client.forward_backward([random_group(rng, number, top_k=3 * (number % 2)) for number in range(4)])
            client.optim_step()
        updated.append(client.policy.tensors())
    for name, tensor in updated[0].items():
        cpu, gpu = (np.frombuffer(each[name].data, np.float32) for each in updated)
        assert np.abs(cpu - gpu).max() < 2e-3, (name, tensor.shape)  # AdamW's first steps are signs


@pytest.mark.parametrize("loss", ["dppo", "ppo", "decoupled", "gspo", "icepop", "cispo"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_loss_runs_on_a_gpu(loss: str, deterministic: bool) -> None:
    client = GrpoClient(policy_on(CUDA), config_of(loss=loss, lr=1e-4, reference_kl=0.1))
    try:
        if deterministic:
            compute_deterministically()
        for step in range(2):
            rng = random.Random(step)
            client.forward_backward([random_group(rng, number, told=2, top_k=3 * (number % 2)) for number in range(4)])
            assert client.optim_step().grad_norm > 0.0
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_adapter_trains_and_is_sampled_from() -> None:
    module = tiny_module(hidden=32).bfloat16()
    policy = policy_on(CUDA, module)
    base = Snapshot(SnapshotRef("base-0", 0, 0), policy.weights(), policy.files)
    adapter = BaseModel(policy, base).adapter(LoraConfig(rank=4), 0)
    client = GrpoClient(adapter, config_of(lr=1e-2))
    client.forward_backward([random_group(random.Random(0), number) for number in range(4)])
    assert client.optim_step().grad_norm > 0.0
    assert adapter.dtype == torch.bfloat16
    assert all(parameter.is_cuda for parameter in adapter.trained_parameters().values())


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    clients = []
    for resumes in (False, True):
        client = GrpoClient(policy_on(CUDA), config_of(lr=1e-3, deterministic=True))
        for step in range(3):
            if resumes and step == 2:
                client.save_state(tmp_path / "step_2").result()
                client = GrpoClient(policy_on(CUDA), config_of(lr=1e-3, deterministic=True))
                client.load_state(tmp_path / "step_2")
            client.forward_backward([random_group(random.Random(step), number) for number in range(4)])
            client.optim_step()
        clients.append({name: TensorBytes(t.dtype, t.shape, t.data) for name, t in client.policy.tensors().items()})
    for name in clients[0]:
        one, other = (np.frombuffer(each[name].data, np.float32) for each in clients)
        assert np.abs(one - other).max() < 1e-5, name


def test_doctor_reports_devices_and_memory() -> None:
    assert pick_device("auto") == pick_device("cuda") == pick_device("auto:0") == CUDA
    total = torch.cuda.get_device_properties(0).total_memory
    assert this_machine().gpus[0] == total
    assert 0 < free_memory_bytes(CUDA) <= total


def test_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 45, dtype=torch.int8, device=CUDA)
    assert is_out_of_memory(caught.value)


def test_a_micro_batch_is_halved_when_memory_runs_out() -> None:
    """A limit on this process's share of the card takes the place of a small card."""
    policy = policy_on(CUDA, tiny_module(hidden=512, layers=8, vocab=4096))
    rng = random.Random(0)

    def datum() -> Datum:
        tokens = array("i", [rng.randrange(4096) for _ in range(128)])
        return Datum(tokens[:1], tokens, b"\x01" * len(tokens), advantages=array("d", [1.0]) * len(tokens))

    data = [datum() for _ in range(64)]
    trainer = Trainer(1 << 14)
    trainer.add("it", policy)
    loss = GrpoLoss(make_loss("dppo"), 0.0)
    trainer.forward_backward("it", data[:2], loss)
    trainer.optim_step("it", AdamParams(1e-4))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (700 << 20)) / total)
    try:
        done = trainer.forward_backward("it", data, loss)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.tokens_per_microbatch < 1 << 14
    assert len(done.logprobs) == len(data)


def test_attention_never_runs_in_cudnn() -> None:
    """It builds a plan for each new shape, which is most shapes here."""
    pick_device("cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_tiles_give_the_scores_and_gradients_of_all_logits(softcap: float | None) -> None:
    """There are more positions and tokens than a tile has."""
    torch.manual_seed(0)
    positions, vocab = GPU_TILE[0] + 100, GPU_TILE[1] + 100
    hidden = torch.randn(positions, 64, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, 64, device=CUDA) * 0.3).requires_grad_()
    target = torch.randint(vocab, (positions,), device=CUDA)
    choice = Choice(torch.arange(positions, device=CUDA), target[:, None])
    found = tiled_scores(hidden, OutputLayer(weight, softcap=softcap), [choice])
    logits = hidden.float() @ weight.bfloat16().float().t()
    expected = plain_scores(logits if softcap is None else softcap * torch.tanh(logits / softcap), [choice])
    assert (found.log_total_u - expected.log_total_u).abs().max() < 1e-3
    assert (found.entropy_u - expected.entropy_u).abs().max() < 1e-2
    ours, theirs = (
        torch.autograd.grad((one.chosen[0][:, 0] - one.log_total_u).sum(), (hidden, weight))
        for one in (found, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert (one.float() - other.float()).norm() < 0.02 * other.float().norm()


def test_a_mixture_in_bfloat16_has_nearly_the_gradients_of_float32() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    found = []
    for in_bfloat16 in (False, True):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
        experts = {"num_experts": 4, "num_experts_per_tok": 4}  # all of them: rounding changes no choice
        module: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCAB, **sizes, **heads, **experts))
        policy = Policy(module, {}, CUDA)
        policy.computes_in_bfloat16 = in_bfloat16
        trainer = Trainer(1000)
        trainer.add("it", policy)
        data = data_of(random_group(random.Random(0), 0))
        trainer.forward_backward("it", data, lambda logp_n, tokens: (-logp_n, None))
        found.append(torch.cat([p.grad.flatten() for n, p in module.named_parameters() if ".experts." in n]))
    assert torch.cosine_similarity(*found, dim=0) > 0.99
    assert not torch.equal(*found)
