"""What clients count on, asked of a running service by a real SDK. Run by the Python that has the SDK:

    python tests/sdk/conformance.py tinker|logits URL KEY OTHER_KEY

Prints one line a case, and exits with the number of those that failed. Not a pytest module: the SDKs pin packages of
their own.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import torch
from tinker import types

BASE = "echo2/tiny"
TOKENS = [40, 80, 81, 90, 91, 92, 40, 80, 81, 90, 91, 92]
ADAM = types.AdamParams(learning_rate=1e-2)


def now(value: Any) -> Any:
    """What a future or a value is; newer SDKs give futures where older ones give values."""
    return value.result() if hasattr(value, "result") else value


class Client:
    """One session of one tenant."""

    def __init__(self, facade: str, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.service = importlib.import_module(facade).ServiceClient(base_url=url, api_key=key)

    def trainer(self, **more: Any) -> Any:
        return now(self.service.create_lora_training_client(base_model=BASE, rank=8, **more))

    def sampler(self, **more: Any) -> Any:
        return now(self.service.create_sampling_client(**more))

    def rest(self) -> Any:
        return self.service.create_rest_client()


def datum(tokens: list[int] = TOKENS, weight: float = 1.0, **more: Any) -> Any:
    inputs = {"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1), **more}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rl_datum(tokens: list[int], logprobs: list[float], advantage: float) -> Any:
    """With its prompt padded, as recipes do."""
    size = len(tokens) - 1
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": [0.0, 0.0] + [advantage] * (size - 2)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def loss(output: Any) -> float:
    return float(output.metrics["loss:sum"])


def prompt(size: int = 5) -> Any:
    return types.ModelInput.from_ints(TOKENS[:size])


def sample(sampler: Any, num_samples: int = 1, **params: Any) -> list[Any]:
    given = types.SamplingParams(**{"max_tokens": 8, "temperature": 1.0, "seed": 1, **params})
    return list(sampler.sample(prompt(), num_samples=num_samples, sampling_params=given).result().sequences)


def check_sums(client: Client, _: Client) -> None:
    trainer = client.trainer()
    one = loss(trainer.forward([datum()], "cross_entropy").result())
    assert math.isclose(loss(trainer.forward([datum()] * 3, "cross_entropy").result()), 3 * one, rel_tol=1e-5)
    assert math.isclose(loss(trainer.forward([datum(weight=4.0)], "cross_entropy").result()), 4 * one, rel_tol=1e-5)
    output = trainer.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    assert math.isclose(-sum(output.data), one, rel_tol=1e-5)


def check_pipelined_steps_learn(client: Client, _: Client) -> None:
    trainer = client.trainer()
    futures = []
    for _step in range(6):
        futures.append(trainer.forward_backward([datum()], "cross_entropy"))
        trainer.optim_step(ADAM)
    losses = [loss(future.result()) for future in futures]
    assert losses == sorted(losses, reverse=True), losses


def check_accumulation_is_addition(client: Client, _: Client) -> None:
    left, right = client.trainer(seed=3), client.trainer(seed=3)
    for _half in range(2):
        left.forward_backward([datum()], "cross_entropy")
    right.forward_backward([datum()] * 2, "cross_entropy")
    for trainer in (left, right):
        trainer.optim_step(ADAM).result()
    losses = [loss(trainer.forward([datum()], "cross_entropy").result()) for trainer in (left, right)]
    assert math.isclose(*losses, rel_tol=1e-4), losses


def check_many_chunks(client: Client, _: Client) -> None:
    trainer = client.trainer()
    one = loss(trainer.forward([datum()], "cross_entropy").result())
    output = trainer.forward_backward([datum()] * 2100, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2100
    assert math.isclose(loss(output), 2100 * one, rel_tol=1e-3)
    trainer.optim_step(ADAM).result()


def check_losses(client: Client, _: Client) -> None:
    trainer = client.trainer()
    size = len(TOKENS) - 1
    for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"):
        output = trainer.forward_backward([rl_datum(TOKENS, [-5.0] * size, 1.0)], name).result()
        assert math.isfinite(loss(output)), name
    trainer.optim_step(ADAM).result()


def check_importance_sampling(client: Client, _: Client) -> None:
    trainer = client.trainer()
    plain = trainer.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    output = trainer.forward_backward([rl_datum(TOKENS, list(plain), 2.0)], "importance_sampling").result()
    assert math.isclose(loss(output), -2.0 * (len(TOKENS) - 3), rel_tol=1e-4)


def check_bounds_of_a_datum(client: Client, _: Client) -> None:
    """Ratios of 1 at an upper bound of one half, for all tokens and for each: half of the loss in cispo."""
    trainer = client.trainer()
    size = len(TOKENS) - 1
    plain = list(trainer.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    losses = []
    for more in ({}, {"clip_high_threshold": [0.5]}, {"clip_high_threshold": [0.5] * size}):
        inputs = {"target_tokens": TOKENS[1:], "logprobs": plain, "advantages": [1.0] * size, **more}
        one = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
        losses.append(loss(trainer.forward_backward([one], "cispo").result()))
    assert np.allclose(losses[1:], losses[0] / 2, rtol=1e-4), losses
    expect_error(lambda: trainer.forward_backward([one], "dro").result())


def check_custom_loss(client: Client, _: Client) -> None:
    trainer = client.trainer()

    def squares(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        total = torch.stack([(row**2).sum() for row in logprobs]).sum()
        return total, {"squares": float(total)}

    losses = []
    for _step in range(4):
        losses.append(trainer.forward_backward_custom([datum()], squares).result().metrics["squares"])
        trainer.optim_step(ADAM).result()
    assert losses == sorted(losses, reverse=True), losses


def check_state_comes_back(client: Client, other: Client) -> None:
    trainer = client.trainer()
    for _step in range(2):
        trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(ADAM)
    path = trainer.save_state("mid").result().path
    again = now(client.service.create_training_client_from_state_with_optimizer(path))
    values = []
    for each in (trainer, again):
        each.forward_backward([datum()], "cross_entropy").result()
        each.optim_step(ADAM).result()
        values.append(loss(each.forward([datum()], "cross_entropy").result()))
    assert values[0] == values[1], values
    trainer.load_state(path).result()
    assert loss(trainer.forward([datum()], "cross_entropy").result()) > values[0]
    expect_error(lambda: now(other.service.create_training_client_from_state(path)))


def check_snapshots_are_frozen(client: Client, _: Client) -> None:
    trainer = client.trainer()
    old = now(trainer.save_weights_and_get_sampling_client())
    before = old.compute_logprobs(prompt(12)).result()
    expected = trainer.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert before[0] is None
    assert np.allclose(before[1:], expected, atol=1e-4)
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(ADAM).result()
    new = now(trainer.save_weights_and_get_sampling_client())
    assert old.compute_logprobs(prompt(12)).result() == before
    assert sum(new.compute_logprobs(prompt(12)).result()[1:]) > sum(before[1:])
    path = trainer.save_weights_for_sampler("named").result().path
    named = client.sampler(model_path=path).compute_logprobs(prompt(12)).result()
    assert np.allclose(named[1:], new.compute_logprobs(prompt(12)).result()[1:], atol=1e-6)


def check_sampling(client: Client, _: Client) -> None:
    sampler = client.sampler(base_model=BASE)
    first, again = sample(sampler, 3), sample(sampler, 3)
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert len({tuple(one.tokens) for one in first}) > 1
    assert all(len(one.tokens) == len(one.logprobs) for one in first)
    greedy = [sample(sampler, temperature=0.0, seed=seed)[0].tokens for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    stop = first[0].tokens[2]
    stopped = sample(sampler, stop=[stop])[0]
    assert stopped.tokens[-1] == stop
    assert stopped.stop_reason == "stop"
    unstopped = sample(sampler, stop=[])[0]
    assert (len(unstopped.tokens), unstopped.stop_reason) == (8, "length")
    text = sample(sampler, 4, stop=["e"], max_tokens=400)
    assert all(one.stop_reason in ("stop", "length") for one in text)


def check_prompt_logprobs(client: Client, _: Client) -> None:
    sampler = client.sampler(base_model=BASE)
    params = types.SamplingParams(max_tokens=1)
    more = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
    output = sampler.sample(prompt(), num_samples=1, sampling_params=params, **more).result()
    top = output.topk_prompt_logprobs
    assert len(top) == len(output.prompt_logprobs) == 5
    assert top[0] is None
    for row, logprob in zip(top[1:], output.prompt_logprobs[1:], strict=True):
        assert len(row) == 3
        assert row[0][1] >= row[1][1] >= row[2][1]
        assert logprob <= row[0][1] + 1e-5


def check_other_tokens_are_scored(client: Client, _: Client) -> None:
    """What newer SDKs have beside prompt logprobs."""
    trainer = client.trainer()
    sampler = now(trainer.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=4, temperature=0.5, seed=3)
    known = inspect.signature(sampler.sample).parameters
    more: dict[str, Any] = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
    if "topk_sample_logprobs" in known:
        more["topk_sample_logprobs"] = 64
    if "prompt_alt_tokens_k" in known:
        targets = np.full((4, 3), -1)
        targets[:, 1] = TOKENS[1:5]
        target_data = types.TensorData.from_numpy(targets)
        more |= {"prompt_alt_tokens_k": 50, "target_prompt_logprobs": target_data}
    output = sampler.sample(prompt(), num_samples=2, sampling_params=params, **more).result()
    if "topk_sample_logprobs" in known:
        for sequence in output.sequences:
            for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
                assert len(top) == 64
                assert math.isclose(dict(top).get(token, logprob), logprob, abs_tol=1e-4)
    if "prompt_alt_tokens_k" in known:
        scored = output.target_prompt_logprobs.to_numpy()
        assert np.allclose(scored[:, 1], output.prompt_logprobs[1:], atol=1e-6)
        assert not scored[:, [0, 2]].any()
        drawn = output.prompt_alt_tokens.tokens.to_numpy()
        logprobs = output.prompt_alt_tokens.logprobs.to_numpy()
        assert drawn.shape == logprobs.shape == (4, 50)
        for tokens, values, top in zip(drawn, logprobs, output.topk_prompt_logprobs[1:], strict=True):
            assert all(math.isclose(dict(top).get(t, v), v, abs_tol=1e-5) for t, v in zip(tokens, values, strict=True))


def check_many_samples(client: Client, _: Client) -> None:
    sampler = client.sampler(base_model=BASE)
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    futures = [sampler.sample(prompt(), num_samples=2, sampling_params=params) for _ in range(64)]
    found = {tuple(one.tokens) for future in futures for one in future.result().sequences}
    assert len(found) > 100


def check_mistakes(client: Client, _: Client) -> None:
    expect_error(lambda: now(client.service.create_lora_training_client(base_model="no/model")))
    trainer = client.trainer()
    expect_error(lambda: trainer.forward_backward([datum([1, 2, 10**6])], "cross_entropy").result())
    expect_error(lambda: trainer.forward_backward([datum(weight=math.inf)], "cross_entropy").result())
    expect_error(lambda: trainer.load_state("tinker://no/weights/such").result())
    assert loss(trainer.forward_backward([datum()], "cross_entropy").result()) > 0
    expect_error(lambda: now(client.sampler(model_path="tinker://no/sampler_weights/such")))


def check_checkpoints(client: Client, other: Client) -> None:
    trainer = client.trainer()
    paths = [trainer.save_state("a", ttl_seconds=3600).result().path]
    paths.append(trainer.save_weights_for_sampler("a").result().path)
    rest = client.rest()
    run = paths[0].removeprefix("tinker://").split("/")[0]
    listed = rest.list_checkpoints(run).result().checkpoints
    assert {one.tinker_path for one in listed} == set(paths)
    assert next(one for one in listed if one.checkpoint_type == "training").expires_at is not None
    assert run in {one.training_run_id for one in rest.list_training_runs(limit=100).result().training_runs}
    expect_error(lambda: other.rest().list_checkpoints(run).result())
    expect_error(lambda: other.rest().delete_checkpoint_from_tinker_path(paths[0]).result())
    expect_error(lambda: other.sampler(model_path=paths[1]))
    rest.publish_checkpoint_from_tinker_path(paths[1]).result()
    assert len(sample(other.sampler(model_path=paths[1]))) == 1
    rest.unpublish_checkpoint_from_tinker_path(paths[1]).result()
    rest.set_checkpoint_ttl_from_tinker_path(paths[0], None).result()
    for path in paths:
        rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(run).result().checkpoints == []


def check_an_adapter_goes_home_and_comes_back(client: Client, other: Client) -> None:
    """As PEFT's files, to another tenant: what it computes there is what it computed here."""
    trainer = client.trainer()
    for _step in range(2):
        trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(ADAM)
    path = trainer.save_weights_for_sampler("home").result().path
    expected = trainer.forward([datum()], "cross_entropy").result()
    run, kind, name = path.removeprefix("tinker://").split("/")
    with httpx.Client(base_url=client.url, headers={"x-api-key": client.key}, follow_redirects=True) as http:
        archive = http.get(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive").content
        given = {"params": {"base_model": BASE, "name": "mine"}, "headers": {"x-api-key": other.key}}
        mine = http.post("/api/v1/adapters", content=archive, **given).json()["path"]
    again = now(other.service.create_training_client_from_state(mine))
    assert math.isclose(loss(again.forward([datum()], "cross_entropy").result()), loss(expected), rel_tol=1e-6)
    logprobs = other.sampler(model_path=mine).compute_logprobs(prompt(12)).result()[1:]
    assert np.allclose(logprobs, expected.loss_fn_outputs[0]["logprobs"].data, atol=1e-4)
    expect_error(lambda: now(client.service.create_training_client_from_state(mine)))


def check_every_path_of_the_sdk_is_known(client: Client, _: Client) -> None:
    """Whatever its source names is served, or refused in words that say what to do."""
    files = [file for file in Path(tinker.__file__).parent.rglob("*.py") if not file.stem.endswith("_test")]
    named = {path for file in files for path in re.findall(r'"(/api/v1/[^"]+)"', file.read_text(encoding="utf-8"))}
    paths = {re.sub(r"\{[^}]*\}", "x", path) for path in named}
    assert len(paths) > 25, paths
    with httpx.Client(base_url=client.url, headers={"x-api-key": client.key}) as http:
        for path in sorted(paths):
            answers = [http.request(method, path) for method in ("GET", "POST", "PUT", "DELETE")]
            assert any("json" in one.headers.get("content-type", "") for one in answers), path


def expect_error(call: Callable[[], Any]) -> None:
    """A mistake is answered, and not asked again until the SDK gives up, which takes minutes."""
    begin = time.monotonic()
    try:
        call()
    except (tinker.TinkerError, ValueError, RuntimeError):
        seconds = time.monotonic() - begin
    else:
        raise AssertionError("no error")
    assert seconds < 60.0, seconds


def main() -> int:
    facade, url, *keys = sys.argv[1:]
    clients = [Client(facade, url, key) for key in keys]
    cases = {name: case for name, case in globals().items() if name.startswith("check_")}
    failed = 0
    for name, case in cases.items():
        begin = time.monotonic()
        try:
            case(*clients)
            print(f"ok   {name} {time.monotonic() - begin:.1f} s", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
