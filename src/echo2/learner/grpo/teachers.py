"""What pulls the policy beside its rewards: teachers, and a reference. Each is a frozen policy beside it, which costs
one more forward pass without gradient; a teacher may also be an endpoint (`endpoint_teachers.py`).

**Teachers** score the tokens that the policy sampled, and pull it towards what they would say (on-policy distillation).
With rho the teacher, pi the policy and x = log rho - log pi of a sampled token, at most 20 either way, the advantage of
the token grows by

    weight * sg(x)

whose expected gradient, with the loss's weights pi / mu, is that of -weight * KL(pi || rho) at the token. It is taken
from pi as it is now, and not from the sampler's mu: at lag 0 both are the same number, and from a stale mu the policy
would be pushed on after it has become the teacher; mu is also a worker's unverified claim.

With `distill.divergence` the loss of each token grows instead by weight times the divergence itself, of p and q: the
policy and the teacher over the `top_k` tokens that the teacher finds most likely, and the rest as one. With TRL's beta,

    1             sum p log(p / q)                                        KL(p, q), the reverse one
    0             sum q log(q / p)                                        KL(q, p), the forward one
    between them  beta sum q log(q / m) + (1 - beta) sum p log(p / m)     m = beta q + (1 - beta) p

Each is at most the divergence over the whole vocabulary, and 0 only where the `top_k` tokens agree. None depends on the
token that was sampled, so they have less noise. With d the derivative by p, the gradient by log p of a likely token is
p (d - d'), d' that of the rest, for p' = 1 - sum p. It is written explicitly, so that it is bounded by 40: log ratios
and d' count as 20 beyond that, where p' is hardly there and its rounding error would decide.

**The reference** is a second copy of the initial weights. With rho the reference and r = pi / mu at most 10, it adds to
the loss of each token

    r (exp(x) - 1 - x)

Schulman's k3 of KL(pi || rho), weighted because mu sampled the token and not pi. Its gradient is r (log pi - log rho)
times that of log pi: unbiased below the cap, and without the exponential that k3 alone has where pi << rho
(DeepSeek-V3.2, arXiv 2512.02556). The gradient is written explicitly, so that it is bounded at the cap too, by 10 * 20:
mu is a worker's unverified claim.

Shape suffixes: n = loss tokens, S = sequences, k = the teacher's most likely tokens, m = these and the rest.
"""

from __future__ import annotations

import copy
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from echo2.config import Config
from echo2.config.values import SELF
from echo2.core.errors import InvariantError, UserError
from echo2.core.types import RolloutGroup
from echo2.engines.tokenizer import load_tokenizer, refuse_other_tokenizer
from echo2.learner.core.adapters import Adapter
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import LOG_RATIO_LIMIT, LossTokens
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy, check_pass, load_policy
from echo2.learner.core.trainer import Likely, Trainer
from echo2.learner.grpo.data import GroupData
from echo2.learner.grpo.endpoint_teachers import EndpointTeachers, Question
from echo2.learner.grpo.step_meter import Taught
from echo2.learner.link.teacher_endpoint import TeacherEndpoint

#: Least probability of the rest, where its true mass may be 0 up to rounding error.
TAIL_LEAST = 1e-6
#: Log-probability of a token that is not there: its exponential is 0.
ABSENT = -1e4
#: Steps beyond the staleness bound whose rows may be asked about before their groups arrive: that under way, and one
#: of groups that are retired.
STEPS_HEARD = 2
#: Largest log ratio in the reference's penalty.
LOG_CAP = math.log(10.0)


class Teachers:
    """The teachers of a run: frozen, in the trainer beside the policy that is called `policy_name` there, or endpoints,
    which the first rank asks for all.

    Raises:
        UserError: a teacher can't be loaded, has no room, or has another vocabulary.
    """

    def __init__(self, policy: Policy, policy_name: str, config: Config, trainer: Trainer, mesh: Mesh) -> None:
        self._trainer, self._top_k = trainer, config.distill.num_likely
        self._temperature = config.sampling.temperature
        self._num_tokens = policy.vocab_size
        self._names: dict[str, str] = {}
        self._seconds = dict.fromkeys(config.distill.teachers, 0.0)
        self._contexts: dict[str, int | None] = {}
        sizes = config.schedule.groups_per_step, config.sampling.group_size
        self._rows_max = math.prod(sizes) * (config.schedule.max_staleness + STEPS_HEARD)
        self._mesh, self._endpoint_teachers = mesh, _open_endpoints(config, policy, mesh, self._top_k)
        self._endpoints = frozenset(config.distill.endpoints)
        for name, path in config.distill.teachers.items():
            if name in self._endpoints:
                self._names[name] = f"the teacher {name or path}"
                continue
            teacher = policy if path == SELF else _loaded(path, policy, mesh)
            self._names[name] = policy_name if path == SELF else f"the teacher {name or path}"
            self._contexts[name] = teacher.max_positions
            if path != SELF:
                trainer.add(self._names[name], teacher, is_trained=False)

    def why_unfit(self, group: RolloutGroup) -> str:
        """Return why the group's teacher cannot process it; empty if it can."""
        name = group.teaching.teacher
        most = (
            self._endpoint_teachers.max_positions(name)
            if self._endpoint_teachers and name in self._endpoint_teachers
            else self._contexts.get(name)
        )
        prompt = len(group.teaching.prompt_tokens or group.prompt_tokens)
        longest = max(len(rollout.tokens) for rollout in group.rollouts)
        if name not in self._names:
            return f"its teacher {name!r} is none of {', '.join(self._names)}"
        if most is None or prompt + longest <= most:
            return ""
        return f"{prompt} + {longest} tokens, where {self._names[name]} has {most} positions"

    def ask_early(self, group: RolloutGroup) -> None:
        """Begin to ask about a group that has arrived or will, if its teacher is an endpoint. For any thread."""
        if self._endpoint_teachers is not None and self._endpoint_teachers.num_rows < self._rows_max:
            for question in self._questions(group):
                self._endpoint_teachers.ask(question)

    def waits_for(self, groups: Sequence[RolloutGroup], seconds: float) -> str:
        """Wait so long at most until the endpoints among the teachers have been greeted, and have answered about these
        groups. Return why they have not yet, for people; empty: they have.

        Raises:
            UserError: one can't teach the policy, or failed.
        """
        if self._endpoint_teachers is None:
            return ""
        return self._endpoint_teachers.waits_for(
            [question for group in groups for question in self._questions(group)], seconds
        )

    def end_step(self, step: int) -> None:
        """The step's groups are trained."""
        if self._endpoint_teachers is not None:
            self._endpoint_teachers.forget(step)

    def close(self) -> None:
        """Ask no more. A second call does nothing."""
        if self._endpoint_teachers is not None:
            self._endpoint_teachers.close()

    def taught(self, groups: Sequence[RolloutGroup], parts: Sequence[GroupData]) -> list[Datum]:
        """Return the data of the groups with what their teachers say of each token."""
        data = [datum for part in parts for datum in part.data]
        for name, places in _by_teacher(groups, parts).items():
            started = time.perf_counter()
            # A teacher is a policy of its own: it reads its own prompt, and chooses its own experts.
            teacher_data = [
                replace(data[place], prompt_tokens=prompt or data[place].prompt_tokens, routes=None)
                for place, prompt in places
            ]
            answers = self._likely(name, teacher_data)
            for (place, _), (logprobs, tokens, tops) in zip(places, answers, strict=True):
                top, logps = array("i", tokens), array("f", tops)
                data[place] = replace(data[place], teacher_logprobs=logprobs, top_tokens=top, top_logprobs=logps)
            self._seconds[name] += time.perf_counter() - started if name not in self._endpoints else 0.0
        return data

    def _likely(self, name: str, data: Sequence[Datum]) -> Sequence[Likely]:
        """Return what a teacher says of the data."""
        if name not in self._endpoints:
            return self._trainer.likely(self._names[name], data, self._temperature, self._top_k, self._num_tokens)
        answers = list[tuple[bytes, bytes, bytes]]()
        if self._endpoint_teachers is not None:
            works = [
                self._endpoint_teachers.ask((one.version, name, one.prompt_tokens, one.tokens, one.loss_mask))
                for one in data
            ]
            answers = [(logprobs.tobytes(), ids, tops) for logprobs, ids, tops in (work.result() for work in works)]
        packed = self._mesh.broadcast(msgspec.msgpack.encode(answers))
        all_answers = msgspec.msgpack.decode(packed, type=list[tuple[bytes, bytes, bytes]])
        return [(array("d", logprobs), ids, tops) for logprobs, ids, tops in all_answers]

    def _questions(self, group: RolloutGroup) -> list[Question]:
        """Return what an endpoint is asked about a group's rows; nothing if its teacher is not behind an endpoint."""
        name, prompt = group.teaching.teacher, group.teaching.prompt_tokens or group.prompt_tokens
        if name not in self._endpoints:
            return []
        return [(group.step, name, prompt, row.tokens, row.loss_mask) for row in group.rollouts if 1 in row.loss_mask]

    def measure(
        self,
        groups: Sequence[RolloutGroup],
        parts: Sequence[GroupData],
        data: Sequence[Datum],
        logprobs: Sequence[array[float]],
    ) -> dict[str, Taught]:
        """Return what the teachers say of the data. `logprobs`: the policy's. The seconds are those since the last
        call."""
        by_teacher = dict[str, Taught]()
        for name, places in _by_teacher(groups, parts).items():
            log_ratios = [_log_ratios(data[place], logprobs[place]) for place, _ in places]
            if self._endpoint_teachers is not None and name in self._endpoint_teachers:
                self._seconds[name] += self._endpoint_teachers.take_seconds(name)
            by_teacher[name] = Taught(
                sum(map(len, log_ratios)), math.fsum(map(math.fsum, log_ratios)), self._seconds[name]
            )
            self._seconds[name] = 0.0
        return by_teacher


def _open_endpoints(config: Config, policy: Policy, mesh: Mesh, top_k: int) -> EndpointTeachers | None:
    """Return the teachers that this rank asks; None: none."""
    if not config.distill.endpoints or mesh.rank:
        return None
    tokens, urls = policy.vocab_size, config.distill.endpoints
    endpoints = {name: TeacherEndpoint(url, tokens, top_k) for name, url in urls.items()}
    return EndpointTeachers(endpoints, load_tokenizer(policy.files))


def _by_teacher(
    groups: Sequence[RolloutGroup], parts: Sequence[GroupData]
) -> Mapping[str, list[tuple[int, array[int]]]]:
    """Return the places of the data by teacher, each with the prompt that it is shown (empty: the same)."""
    places: dict[str, list[tuple[int, array[int]]]] = {}
    place = 0
    for group, part in zip(groups, parts, strict=True):
        for _ in part.data:
            places.setdefault(group.teaching.teacher, []).append((place, group.teaching.prompt_tokens))
            place += 1
    return places


def _log_ratios(datum: Datum, logprobs: array[float]) -> list[float]:
    if datum.teacher_logprobs is None:
        raise InvariantError("a datum was trained on without its teacher's logprobs")
    both = zip(logprobs, datum.teacher_logprobs, datum.loss_mask, strict=True)
    return [own - theirs for own, theirs, counts in both if counts]


def _loaded(path: str, policy: Policy, mesh: Mesh) -> Policy:
    """Load a teacher, in the precision of the policy's products."""
    try:
        teacher = load_policy(path, "bfloat16" if policy.computes_in_bfloat16 else "float32", str(policy.device), mesh)
        if mesh.size > 1:  # all of them are here: a rank on which the load failed ends the learner
            check_pass(teacher, path, mesh)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"distill.teacher = {path!r}: {policy.device} has no room for it beside the policy. Take a smaller "
            "teacher, learner.ranks, or a larger device."
        ) from error
    except UserError as error:
        raise UserError(str(error).replace("model.path", "distill.teacher", 1)) from error
    refuse_other_tokenizer(policy.files, teacher.files, path)
    refuse_vocabulary(path, teacher.vocab_size, policy.vocab_size)
    teacher.module.requires_grad_(False)
    teacher.computes_in_bfloat16 = policy.computes_in_bfloat16
    return teacher


def refuse_vocabulary(path: str, teacher: int, policy: int) -> None:
    """Raise UserError if a teacher has scores for fewer tokens than the policy may sample."""
    if teacher < policy:
        raise UserError(
            f"distill.teacher = {path!r} has a vocabulary of {teacher} tokens, and the policy's has {policy}: it "
            "cannot say how likely the others are. Take a teacher of the same family."
        )


def towards_teacher(logp_n: Tensor, tokens: LossTokens, weight: float) -> LossTokens:
    """Return the tokens with the teacher's part of their advantages."""
    x_n = (tokens.teacher_n - logp_n.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return replace(tokens, advantage_n=tokens.advantage_n + weight * x_n)


def joined_divergence(log_pi_nk: Tensor, log_rho_nk: Tensor, beta: float) -> Tensor:
    """Return the divergence at each token, with the rest of the vocabulary joined, from the logprobs that policy and
    teacher have of the teacher's likely tokens (-inf at the teacher: there are fewer).
    """
    is_there_nk = log_rho_nk.isfinite()
    with torch.no_grad():
        log_p_nm, log_q_nm = (_with_rest(part_nk, is_there_nk) for part_nk in (log_pi_nk, log_rho_nk))
        p_nm = log_p_nm.exp()
        value_n, pull_nm = _divergence(log_p_nm, log_q_nm, beta)
        of_rest_n = (pull_nm[:, -1] / p_nm[:, -1]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        slope_nk = (pull_nm - of_rest_n[:, None] * p_nm)[:, :-1]
    return value_n + (slope_nk * (log_pi_nk - log_pi_nk.detach())).sum(-1)


def _with_rest(logp_nk: Tensor, is_there_nk: Tensor) -> Tensor:
    """Return the log-probabilities, ABSENT where there is no token, and behind them that of all others."""
    logp_nk = logp_nk.masked_fill(~is_there_nk, ABSENT)
    rest_n = (1.0 - logp_nk.exp().sum(-1)).clamp(min=TAIL_LEAST)
    return torch.cat([logp_nk, rest_n.log()[:, None]], dim=-1)


def _divergence(log_p_nm: Tensor, log_q_nm: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence [n], and p times its derivative by each p [n, m], without what all derivatives share."""
    p_nm, q_nm = log_p_nm.exp(), log_q_nm.exp()
    ratio_nm = (log_p_nm - log_q_nm).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if beta == 1.0:
        return (p_nm * ratio_nm).sum(-1), p_nm * ratio_nm
    if beta == 0.0:
        return -(q_nm * ratio_nm).sum(-1), -q_nm
    log_m_nm = torch.logaddexp(log_p_nm + math.log1p(-beta), log_q_nm + math.log(beta))
    of_p_nm = (1.0 - beta) * p_nm * (log_p_nm - log_m_nm)
    return (of_p_nm + beta * q_nm * (log_q_nm - log_m_nm)).sum(-1), of_p_nm


def reference_of(policy: Policy, config: Config, mesh: Mesh) -> Policy:
    """Return the policy that training begins with: an adapter's base model, a frozen copy of a whole model, or, if the
    model is cut over ranks, a model that is loaded again.

    Raises:
        UserError: see `frozen_copy`.
    """
    if isinstance(policy, Adapter):
        return policy.base.alone()
    if mesh.size == 1:
        return frozen_copy(policy)
    reference = load_policy(config.model.path, "float32", str(policy.device), mesh)
    reference.module.requires_grad_(False)
    return reference


def frozen_copy(policy: Policy) -> Policy:
    """Return a frozen copy of the policy as it is now. It takes as much memory as the weights.

    Raises:
        UserError: the device has no room for the copy.
    """
    try:
        module = copy.deepcopy(policy.module)
    except torch.OutOfMemoryError as error:
        size_gb = sum(tensor.numel() * tensor.element_size() for tensor in policy.held().values()) / 1e9
        raise UserError(
            f"learner.reference_kl > 0 keeps a second copy of the weights, {size_gb:.1f} GB, and {policy.device} has "
            "no room for it. Set learner.reference_kl = 0 or take a larger device."
        ) from error
    return Policy(module.requires_grad_(False), policy.files, policy.device)


def token_kl(logp_n: Tensor, tokens: LossTokens, vetoed_S: Tensor) -> Tensor:
    """Return the penalty term of each token; 0 in sequences that the loss vetoed."""
    ratio_n = (logp_n - tokens.behaviour_n).clamp(-LOG_RATIO_LIMIT, LOG_CAP).exp()
    x_n = (tokens.reference_n - logp_n).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    with torch.no_grad():
        value_n, slope_n = ratio_n * (x_n.expm1() - x_n), -ratio_n * x_n
    return ~vetoed_S[tokens.sequence_n] * (value_n + slope_n * (logp_n - logp_n.detach()))
