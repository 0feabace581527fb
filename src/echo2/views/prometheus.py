"""The newest metrics of runs in Prometheus' text format: `echo2_reward_mean{run="sort"} 0.71`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from echo2.views.run_view import RunView

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Names of exported metrics. A metric with a third part, such as the name of a data source, is left out.
NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)?")


def exposition(views: Sequence[RunView]) -> str:
    """Return the version and the newest value of each metric of each run."""
    samples: dict[str, list[str]] = {}
    for view in views:
        label = view.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        newest = {name: value for row in view.rows for name, value in row.items()}
        for name, value in {**newest, "version": view.version}.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if is_number and NAME.fullmatch(name) and name != "step":
                samples.setdefault(f"echo2_{name.replace('/', '_')}", []).append(f'{{run="{label}"}} {value!r}')
    lines = [
        line
        for name, values in sorted(samples.items())
        for line in (f"# TYPE {name} gauge", *(name + value for value in values))
    ]
    return "\n".join(lines) + "\n"
