"""Checks of teachers before a start: whether they read the policy's tokens, and whether rows say what they read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from echo2.config import Config
from echo2.config.values import SELF
from echo2.core.errors import UserError
from echo2.engines.tokenizer import TOKENIZER_SUFFIXES, refuse_other_tokenizer
from echo2.tasks.base import TaskSource, TaskStream
from echo2.tasks.harness_process import is_harness
from echo2.tasks.teaching import task_for_teacher, teacher_of


def check_teaching(config: Config, tasks: TaskSource, source: str, num_rows: int) -> None:
    """Find rows that name no teacher, or show it no prompt, among the first `num_rows`. Print a warning if it is some.

    Raises:
        UserError: it is all of them, or the run's prompts are a harness's.
    """
    teachers = config.distill.teachers
    if SELF in teachers.values() and is_harness(config.tasks.environment):
        raise UserError(
            f"distill.teacher = {config.distill.teacher!r} with tasks.environment = {config.tasks.environment!r}: a "
            "harness makes the prompts itself, so nothing can stand in their place. Name a model."
        )
    stream, problems = TaskStream(tasks, 0, False), list[str]()
    for cursor in range(num_rows if teachers else 0):
        task = stream.task(cursor)
        try:
            teacher_of(task, teachers)
            task_for_teacher(task)
        except UserError as error:
            problems.append(str(error))
    if problems and len(problems) == num_rows:
        raise UserError(f"{problems[0]} So it is with all rows of {source} that were read.")
    if problems:
        told = f"{len(problems)} of {num_rows} rows of {source} can't be taught, and their groups will fail"
        print(f"warning: {told}: {problems[0]}", file=sys.stderr)


def check_tokenizers(config: Config) -> None:
    """Check that teachers have the policy's tokenizer, as far as both are directories. Loads transformers if their
    files differ.

    Raises:
        UserError: one has another.
    """
    policy = Path(config.model.path)
    for path in config.distill.teachers.values():
        if path != SELF and policy.is_dir() and Path(path).is_dir():
            refuse_other_tokenizer(_files(policy), _files(Path(path)), path)


def _files(where: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in where.iterdir() if path.suffix in TOKENIZER_SUFFIXES}
