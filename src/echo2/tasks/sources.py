"""Rows of tasks from elsewhere: files, Hugging Face datasets, reasoning-gym.

A file is JSON Lines, which stays on disk (rows are found by offset), or Parquet, held in memory as Arrow; it has no
splits. A file that is edited while it is read would give other rows than it did. A line is checked whenever it is read
again; `digest` tells whether a whole file is the one that an earlier process read.

A Hugging Face dataset is mapped from disk: a `save_to_disk` directory, a directory of data files, a hub id.

A reasoning-gym generator's `prompt` is the question; the column `reasoning_gym` is for the scorer
(`reward/text_scorers.py`), which reads the whole entry. Some scorers distinguish tuples from lists and integer keys
from text, which JSON does not. So the entry travels as a Python literal, which `ast.literal_eval` restores exactly.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Mapping
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from echo2.core.documents import parse_json
from echo2.core.errors import UserError, did_you_mean
from echo2.core.printable import shown

MAX_LINE_BYTES = 16 << 20
MAX_PARQUET_BYTES = 8 << 30  # decoded
DIGEST_BYTES = 16
#: Rows of a Hugging Face dataset whose values are in its digest.
DIGEST_ROWS = 256
#: Characters shown before and after the place of a mistake.
NEAR_CHARS = 30
ONE_OBJECT = 'Each line must be one JSON object: {"prompt": ...}.'
DEFAULT_SPLIT = "train"
DEFAULT_SIZE = 100_000
# Generators whose questions depend on the order of a set of strings, which differs from process to process: after a
# restart of the head, answers to one question would be scored against another.
HASH_ORDERED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})


class JsonlRows:
    """The rows of a JSON Lines file. Opening parses every line once, so that a bad line is reported at once; afterwards
    memory holds 24 bytes a row. Blank lines are skipped.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object; the message gives file:line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("Q")
        self._lines = array("Q")
        self._marks = array("Q")
        for number, offset, line in self._read_lines():
            if line.strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._lines.append(number)
                self._marks.append(_mark(line))

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[index])
                line = file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise UserError(f"Cannot read {self._path}: {error.strerror}.") from error
        if _mark(line) != self._marks[index]:
            raise UserError(
                f"{self.where(index)} has changed since the file was opened: its rows are no longer those of this run. "
                "Put the old file back, or start a new run on the new one."
            )
        return self._parse(line, self._lines[index])

    def digest(self) -> str:
        return hashlib.blake2b(self._marks.tobytes(), digest_size=DIGEST_BYTES).hexdigest()

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def _read_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number from 1, offset, bytes) of every line, blank ones too."""
        number = offset = 0
        try:
            with self._path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise UserError(
                            f"{self._path}:{number}: the line is longer than the limit of {MAX_LINE_BYTES} bytes."
                        )
                    yield number, offset, line
                    offset += len(line)
        except OSError as error:
            raise UserError(f"Cannot read {self._path}: {error.strerror}.") from error

    def _parse(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            row = parse_json(line.rstrip())
        except JSONDecodeError as error:
            near = shown(error.doc[max(0, error.pos - NEAR_CHARS) : error.pos + NEAR_CHARS].strip())
            detail = f"{error.msg} at character {error.pos + 1}, near {near}"
            raise UserError(f"{self._path}:{number}: not valid JSON: {detail}. {ONE_OBJECT}") from error
        except ValueError as error:
            raise UserError(f"{self._path}:{number}: not valid JSON: {error}. {ONE_OBJECT}") from error
        if not isinstance(row, dict):
            raise UserError(f"{self._path}:{number}: got {type(row).__name__} {shown(row)}. {ONE_OBJECT}")
        return row


def _mark(line: bytes) -> int:
    """Return 64 bits that tell this line from others. The end of the file may be the end of a line."""
    return int.from_bytes(hashlib.blake2b(line.rstrip(), digest_size=8).digest())


class ParquetRows:
    """The rows of a Parquet file, decoded once and held as Arrow columns.

    Raises:
        UserError: pyarrow is not installed, or the file is not Parquet or too large for memory.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise UserError(f"{path}: reading Parquet needs pyarrow: pip install 'echo2[data]'.") from error
        self._path = path
        try:
            with path.open("rb") as file:
                self._digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()
            metadata = pyarrow.parquet.read_metadata(path)
            decoded_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            if decoded_bytes > MAX_PARQUET_BYTES:
                raise UserError(
                    f"{path} holds {decoded_bytes} bytes decoded; the limit is {MAX_PARQUET_BYTES}. "
                    "Name its directory instead: Hugging Face datasets map it from disk."
                )
            self._table = pyarrow.parquet.read_table(path)
        except (OSError, UnicodeError, pyarrow.ArrowException) as error:
            raise UserError(f"Cannot read {path} as Parquet: {error}.") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def digest(self) -> str:
        return self._digest

    def where(self, index: int) -> str:
        return f"{self._path} row {index}"


class HfRows:
    """One split of a Hugging Face dataset. From the hub: owner/name, or owner/name/configuration.

    Raises:
        UserError: `datasets` is not installed, there is no such dataset or split, or its files cannot be read.
    """

    def __init__(self, name: str, split: str, from_hub: bool) -> None:
        try:
            import datasets
        except ImportError as error:
            raise UserError(f"{name}: Hugging Face datasets need: pip install 'echo2[data]'.") from error
        self._name = f"{name}#{split or DEFAULT_SPLIT}"
        saved = not from_hub and any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
        try:
            loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(*_hub_name(name, from_hub))
        except Exception as error:  # `datasets` raises its own errors, pyarrow's, the hub client's and built-in ones
            raise UserError(f"Cannot load the dataset {name}: {type(error).__name__}: {error}") from error
        self._rows = _pick_split(loaded, name, split) if isinstance(loaded, Mapping) else loaded
        if split and not isinstance(loaded, Mapping):
            raise UserError(f"{name} was saved without splits: remove #{split}.")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._rows[index]
        return row

    def digest(self) -> str:
        """Of the number of rows, and of `DIGEST_ROWS` of them, evenly spaced: all may be more than can be read."""
        count = len(self._rows)
        step = max(1.0, count / DIGEST_ROWS)
        places = [int(number * step) for number in range(min(count, DIGEST_ROWS))]
        rows = self._rows.with_format("arrow").select(places)[:].to_pylist()
        return hashlib.blake2b(repr([count, rows]).encode(), digest_size=DIGEST_BYTES).hexdigest()

    def where(self, index: int) -> str:
        return f"{self._name} row {index}"


def _hub_name(name: str, from_hub: bool) -> tuple[str, ...]:
    """The dataset's id, and its configuration where there is one."""
    owner, _, rest = name.partition("/")
    dataset, _, configuration = rest.partition("/")
    return (f"{owner}/{dataset}", configuration) if from_hub and configuration else (name,)


def _pick_split(splits: Mapping[str, Any], name: str, split: str) -> Any:
    """Return the named split; without a name, the only split, else `train`."""
    split_name = split or (DEFAULT_SPLIT if len(splits) != 1 else next(iter(splits)))
    if split_name not in splits:
        available = ", ".join(splits)
        raise UserError(f"{name} has no split {split_name!r}; it has {available}. Write {name}#<split>.")
    return splits[split_name]


class ReasoningGymRows:
    """The rows of the generator `name`, made with `params` (its own configuration; `size` defaults to 100 000).

    Without `seed` in `params`, rows are a function of (seed, split). A generator seeds row i with its seed + i, so
    (seed, split) is hashed to the generator's seed: else neighbouring seeds would share nearly all rows.

    Raises:
        UserError: reasoning-gym is not installed, has no such generator, or refuses the parameters.
    """

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, split: str = "") -> None:
        try:
            from reasoning_gym import factory
        except ImportError as error:
            raise UserError(f"reasoning_gym:{name} needs: pip install 'echo2[tasks]'.") from error
        if name not in factory.DATASETS:
            raise UserError(f"reasoning-gym has no generator {name!r}.{did_you_mean(name, factory.DATASETS)}")
        if name in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise UserError(
                f"reasoning_gym:{name} makes different rows in every process. Set PYTHONHASHSEED=0 and start again."
            )
        self._name = name
        self._params = {"size": DEFAULT_SIZE, "seed": _block_seed(seed, split), **params}
        try:
            self._generator = factory.create_dataset(name, **self._params)
        except Exception as error:  # each generator checks its parameters in its own way, mostly by assert
            raise UserError(f"reasoning_gym:{name} refuses {dict(params)}: {type(error).__name__}: {error}") from error

    def __len__(self) -> int:
        return len(self._generator)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        entry = self._generator[index]
        column = {"name": self._name, "params": self._params, "entry": repr(_plain(entry))}
        return {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": column}

    def where(self, index: int) -> str:
        return f"reasoning_gym:{self._name} row {index}"


def _block_seed(seed: int, split: str) -> int:
    """Hash (seed, split) to 31 bits, so that seed + index stays within numpy's range of seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{split}".encode(), digest_size=4).digest(), "little") >> 1


def _plain(value: Any) -> Any:
    """Return the value with subclasses of str (numpy's), whose repr is not a literal, replaced by str."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else value
