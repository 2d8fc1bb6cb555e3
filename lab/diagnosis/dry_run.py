"""--dry-run: print the plan of a run, check its available data, and report errors; starts
nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2

from agentenv.assembly.checks import paths
from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.checks.start_checks import launched_servers
from agentenv.assembly.keys.benchmarks import benchmark
from agentenv.assembly.keys.cluster import KubernetesCluster, ServeConfig, SlurmCluster
from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.keys.help import values_of
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import SupervisedRunConfig
from agentenv.assembly.parts.assembly import Assembly
from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.run.lock import JOB_VARIABLE
from agentenv.assembly.run.rundir import CONFIG_FILE
from agentenv.assembly.run.tables import Table
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import GIB, find_machine
from agentenv.assembly.serving.server_command import find_python
from agentenv.base import errors
from agentenv.base.config import Resolve, resolver
from agentenv.base.installation import PACKAGES
from agentenv.base.model_files import check_format, find_on_hub, hub_id
from agentenv.engines.openai import OpenAIConfig
from agentenv.envs.search.keys import SearchConfig
from agentenv.envs.search.providers import PROVIDERS, WebConfig
from agentenv.lab.diagnosis.plan import AnyRun, Plan, Process, make_plan, rollouts_of
from agentenv.learners.ranks.messages import ADDRESS_VARIABLE as LEARNER_ADDRESS
from agentenv.learners.ranks.messages import TOKEN_VARIABLE as LEARNER_TOKEN
from agentenv.processes.supervisor import ADDRESS_VARIABLE, TOKEN_VARIABLE
from agentenv.training.supervised.dialogues import registered_files
from agentenv.training.workers.worker_process import DRAIN_VARIABLE, WAIT_VARIABLE

# Missing inputs of a configuration: files, folders, keys, environments of engines.


def missing_files(config: AnyRun, assembly: Assembly[Any]) -> Iterator[paths.PathKey]:
    """The missing paths of a configuration, including files of a registry of datasets and of
    prompts. Raises DataError for names that the registry lacks."""
    yield from paths.absent_paths(assembly)
    registry = paths.dataset_registry(config)
    if registry and assembly.resolve(registry).exists():
        for key, name, _ in paths.paths_of(config):
            if key.startswith("data.") and key != "data.dataset_info":
                files = registered_files(assembly.resolve(registry), [name])
                yield from (paths.PathKey(key, str(file)) for file in files if not file.exists())
    yield from _missing_templates(config, assembly.resolve)


def _missing_templates(config: AnyRun, resolve: Resolve) -> Iterator[paths.PathKey]:
    """The missing files of prompts; a name without a suffix is a preset."""
    if isinstance(config, ServeConfig):
        return
    sets = config.sets.values() if isinstance(config, EvaluateConfig) else ()
    for template in dict.fromkeys(one.prompt.template for one in (config, *sets)):
        if Path(template).suffix and not paths.is_here(resolve(template).expanduser()):
            yield paths.PathKey("prompt.template", template)


def _to_fetch(config: AnyRun, absent: paths.PathKey) -> str:
    """The line of a missing path; for a benchmark's file, with its origin."""
    line = f"{absent.key} = {absent.text}"
    name = absent.key.split(".")[1] if absent.key.startswith("sets.") else ""
    if isinstance(config, EvaluateConfig) and name in config.sets and "path" in absent.key:
        known = config.sets[name].benchmark
        return f"{line}: {benchmark(known).how_to_get}" if known else line
    return line


def _not_cached(config: AnyRun) -> Iterator[str]:
    """A line for each id of the hub that is not in its cache; cached ones are resolved from now
    on."""
    for key, text, kind in paths.hub_keys(config):
        with errors.reported_as(errors.DataError, key, errors.DataError):
            found = find_on_hub(text, kind)
        if found is None and hub_id(text) is not None:
            yield f"{key} = {text}: no such path; the run will look up this {kind} on the hub"


def _missing_parts(config: AnyRun) -> Iterator[str]:
    """Lines on missing keys of search services, and missing Python environments of engines."""
    if not isinstance(config, TrainConfig | EvaluateConfig):
        return
    search = config.search
    if isinstance(search, SearchConfig) and isinstance(search.backend, WebConfig):
        variable = PROVIDERS[search.backend.provider].key_variable
        if variable and not os.environ.get(variable):
            yield f"the environment variable {variable} ({search.backend.provider})"
    for name, launched, key in launched_servers(config):
        try:
            find_python(name, launched, key)
        except errors.ConfigError as error:
            yield str(error)


# The output of a dry run.


def show_values(config: AnyRun, view: View, *, defaults: bool) -> None:
    """Print the non-default values; with `defaults`, also all others."""
    values = list(values_of(config))
    chosen = [f"{value.key} = {value.text}" for value in values if value.chosen]
    rest = [f"{value.key} = {value.text}" for value in values if not value.chosen]
    if not defaults:
        chosen.append(f"{len(rest)} more keys have default values; --defaults shows them")
    show_lines("configuration, non-default values", chosen, view)
    if defaults:
        show_lines("configuration, the defaults", rest, view)


def show_lines(title: str, lines: Iterable[str], view: View) -> None:
    """Print the lines under a title, each once; nothing if there are none."""
    if found := dict.fromkeys(lines):
        view.log("\n  ".join((f"\n{title}:", *found)))


def _sizes(config: AnyRun) -> Iterator[str]:
    if isinstance(config, TrainConfig):
        yield (
            f"an update takes {config.size_of_update}; at most {config.queue.max_staleness} "
            "versions old"
        )
        if config.dropped_terms:
            yield config.dropped_terms
        num_inflight = rollouts_of(config)[1]
        prompts = num_inflight // config.algorithm.group_size
        yield f"up to {prompts} prompts = {num_inflight} trajectories in flight"


def show_plan(plan: Plan, view: View) -> None:
    """Print processes with their GPUs and memory, the memory of each GPU, and missing inputs."""
    view.log("")
    columns = ["process", "number", "GPUs", "GiB on each", "main memory, GiB"]
    rows = [_row(process) for process in plan.processes]
    title = f"processes on {plan.machine.name}"
    view.show(Table(title=title, columns=columns, rows=rows, left=[0, 1, 2]))
    for process in plan.processes:
        for line in _details(process):
            view.log(line)
    alike: dict[float, list[str]] = {}
    for gpu, needed in plan.gpu_bytes.items():
        alike.setdefault(needed, []).append(gpu)
    for needed, gpus in alike.items():
        view.log(
            f"GPU {', '.join(gpus)}: {needed / GIB:.1f} of {plan.machine.gpu_bytes / GIB:.1f} GiB"
        )
    for line in plan.made:
        view.log(line)
    show_lines("missing", plan.missing, view)


def _row(process: Process) -> list[str]:
    on_gpu, main = process.memory.gpu_bytes, process.main_bytes
    return [
        process.name,
        str(process.count or "already running"),
        ", ".join(process.gpus),
        f"{on_gpu / GIB:.1f}" if process.gpus else "",
        f"{main / GIB:.1f}" if main else "",
    ]


def _details(process: Process) -> list[str]:
    what = ", ".join(filter(None, (process.model, process.note)))
    lines = [f"{process.name}: {what}"]
    memory = process.memory
    for sizes, place in ((memory.gpu, "GiB"), (memory.host, "GiB in main memory")):
        parts = [f"{name} {size / GIB:.1f}" for name, size in sizes.items() if size > 0.05 * GIB]
        if parts:
            lines.append(f"    {' + '.join(parts)} {place}")
    return lines


NOT_ALL = "the known part fits, but the size of some models is unknown"


def dry_run(
    config: AnyRun, arguments: argparse.Namespace, view: View, run: Path, model: str = ""
) -> int:
    """Print the plan of a run of `config` in the folder `run`, which need not exist. Returns the
    exit code: 0, or `EXIT_MISSING` if an input is missing.

    `model`: the policy's path if the configuration does not contain it, as for an evaluation.
    Raises ConfigError after the output if the run cannot work.
    """
    machine = find_machine(arguments.gpus, arguments.gpu_memory)
    resolve = resolver(run)

    assembly = Assembly[Any](config, run, AsyncExitStack(), view.log)
    missing = list[str]()
    try:
        asyncio.run(refuse(assembly, "configuration"))
    except errors.MissingError as error:
        missing.append(str(error))
    missing += _not_cached(config)
    plan = make_plan(config, machine, resolve, model)
    plan.missing += missing
    absent = [*missing_files(config, assembly)]
    plan.missing += (_to_fetch(config, one) for one in absent)
    plan.missing += _missing_parts(config)
    show_values(config, view, defaults=arguments.defaults)
    show_lines("sizes", _sizes(config), view)
    if not isinstance(config, ServeConfig):
        place = _model_of(config, model, resolve, plan)
        from agentenv.lab.diagnosis.reading import check_data  # slow to load

        keys = {one.key for one in absent}
        cluster = getattr(config, "cluster", None)
        elsewhere = arguments.gpus is not None or isinstance(cluster, KubernetesCluster)
        lines = list[str]()
        try:
            asyncio.run(check_data(config, run, place, keys, lines.append, is_elsewhere=elsewhere))
        except (errors.AgentEnvError, OSError) as error:
            (plan.missing if _is_missing(error) else plan.problems).append(str(error))
        show_lines("available data", lines, view)
    show_plan(plan, view)
    if plan.problems:
        raise errors.ConfigError("; ".join(dict.fromkeys(plan.problems)))
    if isinstance(config, TrainConfig):
        show_cluster(config, arguments, view, run)
    fits = "it fits" if plan.is_whole else NOT_ALL
    view.log(f"dry run: nothing was started; by this estimate {fits}")
    if not plan.missing:
        view.log(f"next: {_next(config)}")
        return 0
    view.log(
        f"missing items are listed above (exit code {errors.EXIT_MISSING}: no errors, but missing "
        "items); docs/data.md describes data files, and docs/reproduce.md where to get those of "
        "the papers"
    )
    return errors.EXIT_MISSING


def _is_missing(error: BaseException | None) -> bool:
    """Whether a missing package is the cause, including one that an environment imports."""
    while error is not None and not isinstance(error, errors.MissingError):
        if isinstance(error, ModuleNotFoundError) and error.name:
            return find_spec(error.name.partition(".")[0]) is None
        error = error.__cause__
    return error is not None


def show_cluster(config: TrainConfig, arguments: argparse.Namespace, view: View, run: Path) -> None:
    """Print or write the job script of a cluster."""
    script = getattr(config.cluster, "script", "")
    job = job_of(config, arguments.config, arguments.overrides, run)
    if script:
        try:
            with open(script, "w", encoding="utf-8") as file:
                if isinstance(config.cluster, KubernetesCluster):  # it contains a token
                    os.fchmod(file.fileno(), 0o600)
                file.write(job)
        except OSError as error:
            raise errors.ConfigError(
                f"cluster.script = {script}: {error.strerror}; choose a writable file"
            ) from error
        view.log(f"wrote {script}")
    elif job:
        view.log(f"\n{job}")


def _next(config: AnyRun) -> str:
    """The command that starts the run."""
    cluster = getattr(config, "cluster", None)
    if not isinstance(cluster, SlurmCluster | KubernetesCluster):
        return "the same command without --dry-run"
    command = f"{cluster.submit} {shlex.quote(cluster.script or 'FILE')}"
    return command if cluster.script else f"the same with cluster.script=FILE, then {command}"


def _model_of(config: AnyRun, path: str, resolve: Resolve, plan: Plan) -> Path | None:
    """The directory of the policy's tokenizer, if it exists; missing files are added to the
    plan."""
    if isinstance(config, TrainConfig | SupervisedRunConfig):
        path = config.model.path
    elif isinstance(config, EvaluateConfig) and isinstance(config.engine, OpenAIConfig):
        path = config.engine.tokenizer
    place = resolve(path) if path else None
    if place is None or not place.is_dir():
        return None
    place = find_checkpoint(place)
    with errors.reported_as(errors.DataError, "model.path", errors.DataError):
        check_format(place)
    names = ("config.json", "tokenizer.json")
    lacks = [name for name in names if not (place / name).is_file()]
    if not any(place.glob("*.safetensors")) and not isinstance(config, EvaluateConfig):
        lacks.append("*.safetensors")
    if lacks:
        plan.missing.append(f"model.path = {path}: {', '.join(lacks)}")
    return None if {*names} & {*lacks} else place


# A run as a job of Slurm or as objects of Kubernetes, from the files in `templates/`.

TRAIN = ("-m", "agentenv.launchers", "train")  # arguments of Python
CONTROL = ("-m", "agentenv.launchers", "ctl")
WORKER = ("-m", "agentenv.training.workers.rollout_worker")
RANK = ("-m", "agentenv.learners.ranks.rank_process")
NAME_LENGTH = 40
CONFIG_FOLDER = "/etc/agentenv"  # of the configuration in pods, from the manifests
IMAGE_USER = 1000  # user id in the Dockerfile
FACTS = {
    "wait_s": 1800,  # for the controller, which may create or load a model first
    "drain_s": 60,  # for a worker to end
    "grace_s": 300,  # for a controller to save its checkpoint
    "bad_input": errors.EXIT_BAD_INPUT,
    "num_starts": 100,  # of the controller, each with a restart of its workers
    "controller_cpus": 4,
    "token_variable": TOKEN_VARIABLE,
    "address_variable": ADDRESS_VARIABLE,
    "wait_variable": WAIT_VARIABLE,
    "drain_variable": DRAIN_VARIABLE,
    "job_variable": JOB_VARIABLE,
    "learner_token": LEARNER_TOKEN,
    "learner_address": LEARNER_ADDRESS,
}


def job_of(config: TrainConfig, path: Path, overrides: Sequence[str], run: Path) -> str:
    """The script for sbatch, or the manifests for kubectl; empty for other kinds of clusters.
    `path`, `overrides`: the command's arguments; `run`: the folder of the run. Raises ConfigError
    for missing keys."""
    cluster = config.cluster
    given = [str(path), *(one for one in overrides if not one.startswith("cluster.script="))]
    if isinstance(cluster, SlurmCluster):
        return _filled(
            "slurm.sh",
            config,
            run,
            tasks_per_node=-(-cluster.workers // cluster.nodes),
            folder=str(Path.cwd()),
            python=sys.executable,
            packages=str(PACKAGES),
            config_file=str(run.absolute() / CONFIG_FILE),
            train=shlex.join([*TRAIN, *given]),
            worker=shlex.join(WORKER),
            rank=shlex.join(RANK),
        )
    if isinstance(cluster, KubernetesCluster):
        _check_kubernetes(config, cluster)
        given[0] = f"{CONFIG_FOLDER}/config.toml"
        if not config.run.name:
            given.append(f"run.name={run.name}")
        begun, command = shlex.quote(f"{run}/{CONFIG_FILE}"), shlex.join(["python", *TRAIN, *given])
        start = f"if [ -f {begun} ]; then exec {command} --resume; fi; exec {command}"
        return _filled(
            "kubernetes.yaml",
            config,
            run,
            token_value=secrets.token_hex(16),
            config_folder=CONFIG_FOLDER,
            config_text=path.read_text(encoding="utf-8"),
            user=IMAGE_USER,
            controller=["sh", "-c", start],
            control=["python", *CONTROL, str(run)],
            worker=["python", *WORKER],
        )
    return ""


def _filled(template: str, config: TrainConfig, run: Path, **values: object) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"quote": shlex.quote, "json": json.dumps}
    file = resources.files("agentenv.lab.diagnosis") / "templates" / template
    plain = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:NAME_LENGTH].strip("-")
    text = environment.from_string(file.read_text(encoding="utf-8")).render(
        FACTS | values,
        cluster=config.cluster,
        learner=config.learner,
        name=f"agentenv-{plain or 'run'}",
    )
    return text if text.endswith("\n") else f"{text}\n"


def _check_kubernetes(config: TrainConfig, cluster: KubernetesCluster) -> None:
    for key in ("image", "claim"):
        if not getattr(cluster, key):
            raise errors.ConfigError(f"cluster.{key}: required by cluster.kind = kubernetes")
    if config.learner.launch == "external":
        raise errors.ConfigError(
            "learner.launch = external: on Kubernetes the learner's ranks run next to the "
            "controller; remove it"
        )
    if not str(config.run.dir).startswith(f"{cluster.mount}/"):
        raise errors.ConfigError(
            f"run.dir = {config.run.dir}: workers, and the controller after a restart, need the "
            f"run's folder; put it under cluster.mount = {cluster.mount}, as "
            f"run.dir={cluster.mount}/runs"
        )
