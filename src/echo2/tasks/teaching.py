"""What a row says of its teacher: the name, in the column `teacher`, and what it reads, in `teacher_prompt`."""

from __future__ import annotations

from collections.abc import Mapping

from echo2.config.values import SELF
from echo2.core.errors import UserError
from echo2.core.printable import shown
from echo2.core.types import Task
from echo2.tasks.base import task_from_row

TEACHER, TEACHER_PROMPT = "teacher", "teacher_prompt"


def teacher_of(task: Task, teachers: Mapping[str, str]) -> str:
    """Return the name of the task's teacher; of a single teacher it is empty.

    Raises:
        UserError: the row names none of the teachers, or the policy would read what it teaches itself.
    """
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
        UserError: it is no prompt.
    """
    if TEACHER_PROMPT not in task.columns:
        return None
    return task_from_row({"prompt": task.columns[TEACHER_PROMPT]}, task.cursor, f"Task {task.cursor}: {TEACHER_PROMPT}")
