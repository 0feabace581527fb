"""The progress display of a run, and the summary at its end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from echo2.config.rundir import RunDir
from echo2.core.printable import PLAIN_SECONDS, printable
from echo2.head.fleet.decide.measurements import CAUSES
from echo2.head.ledger.rollout_log import samples
from echo2.views.run_view import RunView
from echo2.views.status import REASON_CHARS, failure_lines, safe, strangers_lines
from echo2.weights.format.adapter_files import ADAPTER_CONFIG

#: Minimum seconds between two reads of the run directory.
REFRESH_SECONDS = 0.3
#: Idle ratio of the learner from which the main cause of its waiting is shown.
WORTH_WORDS = 0.05
#: Seconds that a machine wasted on one cause, from which the cause is shown.
WORTH_SECONDS = 1.0
#: Indentation of a sample rollout.
SAMPLE_INDENT = "  "
_BLOCKS = "▁▂▃▄▅▆▇█"


class RunDisplay:
    """Shows the progress of a run from its run directory: live in a terminal, else one line every `PLAIN_SECONDS`."""

    def __init__(self, rundir: RunDir, max_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task("training", total=max_steps)
        self._live = Live(self._progress, console=self._console, refresh_per_second=4, transient=True)
        self._read_at = self._printed_at = 0.0
        self._view = RunView.read(rundir.path)
        self._printed_lines, self._printed_version = set[str](), 0
        self._sampled, self._samples = -1, list[str]()  # version of the evaluation they come from

    def __enter__(self) -> RunDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def poll(self) -> None:
        """Read the run directory and update the display, at most every `REFRESH_SECONDS`."""
        now = time.monotonic()
        if now - self._read_at < REFRESH_SECONDS:
            return
        self._read_at = now
        self._view = self._view.newer()
        status = self._view.status
        self._look_for_samples()
        if self._console.is_terminal:
            self._progress.update(self._bar, completed=status.get("version", 0))
            samples = Text("\n".join(self._samples), style="dim", no_wrap=True, overflow="ellipsis")
            self._live.update(Group(self._progress, _news(self._view), samples))
        elif now - self._printed_at > PLAIN_SECONDS:
            self._printed_at = now
            for line in self._plain_lines():
                self._console.print(Text(line), soft_wrap=True)

    def _look_for_samples(self) -> None:
        """Read samples of the newest evaluation, once per evaluation."""
        version = max((version for version, _ in self._view.accuracies), default=-1)
        if version > self._sampled:
            self._sampled = version
            width = self._console.width - len(SAMPLE_INDENT)
            lines = samples(self._view.rundir.rollouts, "eval", version, width)
            self._samples = [f"{SAMPLE_INDENT}{line}" for line in lines]

    def _plain_lines(self) -> list[str]:
        """Return a progress line of 80 columns, then samples of a new evaluation and problems, each shown once, and the
        current waits if no step was trained since the last line."""
        status, steps = self._view.status, _rewarded(self._view)
        words = [f"step {status.get('version', 0)}/{status.get('max_steps', '?')}"]
        if steps:
            words.append(f"reward {steps[-1]['reward/mean']:.3f}")
        if evals := self._view.accuracies:
            words.append(f"held-out {evals[-1][1]:.3f}")
        if steps:
            last = steps[-1]
            words += [f"entropy {last['entropy/mean']:.2f}"] if "entropy/mean" in last else []
            words += [f"idle {last.get('learner/idle_ratio', 0.0):.0%}", f"workers {last.get('workers/active', 0)}"]
            words.append(f"${last.get('cost/cum_usd', 0.0):.3f}")
        once = [*self._samples, *_wrong_lines(status)]
        lines = ["  ".join(words), *(line for line in once if line not in self._printed_lines)]
        self._printed_lines = {*once}
        if status.get("version", 0) == self._printed_version:
            lines += [f"  {line}" for line in _wait_lines(status)]
        self._printed_version = status.get("version", 0)
        return lines


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the newest finite values as small bars, the last one at the right."""
    values = [value for value in values if math.isfinite(value)][-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high / 2 - low / 2) or 1.0  # halves: the difference of two finite numbers need not be finite
    return "".join(_BLOCKS[int((value / 2 - low / 2) / span * (len(_BLOCKS) - 1))] for value in values)


def _rewarded(view: RunView) -> list[Mapping[str, Any]]:
    return [row for row in view.steps if "reward/mean" in row]


def _wrong_lines(status: Mapping[str, Any]) -> list[str]:
    """Return why the run is paused, and what failed."""
    paused = [f"paused: {printable(status['paused'], REASON_CHARS)}"] if status.get("paused") else []
    return paused + failure_lines(status)


def _wait_lines(status: Mapping[str, Any]) -> list[str]:
    waits = status.get("waits", [])[:2]
    return [
        printable(f"{wait['waiter']} waits for {wait['waits_for']}: {wait['reason']}", REASON_CHARS) for wait in waits
    ]


def _news(view: RunView) -> Text:
    status, steps = view.status, _rewarded(view)
    text = Text()
    if steps:
        last = steps[-1]
        text.append(f"reward {last['reward/mean']:.3f} {sparkline([row['reward/mean'] for row in steps])}")
        text.append(f"  entropy {last['entropy/mean']:.2f}\n" if "entropy/mean" in last else "\n")
        text.append(f"learner idle {last.get('learner/idle_ratio', 0.0):.0%}  ")
        if last.get("off_policy/logged") == 1.0:
            text.append("from a log, of no age")
        else:
            text.append(f"staleness {last.get('off_policy/mean', 0.0):.2f}")
            text.append(f" (max {last.get('off_policy/max', 0)}, bound {last.get('off_policy/bound', '?')})")
        text.append(f"  workers {last.get('workers/active', 0)}  ${last.get('cost/cum_usd', 0.0):.4f}\n")
    if evals := view.accuracies:
        text.append("held-out " + "  ".join(f"{version}: {value:.3f}" for version, value in evals[-6:]) + "\n")
    for line in _wrong_lines(status):
        text.append(f"{line}\n", style="red")
    if broadcast := _broadcast_line(status):
        text.append(f"weights {printable(broadcast, REASON_CHARS)}\n")
    for line in _wait_lines(status):
        text.append(f"{line}\n", style="dim")
    return text


def _broadcast_line(status: Mapping[str, Any]) -> str:
    """Describe how many workers have the newest weights, the progress of the others, and the last broadcast time."""
    workers, newest = status.get("workers", []), status.get("published")
    if newest is None or not workers:
        return ""
    done = sum(1 for worker in workers if str(worker.get("installed")).rpartition(".")[2] == str(newest))
    waiting = len(workers) - done
    words = [f"version {newest} is at {done} workers" + (f", on its way to {waiting}" if waiting else "")]
    under_way = [worker["fetching"] for worker in workers if worker.get("fetching")]
    shares = [each["bytes_stored"] / max(1, each["bytes_total"]) for each in under_way]
    if shares:
        words.append(f"{len(shares)} fetching, the slowest has {min(shares):.0%}")
    broadcast = status.get("broadcast", {})
    if broadcast.get("broadcast/t_bcast") is not None:
        words.append(f"new weights reach the workers in {broadcast['broadcast/t_bcast']:.1f} s")
    if broadcast.get("suspects"):
        words.append("suspected: " + ", ".join(sorted(broadcast["suspects"])))
    return "  ".join(words)


def show_summary(summary: dict[str, Any], console: Console, reason: str = "") -> None:
    """Print the closing tables. `reason`: why the run ended."""
    groups = summary["groups"]
    retired = ", ".join(f"{count} {safe(why)}" for why, count in groups["retired"].items()) or "0"
    refused = ", ".join(f"{count} {safe(why)}" for why, count in groups["refused"].items()) or "0"
    before, after = summary["eval_before"], summary["eval_after"]
    table = Table(title="Run summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    if before is not None:
        table.add_row(
            "held-out reward", f"{before:.3f} before, [green]{after:.3f} after[/green] {summary['steps']} steps"
        )
    for version, failed in (summary.get("eval_failed") or {}).items():
        causes = ", ".join(f"{count} {safe(reason)}" for reason, count in failed.items())
        table.add_row("held-out reward", f"version {version} without the tasks that failed: {causes}", style="red")
    for line in strangers_lines({"not_evaluated": summary.get("not_evaluated")}):
        table.add_row("held-out reward", escape(line))
    for line in failure_lines(summary):
        table.add_row("failed", escape(line), style="red")
    if (idle := summary["learner_idle_ratio"]) is not None:
        table.add_row("learner idle ratio", f"{idle:.1%}{_mostly(summary)}")
    if (mean := summary["staleness_mean"]) is not None:
        staleness = f"mean {mean:.2f}, max {summary['staleness_max']}, bound {summary['staleness_bound']}"
        table.add_row("staleness (versions)", staleness)
    elif summary.get("all_logged"):
        table.add_row("staleness (versions)", "none: all from a log")
    table.add_row("groups", f"{groups['trained']} trained, retired: {retired}; deliveries refused: {refused}")
    shipped = (
        f"{summary['origin_bytes'] / 1e6:.1f} MB from the head, {summary['peer_bytes'] / 1e6:.1f} MB between workers"
    )
    table.add_row("weights sent", shipped)
    table.add_row("time", f"{summary['seconds']:.0f} s")
    table.add_row("cost", f"${summary['cost_usd']:.4f}, of which ${summary['wasted_usd']:.4f} wasted")
    console.print(table)
    machines = Table(title="Machines", title_justify="left")
    for column in ("machine", "groups*", "busy", "connected", "dollars", "wasted"):
        machines.add_column(column, justify="left" if column == "machine" else "right")
    for name, machine in summary["machines"].items():
        wasted = ", ".join(
            f"{safe(cause)} {seconds:.1f} s"
            for cause, seconds in machine["wasted_seconds"].items()
            if seconds >= WORTH_SECONDS
        )
        machines.add_row(
            safe(name),
            f"{machine['useful_groups']:,.0f}" if machine["useful_groups"] else "-",
            f"{machine['useful_seconds']:.0f} s" if machine["useful_groups"] else "-",
            f"{machine['seconds']:.0f} s",
            f"${machine['usd']:.4f}",
            f"${machine['wasted_usd']:.4f}" + (f" ({wasted})" if wasted else ""),
        )
    console.print(machines)
    console.print("* including groups of evaluations", highlight=False)
    _show_samples(summary, console)
    for line in next_steps(summary, reason):
        console.print(escape(line), highlight=False, soft_wrap=True)


def _show_samples(summary: Mapping[str, Any], console: Console) -> None:
    """Print samples of the newest evaluation, or else of the newest step."""
    if not summary.get("directory"):
        return
    folder = RunDir(Path(summary["directory"])).rollouts
    for kind, what in (("eval", "held-out tasks"), ("step", "the last steps")):
        if lines := samples(folder, kind, summary["steps"], console.width - len(SAMPLE_INDENT)):
            console.print(f"Samples from {what}:", highlight=False)
            for line in lines:
                console.print(SAMPLE_INDENT + escape(line), highlight=False, soft_wrap=True)
            return


def _mostly(summary: Mapping[str, Any]) -> str:
    """Return the main cause of the learner's waiting; empty if the learner hardly waited."""
    waits: Mapping[str, float] = summary.get("learner_waits") or {}
    seconds, cause = max(((seconds, cause) for cause, seconds in waits.items()), default=(0.0, ""))
    if summary["learner_idle_ratio"] < WORTH_WORDS or seconds <= 0:
        return ""
    return f", {seconds / sum(waits.values()):.0%} of it waiting for {CAUSES[cause]}"


def next_steps(summary: dict[str, Any], reason: str = "") -> list[str]:
    """Return lines that say where the trained model is and what to do with it, or why there is none."""
    directory, version = summary.get("directory"), summary.get("checkpoint")
    if not directory or version is None:
        return []
    checkpoint = RunDir(Path(directory)).checkpoints / f"step_{version}"
    kind = "a PEFT adapter" if (checkpoint / ADAPTER_CONFIG).is_file() else "a Hugging Face directory"
    where = shlex.quote(directory)
    if not summary["steps"]:
        because = f": {printable(reason, REASON_CHARS)}" if reason else "."
        return [f"Nothing was trained{because}", f"Logs: {directory}/logs"]
    return [
        f"The model after step {version} is in {checkpoint}, {kind}.",
        f"See how it went: echo2 view {where}   Talk to it: echo2 chat {where}",
        f"Evaluate it: echo2 eval {where}   Export it: echo2 export {where} --to DIR",
    ]
