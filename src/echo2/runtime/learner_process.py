"""`echo2 learner DIR`: builds the trainer from the run's configuration, goes on from the newest checkpoint, trains."""

from __future__ import annotations

import logging
from pathlib import Path

from echo2.config import Config
from echo2.errors import UserError
from echo2.learner import loop
from echo2.learner.head_client import LearnerInfo
from echo2.learner.model import load_policy
from echo2.learner.publication import PublishOptions
from echo2.learner.session import HeadSession
from echo2.learner.trainer import Trainer, TrainerOptions
from echo2.runtime.rundir import RunDir, claimed
from echo2.transport.base import Link
from echo2.transport.grpc_link import connect

log = logging.getLogger(__name__)


def trainer_options(config: Config) -> TrainerOptions:
    """The part of the configuration that a training step rests on."""
    learner = config.learner
    return TrainerOptions(
        lr=learner.lr,
        lr_schedule=learner.lr_schedule,
        warmup_steps=learner.warmup_steps,
        max_steps=config.run.max_steps,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        grad_clip=learner.grad_clip,
        loss=learner.loss,
        loss_params=learner.loss_params,
        normalisation=learner.normalisation,
        reference_kl=learner.reference_kl,
        advantage=learner.advantage,
        ess_scaling=learner.ess_scaling,
        mask_truncated=learner.mask_truncated,
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
        snapshot_dtype=config.model.snapshot_dtype,
    )


def loop_options(config: Config, checkpoints: Path) -> loop.LoopOptions:
    """The part of the configuration that the loop rests on."""
    learner, schedule = config.learner, config.schedule
    return loop.LoopOptions(
        checkpoints=checkpoints,
        checkpoint_every=learner.checkpoint_every,
        keep_checkpoints=learner.keep_checkpoints,
        publish_every=schedule.kappa,
        max_staleness=schedule.max_staleness,
        groups_per_microbatch=learner.groups_per_microbatch,
        groups_per_update=schedule.groups_per_step // parts if (parts := learner.minibatches_per_round) > 1 else 0,
        deterministic=config.run.deterministic,
    )


def run_learner(rundir: RunDir, ticket: str) -> int:
    """Train until the run is over.

    Raises:
        UserError: the model can't be loaded, the disk is full, the head does not take this learner.
        LinkError: the head stayed away.
    """
    with claimed(rundir.path, "learner"):
        return _train(rundir, ticket)


def _train(rundir: RunDir, ticket: str) -> int:
    config = rundir.read_config()
    if not ticket and not rundir.learner_ticket.is_file():
        raise UserError(f"{rundir.learner_ticket} is missing: start the head first, or give its ticket with --ticket.")
    policy = load_policy(config.model.path, config.model.dtype, config.learner.device)
    trainer = Trainer(policy, trainer_options(config))
    resumed = loop.resume(trainer, rundir.checkpoints)
    log.info("%s at version %d on %s", "resumed" if resumed else "fresh", trainer.version, policy.device)

    async def connect_head() -> Link:
        link, learner_id = await connect(ticket or f"@{rundir.learner_ticket}", rundir.path / "learner")
        log.info("joined as %s", learner_id)
        return link

    info = LearnerInfo(str(policy.device), policy.vocab_size, resumed)
    publishing = PublishOptions(config.broadcast.deltas, config.broadcast.anchor_every)
    session = HeadSession(connect_head, trainer.version, info, publishing=publishing)
    try:
        reason = loop.run_learner(trainer, session, loop_options(config, rundir.checkpoints))
        log.info("the run is over: %s", reason)
    finally:
        session.close()
    return 0
