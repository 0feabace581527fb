"""The learner: tokens a second, share of the device's arithmetic, and peak memory beside the forecast.

The trainer and the loss are those of a run; weights and rollouts are random. A step is all passes over the rows,
forward and backward, and one AdamW step. Peak: bytes of tensors, without what the process and the device's context
take, which the forecast counts, too.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from array import array
from contextlib import nullcontext
from dataclasses import dataclass

from gpu_sections.bench import Bench, Row
from gpu_sections.engines import cudnn_attention

from echo2.config.sections import LoraConfig
from echo2.core.types import Snapshot, SnapshotRef
from echo2.learner.core.adapters import BaseModel
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import make_loss
from echo2.learner.core.model import Policy
from echo2.learner.core.quantised import layers_in_4_bits, quantise
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.decide.memory import GRADIENTS, MOMENTS, PROCESS_BYTES, LearnerSetup
from echo2.learner.decide.model_shape import read_shape
from echo2.learner.grpo.loop import GrpoLoss

PROMPT = 64
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` rows of `length` tokens, in micro-batches as large as shared prompts allow. `lora`: an adapter over a base
    in bfloat16. `experts_as_they_are`: a mixture's grouped products stay in the weights' dtype, float32. `quantised`:
    as `learner.quantised`; `offloaded`: of gradients and moments, what is in the machine's memory."""

    shape: str
    rows: int
    length: int
    checkpointing: bool
    lora: bool = False
    experts_as_they_are: bool = False
    quantised: str = "none"
    offloaded: str = ""


CASES = (
    Case("0.6B", 32, 1024, False),
    Case("0.6B", 8, 2048, False),
    Case("0.6B", 8, 2048, True),
    Case("1.7B", 8, 2048, False),
    Case("8B", 8, 2048, True, lora=True),
    Case("1.7B", 8, 2048, True),
    Case("0.6B", 64, 256, False),
    Case("8B", 4, 2048, False, lora=True),
)
#: What fits one consumer GPU, and beside each what it replaces.
LOW_MEMORY = (
    Case("8B", 8, 2048, True, lora=True, quantised="base"),
    Case("1.7B", 8, 2048, True, offloaded=GRADIENTS),
    Case("1.7B", 8, 2048, True, quantised="moments"),
    Case("1.7B", 8, 2048, True, offloaded=MOMENTS),
)


def low_memory(bench: Bench) -> None:
    """Measure what saves memory."""
    for case in bench.pick(LOW_MEMORY, LOW_MEMORY, LOW_MEMORY[:3]):
        if case.quantised != "none" and importlib.util.find_spec("bitsandbytes") is None:
            bench.record({"shape": case.shape, "quantised": case.quantised, "not_run": "bitsandbytes is not installed"})
        elif bench.left() < bench.pick(8.0, 3.0, 0.0):
            bench.record({"shape": case.shape, "not_run": "the time was over"})
        else:
            measured(bench, case)


def run(bench: Bench) -> None:
    """Measure the cases, the most telling first."""
    for allowed in (False, True):
        with cudnn_attention() if allowed else nullcontext():
            bench.record({"attention": "cuDNN allowed" if allowed else "without cuDNN", **of_new_shapes(bench)})
    cases = bench.pick(CASES, CASES[1:5], (CASES[1], CASES[4]))
    for case in cases:
        if bench.left() < bench.pick(8.0, 3.0, 0.0):
            bench.record({"shape": case.shape, "not_run": "the time was over"})
            continue
        measured(bench, case)


def of_new_shapes(bench: Bench) -> Row:
    """Measure passes of which each has another length, as a run's have."""
    policy, passes = trained(bench, "0.6B", False), bench.pick(8, 4, 2)
    trainer = Trainer(bench.pick(16_384, 16_384, 256))
    trainer.add("it", policy)
    lengths = [bench.pick(512, 256, 16) - 3 * number for number in range(passes + 1)]
    loss, found = GrpoLoss(make_loss("dppo"), 0.0), []
    for length in lengths:
        data = data_of(policy.vocab_size, 4, length)
        bench.sync()
        started = time.perf_counter()
        trainer.forward_backward("it", data, loss)
        bench.sync()
        found.append(time.perf_counter() - started)
    return {"shape": "0.6B", "passes of new lengths": passes, "rows": 4, "pass_seconds": statistics.median(found[1:])}


def measured(bench: Bench, case: Case) -> None:
    """Measure one case and record it; a case without enough memory is recorded as such."""
    bench.forget_peak()
    row: Row = {"shape": case.shape, **({"experts": "float32"} if case.experts_as_they_are else {})}
    row |= {"trained": "LoRA" if case.lora else "all", "checkpointing": case.checkpointing}
    row |= {"quantised": case.quantised} if case.quantised != "none" else {}
    row |= {"offloaded": case.offloaded} if case.offloaded else {}
    try:
        bench.record(row | _steps(bench, case))
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        bench.record(row | {"failed": str(error).splitlines()[0][:200]})


def data_of(vocab: int, rows: int, length: int, seed: int = 0) -> list[Datum]:
    """Return random rollouts in groups of eight, each group with a prompt of its own."""
    rng = random.Random(seed)

    def tokens(count: int) -> array[int]:
        return array("i", [rng.randrange(2, vocab) for _ in range(count)])

    prompts = [tokens(min(PROMPT, length // 2)) for _ in range(-(-rows // 8))]
    data = []
    for number in range(rows):
        prompt = prompts[number // 8]
        count = length - len(prompt) + 1  # the last token is not run
        data.append(
            Datum(
                prompt,
                tokens(count),
                b"\x01" * count,
                advantages=array("d", [rng.choice((-1.0, 1.0))]) * count,
                behaviour_logprobs=array("f", [-11.9]) * count,
                version_spans=((0, 0),),
            )
        )
    return data


def _steps(bench: Bench, case: Case) -> Row:
    rows, length = bench.pick((case.rows, case.length), (case.rows, 256), (2, 32))
    policy = trained(bench, case.shape, case.lora, case.quantised == "base")
    if case.experts_as_they_are:
        for part in policy.module.modules():
            vars(part).pop("forward", None)  # `follow_autocast`
    bench.forget_peak()  # that of making random weights is none of the learner's
    checkpointing = case.checkpointing and policy.checkpoint_activations()
    data = data_of(policy.vocab_size, rows, length)
    most = bench.pick(16_384, 16_384, 2 * rows * length)
    trainer = Trainer(most)
    trainer.add("it", policy, True, case.quantised == "moments", case.offloaded)
    run_tokens = trainer.num_tokens_run("it", data)
    loss = GrpoLoss(make_loss("dppo"), 0.0)
    passes, updates = [], []
    for number in range(bench.pick(5, 2, 2)):
        bench.sync()
        started = time.perf_counter()
        done = trainer.forward_backward("it", data, loss)
        bench.sync()
        middle = time.perf_counter()
        trainer.optim_step("it", AdamParams(1e-6, grad_clip=1.0), float(run_tokens))
        bench.sync()
        if number:
            passes.append(middle - started)
            updates.append(time.perf_counter() - middle)
        assert trainer.tokens_per_microbatch == most, "memory ran out: the micro-batch was cut"
        if bench.left() < 5.0 and passes:
            break
    seconds = statistics.median(passes)
    found: Row = {
        "rows": rows,
        "length": length,
        "tokens_run": run_tokens,
        "passes": len(done.outputs),
        "tokens_s": run_tokens / seconds,
        "pass_seconds": seconds,
        "optim_seconds": statistics.median(updates),
        "peak_gb": bench.peak() / 1e9,
    }
    flops = flops_per_token(policy, length, case.lora)
    if "tflops" in bench.ceilings:
        found["mfu_of_measured"] = flops * run_tokens / seconds / 1e12 / bench.ceilings["tflops"]
    shape = read_shape(bench.values(case.shape))
    if shape is not None:
        setup = LearnerSetup(
            shape,
            policy.computes_in_bfloat16,
            on_gpu=True,
            lora_rank=LORA_RANK if case.lora else 0,
            quantised=case.quantised,
            offloaded=case.offloaded,
        )
        found["forecast_gb"] = (setup.needed(run_tokens // len(done.outputs), checkpointing) - PROCESS_BYTES) / 1e9
    return found


def trained(bench: Bench, shape: str, lora: bool, in_4_bits: bool = False) -> Policy:
    """Return the policy that is trained: the model in float32, or an adapter over it in bfloat16 or 4 bits."""
    policy = bench.policy(shape, "bfloat16" if lora else "float32")
    if not lora:
        return policy
    if in_4_bits:
        quantise(policy.module)
    base = BaseModel(policy, Snapshot(SnapshotRef("", 0, 0), {}, policy.files))
    adapter = base.adapter(LoraConfig(rank=LORA_RANK), 0)
    adapter.computes_in_bfloat16 = True
    return adapter


def flops_per_token(policy: Policy, length: int, lora: bool) -> float:
    """Return the arithmetic of a token, forward and backward, that no implementation can leave out: products with the
    weights (of a mixture: of the experts that a token uses) and causal attention; nothing is counted twice for being
    computed again. Under an adapter the gradients of the frozen weights are not computed.
    """
    config = policy.module.config
    used = 0.0
    for name, parameter in policy.module.named_parameters():
        if parameter.dim() < 2 or (name.endswith("embed_tokens.weight") and not config.tie_word_embeddings):
            continue
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1.0
        used += share * parameter.numel()
    used += sum(2 * layer.packed.numel() for layer in layers_in_4_bits(policy.module).values())
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
    return float((4 if lora else 6) * used + 3 * attention)
