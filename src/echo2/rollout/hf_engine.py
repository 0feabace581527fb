"""The engine `transformers`: any Hugging Face causal language model, slower than `compact`, in the same decode loop.

Prompts are padded on the left. Code that comes with a model (`trust_remote_code`) is never run.

Shape suffixes: R = prompts, B = rows, T = tokens of a row, V = vocabulary.
"""

from __future__ import annotations

import inspect
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from echo2.errors import PeerError, UserError
from echo2.rollout.snapshot_files import end_tokens, read_config
from echo2.rollout.snapshot_tensors import FLOAT_DTYPES, read_tensor, require_names
from echo2.rollout.torch_engine import Cache, Limits
from echo2.types import Snapshot

NO_POSITION_LIMIT = 1 << 20
"""Context length taken for models whose config.json names none (relative positions); the longest max_tokens allowed."""


class HfCache:
    """transformers' own cache, and which of its columns are padding."""

    def __init__(self, past: Any, mask_BT: Tensor) -> None:
        self.past = past
        self.mask_BT = mask_BT

    def select(self, rows: Tensor) -> HfCache:
        self.past.batch_select_indices(rows)
        return HfCache(self.past, self.mask_BT[rows])


class HfModel:
    """One policy. Implements `torch_engine.Model`."""

    def __init__(self, module: Any, end: tuple[int, ...]) -> None:
        self._module = module
        config = module.config
        self._device: torch.device = module.device
        positions = getattr(config, "max_position_embeddings", None) or NO_POSITION_LIMIT
        self._limits = Limits(int(config.vocab_size), int(positions), end)
        self._takes_positions = "position_ids" in inspect.signature(module.forward).parameters

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def architecture(self) -> str:
        values = self._module.config.to_dict()
        values.pop("_name_or_path", None)  # where it was read from: a directory that is gone
        return json.dumps([values, str(self._module.dtype)], sort_keys=True, default=str)

    def prefill(self, prompts: Sequence[array[int]], max_tokens: int) -> tuple[HfCache, Tensor]:
        """Read the prompts. The cache grows as it goes, whatever `max_tokens`."""
        from transformers import DynamicCache

        columns = max(len(prompt) for prompt in prompts)
        tokens_RT = torch.zeros((len(prompts), columns), dtype=torch.long)
        mask_RT = torch.zeros((len(prompts), columns), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_RT[row, columns - len(prompt) :] = torch.tensor(prompt)
            mask_RT[row, columns - len(prompt) :] = 1
        cache = HfCache(DynamicCache(config=self._module.config), mask_RT.to(self._device))
        return cache, self._forward(cache, tokens_RT.to(self._device))

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        """Read one token per row."""
        assert isinstance(cache, HfCache)
        cache.mask_BT = torch.cat((cache.mask_BT, cache.mask_BT.new_ones((len(tokens_B), 1))), dim=1)
        return self._forward(cache, tokens_B[:, None])

    def _forward(self, cache: HfCache, tokens_BT: Tensor) -> Tensor:
        inputs: dict[str, Any] = {}
        if self._takes_positions:
            # A row that has ended may be stepped past the last position until it is dropped; its logits are not used.
            position_BT = (cache.mask_BT.cumsum(-1) - 1).clamp(0, self._limits.max_positions - 1)
            inputs["position_ids"] = position_BT[:, -tokens_BT.shape[1] :]
        output = self._module(
            input_ids=tokens_BT,
            attention_mask=cache.mask_BT,
            past_key_values=cache.past,
            use_cache=True,
            **inputs,
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV


def build_transformers(snapshot: Snapshot, device: torch.device) -> HfModel:
    """The model of a snapshot, in the dtype of its largest tensor (config.json names the learner's).

    Raises:
        PeerError: the snapshot is torn or wrong.
        UserError: transformers does not know the architecture.
    """
    module = _empty_module(snapshot)
    state: dict[str, Tensor] = module.state_dict()
    # Tied weights are one tensor under several names; a snapshot holds it under one of them.
    names_of: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, tensor in state.items():
        names_of.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
    wanted = {next((name for name in names if name in snapshot.tensors), names[0]) for names in names_of.values()}
    require_names(snapshot, wanted, set(state))
    for name in sorted(wanted):
        state[name].copy_(read_tensor(name, snapshot.tensors[name], tuple(state[name].shape)))
    return HfModel(module.to(device).eval(), end_tokens(snapshot.files))


def _empty_module(snapshot: Snapshot) -> Any:
    """The architecture with weights yet to be filled in."""
    from transformers import AutoConfig, AutoModelForCausalLM

    read_config(snapshot.files)
    stored = max(snapshot.tensors.values(), key=lambda tensor: memoryview(tensor.data).nbytes, default=None)
    if stored is None or stored.dtype not in FLOAT_DTYPES:
        raise PeerError("bad_snapshot", "there are no floating-point weights")
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(snapshot.files["config.json"])
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            module = AutoModelForCausalLM.from_config(
                config, dtype=FLOAT_DTYPES[stored.dtype], attn_implementation="sdpa", trust_remote_code=False
            )
        except (OSError, KeyError, ValueError, TypeError, ImportError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"transformers cannot build this model: {first_line}. Models with code of their own are not run."
            ) from error
    if any(tensor.is_meta for tensor in module.state_dict().values()):
        raise PeerError("bad_snapshot", "the architecture leaves tensors without memory")
    return module
