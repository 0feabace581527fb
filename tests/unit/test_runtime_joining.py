"""What a head makes of a worker's hello."""

from __future__ import annotations

import pytest

from echo2.errors import PeerError
from echo2.runtime.service import worker_joined
from echo2.runtime.worker import AS_THE_RUN_ASKS
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.limits import PROTOCOL_VERSION


@pytest.mark.parametrize(("said", "asked", "together"), [(AS_THE_RUN_ASKS, 1, 1), (AS_THE_RUN_ASKS, 64, 64), (4, 8, 4)])
def test_a_worker_counts_for_as_many_groups_as_it_will_sample_together(said: int, asked: int, together: int) -> None:
    """It says hello before it knows what the run asks for. Counted for more, it would hold leases that others wait for
    while the learner waits for them.
    """
    hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, capacity_groups=said)
    assert worker_joined(Peer("w", "worker"), hello, asked).capacity_groups == together


def test_a_worker_that_samples_nothing_is_refused() -> None:
    with pytest.raises(PeerError, match="at least 1"):
        worker_joined(Peer("w", "worker"), wire.WorkerHello(protocol=PROTOCOL_VERSION), 8)
