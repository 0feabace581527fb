"""What the figures of the benchmarks share: colours that are readable on light and on dark pages."""

from __future__ import annotations

import importlib.util

from echo2.core.errors import UserError

#: Of the Okabe-Ito palette, which people with any kind of colour vision can tell apart, the mid-tones.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Readable on white and on black.
INK = "#7f7f7f"


def require_matplotlib() -> None:
    """Raises: UserError: it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("The figure needs matplotlib: pip install matplotlib.")
