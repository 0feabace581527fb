"""`echo2 worker TICKET`: enrols a machine, chooses what it samples with, and runs it as a worker. It is enrolled, with
several tries, by `transport/grpc_link.py: join`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path

from echo2.config.values import AUTO, FORMS, ROUNDING_ENGINES
from echo2.core.devices import limit_memory, this_machine
from echo2.core.errors import LinkError, PeerError
from echo2.core.retries import Retries
from echo2.core.types import Snapshot
from echo2.engines import registry as engines
from echo2.engines.model_values import all_values
from echo2.learner.core.fitting import PROMPT_TOKENS
from echo2.learner.decide.memory import GB, USABLE
from echo2.learner.decide.model_shape import read_shape
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.transport.grpc_link import RECONNECT_SECONDS, Membership
from echo2.weights.format.model_files import find_model, read_base_model
from echo2.worker.at_home import HOME_SHARE
from echo2.worker.decide.home import EngineCandidate, SamplingNeed, WorkerChoice, choose
from echo2.worker.sampling import open_environment
from echo2.worker.worker_process import CALL_SECONDS, WorkerOptions, WorkerProcess

log = logging.getLogger(__name__)


def _read_base(path: str) -> Snapshot:
    base = read_base_model(find_model(path, "--base"))
    log.info("the base model %s of --base is at hand", base.ref.policy)
    return base


async def enrolled(
    ticket: str, directory: Path | None, options: WorkerOptions
) -> tuple[Membership, Path, Snapshot | None]:
    """Enrol with the ticket. Return this machine's membership, its state directory, and the owner's base model.

    Raises:
        UserError: the ticket admits no machine, or `base` is not a model.
        LinkError: the head is away.
    """
    from echo2.transport import grpc_link

    state = directory or Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "echo2"
    member = await grpc_link.join(ticket, state, options.patience_seconds)
    log.info("joined as %s", member.peer_id)
    own_base = await asyncio.to_thread(_read_base, options.base) if options.base else None
    return member, state / member.peer_id, own_base


async def settled(link: Link, options: WorkerOptions) -> WorkerOptions:
    """Choose engine, form and slots by what this machine has, where its owner and the run leave that open, and log why.

    Raises:
        UserError: no engine, or not the one that was named, has room for the run's model.
    """
    if options.engine not in (AUTO, *FORMS):
        return options
    if options.engine == AUTO and engines.servers_here(options.device, options.engine_python, options.engine_url):
        return options  # a token server has a GPU for itself
    facts = await _facts(link, options.patience_seconds)
    named = facts.engine if options.engine == AUTO else options.engine
    if named not in (AUTO, *FORMS):
        return options
    chosen = await asyncio.to_thread(_chosen, options, facts, named)
    if chosen is None:
        log.info("engine %s: the head does not know the model's sizes yet", named)
        return options
    log.info("%s", chosen)
    is_less = chosen.slots < facts.slots  # else the run may change its mind
    return replace(options, engine=chosen.engine, slots=chosen.slots if is_less else options.slots)


async def _facts(link: Link, patience_seconds: float) -> wire.RunFacts:
    """Ask the head what the run is like. Nothing is known if it refuses: it will say why when this machine attends."""
    retries = Retries(RECONNECT_SECONDS, patience_seconds)
    while True:
        try:
            facts: wire.RunFacts = await link.call("Describe", wire.Empty(), CALL_SECONDS)
            return facts
        except PeerError:
            return wire.RunFacts(engine=AUTO)
        except LinkError:
            if retries.failed():
                raise
            await retries.pause()


def _chosen(options: WorkerOptions, facts: wire.RunFacts, named: str) -> WorkerChoice | None:
    """Return what this machine samples with; None if the model's sizes are not known."""
    config = json.loads(facts.model_config or "{}")
    shape = read_shape(all_values(config)) if isinstance(config, dict) else None
    if shape is None or not facts.slots:
        return None
    slots = min(facts.slots, options.slots or facts.slots)
    need = SamplingNeed(shape, slots, PROMPT_TOKENS + facts.max_tokens, facts.value_bytes, facts.has_adapter)
    main, gpu = given_bytes(options)
    candidates = [EngineCandidate(AUTO, "", gpu or main)]
    for engine, form in FORMS.items():
        if engine not in (*engines.rounding_engines(), named):
            continue
        obstacle = engines.obstacle(engine, config)
        if form not in facts.forms:
            obstacle = f"the run does not let this machine round to {form} (workers.forms)"
        is_on_gpu = not obstacle and gpu and engines.uses_gpu(engine, options.device)
        candidates.append(EngineCandidate(engine, form, gpu if is_on_gpu else main, obstacle))
    choice = choose(need, candidates, "" if named == AUTO else named)
    if choice.engine != AUTO:
        return choice
    inside = engines.in_worker(config)
    if inside.name in ROUNDING_ENGINES:
        return replace(choice, why=f"{inside.name}, since {inside.why}; {choice.why}")
    # The head takes "auto" for an engine that reads rounded weights: it would wait for checks that never come.
    return replace(choice, engine=inside.name, why=f"{inside.why}; {choice.why}")


def given_bytes(options: WorkerOptions) -> tuple[int, int]:
    """Return the bytes that a worker may use of the machine's memory, and of its largest GPU; 0 without one."""
    machine, share = this_machine(), HOME_SHARE if options.at_home else USABLE
    most = options.max_memory_gb * GB or math.inf
    gpu = 0 if options.device == "cpu" else max(machine.gpus, default=0)
    bound = USABLE if options.max_memory_gb else share
    main = bound * machine.memory_bytes
    if not options.max_memory_gb:
        main = min(main, USABLE * engines.sampling_bytes(machine.memory_bytes))
    return int(min(most, main)), int(min(most, bound * gpu))


async def join(ticket: str, directory: Path | None, options: WorkerOptions) -> str:
    """Enrol with the ticket, attend until the run is over, and return the reason for its end.

    Raises:
        UserError: an environment can't be loaded, or `base` is not a model; and as `WorkerProcess.run`.
    """
    member, place, own_base = await enrolled(ticket, directory, options)
    if options.at_home or options.max_memory_gb:
        limit_memory(given_bytes(options)[0])
    link = member.link()
    try:
        options = await settled(link, options)
    finally:
        await link.close()
    environments = {spec: open_environment(spec) for spec in options.allow_environments}
    for environment in environments.values():
        await environment.start()  # fails here, before this worker offers the environment to the head
    return await WorkerProcess(member, place, options, environments, own_base).run()


def run_worker(ticket: str, directory: Path | None, options: WorkerOptions) -> str:
    """Run a worker process. Return the reason for the run's end."""
    return asyncio.run(join(ticket, directory, options))
