"""The KL penalty towards the reference policy: a second, frozen copy of the initial weights.

Per token, with rho the reference, x = log rho - log pi and r = pi / mu at most 10:

    r (exp(x) - 1 - x)

Schulman's k3 of KL(pi || rho), weighted because mu sampled the token and not pi. Its gradient is r (log pi - log rho)
times that of log pi: unbiased below the cap, and without the exponential that k3 alone has where pi << rho
(DeepSeek-V3.2, arXiv 2512.02556). The gradient is written explicitly, so that it is bounded at the cap too, by 10 * 20:
mu is a worker's unverified claim.

Shape suffixes: n = loss tokens, S = sequences.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from echo2.config import Config
from echo2.core.errors import UserError
from echo2.learner.core.adapters import Adapter
from echo2.learner.core.losses import LOG_RATIO_LIMIT, LossTokens
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy, load_policy

LOG_CAP = math.log(10.0)


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
        value_n, slope_n = ratio_n * (x_n.exp() - 1.0 - x_n), -ratio_n * x_n
    return ~vetoed_S[tokens.sequence_n] * (value_n + slope_n * (logp_n - logp_n.detach()))
