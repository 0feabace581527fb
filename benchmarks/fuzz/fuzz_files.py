"""Targets of the fuzzer: files that people, other programs or a crash wrote, flags, and the texts that rewards read."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz_target import Target, folder, from_file, text
from fuzz_wire import JSON_WORDS

from echo2 import config
from echo2.config.offers import load_offers
from echo2.config.rundir import read_json
from echo2.core import documents
from echo2.core.documents import parse_json
from echo2.core.types import Message, StoredTensor, Task
from echo2.engines.model_values import read_architecture
from echo2.engines.tokenizer import encode_prompt, load_tokenizer
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.ledger import costs, eventlog, metrics
from echo2.head.ledger.audit import audit
from echo2.head.ledger.costs import CostBook
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.schema import open_for_reading
from echo2.head.serve.head import planner_options
from echo2.learner.core import checkpoint
from echo2.learner.core.fitting import snapshot_bytes
from echo2.planning.plan_inputs import read_past_run
from echo2.planning.sim.scenario import load_study
from echo2.reward import functions
from echo2.reward.judge_words import NoVerdict, read_reply, verdict
from echo2.reward.text_scorers import final_answer, tagged_answer
from echo2.rollouts.chat_forms import ANTHROPIC, OPENAI, essence, message_of, plain
from echo2.rollouts.recorded import CallRefused
from echo2.sandbox import pipes
from echo2.tasks.base import TaskStream
from echo2.tasks.logs import LoggedRollouts
from echo2.tasks.sources import JsonlRows, ParquetRows
from echo2.tasks.streams import TemplateRows
from echo2.weights.format.snapshot_files import end_tokens, read_config

REPOSITORY = Path(__file__).resolve().parents[2]
TOML_WORDS = (
    b"[",
    b"]",
    b"[[",
    b"]]",
    b"=",
    b'"""',
    b"'''",
    b"\n",
    b"inf",
    b"nan",
    b"0x",
    b"1979-05-27",
    b"true",
    b"#",
    b".",
)


def targets() -> list[Target]:
    """All of them, with their seeds."""
    return [*_settings(), *_tasks(), *_run_files(), *_learner_files(), *_tokenizers(), *_texts(), _chats()]


def _lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _examples(pattern: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(REPOSITORY.glob(pattern)))


# ---- what people write -----------------------------------------------------------------------------------------------


def _read_flag(data: bytes) -> None:
    """The first word is the setting, the rest its value."""
    name, _, value = text(data).partition(" ")
    path = folder() / "flags.toml"
    if not path.exists():
        path.write_text("[run]\nseed = 1\n", encoding="utf-8")
    config.to_json(config.load(path, {name: value}))


def _settings() -> list[Target]:
    flags = [f"{section}.{name} {default}" for section, name, _, default, _ in config.all_fields()]
    flags += ["tasks.params {prompt = '{question}'}", 'reward.functions ["exact_match"]']
    values = tuple(flag.encode() for flag in (*flags[::8], *flags[-3:]))
    names = tuple(flag.split(" ")[0].encode() + b" " for flag in flags)
    offers, study = from_file("offers.toml", load_offers), from_file("study.toml", load_study)
    toml = from_file("config.toml", lambda path: config.to_json(config.load(path)))
    return [
        Target("config_toml", toml, _examples("examples/[a-np-z]*.toml"), words=TOML_WORDS, share=0.05),
        Target(
            "config_json",
            from_file("config.json", lambda path: config.to_json(config.load(path))),
            (config.to_json(config.Config()).encode(),),
            words=JSON_WORDS,
            share=0.05,
        ),
        Target("flags", _read_flag, values, words=(*names, *TOML_WORDS), share=0.01),
        Target("offers", offers, _examples("examples/offers.toml"), words=TOML_WORDS, share=0.1),
        Target("study", study, _examples("simulations/*.toml"), words=TOML_WORDS, share=0.02),
    ]


# ---- tasks -----------------------------------------------------------------------------------------------------------


def _read_tasks(rows: Any) -> None:
    stream = TaskStream(rows, 3, True)
    for cursor in range(min(len(stream), 4)):
        stream.task(cursor)


def _read_log(path: Path) -> None:
    _read_tasks(LoggedRollouts(path, 3, 2))


def _read_template(data: bytes) -> None:
    """A prompt made of the columns of a row."""
    (folder() / "rows.jsonl").write_bytes(b'{"question": "1+1", "answer": 2}\n')
    _read_tasks(TemplateRows(JsonlRows(folder() / "rows.jsonl"), {"prompt": text(data)}))


def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    table = pyarrow.table({"prompt": ["1+1=", "2+2="], "answer": [2, 4]})
    pyarrow.parquet.write_table(table, sink, compression="NONE")
    return sink.getvalue()


def _tasks() -> list[Target]:
    attempt = {"prompt": "p", "completion": "a", "reward": 0.5}
    whole = _lines(*({**attempt, "completion": f"a{i}", "logprob": -0.5 * i} for i in range(4)))
    tokens = _lines(*({"prompt": "q", "tokens": [5, i], "logprobs": [-1, -0.5], "reward": i} for i in range(3)))
    parquet = from_file("tasks.parquet", lambda path: _read_tasks(ParquetRows(path)))
    chat = _lines({"prompt": [{"role": "user", "content": "1+1"}], "answer": 2, "more": [None, {"a": True}]})
    return [
        Target(
            "tasks_jsonl",
            from_file("tasks.jsonl", lambda path: _read_tasks(JsonlRows(path))),
            (_lines({"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": 4}), chat),
            words=JSON_WORDS,
            share=0.3,
        ),
        Target(
            "tasks_parquet",
            parquet,
            (_parquet(),),
            share=0.05,
        ),
        Target(
            "tasks_logs",
            from_file("log.jsonl", _read_log),
            (_lines(*[attempt] * 8), whole, tokens),
            words=JSON_WORDS,
            share=0.2,
        ),
        Target("tasks_template", _read_template, (b"{question}\nThe answer is", b"{{x}} {answer}"), share=0.1),
    ]


# ---- files of a run --------------------------------------------------------------------------------------------------


def _ledger() -> bytes:
    """A small ledger with a group in each of several states."""
    path = folder() / "made" / "ledger.sqlite"
    path.parent.mkdir(exist_ok=True)
    ledger = Ledger(path)
    ledger.learner_joined(version=0, lineage=1, now=0.0)
    for number in range(3):
        ledger.issue(number, step=0, cursor=number, now=0.0)
    ledger.grant(1, 0, "w-1", now=1.0, deadline=9.0, num_samples=4)
    costs = CostBook()
    costs.joined("w-1", 0.5, now=0.0)
    ledger.set_meta("costs", costs.to_plain(9.0))
    ledger.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA page_size = 512")
        connection.execute("VACUUM")
    connection.close()
    return path.read_bytes()


def _read_ledger(path: Path) -> None:
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    connection = open_for_reading(path)
    connection.close()
    audit(path)
    costs.read_report(path.parent)


def _read_rows(path: Path) -> None:
    metrics.Metrics(path)


def _events() -> bytes:
    """What a head's planner was told, and answered."""
    path = folder() / "made" / "events.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    options = planner_options(config.Config(), 0)
    log, planner = eventlog.EventLog(path, options), Planner(options)
    for now, event in enumerate((ev.LearnerJoined(0), ev.WorkerJoined("w-1", 2, 0.5, installed=None))):
        log.write(float(now), event, planner.handle(event, float(now)))
    log.flush()
    log.close()
    return path.read_bytes()


def _run_files() -> list[Target]:
    rows = _lines(
        *(
            {"step": step, "time/train": 1.5, "broadcast/t_bcast": 0.2, "broadcast/delta_ratio": 0.1, "ess": 0.9}
            for step in range(3)
        )
    )
    frame = pipes.encode({"task": {"cursor": 1}, "scores": [[0.5, {"a": 1.0}]]})
    return [
        Target(
            "past_run",
            from_file("past/metrics.jsonl", lambda path: read_past_run(path.parent)),
            (rows,),
            words=(*JSON_WORDS, b'"time/train"'),
            share=0.3,
        ),
        Target("metrics", from_file("metrics.jsonl", _read_rows), (rows,), words=JSON_WORDS, share=0.2),
        Target("events", from_file("events.jsonl", eventlog.replay), (_events(),), words=JSON_WORDS, share=0.05),
        Target(
            "json_file", from_file("status.json", read_json), (b'{"head": {"pid": 3}}',), words=JSON_WORDS, share=0.5
        ),
        Target("ledger", from_file("run/ledger.sqlite", _read_ledger), (_ledger(),), share=0.05),
        Target("frames", lambda data: pipes.read(io.BytesIO(data)), (frame,), words=JSON_WORDS, share=1.0),
    ]


# ---- models and checkpoints ------------------------------------------------------------------------------------------


def _read_checkpoint(data: bytes) -> None:
    directory = folder() / "checkpoints" / "step_3"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(b"{}")
    (directory / checkpoint.STATE_FILE).write_bytes(data)
    checkpoint.latest(directory.parent)
    checkpoint.read_client(directory)


def _checkpoint() -> bytes:
    directory = folder() / "made" / "step_3"
    directory.parent.mkdir(exist_ok=True)
    checkpoint.write_checkpoint(directory, {"version": 3}, {"config.json": b"{}"}, {})
    return (directory / checkpoint.STATE_FILE).read_bytes()


def _read_model_config(data: bytes) -> None:
    files = {"config.json": data, "generation_config.json": data}
    end_tokens(files)
    read_architecture(read_config(files)).tensor_shapes()


_ADAPTER_CONFIG = b'{"peft_type": "LORA", "r": 2, "lora_alpha": 16, "bias": "none", "use_rslora": true}'


def _read_adapter_config(data: bytes) -> None:
    """Of an adapter of rank 2: with any other it is refused."""
    import torch

    from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, TensorBytes
    from echo2.engines.adapter import DOWN, PREFIX, UP, read_adapter
    from echo2.weights.format.adapter_files import ADAPTER_CONFIG

    shapes = {DOWN: (2, 4), UP: (4, 2)}
    tensors = {f"{PREFIX}q_proj{part}": TensorBytes("F32", shape, bytes(32)) for part, shape in shapes.items()}
    snapshot = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), tensors, {ADAPTER_CONFIG: data})
    read_adapter(snapshot, {"q_proj": (4, 4)}, torch.device("cpu"))


def tokenizer_files() -> dict[str, bytes]:
    """A small tokenizer that writes digits too."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "=": 3} | {str(digit): 4 + digit for digit in range(10)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    settings["chat_template"] = "{% for m in messages %}{{ m.role }}={{ m.content }}{% endfor %}"
    return {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


def _read_tokenizer(name: str) -> Callable[[bytes], object]:
    """A snapshot of which one of the tokenizer's files is hostile, read and used."""

    def read(data: bytes) -> None:
        tokenizer = load_tokenizer({**tokenizer_files(), name: data})
        encode_prompt(Task(0, "a = a"), tokenizer)
        encode_prompt(Task(0, (Message("user", "a"),)), tokenizer)

    return read


def _tokenizers() -> list[Target]:
    """Slow: transformers is imported, and looks at each file with care."""
    classes = ("LlamaTokenizer", "T5Tokenizer", "BertTokenizer", "GPT2Tokenizer", "MBart50Tokenizer", "NllbTokenizer")
    words = (
        *JSON_WORDS,
        *(name.encode() for name in classes),
        b'"model_type": ',
        b'"auto_map": ',
        b'"added_tokens_decoder": ',
    )
    names = ("tokenizer.json", "tokenizer_config.json")
    files = tokenizer_files()
    return [
        Target(name.replace(".", "_"), _read_tokenizer(name), (files[name],), words=words, share=0.004)
        for name in names
    ]


def _learner_files() -> list[Target]:
    model = {
        "model_type": "qwen3",
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": [1, 2],
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0},
    }
    model["rope_parameters"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # type: ignore[operator]
    linear = {**model, "model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    models = (json.dumps(model).encode(), json.dumps(linear).encode())
    words = (*JSON_WORDS, b'"head_dim": ', b'"sliding_window": ', b'"layer_types": ', b'"rope_scaling": ')
    tensors = {"a": StoredTensor("F32", (2, 3), 24, lambda start, stop: bytes(stop - start))}
    header = b"".join(bytes(piece) for piece in documents.safetensors_pieces(tensors))
    sizes = from_file("model/model.safetensors", lambda path: snapshot_bytes(path.parent, "bfloat16"))
    return [
        Target("checkpoint", _read_checkpoint, (_checkpoint(),), words=JSON_WORDS, share=0.2),
        Target("model_config", _read_model_config, models, words=words),
        Target("adapter_config", _read_adapter_config, (_ADAPTER_CONFIG,), words=JSON_WORDS, share=0.3),
        Target("safetensors", sizes, (header,), words=JSON_WORDS, share=0.3),
    ]


# ---- texts that rewards read -----------------------------------------------------------------------------------------


def _match(data: bytes) -> None:
    completion, _, wanted = text(data).partition("|")
    functions.exact_match([completion], answer=[wanted])
    functions.numeric_match([completion], answer=[wanted])


def _find(data: bytes) -> None:
    tagged_answer(text(data))
    final_answer(text(data))


def _judge(data: bytes) -> None:
    """What a judge's endpoint answers."""
    verdict(read_reply(data), is_pair=False)


def _texts() -> list[Target]:
    numbers = (b"so it is 1,234.5e3|1234500", b"The answer is -.5|-0.5", b"1-2=-1|#### -1")
    words = (b",000", b"1,", b".", b"e", b"e999", b"-", b"+", b"|", "²".encode(), "١".encode())
    answers = (b"<answer>12</answer>", b"so #### 42\nmore", b"\\boxed{72} #### 3")
    verdicts = b'{"choices":[{"message":{"content":"Good.\\n[[7.5]]"}}],"usage":{"prompt_tokens":9}}'
    tags = (b"<answer>", b"</answer>", b"####", b"\\boxed", b"\n")
    return [
        Target("match", _match, numbers, words=words, share=2.0),
        Target("answer", _find, answers, words=tags, share=2.0),
        Target("judge", _judge, (verdicts,), words=(*JSON_WORDS, b"[[", b"]]", b"10", b"\\n"), errors=(NoVerdict,)),
    ]


def _read_chat(data: bytes) -> None:
    """A body of a chat client, in each form; and the model's answer, which may be the same text."""
    message_of(text(data), True, 1)
    try:
        body = parse_json(data)
    except ValueError:
        return
    for form in (OPENAI, ANTHROPIC):
        with suppress(CallRefused):
            call = form.call(body if isinstance(body, dict) else {"messages": body})
            assert [essence(plain(message)) for message in call.messages] == [essence(one) for one in call.messages]


def _chats() -> Target:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    used = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c"}
    blocks = {"role": "assistant", "content": [used]}, {"role": "user", "content": [{"type": "tool_result"}]}
    options = {
        "tools": [{"type": "function", "name": "add", "input_schema": {}}],
        "stop": ["x"],
        "n": 2,
        "max_tokens": 5,
    }
    bodies = ({**options, "messages": messages, "tool_choice": {"type": "none"}} for messages in (said, blocks))
    return Target("chat", _read_chat, tuple(json.dumps(one).encode() for one in bodies), words=JSON_WORDS, share=2.0)
