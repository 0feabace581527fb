"""The trainer: verbs on a policy over data. All training code is a client of these verbs.

    forward(policy, data)                   logprobs of the data, no gradients; `likely`: and of the likeliest tokens
    forward_backward(policy, data, loss)    add the data's gradients; any number of times, any split
    optim_step(policy, adam, divisor)       one AdamW step on the added gradients
    save_weights_for_sampler(policy)        weights and files of a snapshot, read in the background
    save_state / load_state                 everything needed to continue, bit for bit

The trainer knows policies, data and optimizers. Groups, advantages, schedules, versions and steps belong to a client
(`learner/grpo/`). A verb on one policy leaves the others unchanged: policies share nothing, or a frozen model.

Gradients are *un-normalised sums* over loss tokens, each times its weight. They are divided once, at the step, and
clipped after that. So a streamed step equals the step on the whole batch (up to the order of float sums). Micro-batches
are limited by tokens, so memory does not grow with the data of a call; only a single datum is never cut. When memory
runs out, micro-batches are halved from then on, and the data of the failed one are trained again. Parameters that its
backward pass had already reached (it goes from the output to the input) keep their gradient and take no second one.

Same data in the same order and calls give the same bits on the same machine (one thread count, one torch).

With several ranks (`learner/core/mesh.py`) every rank makes the same calls. Each runs its share of a call's data, in as
many passes as the rank that has most. Gradients, norms and logprobs cover the data of all ranks.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from echo2.core.devices import is_out_of_memory, map_large_blocks
from echo2.core.errors import InvariantError, UserError
from echo2.core.types import StoredTensor
from echo2.engines.hub_layout import TensorPart, whole_place
from echo2.learner.core import checkpoint
from echo2.learner.core.batch import (
    Layout,
    PackedBatch,
    by_datum,
    collate,
    microbatches,
    num_tokens_run,
    rows_by_datum,
)
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import LossTokens
from echo2.learner.core.mesh import Mesh, ModuleRun, shares
from echo2.learner.core.model import DTYPES, Policy, stored
from echo2.learner.core.optimizer import gradient_of, make_optimizer, moments_of
from echo2.learner.core.publication import BorrowedWeights, UnlinkedFile, share_of
from echo2.learner.core.quantised import num_weights
from echo2.learner.core.state import (
    OPTIMIZER_FILE,
    Saving,
    ShardedTensors,
    begin_saving,
    load_moments,
    load_weights,
    open_tensors,
)
from echo2.weights.format.segments import cut_stream, pieces, tensor_index
from echo2.weights.format.snapshot_files import model_type

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Logprobs of a datum, the most likely tokens at its loss tokens (int32), and their logprobs (float32).
Likely: TypeAlias = "tuple[array[float], bytes, bytes]"

#: (logp [n] with gradient, data of the n tokens) -> (losses [n] with gradient, the client's output). Called once per
#: micro-batch. The losses must not depend on how the data is cut: see `learner/core/losses.py`.
Loss = Callable[[Tensor, LossTokens], tuple[Tensor, T]]
#: From this size on, activations on a CPU are so large that malloc must return them to the system (`devices.py`).
LARGE_PARAMETERS = 50_000_000
#: Key beside the client's data in a checkpoint of an adapter: the policy id of its base model.
BASE_MODEL = "base_model"


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Parameters of one AdamW step. `grad_clip`: largest norm of the divided gradient; 0: no clipping."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 0.0


@dataclass(frozen=True, slots=True)
class ForwardBackward(Generic[T]):
    """`logprobs[i]` is 'd' [T] of datum i, 0 where no token is predicted. `outputs`: the loss's outputs, one for each
    micro-batch of this rank."""

    logprobs: list[array[float]]
    outputs: list[T]


@dataclass(frozen=True, slots=True)
class OptimStep:
    """`grad_norm` is before clipping. `updated`: False if there was no gradient and nothing changed."""

    grad_norm: float
    updated: bool


@dataclass(slots=True)
class _Trained:
    """A policy, the function that runs computations with its weights, and its optimizer (None: it is never trained).
    `readers`: background readers of the weights (a checkpoint being written, a snapshot being encoded); their results
    are checked elsewhere. `reached`: names of the parameters that already have their gradient from the backward pass
    under way. Their hooks fill it; a hook that led to its own parameter would keep it for ever.
    """

    policy: Policy
    run: ModuleRun
    layout: Layout
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    readers: list[Future[Any]] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)


class Trainer:
    """Owns policies, their gradients and their optimizers. To be used from one thread."""

    def __init__(self, tokens_per_microbatch: int, layout: Layout = "auto", mesh: Mesh | None = None) -> None:
        self.tokens_per_microbatch = tokens_per_microbatch  # reduced when memory runs out
        self._layout = layout
        self._mesh = mesh or Mesh()
        self._policies: dict[str, _Trained] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def add(
        self, name: str, policy: Policy, is_trained: bool = True, in_8_bits: bool = False, offloaded: str = ""
    ) -> None:
        """Add a policy under a new name. `is_trained` False: it only answers `forward`. `in_8_bits` and `offloaded`: of
        its moments (`make_optimizer`).

        Raises:
            UserError: the name is taken, or there are more ranks than the policy can be cut into.
        """
        if name in self._policies:
            raise UserError(f"There is a policy {name!r} already: give the other one another name.")
        run = self._mesh.shard(policy.module)
        parameters = policy.trained_parameters()
        layout: Layout = self._layout if policy.honours_masks else "plain"
        kinds = in_8_bits, offloaded
        optimizer = make_optimizer(list(parameters.values()), policy.device, *kinds) if is_trained else None
        if policy.device.type == "cpu" and num_weights(policy.module) >= LARGE_PARAMETERS:
            map_large_blocks()
        trained = self._policies[name] = _Trained(policy, run, layout, parameters, optimizer)
        with policy.engaged():  # an adapter that is not engaged takes no gradients
            for key, parameter in parameters.items() if is_trained else ():
                parameter.register_post_accumulate_grad_hook(partial(_note, trained.reached, key))

    def remove(self, name: str) -> None:
        """Forget a policy, its gradients and its optimizer, once no background reader uses its weights.

        Raises:
            UserError: there is no such policy.
        """
        self.finish_reading(name)
        del self._policies[name]

    def tensors(self) -> list[Any]:
        """Return what refers to the policies' tensors: weights, gradients, moments. No background reader uses them."""
        for name in self._policies:
            self.finish_reading(name)
        return [(one.policy.module, one.optimizer and one.optimizer.state) for one in self._policies.values()]

    def num_tokens_run(self, name: str, data: Sequence[Datum]) -> int:
        """Return the number of tokens in forward passes over the data; it limits micro-batches."""
        return num_tokens_run(data, self._policy(name).layout != "plain")

    def forward(self, name: str, data: Sequence[Datum], temperature: float = 1.0) -> list[array[float]]:
        """Return the logprobs 'd' [T] of each datum, 0 where none is predicted; logits are divided by `temperature`.

        Raises: as `likely`.
        """
        return [logprobs for logprobs, _, _ in self.likely(name, data, temperature)]

    def likely(
        self, name: str, data: Sequence[Datum], temperature: float = 1.0, top_k: int = 0, num_tokens: int = 0
    ) -> list[Likely]:
        """Return for each datum the logprobs 'd' [T], 0 where none is predicted, and for its loss tokens the `top_k`
        most likely of the first `num_tokens` tokens of the vocabulary and their logprobs.

        Raises: as `forward_backward`.
        """
        trained = self._policy(name)

        def run(part: Sequence[Datum]) -> list[Likely]:
            batch = self._packed(trained, part)
            with trained.policy.replaying(batch):
                logp_n, *tops = trained.run(partial(trained.policy.likely, batch, temperature, top_k, num_tokens))
            ids, logps = (rows_by_datum(top_nk, batch, part) for top_nk in tops)
            return list(zip(by_datum(logp_n, batch, part), ids, logps, strict=True))

        with torch.no_grad():
            own = [each for part in self._passes(trained, data, run) for each in part]
        if self._mesh.size == 1:
            return own
        tops = [4 * min(top_k, num_tokens) * datum.loss_mask.count(1) for datum in data]
        sizes = [8 * len(datum.tokens) for datum in data], tops, tops
        columns = (self._joined([bytes(each[at]) for each in own], size) for at, size in enumerate(sizes))
        return [(array("d", logprobs), *top) for logprobs, *top in zip(*columns, strict=True)]

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss: Loss[T], temperature: float = 1.0, adds_gradients: bool = True
    ) -> ForwardBackward[T]:
        """Add the gradients of the sum of the data's weighted token losses; without `adds_gradients`, only compute it.

        Raises:
            UserError: there is no such policy.
            InvariantError: the policy is not trained, or a datum has an empty prompt.
        """
        trained = self._policy(name)
        if trained.optimizer is None:
            raise InvariantError(f"policy {name!r} is not trained: it was added to answer `forward` alone")

        def run(part: Sequence[Datum]) -> tuple[list[array[float]], T]:
            batch = self._packed(trained, part)
            with trained.policy.replaying(batch):
                logp_n, entropy_n, top_policy_nk = trained.run(partial(trained.policy.logprobs, batch, temperature))
                tokens = replace(batch.loss_tokens, top_policy_nk=top_policy_nk, entropy_n=entropy_n)
                loss_n, output = loss(logp_n, tokens)
                if adds_gradients:
                    (loss_n * batch.loss_tokens.weight_n).sum().backward()
            return by_datum(logp_n.detach(), batch, part), output

        with torch.set_grad_enabled(adds_gradients):
            done = self._passes(trained, data, run)
        all_logprobs = [each for logprobs, _ in done for each in logprobs]
        return ForwardBackward(self._of_all_ranks(all_logprobs, data), [output for _, output in done])

    def optim_step(self, name: str, adam: AdamParams, divisor: float = 1.0) -> OptimStep:
        """Divide the gradients added so far, clip them, make one AdamW step, and forget them.

        Raises:
            UserError: there is no such policy, or the gradient is not finite (training has diverged): the gradients are
                discarded, the weights unchanged.
        """
        trained = self._policy(name)
        self.finish_reading(name)
        optimizer = trained.optimizer
        gradients = (
            [gradient_of(optimizer, each) for each in trained.parameters.values()] if optimizer is not None else []
        )
        grads = [grad for grad in gradients if grad is not None]
        if not grads or optimizer is None:
            return OptimStep(0.0, False)
        self._mesh.sum(trained.parameters.values())
        own = [self._mesh.own(grad) for grad in grads]
        torch._foreach_div_(own, divisor)
        norm_of_all = self._mesh.norm(grads)
        norm = float(norm_of_all)
        if math.isfinite(norm):
            if adam.grad_clip:
                torch._foreach_mul_(own, (adam.grad_clip / (norm_of_all + 1e-6)).clamp(max=1.0))
            settings = {"lr": adam.lr, "betas": adam.betas, "eps": adam.eps, "weight_decay": adam.weight_decay}
            optimizer.param_groups[0].update(settings)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise UserError(
                f"The gradient of {name} is not finite ({norm}): training has diverged. Lower the learning rate "
                "(learner.lr) and resume from the last checkpoint."
            )
        return OptimStep(norm, True)

    def save_weights_for_sampler(self, name: str, dtype: str) -> BorrowedWeights:
        """Lend the weights by Hugging Face name, in `dtype`, and the other files of the model. They are read in the
        background, not copied: `optim_step` and `load_state` wait until they are given back, other verbs do not. On
        several ranks each gets a copy of its share of the segments (`share_of`); only the first waits.
        """
        trained = self._policy(name)
        policy, kind = trained.policy, DTYPES[dtype]
        tensors = policy.weights(kind) if self._mesh.size == 1 else self._gathered(policy, kind)
        lent = BorrowedWeights(tensors, policy.files, policy.base_model)
        if self._mesh.rank == 0:
            trained.readers.append(lent.returned)
        return lent

    def _gathered(self, policy: Policy, dtype: torch.dtype) -> dict[str, StoredTensor]:
        """Copy this rank's share of the weights to a file, at their places in the tensor stream. Only all ranks
        together can read cut weights, so no background thread can. One tensor at a time is whole, in its final
        precision.
        """
        entries = tensor_index(policy.weights(dtype))
        places = itertools.accumulate((entry.num_bytes for entry in entries), initial=0)
        starts = {entry.name: start for entry, start in zip(entries, places, strict=False)}
        ranges: dict[str, list[tuple[int, int]]] = {entry.name: [] for entry in entries}
        first, step = share_of(self._mesh.rank, self._mesh.size)
        for parts in itertools.islice(pieces(entries, cut_stream(entries)), first, None, step):
            for key, start, stop in parts:
                ranges[key].append((start, stop))
        file = UnlinkedFile(self._mesh.scratch)
        for key, whole in self._one_by_one(policy, dtype):
            for start, stop in ranges[key]:
                file.write(starts[key] + start, whole.read(start, stop))
        return {
            entry.name: StoredTensor(entry.dtype, entry.shape, entry.num_bytes, partial(file.read, starts[entry.name]))
            for entry in entries
        }

    def _one_by_one(self, policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the stored tensors of a policy. Tensors that are cut over ranks are made whole one at a time."""
        pieces_of = defaultdict[str, list[tuple[str, TensorPart]]](list)
        for key, place in policy.places().items():
            pieces_of[place.name].append((key, place))
        for name, tensor in policy.held().items():
            kinds = {key: policy.stored_dtype(key, dtype) or tensor.dtype for key, _ in pieces_of[name]}
            widest = max(kinds.values(), key=lambda kind: kind.itemsize, default=tensor.dtype)
            whole = self._mesh.whole(tensor.to(widest) if tensor.is_floating_point() else tensor)
            for key, place in pieces_of[name]:
                yield key, stored(place.of(whole), kinds[key])
        yield from policy.others.items()

    def finish_reading(self, name: str) -> None:
        """Wait until no background reader uses the weights. Errors are raised to the holder of a reader's future."""
        readers = self._policy(name).readers
        wait(readers)
        readers.clear()

    def save_state(self, name: str, directory: Path, client: Mapping[str, Any]) -> Saving:
        """Begin to write a checkpoint of the policy to `directory`, whole or not at all; `client` is kept with it.

        It is written in the background, from the weights and moments themselves and not from a copy: `optim_step` and
        `load_state` wait for it, other verbs do not. The result raises:
            NoRoomError: no room; an earlier checkpoint in the directory is untouched.
            UserError: the directory cannot be written.
        """
        trained = self._policy(name)
        held, places = trained.policy.held(), trained.policy.places()
        moments = {
            f"{kind}.{key}": tensor
            for key, parameter in trained.parameters.items()
            if trained.optimizer is not None
            for kind, tensor in moments_of(trained.optimizer, parameter).items()
        }
        contents = {
            trained.policy.weights_file: {key: (held[place.name], place) for key, place in places.items()},
            OPTIMIZER_FILE: {key: (tensor, whole_place(key, tensor)) for key, tensor in moments.items()},
        }
        files, base = trained.policy.files, trained.policy.base_model
        client_data = client if base is None else {**client, BASE_MODEL: base.policy}
        others = {trained.policy.weights_file: trained.policy.others}
        reader, saving = begin_saving(self._writer, self._mesh, directory, client_data, files, contents, others)
        trained.readers.append(reader)
        return saving

    def load_state(self, name: str, directory: Path, with_optimizer: bool = True) -> dict[str, Any]:
        """Load weights and optimizer, and discard gradients. Return the client's data in the checkpoint. Without
        `with_optimizer` the optimizer starts afresh.

        Raises:
            UserError: there is no whole checkpoint, or it is of another model.
        """
        trained = self._policy(name)
        self.finish_reading(name)
        client: dict[str, Any] = json.loads(
            self._mesh.broadcast(b"" if self._mesh.rank else json.dumps(checkpoint.read_client(directory)).encode())
        )
        trained.policy.check_checkpoint(directory, client.pop(BASE_MODEL, None))
        with open_tensors(directory, trained.policy.weights_file) as tensors:
            self._load_weights(trained, directory, tensors)
        if trained.optimizer is not None:
            trained.optimizer.state.clear()
            if with_optimizer:
                with open_tensors(directory, OPTIMIZER_FILE) as tensors:
                    load_moments(self._mesh, trained.optimizer, trained.parameters, tensors)
            trained.optimizer.zero_grad(set_to_none=True)
        return client

    def _load_weights(self, trained: _Trained, directory: Path, tensors: ShardedTensors) -> None:
        places = trained.policy.places()
        missing = {*places, *trained.policy.others} ^ set(tensors.shapes)
        if missing:
            theirs = model_type({path.name: path.read_bytes() for path in directory.glob("config.json")})
            raise UserError(
                f"{directory} is a checkpoint of another model: its model_type is {theirs}, that of model.path is "
                f"{model_type(trained.policy.files)}, and {len(missing)} tensors are in one of them only, for example "
                f"{sorted(missing)[0]}. Set model.path back, or start another --out."
            )
        load_weights(self._mesh, directory, trained.policy.held(), places, tensors)

    def _policy(self, name: str) -> _Trained:
        trained = self._policies.get(name)
        if trained is None:
            raise UserError(f"There is no policy {name!r}; there are {sorted(self._policies)}.")
        return trained

    def _passes(self, trained: _Trained, data: Sequence[Datum], run: Callable[[Sequence[Datum]], T]) -> list[T]:
        """Return the result of `run` for each micro-batch of this rank's share, in order. When memory runs out,
        micro-batches are halved.

        Every pass needs all ranks: a rank with fewer passes than another runs the shortest datum without effect.
        """
        shares_prompts = trained.layout != "plain"
        parts = shares(data, self._mesh.size)
        done: list[T] = []
        waiting: list[tuple[Sequence[Datum], frozenset[str]]] = [(parts[self._mesh.rank], frozenset())]
        while waiting:
            part, reached = waiting.pop()
            pieces = microbatches(part, self.tokens_per_microbatch, shares_prompts)
            if len(pieces) != 1:
                waiting += [(piece, reached) for piece in reversed(pieces)]
                continue
            trained.reached.clear()
            try:
                with trained.policy.engaged(), _gradients_left([trained.parameters[key] for key in reached]):
                    done.append(run(part))
                continue
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if self._mesh.size > 1:  # the others are in the middle of the same pass
                    raise _too_large_for_rank(self._mesh.rank, self.tokens_per_microbatch) from error
                if len(part) == 1:
                    raise _too_large(part[0], trained.policy) from error
            # Outside of the handler the error is freed, and with it the tensors that its frames held.
            if trained.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.tokens_per_microbatch = num_tokens_run(part, shares_prompts) // 2
            log.warning("memory ran out: micro-batches of %d tokens from now on", self.tokens_per_microbatch)
            waiting.append((part, reached | trained.reached))
        if self._mesh.size > 1:
            cuts = [len(microbatches(part, self.tokens_per_microbatch, shares_prompts)) for part in parts]
            for _ in range(len(done), max(cuts)):
                self._dummy_pass(trained, min(data, key=lambda datum: len(datum.prompt_tokens) + datum.num_inputs))
        return done

    def _dummy_pass(self, trained: _Trained, datum: Datum) -> None:
        with trained.policy.engaged():
            logp_n, *_ = trained.run(partial(trained.policy.logprobs, self._packed(trained, [datum]), 1.0))
            if logp_n.requires_grad:
                (logp_n * 0.0).sum().backward()

    def _of_all_ranks(self, logprobs: list[array[float]], data: Sequence[Datum]) -> list[array[float]]:
        """Gather the logprobs of all data from the ranks."""
        if self._mesh.size == 1:
            return logprobs
        gathered = self._joined([bytes(each) for each in logprobs], [8 * len(datum.tokens) for datum in data])
        return [array("d", each) for each in gathered]

    def _joined(self, parts: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        """Gather the bytes of all data, of these sizes, from the ranks."""
        joined = memoryview(b"".join(self._mesh.gather(b"".join(parts))))
        ends = itertools.accumulate(sizes, initial=0)
        return [joined[start:end].tobytes() for start, end in itertools.pairwise(ends)]

    def _packed(self, trained: _Trained, part: Sequence[Datum]) -> PackedBatch:
        policy = trained.policy
        dtype = policy.dtype if policy.dtype == torch.float64 else torch.float32
        return collate(part, trained.layout, policy.pair_cost, self.tokens_per_microbatch).to(policy.device, dtype)


def _note(reached: set[str], key: str, _: Tensor) -> None:
    reached.add(key)


@contextmanager
def _gradients_left(reached: Sequence[Tensor]) -> Iterator[None]:
    """Inside, these parameters take no gradients: they already have those of the data."""
    for parameter in reached:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in reached:
            parameter.requires_grad_(True)


def _too_large_for_rank(rank: int, tokens: int) -> UserError:
    return UserError(
        f"Rank {rank} has no memory for a micro-batch of {tokens} tokens. Set learner.tokens_per_microbatch = "
        f"{max(1, tokens // 2)} or take more ranks, and --resume."
    )


def _too_large(datum: Datum, policy: Policy) -> UserError:
    tokens = len(datum.prompt_tokens) + datum.num_inputs
    return UserError(
        f"{policy.device} has no memory for one rollout of {tokens} tokens: a micro-batch cannot be smaller. Lower "
        "sampling.max_tokens, or take a larger machine; `echo2 plan` says what is needed."
    )
