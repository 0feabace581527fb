"""What a row says of its teacher: the name, in the column `teacher`, and what it reads, in `teacher_prompt`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from echo2.config import Config
from echo2.config.values import SELF
from echo2.core.errors import UserError
from echo2.core.printable import shown
from echo2.core.types import Task
from echo2.tasks.base import TaskSource, TaskStream, task_from_row
from echo2.tasks.harness_process import is_harness

TEACHER, TEACHER_PROMPT = "teacher", "teacher_prompt"


def teacher_of(task: Task, teachers: Mapping[str, str], environment: str) -> str:
    """Return the name of the task's teacher; of a single teacher it is empty. `environment`: `tasks.environment`.

    Raises:
        UserError: the row names none of the teachers, the policy would read what it teaches itself, or there is
            no prompt that the teacher's replaces.
    """
    if TEACHER_PROMPT in task.columns and is_harness(environment):
        raise UserError(
            f"Task {task.cursor} has a column {TEACHER_PROMPT!r}, and tasks.environment {environment!r} is a harness: "
            "it makes the prompts of each row itself. Leave the column out: the teacher reads what the policy read."
        )
    name = "" if "" in teachers else task.columns.get(TEACHER)
    if not isinstance(name, str) or name not in teachers:
        raise UserError(
            f"Task {task.cursor}: its column {TEACHER!r} is {shown(name)}, and distill.teacher names "
            f"{', '.join(teachers)}. Give each row one of these."
        )
    if teachers[name] == SELF and TEACHER_PROMPT not in task.columns:
        raise UserError(
            f"Task {task.cursor}: the policy teaches itself only from another prompt, and the row has no column "
            f"{TEACHER_PROMPT!r}. Add it, for example with tasks.params = {{teacher_prompt = ...}}."
        )
    return name


def task_for_teacher(task: Task) -> Task | None:
    """Return the task with the prompt that its teacher reads; None if that is the policy's.

    Raises:
        UserError: it is not a prompt.
    """
    if TEACHER_PROMPT not in task.columns:
        return None
    return task_from_row({"prompt": task.columns[TEACHER_PROMPT]}, task.cursor, f"Task {task.cursor}: {TEACHER_PROMPT}")


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
            teacher_of(task, teachers, config.tasks.environment)
            task_for_teacher(task)
        except UserError as error:
            problems.append(str(error))
    if problems and len(problems) == num_rows:
        raise UserError(f"{problems[0]} The same is true of all rows of {source} that were read.")
    if problems:
        problem = f"{len(problems)} of {num_rows} rows of {source} can't be taught, and their groups will fail"
        print(f"warning: {problem}: {problems[0]}", file=sys.stderr)
