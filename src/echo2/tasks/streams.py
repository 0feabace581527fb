"""The tasks of a run: the rows that `tasks.source` names, from one source or several, as a mixture for training and as
sets for evaluation.

Rows without a prompt get it from their columns: `params = {prompt = "{question} The answer is"}`.

A mixture takes its sources in fixed shares: every block of `BLOCK` consecutive tasks contains exactly each source's
share, in an order drawn for that block. So the task at a cursor, its source and its row follow from the cursor alone,
as they do with one source.
"""

from __future__ import annotations

import inspect
import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Protocol

from echo2.config.sections import EvalConfig, TasksConfig
from echo2.config.values import template_pieces, weighted
from echo2.core.errors import UserError, did_you_mean
from echo2.core.types import Task
from echo2.sandbox.plugins import innermost_line, load_named
from echo2.tasks.base import TaskSource, TaskStream, digest_of, permute, row_name
from echo2.tasks.digit_sorting import DigitSorting
from echo2.tasks.harbor_rows import HarborRows, is_task_set
from echo2.tasks.logs import LoggedRollouts
from echo2.tasks.sources import HfRows, JsonlRows, ParquetRows, ReasoningGymRows
from echo2.tasks.teaching import TEACHER_PROMPT
from echo2.tasks.verifiers_rows import VerifiersRows

#: Number of consecutive tasks over which a mixture keeps its shares exactly.
BLOCK = 1000
BUILT_IN = {"digit_sorting": DigitSorting}
KINDS = (
    "rows.jsonl, rows.parquet, a directory (of a Hugging Face dataset, or of Harbor tasks), "
    "hub:owner/name[/configuration], reasoning_gym:<name>, verifiers:<taskset>, logs:hands.jsonl, file.py:Class, "
    f"package.module:Class or {', '.join(BUILT_IN)}"
)


class Tasks(Protocol):
    """Tasks by cursor: one `TaskStream`, or several combined."""

    def __len__(self) -> int:
        """Rows of all sources."""

    def task(self, cursor: int) -> Task:
        """The task at position `cursor` >= 0; the same cursor always gives the same task. Raises UserError if its row
        is invalid."""

    def digests(self) -> list[str]:
        """The digest of each source's rows, in the order of the sources; empty where there is none."""

    def source_of(self, cursor: int) -> str:
        """The name of this task's source or set; empty if there is only one source."""


def training_tasks(tasks: TasksConfig, seed: int) -> Tasks:
    """Load the tasks of `tasks.source`: one source, or a mixture of several.

    Raises:
        UserError: as `load_tasks`; a weight that is not above 0; a source that is named twice.
    """
    if isinstance(tasks.source, str):
        return TaskStream(load_tasks(tasks.source, tasks.params, seed), seed, shuffle=True)
    weights = [weighted(entry, "tasks.source")[0] for entry in tasks.source]
    if bad := [entry for entry, weight in zip(tasks.source, weights, strict=True) if weight <= 0.0]:
        raise UserError(f"tasks.source has {bad[0]!r}: a source's weight must be above 0. Remove it instead.")
    names = _metric_names(tasks.sources)
    if len(set(names)) < len(weights) or not weights:
        raise UserError(f"tasks.source = {tasks.source}: name at least one source, and each once.")
    loaded = (TaskStream(load_tasks(source, tasks.params, seed), seed, shuffle=True) for source in tasks.sources)
    return Mixture(dict(zip(names, loaded, strict=True)), weights, seed)


def _metric_names(sources: Sequence[str]) -> list[str]:
    """Return a name for each source: of an absolute path the last parts, as few as tell it from the other sources, so
    that metrics have the same names on every machine."""
    parts = [PurePath(source).parts[1:] if PurePath(source).is_absolute() else (source,) for source in sources]

    def is_alone(at: int, count: int) -> bool:
        return all(other[-count:] != parts[at][-count:] for number, other in enumerate(parts) if number != at)

    counts = (
        next((count for count in range(1, len(own)) if is_alone(at, count)), len(own)) for at, own in enumerate(parts)
    )
    return ["/".join(own[-count:]) for own, count in zip(parts, counts, strict=True)]


def held_out_tasks(held_out: EvalConfig, seed: int) -> Tasks | None:
    """Load the first `limit` tasks of each set of `eval.source`; None if there are no sets.

    Raises:
        UserError: as `load_tasks`.
    """
    sets = {name: load_tasks(source, held_out.params, seed) for name, source in held_out.sets.items()}
    return Sets({name: TaskStream(rows, seed, False) for name, rows in sets.items()}, held_out.limit) if sets else None


def refuse_changed_rows(names: Sequence[str], digests: Sequence[str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of all sources by name, to be kept: those of before, and those of these sources.

    Raises:
        UserError: a source of this name had other rows before.
    """
    now = {name: digest for name, digest in zip(names, digests, strict=True) if digest}
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            raise UserError(
                f"The rows of {name} have changed since this began, so the same positions would give other rows. Put "
                "the old file back, give the new one another name, or begin anew from the newest checkpoint."
            )
    return {**before, **now}


class Mixture:
    """An endless mixture of streams in fixed shares: see the module. `weights`: one per stream, above 0.

    Raises:
        UserError: a stream's share is below 1 in `BLOCK`.
    """

    def __init__(self, streams: Mapping[str, TaskStream], weights: Sequence[float], seed: int) -> None:
        self._streams, self._seed = dict(streams), seed
        shares = quotas(weights, BLOCK)
        self._ends = list(itertools.accumulate(shares))
        if not min(shares):
            least = list(streams)[shares.index(0)]
            raise UserError(f"tasks.source: the share of {least!r} is below 1 in {BLOCK}. Raise its weight.")

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def task(self, cursor: int) -> Task:
        name, own = self._place(cursor)
        return replace(self._streams[name].task(own), cursor=cursor)

    def digests(self) -> list[str]:
        return [digest for stream in self._streams.values() for digest in stream.digests()]

    def source_of(self, cursor: int) -> str:
        return self._place(cursor)[0]

    def _place(self, cursor: int) -> tuple[str, int]:
        """Return the source of a task, and the cursor within that source."""
        block, position = divmod(cursor, BLOCK)
        drawn = permute(position, BLOCK, f"{self._seed}/mixture/{block}")
        at = bisect_right(self._ends, drawn)
        start = self._ends[at - 1] if at else 0
        return list(self._streams)[at], block * (self._ends[at] - start) + drawn - start


class Sets:
    """The first `limit` tasks of each stream, one stream after the other."""

    def __init__(self, streams: Mapping[str, TaskStream], limit: int) -> None:
        self._streams = dict(streams)
        self._ends = list(itertools.accumulate(min(limit, len(stream)) for stream in streams.values()))

    def __len__(self) -> int:
        return self._ends[-1]

    def task(self, cursor: int) -> Task:
        """See `Tasks.task`.

        Raises:
            UserError: the cursor is past the last task, which happens as the head reads ahead.
        """
        if cursor >= len(self):
            raise UserError(f"There are {len(self)} held-out tasks, and no task {cursor}.")
        at = bisect_right(self._ends, cursor)
        start = self._ends[at - 1] if at else 0
        return replace(list(self._streams.values())[at].task(cursor - start), cursor=cursor)

    def digests(self) -> list[str]:
        return [digest for stream in self._streams.values() for digest in stream.digests()]

    def source_of(self, cursor: int) -> str:
        return list(self._streams)[bisect_right(self._ends, cursor)]


def quotas(weights: Sequence[float], size: int) -> list[int]:
    """Divide `size` in proportion to the weights by the largest-remainder method; the parts add up to `size`."""
    exact = [size * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda at: (shares[at] - exact[at], at))
    for at in by_remainder[: size - sum(shares)]:
        shares[at] += 1
    return shares


class TemplateRows:
    """`rows` with a column `prompt`: the template with {column} filled in; `{{` and `}}` are braces. All columns stay.
    In the same way `teacher_prompt`, for a teacher.

    With `chat`, these are single user messages, for the model's chat template.

    Raises:
        UserError: the template has fields that are not plain names, or `params` has other parameters.
    """

    def __init__(self, rows: TaskSource, params: Mapping[str, Any]) -> None:
        templates = {name: params[name] for name in ("prompt", TEACHER_PROMPT) if name in params}
        unknown, self._chat = sorted({*params} - {*templates, "chat"}), params.get("chat", False)
        are_texts = "prompt" in params and all(isinstance(template, str) for template in templates.values())
        if unknown or not are_texts or not isinstance(self._chat, bool):
            raise UserError(
                'Rows that are read take the params {prompt = "text with {column}", chat = true or false}, '
                f"teacher_prompt like prompt, and no others; got {dict(params)}."
            )
        self._rows, self._parts = rows, {name: template_pieces(template) for name, template in templates.items()}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        made = dict[str, Any]()
        for column, parts in self._parts.items():
            text = "".join(literal + self._column(row, name, index) for literal, name in parts)
            made[column] = [{"role": "user", "content": text}] if self._chat else text
        return {**row, **made}

    def digest(self) -> str:
        return digest_of(self._rows)

    def where(self, index: int) -> str:
        return row_name(self._rows, index)

    def _column(self, row: Mapping[str, Any], name: str | None, index: int) -> str:
        if name is None:
            return ""
        if name not in row:
            raise UserError(
                f"{self.where(index)}: no column {name!r} for the prompt (columns: {', '.join(map(str, row))})."
            )
        return str(row[name])


def load_tasks(source: str, params: Mapping[str, Any], seed: int) -> TaskSource:
    """Open a task source; `#split` at its end picks a split.

    Generators and classes use `params` and `seed`: a class gets `params` as keyword arguments, `split` if there is one,
    and `seed` if its signature takes one and `params` has none. reasoning_gym makes different rows for each split name.
    For rows that are read from files or a hub, `params` can make the prompt from their columns:
    {prompt = "{question}\nThe answer is"}.

    Raises:
        UserError: the source does not exist, cannot be read, is empty, or does not take the parameters.
    """
    name, split = (source, "") if Path(source).exists() else source.partition("#")[::2]
    made = _made_rows(name, split, params, seed)
    rows = _read_rows(name, split, source) if made is None else made
    if made is None and params:
        rows = TemplateRows(rows, params)
    if len(rows) < 1:
        raise UserError(f"The task source {source!r} is empty: it needs at least one row.")
    return rows


def _made_rows(name: str, split: str, params: Mapping[str, Any], seed: int) -> TaskSource | None:
    if name in BUILT_IN:
        return _construct(BUILT_IN[name], name, split, params, seed)
    if name.startswith("reasoning_gym:"):
        return ReasoningGymRows(name.removeprefix("reasoning_gym:"), params, seed, split)
    if name.startswith("verifiers:"):
        return VerifiersRows(name.removeprefix("verifiers:"), params)
    if name.startswith("logs:"):
        return _construct(partial(LoggedRollouts, Path(name.removeprefix("logs:"))), name, split, params, seed)
    if ":" in name and not name.startswith("hub:") and not Path(name).exists():
        return _construct(load_named(name), name, split, params, seed)
    return None


def _read_rows(name: str, split: str, source: str) -> TaskSource:
    if name.startswith("hub:"):
        return HfRows(name.removeprefix("hub:"), split, from_hub=True)
    path = Path(name)
    if name and path.is_dir() and not split and is_task_set(path):
        return HarborRows(path)
    if name and path.is_dir():
        return HfRows(name, split, from_hub=False)
    readers: dict[str, Callable[[Path], TaskSource]] = {".jsonl": JsonlRows, ".parquet": ParquetRows}
    if path.suffix not in readers:
        hint = did_you_mean(name, BUILT_IN) or f" A source is one of: {KINDS}."
        raise UserError(f"{source!r} is not a task source (looked in {Path.cwd()}).{hint}")
    if split:
        raise UserError(f"{source!r}: a single file has no splits; remove #{split}, or name a dataset directory.")
    return readers[path.suffix](path)


def _construct(kind: Any, name: str, split: str, params: Mapping[str, Any], seed: int) -> TaskSource:
    """Create an instance of a source class, and check that it is a task source."""
    arguments = {**({"split": split} if split else {}), **params}
    try:
        signature = inspect.signature(kind)
        if "seed" in signature.parameters:
            arguments.setdefault("seed", seed)
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} cannot be made with {arguments}: {error}.") from error
    try:
        rows = kind(**arguments)
        length = len(rows)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}({arguments}) raised: {innermost_line(error)}") from error
    if not hasattr(rows, "__getitem__") or not isinstance(length, int):
        raise UserError(f"{name} is not a task source: it needs __len__ and __getitem__(index) -> row.")
    source: TaskSource = rows
    return source
