"""Makes the planner's options from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.head.decide.state import PlannerOptions, RentableOffer
from echo2.head.fleet.machines import offers_for


def read_offers(config: Config) -> dict[str, Offer]:
    """Return the run's offers by name.

    Raises:
        UserError: the offers file is invalid, or has rates for another model and the size of the run's is unknown.
    """
    found = offers_for(config, Path(config.fleet.offers)) if config.fleet.offers else []
    return {offer.name: offer for offer in found}


def planner_options(config: Config, eval_size: int, offers: Mapping[str, Offer] | None = None) -> PlannerOptions:
    """Return the part of the configuration that the planner needs.

    Raises:
        UserError: an offer that can be rented has no rate.
    """
    schedule, sampling = config.schedule, config.sampling
    return PlannerOptions(
        groups_per_step=schedule.groups_per_step,
        group_size=sampling.group_size,
        max_steps=config.run.max_steps,
        min_group=sampling.min_group or max(2, -(-sampling.group_size // 2)),
        max_staleness=schedule.max_staleness,
        publish_every=schedule.publish_every,
        dynamic_sampling=schedule.dynamic_sampling,
        deterministic=config.run.deterministic,
        require_checks=config.workers.require_checks,
        groups_per_batch=sampling.groups_per_batch,
        order=schedule.order,
        lease_seconds=schedule.lease_seconds,
        seed=config.run.seed,
        eval_size=eval_size,
        eval_every=config.eval.every,
        eval_samples=config.eval.samples,
        activation=bool(config.fleet.offers),
        offers=tuple(
            RentableOffer(offer.name, offer.effective_rate, offer.price_usd_per_hour, offer.count)
            for offer in (offers or {}).values()
            if offer.rent
        ),
    )
