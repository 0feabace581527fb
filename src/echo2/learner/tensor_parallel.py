"""Tensor parallelism: neighbouring ranks split the matrix products of each layer, by the plan that transformers'
configuration of the model names (`base_model_tp_plan`).

A weight that is cut by its rows gives a part of the outputs, one cut by its columns takes a part of the inputs; ranks
add up what the second kind gives. Between the two each rank computes with its own attention heads and its own part of
the feed-forward layer. Everything outside of the layers stays as FSDP has it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from echo2.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The plan's names, and the dimension of the weight that is cut.
CUT_DIMENSIONS = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}
LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
#: Modules that every rank has and applies to its own heads: their gradients are sums over the ranks.
SUMMED = "replicated_with_grad_allreduce"


class ProductCut:
    """How the layers of a model are cut over `size` ranks."""

    def __init__(self, module: nn.Module, size: int) -> None:
        """Raises: UserError, if the model has no plan that can be followed, or `size` does not divide it."""
        whole: Any = module
        base = whole.base_model
        plan = getattr(base.config, "base_model_tp_plan", None) or {}
        self._styles: dict[nn.Module, str] = {
            part: plan[name] for key, part in base.named_modules() if (name := LAYER_NUMBER.sub(".*", key)) in plan
        }
        unknown = sorted(set(plan.values()) - {*CUT_DIMENSIONS, SUMMED})
        unplanned = self._unplanned(base)
        if unknown or unplanned or not self._styles:
            why = "has no plan" if not self._styles else f"has a plan without its {unplanned}"
            why = f"has {', '.join(unknown)} in its plan, which this learner does not do" if unknown else why
            raise UserError(
                f"learner.tensor_parallel = {size}: transformers' {base.config.model_type} {why}. Leave it at 1: "
                "learner.ranks alone cuts weights, gradients and moments just as far."
            )
        config = base.config.get_text_config()
        heads = [config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads]
        cut: list[tuple[Any, str]] = [item for item in self._styles.items() if item[1] in CUT_DIMENSIONS]
        widths = [part.weight.shape[CUT_DIMENSIONS[style]] for part, style in cut]
        shareable = math.gcd(*heads, *widths)
        if shareable % size:
            raise UserError(
                f"learner.tensor_parallel = {size} does not divide this model's heads ({heads[0]}, {heads[1]} of keys "
                f"and values) or layers. Set it to a divisor of {shareable}."
            )

    def _unplanned(self, base: nn.Module) -> str:
        """Return the name of a module that sees one rank's part of a product and is not in the plan; empty: none."""
        for key, parent in base.named_modules():
            children = dict(parent.named_children())
            if any(self._styles.get(child) == "colwise" for child in children.values()):
                for name, child in children.items():
                    if child not in self._styles and list(child.parameters()):
                        return f"{key}.{name}"
        return ""

    def cut(self, layer: nn.Module, ranks: DeviceMesh) -> None:
        """Cut the products of a layer over the ranks, in place; each rank keeps its own part of the weights it has."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {
            "colwise": ColwiseParallel(),
            "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
            "rowwise": RowwiseParallel(),
            "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        }
        named = ((key, self._styles.get(part, SUMMED)) for key, part in layer.named_modules())
        plan = {key: styles[style] for key, style in named if style in styles}
        parallelize_module(layer, ranks, plan, src_data_rank=None)

    def summed(self, layer: nn.Module) -> list[Tensor]:
        """Return the parameters of a layer whose gradients are sums over the ranks that split its products."""
        parts = [part for part in layer.modules() if self._styles.get(part) == SUMMED]
        return [parameter for part in parts for parameter in part.parameters()]
