"""Write the data files and models that some examples read. Deterministic; takes a minute or two.

    python examples/make_data.py            # into outputs/data and outputs/models

Rows are those of the demo's task, in each of the formats, a log of poker hands, and facts for smollm/. Models are made
from the demo's: digit_sorting_chat has a chat template, ascii reads every printable character and longer prompts, poker
plays poker. digit_sorting_teacher is warmed up further than it. Those of sokoban, calculator, terminal and reverse_text
are made anew.
"""

import argparse
import json
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from echo2.tasks.digit_sorting import DigitSorting

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
ROWS = 64


def make_data(out: Path) -> None:
    """rows.parquet, verl.parquet and the Hugging Face dataset directory `dataset` with two splits."""
    out.mkdir(parents=True, exist_ok=True)
    train = list(DigitSorting("train", size=ROWS))
    heldout = list(DigitSorting("heldout", size=ROWS))
    numbers = [{**row, "answer": int(row["answer"])} for row in train]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(numbers), out / "rows.parquet")
    verl = [verl_row(index, row) for index, row in enumerate(train)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl), out / "verl.parquet")
    splits = {"train": datasets.Dataset.from_list(train), "heldout": datasets.Dataset.from_list(heldout)}
    shutil.rmtree(out / "dataset", ignore_errors=True)
    datasets.DatasetDict(splits).save_to_disk(out / "dataset")
    run_script("poker/make_logs.py", "--out", str(out / "hands.jsonl"))
    run_script("smollm/facts.py", "--out", str(out / "facts"))


def verl_row(index: int, row: dict[str, str]) -> dict[str, Any]:
    return {
        "data_source": "digit_sorting",
        "prompt": [{"role": "user", "content": row["prompt"].removesuffix("=")}],
        "ability": "sorting",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": "train", "index": index},
    }


def make_chat_model(model: Path, out: Path) -> None:
    """A copy of a model directory with a chat template."""
    shutil.copytree(model, out, dirs_exist_ok=True)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_ascii_model(model: Path, out: Path) -> None:
    """A copy of a model directory with a token for every printable character, and a context of 1024. What is new is
    untrained."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    shutil.copytree(model, out, dirs_exist_ok=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    for character in string.printable:
        vocab.setdefault(character, len(vocab))
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    wide = AutoModelForCausalLM.from_pretrained(model)
    wide.resize_token_embeddings(len(vocab), mean_resizing=False)
    wide.config.max_position_embeddings = 1024
    wide.save_pretrained(out)


def run_script(name: str, *arguments: str) -> None:
    """One of the examples' own, `poker/build_model.py` for instance."""
    script = Path(__file__).parent / name
    subprocess.run([sys.executable, str(script), *arguments], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/data"))
    parser.add_argument("--model", type=Path, default=Path("outputs/models/digit_sorting"))
    options = parser.parse_args()
    datasets.disable_progress_bars()
    make_data(options.out)
    run_script("sokoban/build_model.py", "--out", str(options.model.with_name("sokoban")))
    run_script("calculator/build_model.py", "--out", str(options.model.with_name("calculator")))
    run_script("terminal/build_model.py", "--out", str(options.model.with_name("terminal")))
    words = options.out / "reverse_text"
    run_script(
        "reverse_text/build_model.py", "--out", str(options.model.with_name("reverse_text")), "--data", str(words)
    )
    if options.model.is_dir():
        make_chat_model(options.model, options.model.with_name(options.model.name + "_chat"))
        make_ascii_model(options.model, options.model.with_name("ascii"))
        teacher = options.model.with_name(options.model.name + "_teacher")
        warmed = ("--heads", "3", "--accuracy", "0.6")
        subprocess.run([sys.executable, "-m", "echo2.demo.digit_sorting", "--out", str(teacher), *warmed], check=True)
        poker = options.model.with_name("poker")
        run_script("poker/build_model.py", "--source", str(options.model), "--out", str(poker))
    else:
        print(f"No model in {options.model} (`make demo` builds it): left the models away.")
