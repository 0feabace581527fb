"""LoRA: any number of adapters over one frozen model, which is held once.

Each targeted linear layer computes W x + (alpha / rank) B A x (arXiv 2106.09685). `peft` puts its layers into the model
in place, which stays of transformers' own class; experts are adapted by `experts.py`. Each adapter is a `Policy`
with parameters of its own; while one is engaged, the others have no effect. B begins as 0, so version 0 is the base
model. Adapter parameters are float32 in whatever dtype the base model is stored, so that no update is rounded away.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from echo2.config.rules import Config
from echo2.config.sections import LoraConfig
from echo2.core.devices import pick_device, require_bitsandbytes
from echo2.core.documents import parse_json
from echo2.core.errors import UserError
from echo2.core.types import Snapshot, SnapshotRef, StoredTensor
from echo2.engines.adapter import DOWN, PREFIX, UP, stacked, stacked_maps
from echo2.engines.hub_layout import TensorPart, whole_place
from echo2.engines.routing import Routing
from echo2.learner.core.experts import ExpertFactors
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy, load_policy, outline_policy, stored
from echo2.learner.core.quantised import Nf4Linear, layers_in_4_bits, num_weights, round_to_nf4
from echo2.learner.core.state import load_weights, open_tensors
from echo2.transport.routes import RouteShape
from echo2.weights.format.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ALL_LINEAR,
    BEGINNING_REMEDY,
    EXPERTS,
    adapter_config,
    check_same_settings,
    lora_factors,
    lora_targets,
)
from echo2.weights.format.model_files import find_model, read_base_model, rounded

log = logging.getLogger(__name__)

#: Layers that PEFT refuses in models of these types (peft 0.21, `_check_lora_target_modules_mamba`): fast kernels read
#: their weights without calling them.
MAMBA_TYPES, MAMBA_LAYERS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), {"out_proj", "conv1d"}
#: Names that layers of experts have in files. PEFT takes targets of these names for the experts' fused tensors, where a
#: model has those, and leaves linear layers of the same names out.
EXPERT_LAYERS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
#: A larger share of weights in layers without an adapter causes a warning.
LEFT_SHARE = 0.01


class BaseModel:
    """A frozen model with its name and bytes (`snapshot`), and its adapters, of which at most one is engaged."""

    def __init__(self, policy: Policy, snapshot: Snapshot) -> None:
        policy.module.requires_grad_(False)
        self.policy, self.snapshot = policy, snapshot
        head = policy.module.get_output_embeddings()
        linear = [
            name for name, part in policy.module.named_modules() if isinstance(part, nn.Linear) and part is not head
        ]
        self._refused = _refused(policy.module, {name.rpartition(".")[2] for name in linear})
        self._linear = [name for name in linear if name.rpartition(".")[2] not in self._refused]
        self._experts = ExpertFactors(policy.module)
        self._tuner: Any = None
        self._num_adapters = 0
        self._tuned: list[Any] = []  # layers that have adapters
        self._engaged: str | None = ""  # "": unknown, as PEFT left it

    def adapter(self, lora: LoraConfig, seed: int) -> Adapter:
        """Create an adapter. The same settings and seed give the same adapter on every device.

        Raises:
            UserError: a target matches no linear layer, or PEFT cannot adapt it.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer  # takes two seconds: only if there are adapters

        targets = self._checked(lora)
        name, module = f"adapter{self._num_adapters}", self.policy.module
        if targets:
            self._adapt_linear(name, lora, targets)
        experts = list(self._experts.parts.values()) if EXPERTS in lora.targets else []
        if experts:
            self._experts.add(name, lora.rank, lora.scaled_alpha / lora.rank)
        if not self._num_adapters:
            self._say_what_is_left(targets, experts)
        self._num_adapters += 1
        self._tuned, self._engaged = [part for part in module.modules() if isinstance(part, BaseTunerLayer)], ""
        inner, outer = self.policy.layout.outer
        stacks = sorted({f"{EXPERTS}.{one.parameter}" for part in experts for one in stacked_maps(part)})
        settings = adapter_config(lora, targets, self.snapshot.ref, outer if outer != inner else "", stacks)
        files = {**self.snapshot.files, ADAPTER_CONFIG: settings}
        return Adapter(self, name, files, seed)

    def _checked(self, lora: LoraConfig) -> list[str]:
        """Return the targets that are linear layers, in PEFT's form. Raises UserError: see `adapter`."""
        model_type, targets = self.policy.module.config.model_type, [one for one in lora.targets if one != EXPERTS]
        if len(targets) < len(lora.targets) and not self._experts.parts:
            raise UserError(
                f"lora.targets has {EXPERTS!r}, and a {model_type} has no experts that echo2 can adapt, which are one "
                f"tensor for all. Leave {EXPERTS!r} out."
            )
        if targets and not self._linear:
            raise UserError(
                f"lora.rank = {lora.rank}: a {model_type} has no linear layers of torch's kind, and adapters of other "
                "layers are not trained here. Set lora.rank = 0, which trains all weights."
            )
        for target in targets:
            if target.rpartition(".")[2] in self._refused:
                among = f', and "{EXPERTS}", which are all experts' if self._experts.parts else ""
                raise UserError(
                    f"lora.targets has {target!r}, and PEFT does not adapt linear layers of that name in a "
                    f"{model_type}. There are: {', '.join(lora_targets(self._linear, [ALL_LINEAR]))}; "
                    f'["{ALL_LINEAR}"] is all of them{among}.'
                )
        return lora_targets(self._linear, targets)

    def _adapt_linear(self, name: str, lora: LoraConfig, targets: list[str]) -> None:
        from peft import LoraConfig as PeftConfig
        from peft import LoraModel

        module = self.policy.module
        peft_config = PeftConfig(
            r=lora.rank, lora_alpha=lora.scaled_alpha, target_modules=targets, task_type="CAUSAL_LM"
        )
        try:
            if self._tuner is None:
                self._tuner = LoraModel(module, peft_config, name)
            else:
                self._tuner.peft_config[name] = peft_config
                self._tuner.inject_adapter(module, name)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UserError(
                f"lora.targets: PEFT cannot adapt {', '.join(targets)} of a {module.config.model_type}: {error}. Name "
                "other layers, or set lora.rank = 0, which trains all weights."
            ) from error

    def _say_what_is_left(self, targets: Sequence[str], experts: Sequence[Any]) -> None:
        """Warn of weights that have no adapter although `targets` may sound as if they had: experts, unless they are
        among the adapted `experts`, and layers that PEFT does not adapt."""
        module = self.policy.module
        adapted = {id(getattr(part, one.parameter)) for part in experts for one in stacked_maps(part)}
        ends = tuple(f".{target}.base_layer.weight" for target in targets)
        outside = {id(part.weight) for part in (module.get_input_embeddings(), module.get_output_embeddings()) if part}
        sizes, unadapted = dict[str, int](), dict[str, int]()
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 and ".lora_" not in name and id(parameter) not in outside:
                sizes[name] = parameter.numel()
                if not name.endswith(ends) and id(parameter) not in adapted:
                    unadapted[name] = parameter.numel()
        for name, layer in layers_in_4_bits(module).items():
            sizes[f"{name}.weight"] = 2 * layer.packed.numel()
            if not f"{name}.weight".endswith(ends):
                unadapted[f"{name}.weight"] = 2 * layer.packed.numel()
        share = sum(unadapted.values()) / sum(sizes.values())
        if share > LEFT_SHARE:
            kinds = sorted({name.rpartition(".layers.")[2].partition(".")[2] for name in unadapted})
            log.warning(
                "lora.targets: %.0f %% of the weights in layers have no adapter and stay as they are: %s%s. %s"
                "lora.rank = 0 trains all weights",
                100 * share,
                ", ".join(kinds[:4]),
                " and others" if len(kinds) > 4 else "",
                f'"{EXPERTS}" among lora.targets adapts experts; ' if self._experts.parts and not experts else "",
            )

    def remove(self, adapter: Adapter) -> None:
        """Forget an adapter of this model. Its memory is freed once nothing else holds its tensors."""
        for layer in self._tuned:
            layer.set_adapter([])  # otherwise PEFT engages another in place of an active one
        self._engaged = ""
        self._experts.remove(adapter.name)
        if self._tuner is not None and adapter.name in self._tuner.peft_config:
            self._tuner.delete_adapter(adapter.name)

    def alone(self) -> Policy:
        """Return the base model as a policy without adapters."""
        return _Alone(self)

    def engage(self, name: str | None) -> None:
        """Make this adapter the active one; None: no adapter is active."""
        if name == self._engaged:
            return
        for layer in self._tuned:
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name)
        self._experts.engage(name)
        self._engaged = name


def _refused(module: Any, names: set[str]) -> set[str]:
    """Return which of these names of linear layers PEFT does not adapt in a model."""
    from peft import LoraConfig as PeftConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    refused = names & MAMBA_LAYERS if module.config.model_type in MAMBA_TYPES else set()
    trial = PeftConfig(target_modules=sorted(EXPERT_LAYERS))
    convert_peft_config_for_transformers(trial, module, None)
    return refused | (names & EXPERT_LAYERS - set(trial.target_modules or ()))


class Adapter(Policy):
    """A LoRA adapter over a base model. Its tensors are named as in PEFT's adapter_model.safetensors."""

    weights_file = ADAPTER_WEIGHTS

    def __init__(self, base: BaseModel, name: str, files: Mapping[str, bytes], seed: int) -> None:
        super().__init__(base.policy.module, files, base.policy.device)
        self.base, self.base_model = base, base.snapshot.ref
        # The base model's cost: the layout of data, and so the last bits, must not depend on other adapters.
        self.pair_cost = base.policy.pair_cost
        self.name = name
        own = f".{name}."
        outer_name = base.policy.layout.outer_name
        self._parameters = {
            PREFIX + outer_name(key.replace(own, ".")): parameter
            for key, parameter in self.module.named_parameters()
            if own in key
        }
        generator = torch.Generator().manual_seed(seed)
        for key in sorted(self._parameters):
            parameter = self._parameters[key]
            wide = torch.promote_types(parameter.dtype, torch.float32)
            drawn = torch.zeros(parameter.shape, dtype=wide)
            if "lora_A" in key:
                bound = 1.0 / math.sqrt(parameter.shape[-1])
                drawn.uniform_(-bound, bound, generator=generator)
            parameter.data = drawn.to(self.device)

    @cached_property
    def ends_with_output_layer(self) -> bool:
        return self.base.policy.ends_with_output_layer

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._parameters)

    def held(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def places(self) -> dict[str, TensorPart]:
        return {name: whole_place(name, parameter) for name, parameter in self._parameters.items()}

    @contextmanager
    def engaged(self) -> Iterator[None]:
        self.base.engage(self.name)
        yield

    def check_checkpoint(self, directory: Path, base_model: str | None) -> None:
        super().check_checkpoint(directory, base_model)
        ref = self.base.snapshot.ref
        if base_model != ref.policy:
            raise UserError(
                f"{directory} is a checkpoint of an adapter over {base_model}; model.path holds "
                f"{ref.policy}. Set model.path back, or start another --out."
            )
        check_same_settings(self.files[ADAPTER_CONFIG], directory, "Set it back, or start another --out.")

    def begin_with(self, directory: Path) -> None:
        """Load the weights of the PEFT adapter in a directory.

        Raises:
            UserError: there is no adapter, or it has another base model, rank, alpha or targets.
        """
        named = check_same_settings(self.files[ADAPTER_CONFIG], directory, BEGINNING_REMEDY)
        base = self.base.snapshot.ref.policy
        if SnapshotRef(named, 0, 0).is_base_model and named != base:  # a hub id does not identify content
            raise UserError(
                f"lora.path: {directory} is an adapter over {named}, and model.path holds {base}. Name another "
                "adapter, or set model.path to the model that it was trained on."
            )
        with open_tensors(directory, ADAPTER_WEIGHTS) as tensors:
            ours = {name: tuple(tensor.shape) for name, tensor in self.state().items()}
            others = ours.items() ^ tensors.shapes.items()
            if others:
                name, shape = min(others)
                raise UserError(
                    f"lora.path: {directory} is an adapter of another model: {len(others)} tensors are there or here "
                    f"alone, for example {name} of the shape {list(shape)}. Name an adapter of model.path's model."
                )
            load_weights(Mesh(), directory, self.state(), self.places(), tensors)


class _Alone(Policy):
    """The base model without any adapter."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__(base.policy.module, base.policy.files, base.policy.device)
        self._base = base

    @contextmanager
    def engaged(self) -> Iterator[None]:
        self._base.engage(None)
        yield


def load_base(
    path: str, device: str, mesh: Mesh | None = None, dtype: Literal["stored", "bfloat16", "nf4"] = "stored"
) -> BaseModel:
    """Load the model of a directory or hub id, as it is stored, rounded to bfloat16, or with its linear layers in nf4
    and the rest in bfloat16. Learner and workers have the same weights: those of nf4 are published as their values in
    bfloat16; on a CPU, 16 bits are held in float32, whose products are up to a hundred times faster there. `mesh`: the
    ranks that the model is cut over.

    Raises:
        UserError: the model or the device is not usable.
    """
    directory = find_model(path)
    snapshot = read_base_model(directory)
    largest = max((tensor.num_bytes, tensor.dtype) for tensor in snapshot.tensors.values())[1]
    is_rounded = dtype != "stored" and "F32" in {tensor.dtype for tensor in snapshot.tensors.values()}
    is_half, on_cpu = is_rounded or largest in ("BF16", "F16"), pick_device(device).type == "cpu"
    stored_as = "float32" if is_half and on_cpu else "bfloat16" if is_half and is_rounded else "stored"
    policy = load_policy(str(directory), stored_as, device, mesh, in_4_bits=dtype == "nf4")
    decoded = _decoded(policy)
    if is_rounded or decoded:
        snapshot = rounded(snapshot, policy.layout.float32_names, decoded)
    if is_rounded and stored_as != "bfloat16":
        _round_to_bfloat16(policy)
    return BaseModel(policy, snapshot)


def _round_to_bfloat16(policy: Policy) -> None:
    float32_names = {policy.layout.places[name].name for name in policy.layout.float32_names}
    for name, tensor in policy.held().items():
        if name not in float32_names and tensor.dtype == torch.float32:
            tensor.copy_(tensor.to(torch.bfloat16))


def _decoded(policy: Policy) -> dict[str, StoredTensor]:
    """Return the tensors that a model in 4 bits computes with, by stored name; read, they are decoded."""
    layers, tensors = layers_in_4_bits(policy.module), dict[str, StoredTensor]()
    for key, place in policy.places().items():
        if (layer := layers.get(place.name.removesuffix(".weight"))) is not None and place.name.endswith(".weight"):
            num_bytes = math.prod(place.shape) * torch.bfloat16.itemsize
            tensors[key] = StoredTensor("BF16", place.shape, num_bytes, partial(_read_decoded, layer, place))
    experts = sum(parameter.numel() for parameter in policy.module.parameters() if parameter.dim() > 2)
    if layers and experts > LEFT_SHARE * num_weights(policy.module):
        log.warning(
            "learner.quantised: experts stay in 16 bits, %.0f %% of this model's weights",
            100 * experts / num_weights(policy.module),
        )
    return tensors


def _read_decoded(layer: Nf4Linear, place: TensorPart, start: int, stop: int) -> bytes | memoryview:
    return stored(place.of(layer.weight)).read(start, stop)


def load_trained(config: Config, device: str, mesh: Mesh | None = None) -> Policy:
    """Load the policy that a run trains, at version 0: the model, or an adapter over it. `mesh`: the ranks that the
    model is cut over.

    Raises:
        UserError: the model can't be loaded, or a target matches no layer; see also `Adapter.begin_with`.
    """
    if not config.lora.rank:
        return load_policy(config.model.path, "float32", device, mesh)
    dtype: Literal["stored", "bfloat16", "nf4"] = "stored"
    if config.learner.quantised == "base":
        require_bitsandbytes("learner.quantised = 'base'")
        dtype = "nf4"
    elif config.model.snapshot_dtype == "bfloat16":
        dtype = "bfloat16"
    adapter = load_base(config.model.path, device, mesh, dtype).adapter(config.lora, config.run.seed)
    if config.lora.path:
        adapter.begin_with(Path(config.lora.path))
    return adapter


def check_trained(config: Config) -> RouteShape | None:
    """Check that the policy of a run can be built, as far as a local model directory tells without reading weights.
    Return the shape of the routes that it replays, if it replays any.

    Raises:
        UserError: as `load_trained`.
    """
    policy = outline_policy(config.model.path)
    routes = Routing(policy.module).shape if config.learner.routing_replay else None
    if config.lora.rank:
        base = BaseModel(policy, Snapshot(SnapshotRef("", 0, 0), {}, policy.files))
        adapter = base.adapter(config.lora, config.run.seed)
        if config.lora.path:
            check_same_settings(adapter.files[ADAPTER_CONFIG], Path(config.lora.path), BEGINNING_REMEDY)
    return routes


def load_merged(base: str, adapter: Path, device: str, in_4_bits: bool = False) -> Policy:
    """Return the model `base` in float32, with the adapter in the directory `adapter` merged into it. `in_4_bits`: the
    adapter was trained over the base in nf4, and is merged into the values that this has.

    Raises:
        UserError: there is no such model, or the adapter does not fit it.
    """
    policy = load_policy(base, "float32", device)
    scale = lora_factors(parse_json(_read(adapter / ADAPTER_CONFIG))).scale
    factors = load_file(adapter / ADAPTER_WEIGHTS)
    if in_4_bits:
        require_bitsandbytes("learner.quantised = 'base'")
        _round_to_bfloat16(policy)
        round_to_nf4(policy.module)
    weights = {policy.layout.outer_name(name): tensor for name, tensor in policy.held().items()}
    outer, experts = policy.layout.outer_name, ExpertFactors(policy.module).parts
    stacks = {
        outer(name) + one.suffix: (name, part, one) for name, part in experts.items() for one in stacked_maps(part)
    }
    try:
        for name in [name for name in factors if name.endswith(DOWN)]:
            layer = name.removeprefix(PREFIX).removesuffix(DOWN)
            down, up = (factors.pop(PREFIX + layer + end).to(policy.device) for end in (DOWN, UP))
            if layer in stacks:
                inner, part, one = stacks[layer]
                target, low = weights[outer(f"{inner}.{one.parameter}")], stacked(down, up, one.num_experts)
                (target.mT if part.is_transposed else target).baddbmm_(low.b_OR, low.a_RI, alpha=scale)
            else:
                weights[f"{layer}.weight"].add_(up @ down, alpha=scale)
        if factors:
            raise UserError(f"{adapter} has {min(factors)}, which is not a factor of a linear layer of {base}.")
    except (KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{adapter} is not an adapter of {base}: {error!r}.") from error
    return policy


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
