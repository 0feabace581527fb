"""A model of real size, end to end: `echo2 run` on this machine, the most memory of each process, seconds by phase.

    python benchmarks/real_size.py                          # 9.8 M parameters with a vocabulary of 151,936; minutes
    python benchmarks/real_size.py --shape qwen3-0.6b       # 596 M parameters; 15 GB of memory, 10 GB of disk
    python benchmarks/real_size.py --shape qwen3-0.6b --lora-rank 16

Weights are random and made on the spot, in the shape of Qwen3; the reward is the text's checksum, so that groups
have a gradient. Head, learner and one worker are processes of their own and talk over the real transport. Memory is
`VmHWM`, what the kernel says that each process had at most, its interpreter and its modules included; files that are
mapped count while they are in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording import save
from rich.console import Console
from rich.table import Table

VOCABULARY = 151_936
ROLES = ("head", "learner", "worker", "reward")
POLL_SECONDS = 0.2
CONFIG = """
[run]
max_steps = {steps}
[model]
path = "{model}"
snapshot_dtype = "bfloat16"
[tasks]
source = "digit_sorting"
[reward]
functions = ["reward.py:checksum"]
[sampling]
group_size = {group_size}
max_tokens = {max_tokens}
[schedule]
groups_per_step = {groups}
lease_seconds = 3600.0
[learner]
lr = 1e-5
checkpoint_every = {steps}
[workers]
count = 1
engine = "{engine}"
"""
REWARD = """
from zlib import crc32

def checksum(completions, **columns):
    return [crc32(text.encode()) % 5 / 4 for text in completions]
"""


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3; the vocabulary is `VOCABULARY`, its embedding tied."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 2, 1, 32),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128),
}


def build_model(shape: Shape, out: Path) -> int:
    """A directory with a random model of this shape in bfloat16, and a tokenizer that knows all its tokens; how many
    parameters it has."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<pad>", "<eos>", "<unk>", *"0123456789="]
    words += [f" w{number}" for number in range(VOCABULARY - len(words))]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?w\d+|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    specials = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **specials).save_pretrained(out)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **vars(shape),
    )
    module = Qwen3ForCausalLM(config)
    module.save_pretrained(out)
    return sum(parameter.numel() for parameter in module.parameters())


def role_of(words: list[str]) -> str:
    """Which of the run's processes has this command line; empty: none."""
    if "echo2" not in " ".join(words):
        return ""
    return next((role for role in ROLES if role in words or any(f"echo2.{role}" in word for word in words)), "")


class PeakMemory:
    """The most memory of the processes that work on `folder`, by role, while `with` lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.peak_bytes: dict[str, int] = {}

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            for place in Path("/proc").glob("[0-9]*"):
                try:
                    line = (place / "cmdline").read_text()
                    role = role_of(line.split("\0")) if self._folder in line else ""
                    found = (place / "status").read_text().partition("VmHWM:")[2].split() if role else []
                except OSError:
                    continue  # it has ended
                if found:
                    self.peak_bytes[role] = max(self.peak_bytes.get(role, 0), 1024 * int(found[0]))


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run in `folder`; its figures."""
    child = [sys.executable, __file__, "--shape", options.shape, "--build", str(folder / "model")]
    num_parameters = int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    (folder / "reward.py").write_text(REWARD)
    lora = f"[lora]\nrank = {options.lora_rank}\n" if options.lora_rank else ""
    settings = {key: value for key, value in vars(options).items() if f"{{{key}}}" in CONFIG}
    (folder / "run.toml").write_text(CONFIG.format(model=folder / "model", **settings) + lora)
    command = [sys.executable, "-m", "echo2", "run", "run.toml", "--out", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with PeakMemory(folder) as memory:
        subprocess.run(command, cwd=folder, env=environment, check=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]
    phases = sorted({key for row in steps for key in row if key.startswith(("time/", "broadcast/", "snapshot/"))})
    return {
        "shape": options.shape,
        "lora_rank": options.lora_rank,
        "num_parameters": num_parameters,
        "peak_bytes": memory.peak_bytes,
        "bytes_per_parameter": {role: peak / num_parameters for role, peak in memory.peak_bytes.items()},
        "mean": {key: statistics.fmean(row[key] for row in steps if key in row) for key in phases},
        "steps": steps,
    }


def show(figures: dict[str, Any]) -> None:
    """A table for people."""
    table = Table("process", "peak MB", "bytes a parameter", title=f"{figures['num_parameters']:,} parameters")
    for role, peak in figures["peak_bytes"].items():
        table.add_row(role, f"{peak / 1e6:,.0f}", f"{figures['bytes_per_parameter'][role]:.1f}")
    Console().print(table)
    for key, value in figures["mean"].items():
        print(f"{key:28} {value:16,.2f}")


def main() -> None:
    """Measure, or build what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter of this rank (0: the whole model)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8, help="groups a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--engine", default="compact")
    parser.add_argument("--work", type=Path, help="where model and run are kept (default: nowhere)")
    parser.add_argument("--out", type=Path, help="where the figures go")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        print(build_model(SHAPES[options.shape], options.build))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.work or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        figures = run(folder, options)
    show(figures)
    name = f"real_size_{options.shape}" + ("_lora" if options.lora_rank else "")
    print(f"written to {save(name, figures, options.out)}")


if __name__ == "__main__":
    main()
