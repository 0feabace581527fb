"""Checks before a start, also for `--dry-run`: finds the user's mistakes, and explains each in one sentence."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Set
from pathlib import Path

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.rundir import check_directory, holds_run, read_json
from echo2.config.values import ENGINES, LOG_PACKAGES, SERVERS, refuse_unknown_engine, weighted
from echo2.core.addresses import family
from echo2.core.decide.model_config import context_length
from echo2.core.devices import require_bitsandbytes, this_machine
from echo2.core.errors import UserError
from echo2.core.objects import check_store
from echo2.core.types import SnapshotRef
from echo2.engines.model_values import PLAIN_TYPES, UnsupportedError, read_architecture, read_context, text_values
from echo2.engines.registry import PACKAGES, EngineChoice, chosen, missing_packages, servers_here, unchecked
from echo2.engines.tokenizer import TOKENIZER_SUFFIXES, Tokenizer, encode_prompt
from echo2.head.fleet.machines import read_offers
from echo2.head.serve.reading import RunTokenizer
from echo2.learner.core.fitting import model_config, model_shape, settle
from echo2.planning.memory_needs import learner_that_fits, worker_that_fits
from echo2.reward.judge import read_key
from echo2.reward.score import Scorer
from echo2.tasks.base import TaskSource, TaskStream, row_name
from echo2.tasks.environments import LocalEnvironment
from echo2.tasks.harbor_rows import is_task_set
from echo2.tasks.harness_process import HARBOR, OWN, VERIFIERS, is_harness, load_harness
from echo2.tasks.streams import load_tasks, training_tasks
from echo2.tasks.teaching import check_teaching
from echo2.transport.limits import ROUTES_BYTES_MAX
from echo2.weights.format.adapter_files import (
    BEGINNING_REMEDY,
    EXPERTS,
    adapter_config,
    check_same_settings,
    lora_targets,
)
from echo2.weights.format.model_files import hub_refusal, linear_layers, tensor_shapes

#: Maximum number of rows of a file checked before a run starts; the others are checked when they are used.
ROWS_CHECKED_MAX = 10_000
#: Maximum number of rows of a file whose prompts a dry run tokenises.
PROMPTS_CHECKED_MAX = 1_000
#: Rows of a file with which an environment is begun before a run starts.
ENVIRONMENTS_TRIED = 8
ANY_HOST = ("0.0.0.0", "::")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check(config: Config, has_learner: bool = True, has_workers: bool = True) -> None:
    """Find the user's mistakes before processes are started, at every start and for `--dry-run`. Doubtful settings that
    are not mistakes are printed as warnings. `has_learner`: the learner runs on this machine; `has_workers`: so do the
    run's local workers. For a head alone, no weights are anywhere, and this loads no torch.

    Raises:
        UserError: the first mistake found.
    """
    check_model(config.model.path, config.workers.engine, has_learner)
    for path in config.distill.loaded if has_learner else ():  # the learner alone holds teachers
        check_model(path, "", setting="distill.teacher")
    check_lora(config)
    check_engine(config)
    note = unchecked(config, model_config(config.model.path), engine_here(config))
    if note and (config.workers.forms or config.head.is_reachable):
        print(f"note: {note}", file=sys.stderr)
    check_machine(config)
    if has_learner or has_workers:
        check_memory(config, has_learner)
    if has_learner and config.learner.quantised != "none":
        require_bitsandbytes(f"learner.quantised = {config.learner.quantised!r}")
    if not config.tasks.source:
        raise UserError(
            "tasks.source is empty: name your tasks (rows.jsonl, reasoning_gym:<name>, file.py:Class, ...)."
        )
    if not config.reward.functions and not config.distill.teachers:
        raise UserError(
            'reward.functions is empty: name at least one, for example ["exact_match"], or distill.teacher.'
        )
    scorer = Scorer(config.reward.functions)
    judged = frozenset[str]()
    if (judge := config.reward.judge_config) is not None:
        read_key(judge)
        judged = judge.columns
    training_tasks(config.tasks, config.run.seed)
    for names, params in ((config.tasks.sources, config.tasks.params), (config.eval.sets.values(), config.eval.params)):
        for name in names:
            tasks = load_tasks(name, params, config.run.seed)
            num_rows = check_tasks(tasks, scorer, name, judged)
            if params is config.tasks.params:
                check_teaching(config, tasks, name, num_rows)
                note_unused_template(config.model.path, tasks, name)
            if config.tasks.environment and not is_harness(config.tasks.environment):
                check_environment(config.tasks.environment, tasks, name)
    is_verifiers = {name.startswith(f"{VERIFIERS}:") for name in (*config.tasks.sources, *config.eval.sets.values())}
    if is_verifiers != {config.tasks.environment == VERIFIERS}:
        raise UserError(
            f"tasks.source = {config.tasks.source!r} with tasks.environment = {config.tasks.environment!r}: only "
            "verifiers can run tasks of a verifiers taskset, and it can run no others. Set environment = "
            f"{VERIFIERS!r}."
        )
    if is_harness(config.tasks.environment):
        check_harness(config)
    elif not config.tasks.environment and any(
        name == "environment" for _, name in map(weighted, config.reward.functions)
    ):
        raise UserError(
            'reward.functions has "environment", and tasks.environment is empty: name one, or another reward.'
        )
    check_budget(config, read_offers(config).values())
    check_context(config)
    if config.head.store:
        check_store(config.head.store)


def check_harness(config: Config) -> None:
    """Raises UserError if the run's harness cannot be loaded, or the run is deterministic, which harnesses are not."""
    if config.run.deterministic:
        raise UserError(
            f"run.deterministic = true with tasks.environment = {config.tasks.environment!r}: a harness calls the "
            "model at times that differ from run to run. Leave one of them out."
        )
    for name in (*config.tasks.sources, *config.eval.sets.values()):
        if config.tasks.environment == HARBOR and not is_task_set(Path(name)):
            raise UserError(f"tasks.environment = 'harbor' with {name!r}: the source is a directory of Harbor tasks.")
    if config.tasks.environment.startswith(OWN) or (config.tasks.environment == HARBOR and config.workers.count):
        load_harness(config.tasks.environment)


def check_budget(config: Config, offers: Iterable[Offer]) -> None:
    """Check that a run with a budget has a price. Workers that join later bring their own prices.

    Raises:
        UserError: nothing in the run costs anything; the message names the settings with the prices.
    """
    prices = [config.learner.price_usd_per_hour, *(offer.price_usd_per_hour for offer in offers if offer.rent)]
    if config.workers.count:
        prices.append(config.workers.price_usd_per_hour)
    are_known = config.workers.count or len(prices) > 1
    if config.fleet.budget_usd and are_known and not any(prices):
        raise UserError(
            f"fleet.budget_usd = {config.fleet.budget_usd:g} would never be spent: learner, workers and offers cost "
            "$0. Set learner.price_usd_per_hour, workers.price_usd_per_hour or an offer's price, or leave the budget "
            "out."
        )


def check_tasks(tasks: TaskSource, scorer: Scorer, source: str, judged: Set[str] = frozenset()) -> int:
    """Find bad rows, and rows without a column that a reward needs. `ROWS_CHECKED_MAX` rows of a file are checked, and
    only the first of generated rows. Return how many. `judged`: columns that the judge reads.

    Raises:
        UserError: names the first bad row, or the column that no row has.
    """
    stream, missing = TaskStream(tasks, 0, False), Counter[tuple[str, str]]()
    num_rows = min(len(tasks), ROWS_CHECKED_MAX) if hasattr(tasks, "where") else 1
    for cursor in range(num_rows):
        task = stream.task(cursor)
        missing.update([*scorer.missing_columns(task), *(("judge", name) for name in judged - task.columns.keys())])
    for (function, column), count in missing.items():
        if count == num_rows:
            has = sorted(stream.task(0).columns)
            raise UserError(
                f"The reward {function} needs the column {column!r}, which no row of {source} has (the first has "
                f"{', '.join(has) or 'none'}). Rename the column or the function's parameter."
            )
        where = f"{count} of {num_rows} rows of {source}"
        print(f"warning: {where} lack the column {column!r}: their groups will fail in {function}", file=sys.stderr)
    return num_rows


def note_unused_template(model: str, tasks: TaskSource, source: str) -> None:
    """Print a note if the prompts are texts, and the model's directory has a chat template, which they do not pass."""
    settings = Path(model) / "tokenizer_config.json"
    has_template = any((Path(model) / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    has_template |= settings.is_file() and b'"chat_template"' in settings.read_bytes()
    if has_template and isinstance(TaskStream(tasks, 0, False).task(0).prompt, str):
        print(
            f"note: the prompts of {source} are texts, which the model reads as they are, without its chat template. "
            'For a chat model write them as [{"role": "user", "content": "..."}]',
            file=sys.stderr,
        )


def check_environment(spec: str, tasks: TaskSource, source: str) -> None:
    """Begin the environment with the first rows, as each rollout does.

    Raises:
        UserError: there is no such environment, or it fails with each of these rows: for want of a column, for example.
    """
    environment, stream, failures = LocalEnvironment(spec), TaskStream(tasks, 0, False), list[UserError]()
    num_rows = min(len(tasks), ENVIRONMENTS_TRIED) if hasattr(tasks, "where") else 1
    for cursor in range(num_rows):
        try:
            environment.end(environment.begin(stream.task(cursor).columns, cursor))
        except UserError as error:
            failures.append(error)
    if len(failures) == num_rows:
        of = f"the first {num_rows} rows" if num_rows > 1 else "the first row"
        has = ", ".join(sorted(stream.task(0).columns)) or "none"
        raise UserError(f"{failures[0]} The same is true of {of} of {source} (columns of the first: {has}).")


def check_prompts(config: Config) -> None:
    """Find mistakes that head and workers would meet at the first tasks: an unreadable tokenizer, a prompt that the
    chat template can't write, or prompts that fill the model's context. Checks a model directory, not a hub id. Loads
    transformers, which takes seconds.

    Raises:
        UserError: names the model's tokenizer, the task, or the tasks whose prompts all fill the context.
    """
    where = Path(config.model.path)
    if where.is_dir():
        files = {path.name: path.read_bytes() for path in where.iterdir() if path.suffix in TOKENIZER_SUFFIXES}
        reader = RunTokenizer(files, config.model.chat_template_args)
        reader.prompt("train", training_tasks(config.tasks, config.run.seed).task(0))
        context = read_context(files)
        if context is not None:
            sets = (config.tasks.sources, config.tasks.params), (config.eval.sets.values(), config.eval.params)
            for names, params in sets:
                for name in names:
                    tasks, room = load_tasks(name, params, config.run.seed), config.sampling.max_tokens
                    check_prompt_lengths(tasks, name, reader.tokenizer, context, room)


def check_prompt_lengths(
    tasks: TaskSource, source: str, tokenizer: Tokenizer, context: int, max_tokens: int = 0
) -> None:
    """Print a warning if prompts leave no token of the model's context for an answer, or less than `max_tokens`.
    `PROMPTS_CHECKED_MAX` rows of a file are checked, and only the first of generated rows.

    Raises:
        UserError: no prompt of the whole source leaves one.
    """
    stream, num_long, first, tight = TaskStream(tasks, 0, False), 0, "", list[int]()
    num_rows = min(len(tasks), PROMPTS_CHECKED_MAX) if hasattr(tasks, "where") else 1
    for cursor in range(num_rows):
        with contextlib.suppress(UserError):  # the group of a prompt that the template refuses is lost, not the run
            if (length := len(encode_prompt(stream.task(cursor), tokenizer))) >= context:
                num_long, first = num_long + 1, first or f"{row_name(tasks, cursor)} has {length}"
            elif length + max_tokens > context:
                tight.append(length)
    if tight:
        print(
            f"warning: {len(tight)} of {num_rows} prompts of {source} leave less than sampling.max_tokens = "
            f"{max_tokens} of the model's context of {context} tokens: their answers are cut off where it is full. "
            f"The longest has {max(tight)}: lower sampling.max_tokens to {context - max(tight)}, or shorten them",
            file=sys.stderr,
        )
    if not num_long:
        return
    problem = f"{num_long} of {num_rows} prompts of {source} fill the model's context of {context} tokens ({first})"
    if num_long == len(tasks):
        raise UserError(f"{problem}: nothing could be sampled. Shorten them, or take a model with a longer context.")
    print(f"warning: {problem}: their groups will fail. Shorten them, or leave them out", file=sys.stderr)


def check_machine(config: Config) -> None:
    """Check that this machine has an address for tickets, and the packages for logs.

    Raises:
        UserError: names the setting.
    """
    host, _ = config.head.address
    if host in ANY_HOST and not config.head.advertise:
        raise UserError(
            f"head.listen = {config.head.listen!r} lets other machines join, and tickets would name {host}, which "
            "no other machine can call. Set head.advertise to a name or address of this machine that they can reach."
        )
    for target in config.run.log_to:
        package = LOG_PACKAGES[target.partition(":")[0]]
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"run.log_to has {target}, which needs the package {package}: pip install {package}, or leave it out."
            )


def check_memory(config: Config, has_learner: bool = True) -> None:
    """Check that this machine has the memory to train the model, and local workers to hold it, as far as config.json
    tells.

    Raises:
        UserError: names the memory needed, the memory available, and remedies.
    """
    shape = model_shape(config.model.path)
    if shape is not None:
        hardware = this_machine()
        if config.workers.count:
            worker_that_fits(config, shape, hardware)
        if has_learner:
            learner_that_fits(config, shape, hardware)


def take_turns(config: Config) -> bool:
    """Return whether learner and local workers do not fit beside each other on this machine's only GPU."""
    shape = model_shape(config.model.path)
    return shape is not None and settle(config, shape, this_machine()).in_turns


def check_context(config: Config) -> None:
    """Check that the model's context has room for an answer of `sampling.max_tokens` after the shortest prompt, as far
    as config.json tells. `check_prompts` counts the prompts that leave less.

    Raises:
        UserError: it has not: no answer could have the length that is asked for.
    """
    values, max_tokens = model_config(config.model.path), config.sampling.max_tokens
    context = None if values is None else context_length(text_values(values))
    if context is not None and max_tokens >= context:
        raise UserError(
            f"sampling.max_tokens = {max_tokens}, and the model's context has {context} tokens for prompt and answer. "
            f"Set sampling.max_tokens to {context} less your longest prompt, or take a model with a longer context."
        )


def check_place(config: Config, where: Path, resume: bool) -> None:
    """Check the run directory and the port for a dry run, which minds no run that is there already, and no head of it.

    Raises:
        UserError: as `check_directory` and `check_port`.
    """
    if holds_run(where) and not resume:
        print(f"note: {where} holds a run already: a start needs --resume, or another --out", file=sys.stderr)
        return
    check_directory(where, resume)
    if not resume:
        check_port(config)


def check_port(config: Config) -> None:
    """Check that no other process uses the head's port. Do not call it for a run whose own head may still use it.

    Raises:
        UserError: names the setting.
    """
    host, port = config.head.address
    if not port:
        return
    with socket.socket(family(host), socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise UserError(
                f"head.listen = {config.head.listen!r} cannot be used: {error.strerror}. Choose another port, or 0."
            ) from error


def check_model(path: str, engine: str, has_learner: bool = True, setting: str = "model.path") -> None:
    """Check that the model can be loaded, as far as possible without torch and without a download. `has_learner`: it is
    loaded on this machine. `setting`: the one that names it.

    Raises:
        UserError: no path, no model there, a model that the engine cannot run, no tokenizer, or a hub id that neither
            the hub nor its cache provides.
    """
    if not path:
        raise UserError("model.path is empty: name a Hugging Face model directory or hub id.")
    where = Path(path)
    if where.is_dir():
        if not (where / "config.json").is_file():
            raise UserError(f"{setting} = {path!r}: that directory holds no model (no config.json). Check the path.")
        check_model_directory(where, engine, setting)
    elif path.startswith(("/", ".", "~")) or path.count("/") != 1 or where.parent.is_dir():
        raise UserError(
            f"{setting} = {path!r}: there is no such directory below {Path.cwd()}, and it is not a hub id (owner/name)."
        )
    elif reason := hub_refusal(path, has_learner):
        raise UserError(f"{setting} = {path!r}: there is no such directory, and {reason}")


def check_engine(config: Config) -> None:
    """Raises UserError if there is no such engine, or workers on this machine lack it. Other machines are not
    checked."""
    engine, count = config.workers.engine, config.workers.count
    refuse_unknown_engine(engine)
    choice = f"workers.engine = {engine!r} with workers.count = {count}"
    if count and ENGINES.get(engine) in PACKAGES and (why := missing_packages(engine)):
        raise UserError(f'{choice}: {why}. Set workers.engine = "auto", or workers.count = 0.')
    if not count or engine not in SERVERS:
        return
    python = os.environ.get("ECHO2_ENGINE_PYTHON", "")
    if python and shutil.which(python) is None:
        raise UserError(f"ECHO2_ENGINE_PYTHON = {python!r}, which does not exist: give the path of a Python.")
    if not python and importlib.util.find_spec(engine) is None:
        raise UserError(
            f"{choice}, and this Python environment has no {engine}. Set ECHO2_ENGINE_PYTHON to the Python of one that "
            f"has (`make {engine}` makes one for CPUs), or leave the workers to other machines: workers.count = 0."
        )


def engine_here(config: Config) -> EngineChoice:
    """Return the engine of the run's local workers, or of others if there are none."""
    servers = servers_here(f"auto:{config.learner.ranks}") if config.workers.count else ()  # the first worker's device
    return chosen(config, model_config(config.model.path), servers)


def check_lora(config: Config) -> None:
    """Say which weights get no adapter. Raises UserError if lora.targets match no layer, as far as the files of a local
    model tell, or if lora.path is an adapter with other settings; of a mixture of experts, `check_trained` finds that.
    """
    where = Path(config.model.path)
    if not config.lora.rank or not where.is_dir():
        return
    shapes = {name: shape for file in where.glob("*.safetensors") for name, shape in tensor_shapes(file).items()}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if share := sum(size for name, size in sizes.items() if ".experts." in name) / max(1, sum(sizes.values())):
        if EXPERTS not in config.lora.targets:
            print(
                f"warning: lora.targets = {config.lora.targets}: experts get no adapter, and {share:.0%} of this "
                f'model\'s weights are experts. They stay as they are; "{EXPERTS}" among lora.targets adapts them, '
                "lora.rank = 0 trains them",
                file=sys.stderr,
            )
        return
    targets = lora_targets(linear_layers(where), config.lora.targets)
    if config.lora.path:
        ours = adapter_config(config.lora, targets, SnapshotRef("", 0, 0))
        check_same_settings(ours, Path(config.lora.path), BEGINNING_REMEDY)


def check_trained(config: Config) -> None:
    """Check that the learner can build the policy of a run, and its adapter, as far as a local model directory tells.
    Say what routes cost. Loads torch and transformers, which takes seconds; no weights are read.

    Raises:
        UserError: what the learner would say.
    """
    if Path(config.model.path).is_dir():
        from echo2.learner.core.adapters import check_trained as check_policy

        if (routes := check_policy(config)) is not None:
            most = ROUTES_BYTES_MAX // routes.token_bytes
            print(
                f"note: learner.routing_replay: {routes.token_bytes} bytes per token that is read, prompts included, "
                f"before compression; a group that reads more than {most:,} tokens goes without routes",
                file=sys.stderr,
            )


def check_model_directory(where: Path, engine: str, setting: str = "model.path") -> None:
    """Raises UserError if a model directory lacks a tokenizer or weights, or the engine can't run the model."""
    if not any((where / name).is_file() for name in TOKENIZER_FILES) and not any(where.glob("*.model")):
        raise UserError(
            f"{setting} = {str(where)!r}: that directory holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Save the model's tokenizer beside it: tokenizer.save_pretrained(DIR)."
        )
    if not any(where.glob("*.safetensors")) and not any(where.glob("*.bin")):
        raise UserError(
            f"{setting} = {str(where)!r}: that directory holds no weights (no *.safetensors). Save the model there: "
            "model.save_pretrained(DIR)."
        )
    config = read_json(where / "config.json", f"{setting}: download or save the model again.")
    if not isinstance(config, dict):
        raise UserError(f"{setting} = {str(where)!r}: its config.json is not a JSON object.")
    if engine == "compact":
        read_architecture(config)
    if ENGINES.get(engine) in PACKAGES:  # those of machines at home
        try:
            read_architecture(config, PLAIN_TYPES)
        except UnsupportedError as error:
            raise UserError(
                f"{setting} = {str(where)!r}: workers.engine = {engine!r} does not support {error.trait}. Set "
                'workers.engine = "auto".'
            ) from error
