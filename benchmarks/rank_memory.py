"""Memory of a learner's rank, and seconds of a step: alone, cut by FSDP2, and sharing products (tensor parallel).

    python benchmarks/rank_memory.py                     # 71 M parameters, gloo, on the CPU; five minutes

Every rank is a process of its own that loads the model, and trains two steps of the same data in micro-batches of 1,024
tokens. Peak: the most that its process held (`VmHWM`), beside the forecast. Ranks share this machine's cores, so that
the seconds show what communication costs and not what GPUs would gain.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from recording import save

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
#: Ranks, and how many share products.
SETUPS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
TOKENS, ROW_TOKENS, NUM_ROWS = 1024, 256, 8


def write_model(out: Path) -> None:
    """A directory with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES)).save_pretrained(out)


def measured(where: Path, rank: int, ranks: int, sharing: int) -> dict[str, float]:
    """Bytes at the peak of this rank and by the forecast, and seconds of the second step."""
    import torch

    from echo2.control.capacity.memory import LearnerSetup, read_shape
    from echo2.learner.datum import Datum
    from echo2.learner.mesh import Mesh, Place, join
    from echo2.learner.model import load_policy
    from echo2.learner.trainer import AdamParams, Trainer

    place = Place(rank, ranks, rank, (where / "store").as_uri())
    mesh = Mesh() if ranks == 1 else join(place, torch.device("cpu"), where, sharing)
    trainer, rng = Trainer(TOKENS, mesh=mesh), random.Random(0)
    trainer.add("it", load_policy(str(where.parent / "model"), "float32", "cpu", mesh))
    rows = [array("i", [rng.randrange(SIZES["vocab_size"]) for _ in range(ROW_TOKENS + 1)]) for _ in range(NUM_ROWS)]
    data = [Datum(row[:64], row[64:], b"\x01" * (len(row) - 64)) for row in rows]
    seconds = 0.0
    for _ in range(2):  # the first step makes gradients and moments
        started = time.perf_counter()
        trainer.forward_backward("it", data, lambda logp_n, _: (-logp_n, None))
        trainer.optim_step("it", AdamParams(1e-6))
        seconds = time.perf_counter() - started
    mesh.leave()
    shape = read_shape(SIZES)
    assert shape is not None
    forecast = LearnerSetup(shape, ranks=ranks, tensor_parallel=sharing).needed(TOKENS, checkpointing=False)
    peak = 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    return {"peak": peak, "forecast": forecast, "seconds": seconds}


def case(folder: Path, ranks: int, sharing: int) -> dict[str, Any]:
    """All ranks of a setup; the figures of the one that held most."""
    where = folder / f"of_{ranks}_{sharing}"
    where.mkdir()
    words = [
        [sys.executable, __file__, "--case", str(where), *map(str, (rank, ranks, sharing))] for rank in range(ranks)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True) for each in words]
    found: list[dict[str, Any]] = [json.loads(process.communicate()[0]) for process in processes]
    return max(found, key=lambda figures: figures["peak"]) | {"ranks": ranks, "tensor_parallel": sharing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.case:
        where, *numbers = options.case
        print(json.dumps(measured(Path(where), *map(int, numbers))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        for ranks, sharing in SETUPS:
            rows.append(found := case(Path(folder), ranks, sharing))
            print(
                f"{ranks} ranks, {sharing} share products: {found['peak'] / 1e6:6.0f} MB a rank, "
                f"{found['peak'] / found['forecast']:.2f} of the forecast, {found['seconds']:5.1f} s a step",
                flush=True,
            )
    print(save("rank_memory", {"model": SIZES, "tokens": TOKENS, "rows": rows}, options.out))


if __name__ == "__main__":
    main()
