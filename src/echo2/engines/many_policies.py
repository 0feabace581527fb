"""Decodes rows of many policies in one batch: each row has its own adapter over a common base model.

Linear maps of the base model are computed for all rows at once, the low-rank part of each adapter only for its own
rows. A policy is loaded once and never changes. `ManyPolicies` is a `decode_loop.Decoder` whose installed snapshot is
the base model; each request names its policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from echo2.core.errors import InvariantError, PeerError
from echo2.core.types import Snapshot
from echo2.engines.adapter import read_adapter
from echo2.engines.compact import CompactModel, build_compact
from echo2.engines.engine import SampleRequest
from echo2.engines.rows import Cache, Limits
from echo2.engines.torch_engine import Model, TorchDecoder


@dataclass(frozen=True, slots=True)
class PolicyRequest(SampleRequest):
    """A request to one policy of a `ManyPolicies`. `owner`, `policy_name`: only requests that have both in common
    continue from each other's caches, so nobody can tell by the time what others have asked."""

    policy: CompactModel | None = None
    policy_name: str = ""
    owner: str = ""


class ManyPolicies(TorchDecoder):
    """A `Decoder` of a base model and adapters over it. A request without a stop token ends at `max_tokens`: the caller
    decides whether the model's `end_tokens` are among its stop tokens.
    """

    def __init__(self, base: Snapshot, device: str = "auto") -> None:
        """Raises: as `Decoder.load`."""
        super().__init__(build_compact, device)
        self.load(base)
        ref, model, limits = self._policy()
        assert isinstance(model, CompactModel)
        self.base, self.end_tokens = model, limits.end_tokens
        self._current = (ref, model, replace(limits, end_tokens=()))
        self._mixed: Model | None = None

    def adapter(self, snapshot: Snapshot) -> CompactModel:
        """Return the policy of an adapter over this base model.

        Raises:
            PeerError: the adapter is over another base model, or is not a LoRA adapter that fits.
        """
        ref, model, _ = self._policy()
        if snapshot.base_model is None or snapshot.base_model.policy != ref.policy:
            raise PeerError("bad_adapter", f"an adapter over {snapshot.base_model}, not over {ref}")
        assert isinstance(model, CompactModel)
        with torch.inference_mode():
            return model.adapted(read_adapter(snapshot, model.linears, self._device))

    def _rows_model(self, model: Model) -> Model:
        if self._mixed is None:
            self._mixed = self._mix()
        return self._mixed

    def _mix(self) -> Model:
        rows_of: dict[int, list[int]] = {}
        policies: dict[int, CompactModel] = {}
        for place, request in enumerate(self._rows.requests):
            policy = self._policy_of(request)
            policies[id(policy)] = policy
            rows_of.setdefault(id(policy), []).append(place)
        if len(policies) == 1:
            return next(iter(policies.values()))
        return self.base.mixed([(policies[key], self._on_device(rows)) for key, rows in rows_of.items()])

    def _read_prompts(self, model: Model, added: Mapping[int, SampleRequest]) -> tuple[Cache, list[int]]:
        by_policy: dict[int, dict[int, SampleRequest]] = {}
        for number, request in added.items():
            by_policy.setdefault(id(self._policy_of(request)), {})[number] = request
        cache: Cache | None = None
        row_of: dict[int, int] = {}
        num_rows = 0
        for requests in by_policy.values():
            fresh, rows = super()._read_prompts(self._policy_of(next(iter(requests.values()))), requests)
            row_of |= {number: num_rows + row for number, row in zip(requests, rows, strict=True)}
            every = range(max(rows) + 1)
            if cache is None:
                cache = fresh
            else:
                cache = cache.join(self._on_device(range(num_rows)), fresh, self._on_device(every))
            num_rows += len(every)
        assert cache is not None
        return cache, [row_of[number] for number in added]

    def _change(self, model: Model, limits: Limits, added: Mapping[int, SampleRequest]) -> None:
        self._mixed = None
        super()._change(model, limits, added)

    def _prefix_cache(self, request: SampleRequest) -> Cache | None:
        """Return the cache of a prefix that its owner's earlier requests to this policy have read. Running rows may be
        of other policies."""
        return self._kept_prefix(request)

    def _scope(self, request: SampleRequest) -> bytes:
        assert isinstance(request, PolicyRequest)
        return hashlib.sha256(f"{request.owner}\n{request.policy_name}".encode()).digest()

    def _policy_of(self, request: SampleRequest) -> CompactModel:
        if not isinstance(request, PolicyRequest):
            raise InvariantError("a request without a policy reached an engine of many")
        return request.policy or self.base
