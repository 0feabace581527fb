"""The progress display of a run, and the summary at its end."""

from __future__ import annotations

import argparse
import json
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
from echo2.core.errors import counted
from echo2.core.printable import LINE_CHARS_MAX, PLAIN_SECONDS, printable
from echo2.head.fleet.decide.measurements import CAUSES
from echo2.head.ledger.rollout_log import samples
from echo2.views.run_view import RunView, read_status
from echo2.weights.format.adapter_files import ADAPTER_CONFIG

#: Minimum seconds between two reads of the run directory.
REFRESH_SECONDS = 0.3
#: State shown for a process, by whether it is alive; None: it runs on another machine.
PROCESS_STATES = {True: "[green]alive[/green]", False: "[red]gone[/red]", None: "remote"}
#: Maximum length of a reason or state; echo2's own have at most half of that.
REASON_CHARS = 1000
#: Characters of a reason in the table; `--json` has them whole.
TRUST_REASON_CHARS = 160
_LOST = ("rollout or group", "rollouts or groups")
#: By kind of failure: one and several of what failed, how, and the log that lists every failure.
FAILURE_WORDS = {
    "reward_failed": (*_LOST, "lost to your reward function", "reward.log"),
    "reward_retried": ("call", "calls", "of your reward function raised, then tried again", "reward.log"),
    "judge_failed": (*_LOST, "lost because the judge gave no verdict", "head.log"),
    "judge_retried": ("request", "requests", "to the judge brought no verdict, then tried again", "head.log"),
    "environment_failed": (*_LOST, "lost to your environment", "head.log"),
    "bad_task": ("group", "groups", "lost to rows that are not valid tasks", "head.log"),
    "prompt_too_long": ("group", "groups", "with a prompt that is too long for the model", "head.log"),
    "log_unfit": ("group", "groups", "with logged rollouts that the model cannot read", "head.log"),
    "snapshot_refused": ("snapshot", "snapshots", "refused by a worker", "head.log"),
    "engine_failed": ("lease", "leases", "failed in the worker's engine", "head.log"),
}
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
        self._told, self._told_version = set[str](), 0
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
            found = samples(self._view.rundir.rollouts, "eval", version, width)
            self._samples = [f"{SAMPLE_INDENT}{line}" for line in found]

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
        lines = ["  ".join(words), *(line for line in once if line not in self._told)]
        self._told = {*once}
        if status.get("version", 0) == self._told_version:
            lines += [f"  {line}" for line in _wait_lines(status)]
        self._told_version = status.get("version", 0)
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


def fleet_words(fleet: dict[str, Any] | None) -> list[str]:
    """Describe whether the workers suffice, and the predicted and measured idle ratio of the learner."""
    if not fleet:
        return []
    words = [f"{fleet['active']} active"]
    if fleet["standby"]:
        words.append(f"{fleet['standby']} standing by")
    if fleet["rented"]:
        words.append(f"{len(fleet['rented'])} rented")
    needed = fleet["needed_rate"]
    rates = "" if needed is None else f": {_rate(fleet['rate'])} of {_rate(needed)} rollouts/s needed"
    words.append(f"{fleet['text']}{rates}")
    if fleet["idle_predicted"] is not None and fleet["idle_ratio"] is not None:
        steps = fleet.get("idle_steps", 1)
        over = f" over the last {steps} steps" if steps > 1 else ""
        words.append(f"learner idle {fleet['idle_ratio']:.1%}{over}, predicted {fleet['idle_predicted']:.1%}")
    return words


def _rate(rate: float) -> str:
    """Write a rate with three digits that count: `0.125`, `17,500`."""
    return f"{float(f'{rate:.3g}'):,.12g}"


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


def strangers_lines(status: Mapping[str, Any]) -> list[str]:
    """Return lines about skipped evaluations, the prices strangers ask, and the strangers that were turned away."""
    lines = []
    if versions := sorted(status.get("not_evaluated") or {}, key=int):
        names = ", ".join(versions)
        lines.append(f"not evaluated: version {names}: no machine of yours is connected; run `echo2 eval DIR`")
    asks = {w["id"]: w["price_usd_per_hour"] for w in status.get("workers", []) if w.get("is_own") is False}
    if asks := {worker_id: price for worker_id, price in asks.items() if price}:
        lines.append("strangers ask: " + ", ".join(f"{worker_id} ${price:g}/h" for worker_id, price in asks.items()))
    return lines + [f"turned away: {name}: {why}" for name, why in (status.get("turned_away") or {}).items()]


def failure_lines(status: Mapping[str, Any], with_tracebacks: bool = False) -> list[str]:
    """Return a line per process that died and was started again, with its last words, and one per kind of failure: the
    count, the first failure in full, and the log that has the others."""
    lines = [printable(_death(entry), REASON_CHARS) for entry in status.get("deaths") or []]
    for failure in status.get("failures") or []:
        unknown = ("group", "groups", f"failed ({failure['kind']})", "head.log")
        one, several, how, log = FAILURE_WORDS.get(failure["kind"], unknown)
        before = failure.get("num_before", 0)
        when = " before the head was started again" if before == failure["count"] else ""
        first = "The first since the head was started again" if 0 < before < failure["count"] else "The first"
        line = (
            f"{counted(failure['count'], one, several)} {how}{when}; logs/{log} has all. {first}: {failure['message']}"
        )
        lines.append(printable(line, REASON_CHARS))
        if with_tracebacks:
            lines += [printable(one, REASON_CHARS) for one in failure["traceback"].rstrip().split("\n") if one]
    return lines


def _death(entry: Mapping[str, Any]) -> str:
    times = "once" if entry["deaths"] == 1 else f"{entry['deaths']} times in a row"
    when = time.strftime("%H:%M:%S", time.localtime(entry["died_at"]))
    died = f"{entry['name']} died {times}, last at {when}, and was started again (logs/{entry['name']}.log)"
    return f"{died}: {entry['last_words']}"


def show_summary(summary: dict[str, Any], console: Console, reason: str = "") -> None:
    """Print the closing tables. `reason`: why the run ended."""
    groups = summary["groups"]
    retired = ", ".join(f"{count} {_safe(why)}" for why, count in groups["retired"].items()) or "0"
    refused = ", ".join(f"{count} {_safe(why)}" for why, count in groups["refused"].items()) or "0"
    before, after = summary["eval_before"], summary["eval_after"]
    table = Table(title="Run summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    if before is not None:
        table.add_row(
            "held-out reward", f"{before:.3f} before, [green]{after:.3f} after[/green] {summary['steps']} steps"
        )
    for version, failed in (summary.get("eval_failed") or {}).items():
        causes = ", ".join(f"{count} {_safe(reason)}" for reason, count in failed.items())
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
            f"{_safe(cause)} {seconds:.1f} s"
            for cause, seconds in machine["wasted_seconds"].items()
            if seconds >= WORTH_SECONDS
        )
        machines.add_row(
            _safe(name),
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


def _safe(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """Make text that may come from a peer safe for a table: no control characters, no markup."""
    return escape(printable(text, chars_max))


def _version(version: int | None) -> str:
    return "none" if version is None else str(version)


def show_status(status: Mapping[str, Any], console: Console) -> None:
    """Print `echo2 status`: progress of the run, who waits for whom, and the processes."""
    done = f"step {status['version']} of {status['max_steps']}, lineage {status['lineage']}"
    published = f"snapshot {_version(status['published'])}, checkpoint {_version(status['checkpoint'])}"
    where, state = escape(status["directory"]), _safe(status["state"], REASON_CHARS)
    console.print(f"[bold]{where}[/bold]  {state}  {done}  {published}  ${status['cost_usd']:.4f}", highlight=False)
    if judge := status.get("judge"):
        console.print(f"judge: {judge['answers']} answers, ${judge['usd']:.4f}", highlight=False)
    if fleet := fleet_words(status.get("fleet")):
        console.print(f"fleet: {_safe('; '.join(fleet), REASON_CHARS)}", highlight=False)
    for line in failure_lines(status, with_tracebacks=True):
        console.print(escape(line), style="red", highlight=False)
    for line in strangers_lines(status):
        console.print(escape(line), highlight=False)
    waits = Table("who", "waits for", "since", "until", "why", title="Waits", title_justify="left")
    now = status["time"]
    for wait in status["waits"]:
        since = f"{max(0.0, now - wait['since']):.1f} s" if wait["since"] else "-"
        until = f"in {wait['until'] - now:.1f} s" if wait["until"] is not None else "-"
        waits.add_row(
            _safe(wait["waiter"]), _safe(wait["waits_for"]), since, until, _safe(wait["reason"], REASON_CHARS)
        )
    console.print(waits if status["waits"] else "no process waits")
    table = Table("role", "id", "pid", "state", "engine", "weights", "doing", title="Processes", title_justify="left")
    for process in status["processes"]:
        state = PROCESS_STATES[process["alive"]] if process["host"] else "away"
        pid, texts = str(process["pid"] or "-"), (_safe(process.get(key, "")) for key in ("engine", "weights", "doing"))
        table.add_row(process["role"], _safe(process["id"]), pid, state, *texts)
    console.print(table)


def trust_command(options: argparse.Namespace) -> int:
    """Print the results of checks by ticket. Raises as `read_status`."""
    found = trust_rows(read_status(RunDir(options.directory)))
    if options.json:
        print(json.dumps(found))
    else:
        show_trust(found, Console())
    return 0


def trust_rows(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each ticket of strangers that delivered groups, the least trusted first. Times are in seconds
    before the status.
    """
    found = []
    for ticket, trust in (status.get("trust") or {}).items():
        history = [{"seconds_ago": status["time"] - at, "what": what} for at, what in trust["history"]]
        found.append({"ticket": ticket, **trust, "history": history})
    return sorted(found, key=lambda row: (row["score"], row["ticket"]))


def show_trust(found: list[dict[str, Any]], console: Console) -> None:
    """Print the rows as a table."""
    if not found:
        console.print("no stranger has delivered a group")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("ticket", "trust", "groups", "passed", "failed", "no verdict", "stands", "last"):
        table.add_column(name, no_wrap=name != "last")
    for row in found:
        stands = "in quarantine" if row["is_quarantined"] else "new" if row["is_new"] else "trusted"
        last = row["history"][-1] if row["history"] else None
        told = "" if last is None else f"{last['seconds_ago']:.0f} s ago: {_safe(last['what'], TRUST_REASON_CHARS)}"
        numbers = (row[name] for name in ("num_groups", "num_passed", "num_failed", "num_missed"))
        table.add_row(_safe(row["ticket"]), f"{row['score']:.2f}", *map(str, numbers), stands, told)
    console.print(table, highlight=False)
