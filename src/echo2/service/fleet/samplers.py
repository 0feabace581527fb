"""Gives each sampling call to one of the service's machines, and to another one if that machine is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path

from echo2.control.service.placing import LOCAL, Placing
from echo2.errors import PeerError
from echo2.service.backend import SampleOutput, SampleSpec
from echo2.service.fleet.machines import MachineLostError, SamplingMachine

log = logging.getLogger(__name__)


class Samplers:
    """The machines that sample for a service. For one event loop."""

    def __init__(self, own: SamplingMachine) -> None:
        self._placing = Placing()
        self._machines: dict[str, SamplingMachine] = {LOCAL: own}
        self._numbers = itertools.count(1)
        self._turns: dict[int, asyncio.Future[SamplingMachine]] = {}

    def joined(self, name: str, slots: int, machine: SamplingMachine) -> None:
        """Add a machine of the fleet."""
        self._machines[name] = machine
        self._placing.joined(name, slots)
        self._place()

    def left(self, name: str) -> None:
        """Remove a machine. Its calls end with `MachineLostError`, and other machines take them."""
        del self._machines[name]
        self._placing.left(name)

    async def sample(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        """See `Backend.sample`."""
        number = next(self._numbers)
        self._placing.arrive(number, spec.owner, str(snapshot or base), spec.num_samples)
        try:
            while True:
                turn: asyncio.Future[SamplingMachine] = asyncio.get_running_loop().create_future()
                self._turns[number] = turn
                self._place()
                machine = await turn
                try:
                    return await machine.sample(number, base, snapshot, spec)
                except (MachineLostError, PeerError) as error:
                    log.info("call %d goes to another machine: %s", number, error)
                    self._placing.came_back(number)
        finally:
            del self._turns[number]
            self._placing.ended(number)
            self._place()

    @property
    def num_waiting(self) -> int:
        """Number of calls that no machine has room for."""
        return self._placing.num_waiting

    def under_way(self) -> dict[str, int]:
        """Return the number of sequences in progress, by machine."""
        return self._placing.under_way()

    def _place(self) -> None:
        for number, name in self._placing.place():
            turn = self._turns[number]
            if not turn.done():  # else the caller was cancelled, and its call is about to end
                turn.set_result(self._machines[name])
