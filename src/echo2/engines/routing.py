"""The choices of a mixture's routers: recorded while tokens are sampled, replayed while the policy learns, judged.

A router scores all experts for each token and takes the k best with `torch.topk`, in all families of transformers in
the router's own class. While a router runs, a call of `topk` over its experts is answered here: with its own choice
(recorded), or with given experts and their *live* scores (replayed), so that the router keeps its gradient. This works
in whichever thread the router runs, as activation checkpointing needs, whose second pass may be in autograd's.

A given choice is judged by its *regret*: how much lower the router scores these experts than its own choice, in units
of the difference between its own choice and the mean expert. 0: the same experts; about 1: any experts. Rounding flips
experts that are nearly equal, whose regret is small.

Shape suffixes: N = tokens of a pass, row by row; B = rows, T = columns; L = layers with a router, k = experts chosen
for a token, E = experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from echo2.core.decide.model_config import num_chosen, num_experts
from echo2.core.errors import UserError
from echo2.transport.routes import RouteShape

#: Place of a token whose own choice stays.
LIVE = -1
ASKED = "learner.routing_replay = true"


class Routing:
    """The routers of one module. They choose by themselves except in the contexts that this class gives; one at a time.

    Raises:
        UserError: the module has no routers, or they choose in another way.
    """

    def __init__(self, module: Any) -> None:
        config = module.config.get_text_config()
        values = config.to_dict()
        experts, chosen = num_experts(values), num_chosen(values)
        if not 0 < chosen < experts:
            raise UserError(f"{ASKED}: {config.model_type} is not a mixture of experts. Leave it out.")
        routers = _routers(module, experts)
        if not routers:
            raise UserError(
                f"{ASKED}: the routers of {config.model_type} do not choose with torch.topk in a class of their own, "
                "so their choices cannot be recorded. Leave it out."
            )
        self.shape = RouteShape(len(routers), chosen, experts)
        self._model_type = config.model_type
        self._given_NLk: Tensor | None = None
        self._watched: Watched | None = None
        self._chose: set[int] = set()
        for layer, router in enumerate(routers):
            router.forward = partial(_forward, self, layer, router.forward)

    @property
    def is_active(self) -> bool:
        return self._given_NLk is not None or self._watched is not None

    @contextmanager
    def replaying(self, ids_NLk: Tensor) -> Iterator[None]:
        """Inside, routers take these experts; `LIVE` keeps their own. The backward pass belongs inside, too."""
        self._given_NLk, self._chose = ids_NLk, set()
        try:
            yield
            self._check()
        finally:
            self._given_NLk = None

    @contextmanager
    def watching(self) -> Iterator[Watched]:
        """Record the routers' own choices in a pass. Within `replaying`, judge those that are taken."""
        watched = self._watched = Watched(self.shape, self._given_NLk)
        self._chose = set()
        try:
            yield watched
            self._check()
        finally:
            self._watched = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, routers choose by themselves."""
        given_NLk, watched = self._given_NLk, self._watched
        self._given_NLk = self._watched = None
        try:
            yield
        finally:
            self._given_NLk, self._watched = given_NLk, watched

    def _check(self) -> None:
        if len(self._chose) != self.shape.layers:
            raise UserError(
                f"{ASKED}: {len(self._chose)} of {self.shape.layers} routers of {self._model_type} chose "
                f"{self.shape.chosen} of {self.shape.experts} experts with torch.topk, so their choices cannot be "
                "recorded. Leave it out."
            )

    def choice(self, layer: int, scores_NE: Tensor, own: Any) -> Any:
        """Return the router's answer of `topk`, in place of its `own`."""
        self._chose.add(layer)
        if self._watched is not None:
            self._watched.see(layer, scores_NE, own)
        if self._given_NLk is None:
            return own
        given_Nk = self._given_NLk[:, layer].to(own[1].dtype)
        ids_Nk = torch.where(given_Nk == LIVE, own[1], given_Nk)
        return torch.return_types.topk((scores_NE.gather(-1, ids_Nk), ids_Nk))


class Watched:
    """The choices of one pass."""

    def __init__(self, shape: RouteShape, given_NLk: Tensor | None) -> None:
        self._given_NLk = given_NLk
        self._ids: list[Tensor | None] = [None] * shape.layers
        self._regrets: list[Tensor] = []

    def see(self, layer: int, scores_NE: Tensor, own: Any) -> None:
        """Record a router's choice, and judge the given one."""
        self._ids[layer] = own[1]
        if self._given_NLk is not None:
            self._regrets.append(_regret(scores_NE, own, self._given_NLk[:, layer]))

    @property
    def ids_NLk(self) -> Tensor:
        """The experts that the routers chose, as int16."""
        return torch.stack([ids for ids in self._ids if ids is not None], dim=1).to(torch.int16)

    @property
    def regret_N(self) -> Tensor:
        """The largest regret of each token's given experts, over the layers; infinite where its own choice stays."""
        return torch.stack(self._regrets).amax(0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The choices of a batch, column by column as it was read: int16, `LIVE` where they were not recorded."""

    shape: RouteShape
    ids_BTLk: Tensor

    def nothing(self, rows: int, columns: int) -> Recorded:
        size = rows, columns, self.shape.layers, self.shape.chosen
        return replace(self, ids_BTLk=torch.full(size, LIVE, dtype=torch.int16, device=self.ids_BTLk.device))

    def add(self, ids_NLk: Tensor) -> Recorded:
        added_BTLk = ids_NLk.unflatten(0, (len(self.ids_BTLk), -1))
        return replace(self, ids_BTLk=torch.cat((self.ids_BTLk, added_BTLk), dim=1))

    def select(self, rows: Tensor, newest: int, columns: int) -> Recorded:
        """Return the newest columns of these rows, with others before them that were not recorded."""
        kept_BTLk = self.ids_BTLk[rows][:, self.ids_BTLk.shape[1] - newest :]
        return replace(self, ids_BTLk=functional.pad(kept_BTLk, (0, 0, 0, 0, columns - newest, 0), value=LIVE))

    def read(self, row: int, is_token_T: Tensor, length: int) -> bytes:
        """Return the routes of a row's first tokens as bytes; empty if some were not recorded."""
        ids_TLk = self.ids_BTLk[row][is_token_T][:length]
        if bool((ids_TLk == LIVE).any()):
            return b""  # the row began before routes were asked for
        return ids_TLk.cpu().numpy().astype(self.shape.dtype).tobytes()


def _regret(scores_NE: Tensor, own: Any, given_Nk: Tensor) -> Tensor:
    """Return the regret of each token's given experts. Experts that group-limited routing has ruled out (-inf) count as
    the worst of the others."""
    scores_NE = scores_NE.detach().double()
    worst_N1 = scores_NE.masked_fill(scores_NE.isinf(), float("inf")).amin(-1, keepdim=True)
    scores_NE = torch.where(scores_NE.isinf(), worst_N1, scores_NE)
    best_N = scores_NE.gather(-1, own[1]).mean(-1)
    lost_N = best_N - scores_NE.gather(-1, given_Nk.long().clamp(min=0)).mean(-1)
    regret_N = lost_N / (best_N - scores_NE.mean(-1)).clamp(min=1e-9)
    return regret_N.masked_fill((given_Nk == LIVE).any(-1), float("inf"))


class _Choosing(TorchFunctionMode):
    """Answers `topk` over the experts while one router runs."""

    def __init__(self, routing: Routing, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            scores, shape = args[0], self._routing.shape
            # Groups of experts, which some routers choose first, have one dimension more, or are fewer.
            if scores.dim() == 2 and scores.shape[-1] == shape.experts and answer[1].shape[-1] == shape.chosen:
                return self._routing.choice(self._layer, scores, answer)
        return answer


def _forward(routing: Routing, layer: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not routing.is_active:
        return forward(*args, **named)
    with _Choosing(routing, layer):
        return forward(*args, **named)


def routing_of(module: Any) -> Routing | None:
    """Return the routing of a mixture whose choices can be recorded; None for any other module."""
    try:
        return Routing(module)
    except UserError:
        return None


def _routers(module: nn.Module, experts: int) -> list[nn.Module]:
    """Return the modules that call `topk` and hold scores of the experts; the innermost where they are nested."""
    kinds = {kind for kind in {type(part) for part in module.modules()} if _calls_topk(kind)}
    callers = [part for part in module.modules() if type(part) in kinds and _scores(part, experts)]
    return [part for part in callers if not any(other in callers for other in part.modules() if other is not part)]


def _calls_topk(kind: type) -> bool:
    functions = (value for one in kind.__mro__ if one is not nn.Module for value in vars(one).values())
    codes = (getattr(inspect.unwrap(each), "__code__", None) for each in functions if callable(each))
    return any("topk" in code.co_names for code in codes if code is not None)


def _scores(part: nn.Module, experts: int) -> bool:
    tensors = (
        tensor
        for one in (part, *part.children())
        for tensor in (*one.parameters(recurse=False), *one.buffers(recurse=False))
    )
    return any(tensor.dim() in (1, 2) and tensor.shape[0] == experts for tensor in tensors)
