"""Memory of one rank while it loads a mixture of experts, against the share of the model that it keeps.

    make bench-mixture_loading                        # 501 M parameters, 1.0 GB of files: two minutes on two cores
    make bench-mixture_loading ARGS='--layers 4'      # a smaller one, to check the benchmark

A Qwen3-MoE is written as the hub has it: bfloat16, a tensor for each expert, a file for each layer. Ranks load it in
float32, as a run without adapters does (gloo, each rank a process of its own). The peak is what a rank's memory grows
by from the loaded libraries on (`VmHWM`, reset before); its share is 4 bytes a parameter over the ranks. A rank holds
one layer whole before that is cut, and the embedding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from recording import child_environment, save
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from echo2.learner.core.mesh import Mesh, Place, join
from echo2.learner.core.model import load_policy

HIDDEN, EXPERT, EXPERTS, VOCABULARY, HEAD = 512, 256, 64, 16_384, 64


def write_model(directory: Path, num_layers: int) -> int:
    """Write the model. Returns its number of parameters."""
    values = dict[str, Any](
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=HEAD,
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        moe_intermediate_size=EXPERT,
        intermediate_size=4 * EXPERT,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    Qwen3MoeConfig(**values).save_pretrained(directory)
    files, total, names = [outer_shapes(), *(layer_shapes(number) for number in range(num_layers))], 0, dict[str, str]()
    for number, shapes in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        tensors = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
        save_file(tensors, directory / file, {"format": "pt"})
        total += sum(tensor.numel() for tensor in tensors.values())
        names |= dict.fromkeys(shapes, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return total


def outer_shapes() -> dict[str, tuple[int, ...]]:
    embedding = (VOCABULARY, HIDDEN)
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding, "model.norm.weight": (HIDDEN,)}


def layer_shapes(number: int) -> dict[str, tuple[int, ...]]:
    layer = f"model.layers.{number}"
    heads = {"q": (8 * HEAD, HIDDEN), "k": (2 * HEAD, HIDDEN), "v": (2 * HEAD, HIDDEN), "o": (HIDDEN, 8 * HEAD)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in heads.items()
    }
    shapes |= {f"{layer}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        for name, shape in {"gate": (EXPERT, HIDDEN), "up": (EXPERT, HIDDEN), "down": (HIDDEN, EXPERT)}.items():
            shapes[f"{layer}.mlp.experts.{expert}.{name}_proj.weight"] = shape
    return shapes


def memory(field: str) -> int:
    """A size of this process in bytes, of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def load(directory: Path, rank: int, ranks: int) -> None:
    """What each rank does. Prints what it measured."""
    place = Place(rank, ranks, rank, (directory / f"store{ranks}").as_uri())
    mesh = join(place, torch.device("cpu")) if ranks > 1 else Mesh()
    for library in ("transformers.models.qwen3_moe.modeling_qwen3_moe", "accelerate", "torch.distributed.fsdp"):
        import_module(library)  # they are part of the process, not of the model
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    policy = load_policy(str(directory), "float32", "cpu", mesh)
    held = sum(mesh.own(tensor).numel() for tensor in policy.held().values())
    found = {"peak_bytes": memory("VmHWM") - before, "after_bytes": memory("VmRSS") - before, "held_bytes": 4 * held}
    print(json.dumps(found | {"process_bytes": before}))
    if ranks > 1:
        mesh.leave()


def measured(directory: Path, ranks: int) -> list[dict[str, Any]]:
    """Each rank's figures."""
    words = [sys.executable, __file__, "--load", str(directory), "--ranks", str(ranks)]
    started = [
        subprocess.Popen([*words, "--rank", str(rank)], env=child_environment(), stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/mixture_loading-DATE.json)")
    options = parser.parse_args()
    if options.load:
        load(options.load, options.rank, options.ranks[0])
        return
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        parameters = write_model(Path(directory), options.layers)
        for ranks in options.ranks:
            share = 4 * parameters / ranks
            peaks = measured(Path(directory), ranks)
            rows.append({"ranks": ranks, "share_bytes": share, "each": peaks})
            worst = max(one["peak_bytes"] for one in peaks)
            said = f"share {share / 1e9:.2f} GB, peak {worst / 1e9:.2f} GB, {worst / share:.2f} times"
            print(f"{ranks} ranks: {said}", flush=True)
    print(f"written to {save('mixture_loading', {'parameters': parameters, 'rows': rows}, options.out)}")


if __name__ == "__main__":
    main()
