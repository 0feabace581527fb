"""The sizes of a model and its snapshots, from its configuration and safetensors headers, without torch; and whether a
run's learner and workers fit in their machines' memory (`learner/decide/memory.py`), with what micro-batch.

The learner takes the first GPU, local workers the next ones, modulo the number of GPUs (`devices.nth_device`); on a
machine without a GPU all processes share its memory. The result depends only on the configuration, the model and the
machine's total memory, so it is the same on every start of a run.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2.config import Config
from echo2.config.rundir import read_json
from echo2.config.values import AUTO, FORMS
from echo2.core.devices import this_machine
from echo2.core.errors import UserError
from echo2.core.types import Hardware
from echo2.engines.model_values import all_values, values_of
from echo2.learner.decide.memory import (
    BOTH_SHARE,
    BYTES_PER_VALUE,
    COPY_SHARE,
    CPU_MICROBATCH_TOKENS_MAX,
    GPU_SHARE,
    OFFLOADS,
    PROCESS_BYTES,
    USABLE,
    LearnerSetup,
    Microbatch,
    engine_parts,
    settle_microbatch,
    worker_parts,
)
from echo2.learner.decide.model_shape import ModelShape, read_shape
from echo2.weights.format.adapter_files import EXPERTS, lora_targets
from echo2.weights.format.model_files import linear_layers, tensor_shapes

if TYPE_CHECKING:
    from echo2.learner.core.mesh import Mesh
    from echo2.learner.core.model import Policy

log = logging.getLogger(__name__)

#: From the hub's config.json of each; of outputs/models, from what `echo2 demo` and examples/smollm make.
KNOWN_MODELS = Path(__file__).with_name("known_models.json")
#: What `read_shape` needs of a model with attention over all tokens, and what of which model types besides.
STATED = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"}
)
MORE_STATED = {
    "llama": frozenset[str](),
    "qwen2": frozenset[str](),
    "qwen3": frozenset({"head_dim"}),
    "qwen3_moe": frozenset({"head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"}),
}
#: The head's memory, which does not grow with the model.
HEAD_BYTES = 500_000_000
#: Assumed memory of a machine whose GPUs alone are known, in that of one of them.
MACHINE_SHARES = 2
#: Assumed tokens of a prompt, where the tasks have not been read.
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a process needs, by part; the bytes `available` to it; and the `place` of that memory."""

    parts: dict[str, int]
    available: int
    place: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class LearnerMemoryNeed(MemoryNeed):
    """The learner's memory need with its micro-batch. `host`: bytes of the machine's memory, where moments are there in
    place of the GPU's, or all that it has while a worker has the GPU."""

    microbatch: Microbatch
    host: int = 0


def machine_with(gpu_bytes: int, count: int) -> Hardware:
    """Return a machine of which only the GPUs are known."""
    return Hardware(MACHINE_SHARES * gpu_bytes, (gpu_bytes,) * count)


def row_tokens(config: Config, shape: ModelShape) -> int:
    """Return the tokens of the longest training row; a row is never cut."""
    return min(shape.max_positions, PROMPT_TOKENS + config.sampling.max_tokens)


def frozen_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes per parameter of a model under adapters: never wider than it is stored. What is in 4 bits at the
    learner travels as bfloat16, as all that is beside it."""
    if config.learner.quantised == "base":
        return BYTES_PER_VALUE["bfloat16"]
    return min(shape.stored_bytes, BYTES_PER_VALUE[config.model.snapshot_dtype])


def teacher_parameters(config: Config) -> int:
    """Return the parameters of all teachers whose sizes are known."""
    shapes = [model_shape(path) for path in config.distill.loaded]
    return sum(shape.parameters for shape in shapes if shape is not None)


def learner_setup(config: Config, shape: ModelShape, on_gpu: bool) -> LearnerSetup:
    """Return the settings that determine the learner's memory."""
    return LearnerSetup(
        shape,
        is_bfloat16=config.model.compute_dtype == "bfloat16" or (config.model.compute_dtype == "auto" and on_gpu),
        on_gpu=on_gpu,
        ranks=config.learner.ranks,
        lora_rank=config.lora.rank,
        adapts_experts=EXPERTS in config.lora.targets,
        base_bytes=frozen_bytes(config, shape) if on_gpu else 4,
        keeps_reference=config.learner.reference_kl > 0.0,
        teachers=teacher_parameters(config),
        quantised=config.learner.quantised,
    )


def settle(config: Config, shape: ModelShape, machine: Hardware) -> Microbatch:
    """Return the learner's micro-batch on this machine. Where a GPU has no room for all, moments, and next gradients,
    are in the machine's memory if that has. Where the only GPU has none beside the workers, they take turns on it."""
    set_tokens, longest = config.learner.tokens_per_microbatch, row_tokens(config, shape)
    setup, count = learner_setup(config, shape, bool(machine.gpus)), config.workers.count
    can_offload = machine.gpus and setup.ranks == 1 and not setup.lora_rank and setup.quantised == "none"
    can_share = len(machine.gpus) == 1 and setup.ranks == 1 and count > 0 and config.workers.engine not in FORMS
    tried = list[Microbatch]()
    for in_turns in (False, True) if can_share else (False,):
        room = USABLE * learner_bytes(config, shape, machine, in_turns)
        for offloaded in OFFLOADS if can_offload else OFFLOADS[:1]:
            one = replace(setup, offloaded=offloaded)
            microbatch = settle_microbatch(one, room, longest, None if set_tokens == "auto" else set_tokens)
            tried.append(replace(microbatch, in_turns=in_turns))
            is_there = one.needed(max(longest, microbatch.tokens), microbatch.checkpointing) <= room
            host = one.host_bytes if offloaded or in_turns else 0
            if in_turns:
                workers = count * worker_need(config, shape, machine).total
                is_there = is_there and workers <= machine.gpus[0] - PROCESS_BYTES
                host += max(one.parked_bytes, workers) + count * PROCESS_BYTES
            if is_there and host <= USABLE * machine.memory_bytes - HEAD_BYTES:
                return tried[-1]
    return tried[0]


def fitted(policy: Policy, config: Config, mesh: Mesh) -> Microbatch:
    """Return the micro-batch that fits; switch on activation checkpointing if the memory forecast says so. Both are the
    same on every rank: those of the one with the least memory.
    """
    sized = replace(config, learner=replace(config.learner, ranks=mesh.size))  # torchrun may have set it
    settled = _settled(policy, sized)
    answers = mesh.gather(f"{settled.tokens} {int(settled.checkpointing)}".encode())
    settings = [tuple(map(int, answer.split())) for answer in answers]
    tokens = min(each for each, _ in settings)
    checkpointing = any(each for _, each in settings) and policy.checkpoint_activations()
    how = "activations are computed again" if checkpointing else "activations are kept"
    log.info("micro-batches of %d tokens at most; %s", tokens, how)
    if settled.offloaded:
        log.info("%s are in the machine's memory, and pass through the GPU in each step", settled.offloaded)
    if settled.in_turns:
        log.info("the GPU has no room for local workers beside this learner: they take turns (--card)")
    return Microbatch(tokens, checkpointing, settled.offloaded, settled.in_turns)


def _settled(policy: Policy, config: Config) -> Microbatch:
    machine, set_tokens = this_machine(), config.learner.tokens_per_microbatch
    if policy.device.type != "cuda":
        machine = replace(machine, gpus=())
    shape = read_shape(values_of(policy.module.config))
    if shape is None:
        tokens = CPU_MICROBATCH_TOKENS_MAX if set_tokens == "auto" else set_tokens
        kind = policy.module.config.model_type
        log.warning("no memory forecast for %s: micro-batches have at most %d tokens", kind, tokens)
        return Microbatch(tokens, checkpointing=False)
    return settle(config, shape, machine)


def learner_bytes(config: Config, shape: ModelShape, machine: Hardware, in_turns: bool = False) -> int:
    """Return the bytes of the machine that head and local workers leave to one learner process. `in_turns`: workers
    leave the GPU to it, but for what a process has there without tensors."""
    ranks, count = config.learner.ranks, config.workers.count
    if in_turns:
        return machine.gpus[0] - count * PROCESS_BYTES
    local = worker_need(config, shape, machine).total
    if not machine.gpus:
        return (machine.memory_bytes - HEAD_BYTES - count * local) // ranks
    ranks = min(ranks, len(machine.gpus))  # the others are elsewhere
    sharing = -(-(ranks + count) // len(machine.gpus)) - 1  # workers beside the learner on the fullest GPU
    return min(machine.gpus) - sharing * local


def worker_need(config: Config, shape: ModelShape, machine: Hardware, keeps_both: bool = False) -> MemoryNeed:
    """Return a worker's need on such a machine. If two copies of the weights don't fit, it loads new ones in place.
    `keeps_both`: it is a stranger, whose rollouts keep the weights that they began with while others have newer ones
    (`Config.swap_of`), or checks strangers; if both don't fit, new ones wait until nothing is sampled."""
    sampling = config.sampling
    rollouts, length = sampling.groups_per_batch * sampling.group_size, row_tokens(config, shape)
    available = min(machine.gpus, default=machine.memory_bytes)
    bytes_per_value = frozen_bytes(config, shape) if config.lora.rank else BYTES_PER_VALUE[config.model.snapshot_dtype]
    parts = worker_parts(shape, bytes_per_value, rollouts, length)
    if config.lora.rank:
        trained = shape.adapter_parameters(config.lora.rank, EXPERTS in config.lora.targets)
        parts["adapter"] = BYTES_PER_VALUE[config.model.snapshot_dtype] * trained
    if config.workers.engine in (AUTO, "compact"):
        free = max(0, available - sum(parts.values()))
        packs, swaps = bytes_per_value == 4, not config.lora.rank
        copies = swaps * keeps_both if machine.gpus else packs + swaps * (1 + packs)
        share = GPU_SHARE if machine.gpus else BOTH_SHARE if keeps_both else COPY_SHARE
        parts |= engine_parts(parts["weights"], free, copies, bool(config.tasks.environment), share)
    return MemoryNeed(parts, available, "a GPU" if machine.gpus else "the machine")


def learner_need(config: Config, shape: ModelShape, machine: Hardware) -> LearnerMemoryNeed:
    """Return the learner's need on this machine, with its micro-batch and room for at least the longest row."""
    microbatch = settle(config, shape, machine)
    setup = replace(learner_setup(config, shape, bool(machine.gpus)), offloaded=microbatch.offloaded)
    tokens = max(microbatch.tokens, row_tokens(config, shape))
    parts = setup.parts(tokens, microbatch.checkpointing)
    available = learner_bytes(config, shape, machine, microbatch.in_turns)
    host = setup.host_bytes if microbatch.offloaded or microbatch.in_turns else 0
    host += setup.parked_bytes if microbatch.in_turns else 0
    return LearnerMemoryNeed(parts, available, "a GPU" if machine.gpus else "the machine", microbatch, host)


def model_config(path: str) -> dict[str, Any] | None:
    """Return config.json of a model directory, or of a hub id in the local hub cache; None if there is none."""
    config = Path(path) / "config.json"
    if not config.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache
            from huggingface_hub.errors import HFValidationError
        except ImportError:
            return None
        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        config = Path(cached)
    values = read_json(config, "Download or save the model again.")
    return values if isinstance(values, dict) else None


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """The sizes in config.json of the models of the examples, by hub id or by the path where they are made."""
    return json.loads(KNOWN_MODELS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def known_config(path: str) -> dict[str, Any] | None:
    """Return config.json as `model_config` does, or the sizes of a model of the examples that is not here yet."""
    config = model_config(path)
    return known_models().get(path) if config is None and not Path(path).exists() else config


def model_shape(path: str) -> ModelShape | None:
    """Return the shape of a model directory, of a hub id in the local hub cache, or of a model of the examples; None if
    it is unknown."""
    config = known_config(path)
    return None if config is None else _shape_of(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=16)
def _shape_of(config_json: str) -> ModelShape | None:
    """A plan and its neighbours ask for the same one many times, and transformers takes long to answer: two seconds of
    computing, where torch is installed. It is not asked for values that config.json has.
    """
    values = json.loads(config_json)
    needed = STATED | MORE_STATED.get(str(values.get("model_type")), {"transformers"})
    stated = read_shape(values) if needed <= values.keys() and not values.get("use_sliding_window") else None
    return stated or read_shape(all_values(values))


@dataclass(frozen=True, slots=True)
class SnapshotSize:
    """Bytes of a full snapshot. `base_bytes`: of the model under the adapter, which travels once; 0 without one."""

    num_bytes: int
    base_bytes: int = 0


def num_parameters(path: str) -> int | None:
    """Return the number of weights of a model directory, or of a hub id in the local cache; None if it is unknown."""
    model = Path(path)
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    if count := sum(math.prod(shape) for file in files for shape in tensor_shapes(file).values()):
        return count
    shape = model_shape(path)
    return None if shape is None else shape.parameters


def snapshot_bytes(model: Path, snapshot_dtype: str) -> int:
    """Return the bytes of tensors that a worker receives in a full snapshot of this model.

    Raises:
        UserError: it is not a directory with safetensors files.
    """
    if not model.is_dir() or (count := num_parameters(str(model))) is None or not any(model.glob("*.safetensors")):
        raise UserError(
            f"The size of a snapshot is not known: model.path = {str(model)!r} is not a local directory with "
            "*.safetensors files. Give --snapshot-bytes (parameters x 2 for bfloat16, x 4 for float32; with "
            "lora.rank, of the adapter's)."
        )
    return count * BYTES_PER_VALUE[snapshot_dtype]


def snapshot_size(config: Config) -> SnapshotSize:
    """Return what a worker receives in a full snapshot of this run: the model, or the adapter over it.

    Raises:
        UserError: as `snapshot_bytes`, or the adapter matches no layer.
    """
    model, dtype = Path(config.model.path), config.model.snapshot_dtype
    whole = snapshot_bytes(model, dtype)
    if not config.lora.rank:
        return SnapshotSize(whole)
    layers = linear_layers(model)
    ends = tuple(f".{one}" for one in lora_targets(layers, config.lora.targets))
    trained = sum(sum(shape) for name, shape in layers.items() if f".{name}".endswith(ends))
    shape = model_shape(str(model)) if EXPERTS in config.lora.targets else None
    trained += sum(layer.stacked for layer in shape.layers) if shape else 0
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return SnapshotSize(config.lora.rank * trained * BYTES_PER_VALUE[dtype], min(stored, whole))
