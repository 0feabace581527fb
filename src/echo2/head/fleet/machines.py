"""Rents and returns machines during a run, with the `rent` and `release` commands of the offers.

The user writes the commands. They are split by `shlex` and run without a shell, so a filled-in value stays one word. A
command gets {name}, {ticket} and {offer}, and the same values in its environment. The list of machines is durable, so
that a restarted head still returns them. The planner retries a failed rent; this module retries a failed return.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echo2.config import Config
from echo2.config.offers import Offer, load_offers
from echo2.core.child import ChildProcess
from echo2.core.retries import Retries
from echo2.core.types import Backoff
from echo2.learner.core.fitting import num_parameters

log = logging.getLogger(__name__)

#: Timeout of a command; then it is killed, with its child processes.
HOOK_SECONDS = 900.0
#: First and longest pause between tries to return a machine; doubled after each try.
RETRY_SECONDS = Backoff(5.0, 600.0)
#: Number of tries to return a machine once the run is over.
LAST_TRIES = 3


def scaled_offers(config: Config, offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers, their rates scaled to the run's model and answers. An offer whose rate is for a model of other
    `parameters` keeps it, and says so, if the size of the run's model is unknown.
    """
    count = num_parameters(config.model.path) if any(offer.parameters for offer in offers) else None
    return [offer.scaled_to(count, config.sampling.max_tokens) for offer in offers]


def read_offers(config: Config) -> dict[str, Offer]:
    """Return the run's offers by name.

    Raises:
        UserError: the offers file is invalid, or a machine that can be rented has no rate.
    """
    offers = scaled_offers(config, load_offers(Path(config.fleet.offers))) if config.fleet.offers else []
    [offer.effective_rate for offer in offers if offer.rent]  # refuses one without a rate
    return {offer.name: offer for offer in offers}


@dataclass(slots=True)
class Machine:
    """One rented machine. `worker_id`: empty until its worker has joined. `leaving`: the machine is being returned."""

    name: str
    offer: str
    worker_id: str = ""
    leaving: bool = False


class Machines:
    """The rented machines of a run. `save` stores the list for restarts; `failed(offer, reason)` is called when a
    `rent` command fails."""

    def __init__(
        self,
        offers: Mapping[str, Offer],
        run_id: str,
        ticket: Path,
        log_path: Path,
        saved: Mapping[str, Any],
        save: Callable[[dict[str, Any]], None],
        failed: Callable[[str, str], object],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.offers, self._run_id, self._ticket, self._log_path = offers, run_id, ticket, log_path
        self._save, self._failed, self._spawn = save, failed, spawn
        self._number: int = saved.get("number", 0)
        self._busy: dict[str, asyncio.Lock] = {}
        self._out = {plain["name"]: Machine(**plain) for plain in saved.get("machines", [])}

    def start(self) -> None:
        """Continue returning the machines that an earlier head was returning."""
        for machine in self._out.values():
            if machine.leaving:
                self._spawn(self._return(machine))

    def rent(self, offer: str) -> None:
        self._number += 1
        machine = Machine(f"{offer}-{self._run_id[:6]}-{self._number}", offer)
        self._out[machine.name] = machine
        self._remember()
        self._spawn(self._rent(machine))

    def bind(self, name: str, worker_id: str) -> Offer | None:
        """Return the offer of the machine `name`, on which the worker claims to run, and bind the worker to it. None if
        this run did not rent that machine, returns it, or has another worker on it."""
        machine = self._out.get(name)
        if machine is None or machine.leaving or machine.worker_id not in ("", worker_id):
            return None
        if not machine.worker_id:
            machine.worker_id = worker_id
            self._remember()
        return self.offers.get(machine.offer)

    def return_machine(self, offer: str, worker_id: str) -> None:
        """Return the machine of this worker; with an empty id, a machine of the offer whose worker has not joined."""
        for machine in self._out.values():
            if machine.offer == offer and machine.worker_id == worker_id and not machine.leaving:
                machine.leaving = True
                self._remember()
                self._spawn(self._return(machine))
                return

    def names(self) -> list[str]:
        """Names of the rented machines, including those being returned."""
        return list(self._out)

    def kept(self) -> list[Machine]:
        return [machine for machine in self._out.values() if not machine.leaving]

    async def close(self) -> None:
        """The run is over: return all machines at once."""
        await asyncio.gather(*(self._return(machine, LAST_TRIES) for machine in list(self._out.values())))
        if self._out:
            log.error("these machines could not be returned and may still cost money: %s", ", ".join(self._out))

    async def _rent(self, machine: Machine) -> None:
        problem = await self._run("rent", machine)
        if problem and machine.name in self._out:
            log.warning("no machine of offer %s: %s", machine.offer, problem)
            machine.leaving = True  # a failed command may still have created a machine
            self._remember()
            self._failed(machine.offer, problem)
            await self._return(machine)

    async def _return(self, machine: Machine, tries: int | None = None) -> None:
        """Try to return a machine until it works, or a limited number of times."""
        retries, tried = Retries(RETRY_SECONDS), 0
        while machine.name in self._out:
            problem = await self._run("release", machine)
            tried += 1
            if not problem:
                self._out.pop(machine.name, None)
                self._busy.pop(machine.name, None)
                self._remember()
                return
            log.warning("%s could not be returned: %s", machine.name, problem)
            if tried == tries:
                return
            await retries.pause()

    async def _run(self, verb: str, machine: Machine) -> str:
        """Run a command of the offer, after all earlier ones for this machine. Return the problem, or ""."""
        offer = self.offers.get(machine.offer)
        if offer is None:
            return f"the offer {machine.offer!r} is not in the offers file any more"
        async with self._busy.setdefault(machine.name, asyncio.Lock()):
            if machine.name not in self._out:
                return ""  # returned in the meantime
            return await self._execute(verb, offer, machine)

    async def _execute(self, verb: str, offer: Offer, machine: Machine) -> str:
        values = {"name": machine.name, "offer": machine.offer, "ticket": self._ticket.read_text("utf-8").strip()}
        words = [filled(word, values) for word in shlex.split(offer.rent if verb == "rent" else offer.release)]
        if not words:
            return ""
        environment = {
            **os.environ,
            "ECHO2_MACHINE": machine.name,
            "ECHO2_OFFER": machine.offer,
            "ECHO2_TICKET": values["ticket"],
            "ECHO2_WORKER_ID": machine.worker_id,
        }
        log.info("%s %s", verb, machine.name)
        log_path = self._begin_log(f"{verb} {machine.name}")
        try:
            process = ChildProcess(words, log_path=log_path, environment=environment)
        except OSError as error:
            return f"cannot start {words[0]!r}: {error.strerror}"
        return await _ended(process, f"`{verb}` of offer {machine.offer}; see {self._log_path}")

    def _begin_log(self, what: str) -> Path | None:
        """Begin a command's part of the log, which the output of others may be part of, so that nothing of it may be
        taken back. None if the disk is full: a machine is returned all the same, and the output goes to the head's.
        """
        try:
            with self._log_path.open("ab", buffering=0) as output:
                output.write(f"\n--- {what}\n".encode())  # a command that was killed may have left half a line
        except OSError as error:
            log.warning("nothing written to %s: %s", self._log_path, error.strerror)
            return None
        return self._log_path

    def _remember(self) -> None:
        self._save({"number": self._number, "machines": [asdict(machine) for machine in self._out.values()]})


async def _ended(process: ChildProcess, what: str) -> str:
    """Wait for the command, at most `HOOK_SECONDS`. Return the problem, or "".

    It has no lifeline: it finishes even if the head is killed.
    """
    if (status := await process.ended(HOOK_SECONDS)) is None:
        process.kill()
        await process.ended()
        return f"no end after {HOOK_SECONDS:.0f} s of {what}"
    return f"exit status {status} of {what}" if status else ""


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return a word of a command with each {name} replaced by its value."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word
