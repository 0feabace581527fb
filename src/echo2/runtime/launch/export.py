"""`echo2 export`: writes a checkpoint as a separate model directory, without a head, and uploads it if asked."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from echo2.disk import num_bytes
from echo2.documents import parse_json, safetensors_pieces
from echo2.errors import UserError
from echo2.rundir import RunDir
from echo2.runtime.launch.evaluate import MODEL_FILE, Step, checkpoint_directory, copy_model
from echo2.runtime.launch.hub import check_push, push, write_card
from echo2.weights.adapter_files import ADAPTER_CONFIG

#: Dtype of the weights in all checkpoints.
STORED_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Export:
    """A written directory. `dtype`: of its weights; `bytes`: size of all its files; `url`: address of the repository
    that it was pushed to, or ""."""

    path: str
    step: int
    kind: str  # "model" or "adapter"
    dtype: str
    bytes: int
    url: str = ""


def run(options: argparse.Namespace) -> int:
    """Export, push if asked, and print the result. Raises as `export`, `check_push` and `push`."""
    rundir = RunDir(options.directory)
    if options.push:
        check_push(options.push, rundir.read_config(), options.merged)
    elif options.public:
        raise UserError("--public: nothing is pushed. Add --push OWNER/NAME, or leave --public out.")
    done = export(options.directory, options.step, options.to, options.merged, options.dtype)
    if options.push:
        write_card(options.to, rundir, done.step, done.dtype)
        url = push(options.to, options.push, options.public)
        done = replace(done, url=url, bytes=num_bytes(options.to))
    if options.json:
        print(json.dumps(asdict(done)))
    else:
        untrained = "" if done.step else ": the weights that the run began with, not trained"
        print(f"exported step_{done.step} to {done.path}" + (f", pushed to {done.url}" if done.url else "") + untrained)
    return 0


def export(directory: Path, step: Step, to: Path, is_merged: bool = False, dtype: str = "") -> Export:
    """Copy the model part of a checkpoint to `to`, a directory that must not exist. An adapter becomes a PEFT
    directory, or with `is_merged` the whole model of base and adapter. `dtype`: of the weights, if not float32.

    Raises:
        UserError: no such checkpoint; the target exists or can't be written; there is nothing to merge; a weight is too
            large for `dtype`.
    """
    rundir = RunDir(directory)
    source, base = checkpoint_directory(rundir, step), rundir.read_config().model.path
    if to.exists():
        raise UserError(f"{to} exists already. Choose another directory with --to.")
    is_adapter = (source / ADAPTER_CONFIG).is_file()
    if is_merged and not is_adapter:
        raise UserError(f"--merged: {source.name} is a whole model already, not an adapter. Leave --merged out.")
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed export
    try:
        if is_merged:
            _write_merged(base, source, partial, dtype)
        else:
            copy_model(source, partial, dtype)
        if is_adapter and not is_merged:
            values = parse_json((partial / ADAPTER_CONFIG).read_bytes())
            text = json.dumps(values | {"base_model_name_or_path": base}, indent=2, sort_keys=True)
            (partial / ADAPTER_CONFIG).write_text(text)
        partial.rename(to)
    except OSError as error:
        raise UserError(f"Cannot write {to}: {error.strerror or error}. Nothing was exported.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    kind = "adapter" if is_adapter and not is_merged else "model"
    return Export(str(to), int(source.name.removeprefix("step_")), kind, dtype or STORED_DTYPE, num_bytes(to))


def _write_merged(base: str, adapter: Path, to: Path, dtype: str) -> None:
    from echo2.learner.adapters import load_merged  # imports torch, which a plain copy does not need
    from echo2.learner.model import DTYPES, with_dtype
    from echo2.learner.shard_files import cast

    policy = load_merged(base, adapter, "cpu")
    for name, tensor in policy.held().items():
        cast(name, tensor, dtype)  # refuses what is too large
    to.mkdir(parents=True)
    with (to / MODEL_FILE).open("wb") as file:
        file.writelines(safetensors_pieces(policy.weights(DTYPES[dtype or STORED_DTYPE])))
    files = {**policy.files, "config.json": with_dtype(policy.files["config.json"], dtype or STORED_DTYPE)}
    for name, data in files.items():
        (to / name).write_bytes(data)
