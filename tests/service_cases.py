"""Data of the service's clients, for its tests."""

from __future__ import annotations

import random
from array import array

from echo2_service.backend import ClientDatum
from learner_cases import VOCAB


def some_data(seed: str) -> list[ClientDatum]:
    rng = random.Random(seed)
    data = []
    for _ in range(4):
        tokens = array("i", [rng.randrange(VOCAB) for _ in range(rng.randint(3, 12))])
        targets = tokens[1:] + array("i", [rng.randrange(VOCAB)])
        data.append(ClientDatum(tokens, targets, array("d", [rng.random() for _ in tokens])))
    return data
