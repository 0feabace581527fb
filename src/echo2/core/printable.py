"""Text for people: other people's text made safe for terminals, logs and tables, and quantities with their units."""

from __future__ import annotations

import re
import sys
import time

#: Terminal escape sequences. They are removed whole: their letters mean nothing without the escape character.
_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?)")
REPLACED = "\N{REPLACEMENT CHARACTER}"
CUT_OFF = "\N{HORIZONTAL ELLIPSIS}"
#: Maximum characters of one line for people: a wait, a reason, an activity.
LINE_CHARS_MAX = 200

#: Seconds between two lines without a terminal.
PLAIN_SECONDS = 5.0


class PlainLines:
    """Prints a line to stderr at once and then every `PLAIN_SECONDS`, where no terminal shows a progress bar."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal, self._printed_at = is_terminal, float("-inf")

    def print_due(self, line: str, is_last: bool = False) -> None:
        """Print the line if it is due, or the last one."""
        now = time.monotonic()
        if not self._is_terminal and (is_last or now - self._printed_at > PLAIN_SECONDS):
            self._printed_at = now
            print(line, file=sys.stderr, flush=True)


def printable(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """Return `text` as one line without anything that a terminal obeys or hides: no control characters (C0 and C1), no
    escape sequences, no change of writing direction, nothing invisible; `chars_max` characters at most.
    """
    text = text[: 4 * chars_max]  # this bounds the work, too
    if not text.isprintable():
        text = _SEQUENCES.sub("", text)
        text = "".join(c if c.isprintable() else " " if c.isspace() else REPLACED for c in text)
    return text if len(text) <= chars_max else text[: chars_max - 1] + CUT_OFF


def shown(value: object, chars_max: int = 120) -> str:
    """Return the `repr` of a value for an error message, `chars_max` characters at most."""
    return printable(repr(value), chars_max)


def printable_lines(text: str, chars_max: int) -> str:
    """Apply `printable` to each line of `text`; the result has `chars_max` characters at most."""
    lines = [printable(line, chars_max) for line in text[: 4 * chars_max].split("\n")]
    whole = "\n".join(lines)
    return whole if len(whole) <= chars_max else whole[: chars_max - 1] + CUT_OFF


def duration(seconds: float) -> str:
    """Format a duration in seconds; from two minutes on in minutes, from two hours on in hours."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.3g} s"


def size(num_bytes: float) -> str:
    """Format a number of bytes with three significant digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"
