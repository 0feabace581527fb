"""The learner alone beside plain PyTorch, and a worker's engine alone beside `generate`, on a pretrained model.

    make outputs/models/smollm2/config.json       # once
    make bench-plain_torch ARGS='[--rounds 5] [--out FILE]'
    make bench-plain_torch ARGS='--hybrid 12'     # layers

What the machinery around them costs or gains is not in here: no network, no snapshots, no other process. Each round
times all sides one after the other on the same rollouts, so what else runs on the machine slows all of them; the ratio
is that of a round. One thread each, as processes of a run have.

Learner: one step of `examples/smollm/json.toml`, 6 groups of 8 rollouts with advantages, in float32: clipped policy
gradient, gradient norm, AdamW. Plain PyTorch pads micro-batches of 8 rows and reads the loss from all logits, as one
writes it at first; its rows are a group's, so they share a prompt, which it runs 8 times. Engine: these rollouts,
sampled from weights in bfloat16, by `compact` and by transformers' `generate` over one padded batch; tokens a second
count what comes before the end token.

`--hybrid`: instead, the engines `compact` and `transformers` on the shape of Qwen3.5-0.8B with so many of its 24 layers
and random weights in bfloat16: seconds of this thread to read a prompt and to sample a token of each rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recording import save, there
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.compact import build_compact
from echo2.engines.engine import Completion, Engine, SampleRequest
from echo2.engines.hf_engine import build_transformers
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.engines.torch_engine import Model
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import LossTokens
from echo2.learner.core.model import load_policy
from echo2.learner.core.trainer import AdamParams, Trainer

REPOSITORY = Path(__file__).resolve().parents[2]
GROUPS, GROUP_SIZE, MAX_TOKENS = 6, 8, 32
ADAM = AdamParams(lr=2e-5, grad_clip=1.0)
CLIP = 0.2


@dataclass(frozen=True)
class Row:
    """One rollout: its prompt, the tokens that were drawn and their logprobs."""

    prompt: array[int]
    drawn: Completion
    advantage: float


def prompts(tokenizer: Any, rows: Path) -> list[array[int]]:
    lines = rows.read_text(encoding="utf-8").splitlines()[:GROUPS]
    asked = [json.loads(line)["prompt"] for line in lines]
    texts = [
        one if isinstance(one, str) else tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
        for one in asked
    ]
    return [array("i", tokenizer.encode(text, add_special_tokens=False)) for text in texts]


async def sampled(engine: Engine, asked: Sequence[array[int]], seed: int) -> list[Row]:
    """A group for each prompt. Advantages are +1 and -1 in turn: none is flat, so both learners train every row."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [
        SampleRequest(prompt, seed + at, sample, params)
        for at, prompt in enumerate(asked)
        for sample in range(GROUP_SIZE)
    ]
    outcomes = await asyncio.gather(*map(engine.submit, requests))
    rows = []
    for at, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        if not isinstance(outcome, Completion):
            raise RuntimeError(f"a rollout failed: {outcome}")
        rows.append(Row(request.prompt_tokens, outcome, 1.0 if at % 2 else -1.0))
    return rows


# ---- the learner -----------------------------------------------------------------------------------------------------


def clipped(logp_n: torch.Tensor, behaviour_n: torch.Tensor, advantage_n: torch.Tensor) -> torch.Tensor:
    ratio_n = (logp_n - behaviour_n).exp()
    return -torch.minimum(ratio_n * advantage_n, ratio_n.clamp(1 - CLIP, 1 + CLIP) * advantage_n)


def our_step(trainer: Trainer, rows: Sequence[Row]) -> float:
    """One step of this project's learner. Returns the gradient norm."""

    def loss(logp_n: torch.Tensor, tokens: LossTokens) -> tuple[torch.Tensor, None]:
        return clipped(logp_n, tokens.behaviour_n, tokens.advantage_n), None

    data = [
        Datum(
            prompt_tokens=row.prompt,
            tokens=row.drawn.tokens,
            loss_mask=b"\x01" * len(row.drawn.tokens),
            advantages=array("d", [row.advantage]) * len(row.drawn.tokens),
            behaviour_logprobs=row.drawn.logprobs,
        )
        for row in rows
    ]
    trainer.forward_backward(RUN_POLICY, data, loss)
    return trainer.optim_step(RUN_POLICY, ADAM, divisor=sum(len(row.drawn.tokens) for row in rows)).grad_norm


def plain_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: Sequence[Row]) -> float:
    """The same step in plain PyTorch. Returns the gradient norm."""
    divisor = sum(len(row.drawn.tokens) for row in rows)
    for first in range(0, len(rows), GROUP_SIZE):
        some = rows[first : first + GROUP_SIZE]
        ids = [torch.tensor([*row.prompt, *row.drawn.tokens]) for row in some]
        ids_BT = pad_sequence(ids, batch_first=True)
        seen_BT = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        logits_BTV = model(input_ids=ids_BT, attention_mask=seen_BT).logits[:, :-1]
        logp_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        total = torch.zeros(())
        for row, logp_T in zip(some, logp_BT, strict=True):
            start = len(row.prompt) - 1
            logp_n = logp_T[start : start + len(row.drawn.tokens)]
            advantage_n = torch.full_like(logp_n, row.advantage)
            total = total + clipped(logp_n, torch.tensor(row.drawn.logprobs), advantage_n).sum()
        (total / divisor).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


# ---- the engine ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generated(model: Any, tokenizer: Any, asked: Sequence[array[int]], seed: int) -> int:
    """Sample the groups with `generate`. Returns the number of tokens before and with the end."""
    torch.manual_seed(seed)
    width = max(map(len, asked))
    ids_BT = torch.tensor([[tokenizer.pad_token_id] * (width - len(one)) + list(one) for one in asked])
    seen_BT = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in asked])
    output_BT = model.generate(
        input_ids=ids_BT,
        attention_mask=seen_BT,
        max_new_tokens=MAX_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=GROUP_SIZE,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    num = 0
    for drawn in output_BT[:, width:].tolist():
        num += drawn.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in drawn else len(drawn)
    return num


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the clock and what came out."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


async def engine_of(policy_trainer: Trainer) -> Engine:
    """`compact` with the trainer's weights in bfloat16."""
    engine: Engine = make_engine("compact", slots=GROUPS * GROUP_SIZE)
    lent = policy_trainer.save_weights_for_sampler(RUN_POLICY, "bfloat16")
    try:
        await engine.update_weights(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), lent.tensors, lent.files))
    finally:
        lent.release()
    return engine


async def measure(model: str, rows: Path, rounds: int) -> dict[str, Any]:
    policy = load_policy(model, "float32", "auto")
    tokenizer = load_tokenizer({name: bytes(data) for name, data in policy.files.items()})
    trainer = Trainer(tokens_per_microbatch=2048)
    trainer.add(RUN_POLICY, policy)
    engine = await engine_of(trainer)
    asked = prompts(tokenizer, rows)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=ADAM.lr, betas=ADAM.betas, weight_decay=0.0)
    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    found: list[dict[str, float]] = []
    for number in range(rounds + 1):  # the first one is not counted: everything is touched for the first time
        began = time.perf_counter()
        group_rows = await sampled(engine, asked, seed=1000 * number)
        engine_seconds = time.perf_counter() - began
        drawn = sum(len(row.drawn.tokens) for row in group_rows)
        generate_seconds, num = timed(partial(generated, half, tokenizer, asked, number))
        our_seconds, our_norm = timed(partial(our_step, trainer, group_rows))
        plain_seconds, plain_norm = timed(partial(plain_step, plain, optimizer, group_rows))
        record = {
            "learner_seconds": our_seconds,
            "plain_seconds": plain_seconds,
            "learner_ratio": plain_seconds / our_seconds,
            "engine_tokens_per_second": drawn / engine_seconds,
            "generate_tokens_per_second": num / generate_seconds,
            "engine_ratio": (drawn / engine_seconds) / (num / generate_seconds),
            "learner_norm": our_norm,
            "plain_norm": plain_norm,
        }
        print(
            "warm-up" if not number else f"round {number}",
            {name: round(one, 3) for name, one in record.items()},
            flush=True,
        )
        found += [record] if number else []
    await engine.close()
    spread = {
        name: [min(values), statistics.median(values), max(values)]
        for name in found[0]
        if (values := [record[name] for record in found])
    }
    return {"spread": spread, "rounds": found}


# ---- a hybrid --------------------------------------------------------------------------------------------------------

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPT, STEPS = 64, 24


def hybrid_seconds(model: Model, rollouts: int) -> tuple[float, float]:
    """Seconds to read one prompt, and to sample a token of each rollout behind it."""
    tokens_B, prompt = torch.randint(1000, (rollouts,)), array("i", torch.randint(1000, (PROMPT,)).tolist())
    with torch.inference_mode():
        began = time.thread_time()
        cache = model.prefill([prompt])
        reading = time.thread_time() - began
        cache = cache.select(torch.zeros(rollouts, dtype=torch.long))
        model.step(cache, tokens_B)  # which makes room
        began = time.thread_time()
        for _ in range(STEPS):
            model.step(cache, tokens_B)
        return reading, (time.thread_time() - began) / STEPS


def hybrid(num_layers: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(HYBRID | {"num_hidden_layers": num_layers}))
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    tensors = {
        name: TensorBytes("BF16", tuple(tensor.shape), tensor.view(torch.uint8).numpy().data)
        for name, tensor in module.state_dict().items()
        if name != "lm_head.weight"
    }
    snapshot, models = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), tensors, files), {}
    for name, build in (("compact", build_compact), ("transformers", build_transformers)):
        models[name] = build(snapshot, torch.device("cpu"))
        with torch.inference_mode():
            models[name].fill(snapshot)
    found: list[dict[str, Any]] = []
    for _ in range(rounds):
        for rollouts in (1, 8, 32):
            seconds = {name: hybrid_seconds(model, rollouts) for name, model in models.items()}
            (read, step), (other_read, other_step) = seconds["compact"], seconds["transformers"]
            ratios = {"read_ratio": read / other_read, "step_ratio": step / other_step}
            found.append({"rollouts": rollouts, "compact": seconds["compact"], "transformers": seconds["transformers"]})
            found[-1] |= ratios
            print(rollouts, "rollouts:", {name: round(one, 2) for name, one in ratios.items()}, flush=True)
    return {"layers": num_layers, "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(REPOSITORY / "outputs" / "models" / "smollm2"))
    parser.add_argument("--rows", type=there, default=REPOSITORY / "outputs" / "data" / "facts" / "train.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hybrid", type=int, metavar="LAYERS", help="the engines on a shape of Qwen3.5")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    if options.hybrid:
        torch.set_num_threads(1)
        save("plain_torch", {"threads": 1, **hybrid(options.hybrid, options.rounds)}, options.out)
        return
    figures = asyncio.run(measure(options.model, options.rows, options.rounds))
    for name, (least, median, most) in figures["spread"].items():
        print(f"{name}: {median:.3g} ({least:.3g} to {most:.3g})")
    save("plain_torch", {"threads": torch.get_num_threads(), **figures}, options.out)


if __name__ == "__main__":
    main()
