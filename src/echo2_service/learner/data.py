"""Converts a client's data to the learner's form, and the learner's logprobs to the client's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.core.errors import UserError
from echo2.learner.core.client_losses import CLIENT_LOSSES, HIGH, LOW
from echo2.learner.core.datum import Datum
from echo2_service.backend import ClientDatum


@dataclass(frozen=True, slots=True)
class LearnerData:
    """`rows`: for each client datum, as many rows as it has targets per token (`widths`). The rows of a datum have the
    same input tokens, so the learner runs these once where that is cheaper.
    """

    rows: list[Datum]
    widths: list[int]

    def by_client(self, logprobs: Sequence[array[float]]) -> list[array[float]]:
        """Convert logprobs of the rows, 'd' [N], to logprobs of the client's data, 'f' [N * K]."""
        found, start = [], 0
        for width in self.widths:
            rows = logprobs[start : start + width]
            whole = array("f", bytes(4 * width * len(rows[0])))
            for place, row in enumerate(rows):
                whole[place::width] = array("f", row)
            found.append(whole)
            start += width
        return found


def learner_data(data: Sequence[ClientDatum], loss: str) -> LearnerData:
    """Convert the client's data for a loss.

    Raises:
        UserError: there is no datum, or a datum has no tokens or an array that differs in length from its targets.
    """
    if not data:
        raise UserError("There is no data: give at least one datum.")
    rows, widths = [], []
    for place, datum in enumerate(data):
        width = _checked_width(place, datum)
        _check_clips(place, datum, loss)
        weights = _weights(datum, loss)
        for column in range(width):
            at = slice(column, None, width)
            targets = datum.targets[at]
            rows.append(
                Datum(
                    datum.tokens[:1],
                    datum.tokens[1:] + targets[-1:],
                    b"\x01" * len(datum.tokens),
                    None if weights is None else weights[at],
                    None if datum.advantages is None else datum.advantages[at],
                    None if datum.logprobs is None else datum.logprobs[at],
                    targets=targets,
                    clip_low=None if datum.clip_low is None else datum.clip_low[at],
                    clip_high=None if datum.clip_high is None else datum.clip_high[at],
                )
            )
        widths.append(width)
    return LearnerData(rows, widths)


def _checked_width(place: int, datum: ClientDatum) -> int:
    length, num_targets = len(datum.tokens), len(datum.targets)
    if not length or not num_targets or num_targets % length:
        raise UserError(
            f"datum {place} has {length} tokens and {num_targets} targets: give one or more for each token."
        )
    for name in ("weights", "advantages", "logprobs", "clip_low", "clip_high"):
        values = getattr(datum, name)
        if values is None:
            continue
        if len(values) != num_targets:
            raise UserError(f"datum {place} has {len(values)} {name} for {num_targets} targets: give as many.")
        if not all(map(math.isfinite, values)):
            raise UserError(f"datum {place} has {name} that are not finite.")
    return num_targets // length


def _check_clips(place: int, datum: ClientDatum, loss: str) -> None:
    """Refuse clip bounds that the loss does not have. An unknown loss is refused later, by its name."""
    known = CLIENT_LOSSES[loss].defaults if loss in CLIENT_LOSSES else (LOW, HIGH)
    for name, values in ((LOW, datum.clip_low), (HIGH, datum.clip_high)):
        if values is not None and name not in known:
            raise UserError(f"datum {place} has {name}, which the loss {loss} does not.")


def _weights(datum: ClientDatum, loss: str) -> array[float] | None:
    """Return the client's weights, with 0 for padding in the losses with advantages. In gspo without weights, tokens of
    advantage 0 are no part of a sequence's ratio, so their weight is 0, too.
    """
    if loss == "cross_entropy" or datum.advantages is None:
        return datum.weights
    logprobs = datum.logprobs or array("f", bytes(4 * len(datum.targets)))
    weights = array("d", datum.weights or [1.0] * len(datum.targets))
    for at, (target, logprob, advantage) in enumerate(zip(datum.targets, logprobs, datum.advantages, strict=True)):
        is_padding = not target and not logprob
        if not advantage and (is_padding or (loss == "gspo" and datum.weights is None)):
            weights[at] = 0.0
    return weights
