"""`echo2 export`: writes a checkpoint as a separate model directory, without a head; `--gguf` and `--mlx` for programs
at home. `--push` uploads it and a model card with the Hugging Face hub's own library. The card states only facts from
the run's files, and names no directories of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from echo2 import __version__
from echo2.config import Config
from echo2.config.rundir import RunDir, accuracies, read_metrics
from echo2.config.values import GGUF_FORMS
from echo2.core.disk import num_bytes
from echo2.core.documents import parse_json, safetensors_pieces
from echo2.core.errors import UserError, counted, write_failed
from echo2.models.evaluate import MODEL_FILE, Step, checkpoint_directory, copy_model
from echo2.weights.format.adapter_files import ADAPTER_CONFIG
from echo2.weights.format.model_files import MLX_WEIGHTS, no_answer, read_base_model

CARD = "README.md"
GET_TOKEN = (
    "Run `hf auth login`, or put a token with write access in HF_TOKEN (https://huggingface.co/settings/tokens)."
)
#: Dtype of the weights in all checkpoints.
STORED_DTYPE = "float32"
#: The dtype in which MLX computes unless another is given.
MLX_DTYPE = "bfloat16"
#: What an export or a repository on the hub holds, and the end of a file's name that marks it.
MARKS = {
    "an adapter": ADAPTER_CONFIG,
    "a whole model": MODEL_FILE,
    "a model for MLX": MLX_WEIGHTS,
    "a model for llama.cpp": ".gguf",
}
#: The hub's names of the libraries that load them, in the same order.
LIBRARIES = dict(zip(MARKS, ("peft", "transformers", "mlx", "gguf"), strict=True))


def check_push(repo: str, config: Config, is_merged: bool) -> None:
    """Check that an export can be pushed, before anything is written.

    Raises:
        UserError: `repo` is not a repository name, there is no token, or the adapter's base is on this machine only.
    """
    from huggingface_hub import get_token

    if wrong := _wrong_id(repo) or ("" if "/" in repo else "It names no owner."):
        raise UserError(f"--push {repo!r} is not a repository name. Give OWNER/NAME. {wrong}")
    if config.lora.rank and not is_merged and not _is_hub_id(config.model.path):
        raise UserError(
            f"--push: the adapter is over {config.model.path}, which is on this machine alone. Add --merged to push "
            "the whole model, or export without --push and name the base's hub id in adapter_config.json."
        )
    if get_token() is None:
        raise UserError(f"--push {repo}: there is no token for the Hugging Face hub. {GET_TOKEN}")


def push(directory: Path, repo: str, is_public: bool) -> str:
    """Upload all files of the directory. Return the repository's address. The repository is created if it does not
    exist, private unless `is_public`.

    Raises:
        UserError: the hub can't be reached or refuses; the repository holds something else, or has the other
            visibility. The directory stays.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="echo2", library_version=__version__)
    try:
        url = api.create_repo(repo, private=not is_public, exist_ok=True)
        info = api.model_info(repo)
        _check_repo(repo, bool(info.private), is_public, [file.rfilename for file in info.siblings or []], directory)
        api.upload_folder(repo_id=repo, folder_path=directory, commit_message="Upload from echo2 export")
    except UserError:
        raise
    except (OSError, no_answer(), RuntimeError, ValueError) as error:  # raised by the library and its uploader
        visibility = "--no-private" if is_public else "--private"
        again = f"hf upload {repo} {shlex.quote(str(directory))} . {visibility}"
        reason = _reason(error, repo, api.endpoint)
        raise UserError(f"{directory} is written, but not pushed to {repo}: {reason} Then: {again}") from error
    return str(url)


def _check_repo(repo: str, is_private: bool, is_public: bool, files: Collection[str], directory: Path) -> None:
    """Raises UserError if an existing repository has the other visibility, or holds the other kind of model."""
    not_pushed = f"Nothing was pushed; {directory} is written."
    if is_private == is_public:
        what, do = ("private", "leave --public out") if is_private else ("public", "add --public")
        raise UserError(f"{repo} exists and is {what}: {do}, or choose another name. {not_pushed}")
    own_kind, their_kinds = _kinds(os.listdir(directory))[0], _kinds(files)
    if their_kinds and own_kind not in their_kinds:
        raise UserError(
            f"{repo} holds {their_kinds[0]}, and this is {own_kind}: they cannot share a repository. "
            f"Choose another name. {not_pushed}"
        )


def _kinds(files: Collection[str]) -> list[str]:
    """Return what these files are, of the kinds in `MARKS`."""
    return [kind for kind, mark in MARKS.items() if any(name.endswith(mark) and "/" not in name for name in files)]


def _reason(error: Exception, repo: str, endpoint: str) -> str:
    """Return the cause of a failed upload, and a remedy."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set. Unset it."
    if not isinstance(error, HfHubHTTPError):
        return f"{endpoint} can't be reached or does not answer as the hub does ({error}). See to the network."
    status, message = error.response.status_code, error.server_message or ""
    if status == 401:
        return f"the hub does not take the token (401). {GET_TOKEN}"
    if status == 403:
        owner = repo.partition("/")[0]
        return f"the token may not write to {owner} (403 {message}). Give one that may in HF_TOKEN, or another owner."
    return f"the hub answered {status} {message or error}. Do what it asks, or wait."


def _is_hub_id(path: str) -> bool:
    return not Path(path).is_dir() and not _wrong_id(path)


def _wrong_id(name: str) -> str:
    """Return why the hub would refuse this repository name; "" if it is valid."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented there

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return ""


def write_card(directory: Path, rundir: RunDir, step: int, dtype: str) -> None:
    """Write the model card README.md of an export: base model, run, step, and how it was trained.

    Raises:
        UserError: the run's configuration can't be read, or the card can't be written.
    """
    config, is_adapter = rundir.read_config(), (directory / ADAPTER_CONFIG).is_file()
    base, rank = config.model.path, config.lora.rank
    is_hub = _is_hub_id(base)
    kind = f"LoRA adapter of rank {rank}" if is_adapter else "whole model"
    if rank and not is_adapter:
        kind += f", an adapter of rank {rank} merged into its base"
    if config.learner.quantised == "base":
        kind += ", trained over the base in 4 bits (nf4)"
    facts = {
        "base model": f"[{base}](https://huggingface.co/{base})"
        if is_hub
        else f"`{Path(base).name}`, a local directory",
        "run": f"`{rundir.path.resolve().name}`, after step {step}",
        "what is here": f"{kind}, in {dtype}",
        **_training(config),
        **_accuracy(rundir, step),
    }
    header = [f"base_model: {base}"] if is_hub else []
    libraries = [LIBRARIES[kind] for kind in _kinds(os.listdir(directory))]
    header += [*(f"library_name: {library}" for library in libraries), "pipeline_tag: text-generation"]
    header += ["tags:", "- echo2", "- reinforcement-learning"]
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    text = ["---", *header, "---", "", f"# {rundir.path.resolve().name}, step {step}", ""]
    text += [f"Trained with reinforcement learning by echo2 {__version__}. This card has what the run recorded:", ""]
    text += ["| | |", "| --- | --- |", *rows, ""]
    try:
        (directory / CARD).write_text("\n".join(text), encoding="utf-8")
    except OSError as error:
        raise write_failed(error, f"Cannot write {directory / CARD}: {error.strerror}. Nothing was pushed.") from error


def _training(config: Config) -> Mapping[str, str]:
    learner, schedule, sampling = config.learner, config.schedule, config.sampling
    return {
        "tasks": _named(config.tasks.sources),
        "rewards": _named(config.reward.functions),
        "loss": f"{learner.loss}, advantages {learner.advantage}, normalised by {learner.normalisation}",
        "learning rate": f"{learner.lr:g}, {learner.lr_schedule}",
        "a step": f"{schedule.groups_per_step} groups of {sampling.group_size} rollouts",
        "rollouts": f"temperature {sampling.temperature:g}, {sampling.max_tokens} tokens at most",
        "staleness": f"{counted(schedule.max_staleness, 'version')} at most",
    }


def _accuracy(rundir: RunDir, step: int) -> Mapping[str, str]:
    """Return the held-out reward of the exported step, if the run measured it."""
    rewards = accuracies(read_metrics(rundir.metrics))
    if step not in rewards:
        return {}
    before = f"{rewards[0]:.3f} before training, " if step and 0 in rewards else ""
    return {"mean reward of the run's held-out tasks": f"{before}{rewards[step]:.3f} after step {step}"}


def _named(texts: Iterable[str]) -> str:
    """Return the names for a cell of a table: without the directories of local files, and with "|" escaped."""
    names = [re.sub(r"(^|[\s:])/\S*/", r"\1", text) for text in texts]
    return ", ".join(f"`{name}`".replace("|", r"\|") for name in names) or "none"


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
    form = options.gguf or (options.mlx and f"mlx-q{options.mlx}")
    if options.push:
        check_push(options.push, rundir.read_config(), options.merged or bool(form))
    elif options.public:
        raise UserError("--public: nothing is pushed. Add --push OWNER/NAME, or leave --public out.")
    done = export(options.directory, options.step, options.to, options.merged, options.dtype, form)
    if options.push:
        write_card(options.to, rundir, done.step, done.dtype)
        url = push(options.to, options.push, options.public)
        done = replace(done, url=url, bytes=num_bytes(options.to))
    if options.json:
        print(json.dumps(asdict(done)))
    else:
        untrained = "" if done.step else ": the weights that the run began with, not trained"
        print(f"exported step_{done.step} to {done.path}" + (f", pushed to {done.url}" if done.url else "") + untrained)
        if form:
            path = shlex.quote(str(options.to))
            file = shlex.quote(str(options.to / gguf_name(form)))
            print(f"run it: mlx_lm.chat --model {path}" if options.mlx else f"run it: llama-cli -m {file}")
    return 0


def gguf_name(form: str) -> str:
    """Return the name of the file in an export for llama.cpp."""
    return f"model-{form}.gguf"


def export(directory: Path, step: Step, to: Path, is_merged: bool = False, dtype: str = "", form: str = "") -> Export:
    """Copy the model part of a checkpoint to `to`, a directory that must not exist. An adapter becomes a PEFT
    directory, or with `is_merged` the whole model of base and adapter. `dtype`: of the weights, if not float32.
    `form`: for llama.cpp (`GGUF_FORMS`) or MLX (`mlx-q8`, `mlx-q4`), always whole; `dtype` is then MLX's.

    Raises:
        UserError: no such checkpoint; the target exists or can't be written; there is nothing to merge; a weight is too
            large for `dtype`; there is no such form of the model.
    """
    if form in GGUF_FORMS and dtype:
        raise UserError(f"--dtype {dtype} has no effect on a file for llama.cpp: --gguf names its form. Leave it out.")
    rundir = RunDir(directory)
    source, config = checkpoint_directory(rundir, step), rundir.read_config()
    if to.exists():
        raise UserError(f"{to} exists already. Choose another directory with --to.")
    is_adapter = (source / ADAPTER_CONFIG).is_file()
    if is_merged and not is_adapter:
        raise UserError(f"--merged: {source.name} is a whole model already, not an adapter. Leave --merged out.")
    is_merged |= is_adapter and bool(form)
    partial, model = (to.with_name(f".{to.name}.{what}") for what in ("partial", "model"))
    try:
        _clear(partial, model)  # left by a killed export
        copied, copied_dtype = (model, "") if form else (partial, dtype)
        if is_merged:
            _write_merged(config, source, copied, copied_dtype)
        else:
            copy_model(source, copied, copied_dtype)
        if form:
            _write_form(model, partial, form, dtype or MLX_DTYPE)
        elif is_adapter and not is_merged:
            values = parse_json((partial / ADAPTER_CONFIG).read_bytes())
            text = json.dumps(values | {"base_model_name_or_path": config.model.path}, indent=2, sort_keys=True)
            (partial / ADAPTER_CONFIG).write_text(text)
        partial.rename(to)
    except OSError as error:
        raise write_failed(error, f"Cannot write {to}: {error.strerror}. Nothing was exported.") from error
    finally:
        _clear(partial, model)
    kind, stored = "adapter" if is_adapter and not is_merged else "model", form or dtype or STORED_DTYPE
    return Export(str(to), int(source.name.removeprefix("step_")), kind, stored, num_bytes(to))


def _clear(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _write_form(model: Path, to: Path, form: str, dtype: str) -> None:
    """Write a model directory in a form. Raises as `export`."""
    from echo2.engines.home_files import write_gguf, write_mlx  # imports torch, as above

    snapshot = read_base_model(model)
    if form in GGUF_FORMS:
        to.mkdir(parents=True)
        write_gguf(to / gguf_name(form), snapshot, form)
    else:
        write_mlx(to, snapshot, form, dtype)


def _write_merged(config: Config, adapter: Path, to: Path, dtype: str) -> None:
    from echo2.learner.core.adapters import load_merged  # imports torch, which a plain copy does not need
    from echo2.learner.core.model import DTYPES, with_dtype
    from echo2.learner.core.state import cast

    policy = load_merged(config.model.path, adapter, "cpu", config.learner.quantised == "base")
    for name, tensor in policy.held().items():
        cast(name, tensor, dtype)  # refuses what is too large
    to.mkdir(parents=True)
    with (to / MODEL_FILE).open("wb") as file:
        file.writelines(safetensors_pieces(policy.weights(DTYPES[dtype or STORED_DTYPE])))
    files = {**policy.files, "config.json": with_dtype(policy.files["config.json"], dtype or STORED_DTYPE)}
    for name, data in files.items():
        (to / name).write_bytes(data)
