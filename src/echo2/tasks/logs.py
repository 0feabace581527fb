"""Rows from a log of rollouts, `logs:hands.jsonl`. The learner trains on the logged rollouts.

One JSON object a line, one rollout:

    prompt      text, or chat messages, as in any row
    completion  the answer, as text
    reward      the answer's reward
    logprob     logprob of the whole answer when it was given; may be missing
    tokens, logprobs
                the answer's token ids and their logprobs, if an engine wrote the log (in place of `logprob`)

A row is `rollouts` of the rollouts at one prompt, drawn without replacement in an order given by the seed: an epoch
trains on each rollout at most once. The remainder at each prompt, less than a row, is left out.

If the log has no probabilities, they are estimated by the frequency of each answer at its prompt (Hanna, Niekum and
Stone 2019, arXiv 1806.01347, where such an estimate often did better than the true probability). This needs repeated
answers; a log without enough of them is refused.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.core.documents import is_number
from echo2.core.errors import UserError
from echo2.core.printable import shown
from echo2.core.types import DEFAULT_LOGGED_ROLLOUTS, LOGGED_ROLLOUTS
from echo2.tasks.base import permute
from echo2.tasks.sources import JsonlRows

log = logging.getLogger(__name__)

#: Smallest mean number of rollouts per distinct answer at a prompt for frequencies to serve as probabilities.
LEAST_REPEATS = 4
#: Characters of all distinct answers at a prompt, up to which their frequencies travel with each of its rows.
MAX_ANSWERS_CHARS = 1 << 16


class LoggedRollouts:
    """The rows of a log. `rollouts` must be `sampling.group_size`.

    Raises:
        UserError: the log cannot be read, has a bad line (named), no prompt with enough rollouts, or neither
            probabilities nor answers that repeat.
    """

    def __init__(self, path: Path, seed: int, rollouts: Any = DEFAULT_LOGGED_ROLLOUTS) -> None:
        if not isinstance(rollouts, int) or rollouts < 2:
            raise UserError(f"tasks.params.rollouts = {rollouts!r}: a group needs at least 2 rollouts.")
        self._lines = JsonlRows(path)
        self._path, self._seed, self._rollouts = path, seed, rollouts
        self._of_prompt: list[array[int]] = []  # by prompt: the lines that have it
        self._answers: list[Counter[str] | None] = []  # by prompt: frequencies of its answers; None: not sent along
        self._rows: list[tuple[int, int]] = []  # (prompt, number of the row within that prompt)
        self._gather()
        log.info("%s: %d rows; %d rollouts are in none", path, len(self), self.num_left_out)
        if not self._rows:
            most = max((len(lines) for lines in self._of_prompt), default=0)
            raise UserError(
                f"{path}: no prompt has {rollouts} rollouts (at most {most}), so there is nothing to compare. Log more "
                "rollouts at the same prompt, or lower sampling.group_size and tasks.params.rollouts."
            )

    @property
    def num_left_out(self) -> int:
        """Rollouts of the log that are in no row."""
        return len(self._lines) - len(self._rows) * self._rollouts

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        prompt, number = self._rows[index]
        lines, answers = self._of_prompt[prompt], self._answers[prompt]
        places = range(number * self._rollouts, (number + 1) * self._rollouts)
        chosen = [self._lines[lines[permute(place, len(lines), f"{self._seed}/{prompt}")]] for place in places]
        column: dict[str, Any] = {"rollouts": [_logged(line) for line in chosen]}
        if answers is not None:
            column["answers"] = dict(answers)
        return {"prompt": chosen[0]["prompt"], LOGGED_ROLLOUTS: column}

    def digest(self) -> str:
        """See `TaskSource`."""
        return self._lines.digest()

    def where(self, index: int) -> str:
        """The row's number within its prompt, and the first line with that prompt."""
        prompt, number = self._rows[index]
        return f"row {number} of the prompt at {self._lines.where(self._of_prompt[prompt][0])}"

    def _gather(self) -> None:
        prompts: dict[str, int] = {}
        kinds: list[str] = []
        answers: list[Counter[str]] = []
        for index in range(len(self._lines)):
            line, where = self._lines[index], self._lines.where(index)
            kind = _check(line, where)
            prompt = prompts.setdefault(json.dumps(line["prompt"], sort_keys=True), len(prompts))
            if prompt == len(self._of_prompt):
                self._of_prompt.append(array("Q"))
                kinds.append(kind)
                answers.append(Counter())
            if (kind == "none") != (kinds[prompt] == "none"):
                raise UserError(
                    f"{where}: some rollouts at this prompt have probabilities and some have none, which cannot be "
                    "compared. Give all of them, or none."
                )
            self._of_prompt[prompt].append(index)
            if kind != "tokens":
                answers[prompt][line["completion"]] += 1
        for prompt, lines in enumerate(self._of_prompt):
            has_row = len(lines) >= self._rollouts
            if has_row and kinds[prompt] == "none":
                self._check_repeats(lines, answers[prompt])
            # Frequencies travel with whole-answer logprobs, too: they show which tokens decided an answer.
            travels = has_row and kinds[prompt] != "tokens" and _is_short(answers[prompt])
            self._answers.append(answers[prompt] if travels else None)
            self._rows += [(prompt, number) for number in range(len(lines) // self._rollouts)]

    def _check_repeats(self, lines: array[int], answers: Counter[str]) -> None:
        if len(lines) < LEAST_REPEATS * len(answers) or not _is_short(answers):
            raise UserError(
                f"{self._lines.where(lines[0])}: this log has no probabilities, and they cannot be estimated: "
                f"{len(lines)} rollouts at this prompt gave {len(answers)} different answers, of "
                f"{sum(map(len, answers))} characters; {LEAST_REPEATS} rollouts each are needed, and no more than "
                f"{MAX_ANSWERS_CHARS} characters. Log `logprob`, or `tokens` with `logprobs`."
            )


def _is_short(answers: Mapping[str, int]) -> bool:
    return sum(map(len, answers)) <= MAX_ANSWERS_CHARS


def _check(line: Mapping[str, Any], where: str) -> str:
    """Check a line; returns whether its logprobs are those of "tokens", of the "whole" answer, or "none"."""
    for name in ("prompt", "reward"):
        if name not in line:
            raise UserError(f"{where}: no {name!r} (columns: {', '.join(line) or 'none'}).")
    if not is_number(line["reward"]):
        raise UserError(f"{where}: reward = {shown(line['reward'])}: expected a finite number.")
    if ("tokens" in line) != ("logprobs" in line):
        name, other = ("tokens", "logprobs") if "tokens" in line else ("logprobs", "tokens")
        raise UserError(f"{where}: {name} = {shown(line[name])}, and no {other}. Give both, or neither.")
    if "tokens" in line:
        tokens, logprobs = line["tokens"], line["logprobs"]
        if not (isinstance(tokens, list) and isinstance(logprobs, list) and len(tokens) == len(logprobs) > 0):
            raise UserError(
                f"{where}: tokens = {shown(tokens)}, logprobs = {shown(logprobs)}: expected lists of one length, not "
                "empty."
            )
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
            raise UserError(f"{where}: tokens = {shown(tokens)}: expected token ids, whole numbers from 0.")
        if not all(is_number(value) and value <= 0 for value in logprobs):
            raise UserError(f"{where}: logprobs = {shown(logprobs)}: expected finite numbers <= 0.")
        if not isinstance(line.get("completion", ""), str):
            raise UserError(f"{where}: completion = {shown(line['completion'])}: expected text.")
        return "tokens"
    if not isinstance(line.get("completion"), str):
        raise UserError(f"{where}: completion = {shown(line.get('completion'))}: expected text.")
    if line.get("logprob") is None:
        return "none"
    if not is_number(line["logprob"]) or line["logprob"] > 0:
        raise UserError(f"{where}: logprob = {shown(line['logprob'])}: expected a finite number <= 0.")
    return "whole"


def _logged(line: Mapping[str, Any]) -> dict[str, Any]:
    names = ("tokens", "logprobs", "completion", "logprob", "reward")
    return {name: line[name] for name in names if line.get(name) is not None}
