"""Training and evaluation from Python: in a script, a notebook, or next to a running event loop.

    from agentenv import evaluate, train

    result = train("train.toml", ["train.num_steps=20"], env=Warehouse, data=rows)
    print(result.success, result.checkpoint)
    print(evaluate(result, data=other_rows).success)

Each call does the work of its command, `agentenv train` or `agentenv evaluate`, in a separate
thread and event loop, and returns at the end. It sets no signal handlers, ends no process, and
restores the state of this one. It raises the error that the command would print: ConfigError,
DataError, another AgentEnvError, or OSError for files. Ctrl-C, or the stop button of a notebook,
ends the work like the command, with a checkpoint, and raises KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from agentenv.adapters.cold_start import write_rows
from agentenv.assembly.keys.cluster import SpreadCluster
from agentenv.assembly.keys.evaluation import EvaluateConfig, resolve_sets
from agentenv.assembly.keys.help import refuse_verl_keys, shown
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.session import run_session
from agentenv.assembly.reports.pictures import read_metrics
from agentenv.assembly.reports.records import EvalRow
from agentenv.assembly.run.checkpoints import LATEST
from agentenv.assembly.run.exits import check_places, raise_file_limit, reason_of, without_deepspeed
from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.run.rundir import INPUTS
from agentenv.assembly.run.terminal import View
from agentenv.assembly.run.watchdog import Watchdog
from agentenv.assembly.serving.gpus import gpus_for_others
from agentenv.base.config import Tree, read_toml, resolve_config, values_in
from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.installation import require_train
from agentenv.base.model_files import load_pretrained, load_tokenizer
from agentenv.base.offload import in_new_thread, result_of
from agentenv.base.registry import loaded
from agentenv.base.types import Task
from agentenv.contract.env import Env, Grader, isolated_shared
from agentenv.contract.env_registry import registered
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import Tool
from agentenv.envs.qa_grader import ExactMatch
from agentenv.evaluation.figures import Summary
from agentenv.evaluation.run import chosen_sets, default_folder, evaluate_and_report
from agentenv.evaluation.store import read_rows
from agentenv.evaluation.subject import LAST, find_subject, lower_limits, of_env, resolve

T = TypeVar("T")
Rows = str | Path | Sequence[str] | Sequence[Mapping[str, Any]]
EnvInMemory = str | Callable[..., Env] | Sequence[Tool]
Overrides = Sequence[str] | Mapping[str, Any]


class Success(NamedTuple):
    """A share of correct answers with its 95 % interval, over the trajectories that did not fail;
    `value`, `low` and `high` are None if all failed."""

    value: float | None
    low: float | None
    high: float | None
    num_trajectories: int
    num_failed: int

    def __str__(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        if self.value is None:
            return f"none of {self.num_trajectories} trajectories{failed}"
        return (
            f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.num_trajectories} "
            f"trajectories{failed}"
        )


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A finished run. `summary`: its summary.json; `env`: the environment passed to `train`."""

    folder: Path
    summary: dict[str, Any]
    env: EnvInMemory | None = None

    @property
    def success(self) -> Success | None:
        """Success on the reported evaluation set after training; None without such a set."""
        return self.success_at("after_rl")

    def success_at(self, phase: str) -> Success | None:
        """Success at a phase: `before_sft`, `after_sft` (equal without a cold start) or
        `after_rl`."""
        found = self.summary
        if not found["evaluation_set"] or found["num_trajectories"].get(phase) is None:
            return None
        value = found["success"][phase]
        low, high = (None, None) if value is None else found["success_interval"][phase]
        counts = (found[name][phase] for name in ("num_trajectories", "num_failed"))
        return Success(value, low, high, *counts)

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint, a Hugging Face directory."""
        return find_checkpoint(self.folder)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: one per update, one per evaluation."""
        return read_metrics(self.folder)

    def load(self) -> tuple[Any, Any]:
        """The trained model and its tokenizer, loaded by transformers."""
        place = self.checkpoint
        return load_pretrained("AutoModelForCausalLM", place), load_tokenizer(place)

    def __str__(self) -> str:
        found = self.success
        return f"{self.folder}" if found is None else f"{self.folder}: success {found}"

    def _repr_png_(self) -> bytes | None:
        """The learning curve, for notebooks."""
        path = self.folder / "curve.png"
        return path.read_bytes() if path.is_file() else None


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """An evaluation. `summary`: all figures, also by group of questions."""

    folder: Path
    summary: Summary

    @property
    def success(self) -> Success:
        """Success over all questions."""
        overall = self.summary.overall
        found = overall.estimates.get("success")
        values = (None,) * 3 if found is None else (found.value, found.low, found.high)
        return Success(*values, overall.num_trajectories, overall.num_failed)

    @cached_property
    def rows(self) -> list[EvalRow]:
        """A row per trajectory, including failed ones: texts, calls, reward, success."""
        return read_rows(self.folder)

    def __str__(self) -> str:
        return f"{self.folder}: success {self.success}"


def train(
    config: TrainConfig | Mapping[str, Any] | str | Path,
    overrides: Overrides = (),
    *,
    model: Any = None,
    tokenizer: Any = None,
    env: EnvInMemory | None = None,
    grader: Grader | None = None,
    data: Rows | None = None,
    held_out: Rows | None = None,
    resume: str | bool = False,
    is_quiet: bool = False,
) -> TrainingResult:
    """Train a policy, as `agentenv train` does, and return at the end of the run.

    `config`: a TOML file, its content, or the struct. `overrides`: those of a command line,
    ["train.num_steps=20"] or {"train.num_steps": 20}. The other arguments override their keys:

    model, tokenizer   a model of transformers, which is copied, and its tokenizer; or a directory
    env, grader        an environment's class, a function from a Task to an Env, or an id; or tools,
                       with a grader (default: ExactMatch)
    data, held_out     training and held-out questions: rows or files

    Code that other processes import (cluster.workers) must be in a module.

    `resume` continues from a checkpoint: "latest" (or True), "best", or its path. See the top of
    this file for errors.
    """
    from agentenv.training.loop.control import controlled  # slow to load
    from agentenv.training.start import make_training

    with _process(View(is_quiet=is_quiet), "writing the run") as (view, stack):
        raw, source, name = _read(config)
        given = _known_env(env, grader, stack)
        kept = _replace_keys(raw, model, given.id, data, held_out, view)
        left_out: list[str] = []
        texts = list(_texts(overrides))
        built = resolve_config(
            TrainConfig, raw, source, texts, report=left_out.append, explain=refuse_verl_keys
        )
        if given.is_here_only and isinstance(built.cluster, SpreadCluster):
            raise ConfigError(
                f"env: {given.id} is in the memory of this process, and cluster.workers makes "
                "environments in others; put it into a module, or leave the workers out"
            )
        which = LATEST if resume is True else str(resume or "")
        folder = Path(built.run.dir) / (built.run.name or name)
        with run_session(built, folder, view, resume=bool(which), left_out=left_out) as run:
            if not which:
                _keep(folder / INPUTS, kept, model, tokenizer)
            training = make_training(built, run, view, resume=which, subscribers=[controlled])
            _run_in_thread(training.run_all, view)
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return TrainingResult(folder, summary, env)


def evaluate(
    subject: Any,
    config: Mapping[str, Any] | str | Path | None = None,
    overrides: Overrides = (),
    *,
    env: EnvInMemory | None = None,
    grader: Grader | None = None,
    data: Rows | None = None,
    tokenizer: Any = None,
    model: str = "",
    sets: Sequence[str] = (),
    checkpoint: str = LAST,
    max_tasks: int = 0,
    out: str | Path | None = None,
    is_quiet: bool = False,
) -> EvaluationResult:
    """Evaluate, as `agentenv evaluate` does, and return when all trajectories have ended.

    `subject`: a TrainingResult, a run, a checkpoint, a model directory, an id on the hub, the URL
    of an endpoint (with `model`, the name of its model), or a model of transformers with its
    `tokenizer`. `env`, `grader`, `data` and `overrides`: see `train`; for a run, they default to
    the run's. `sets` chooses evaluation sets of a run, `checkpoint` is "last", "best" or "start",
    and `max_tasks` limits the questions per set. The same call with the same `out` samples only
    missing trajectories. See the top of this file for errors.
    """
    if isinstance(subject, TrainingResult):
        env = subject.env if env is None else env
        subject = subject.folder
    with _process(View(is_quiet=is_quiet), "writing the evaluation") as (view, stack):
        raw, source, _ = (None, "", "") if config is None else _read(config)
        given = _known_env(env, grader, stack)
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentenv-")))
        if _is_model(subject):
            _keep(memory, {}, subject, tokenizer)
            text = Path(str(subject.name_or_path)).name or "model"
            found = find_subject(str(memory / "model"))._replace(name=text)
        else:
            text = str(subject)
            found = find_subject(
                text,
                sets=[] if raw else list(sets),
                checkpoint=checkpoint,
                model=model,
                tokenizer=str(tokenizer or ""),
                report=view.log,
            )
        texts = list(_texts(overrides))
        if data is not None:
            paths, is_rows = _files_or_rows(data, "data")
            if is_rows:
                paths = str(write_rows(memory / "questions.jsonl", paths))
            texts.append(f"data={shown(paths)}")
        built = resolve(
            found, source or text, raw, texts, given.id, EvaluateConfig, resolve_sets, view.log
        )
        built = chosen_sets(built, sets, max_tasks)
        for line in lower_limits(built, found.raw):
            view.warn(line)
        if found.model is not None:
            require_train("torch", "transformers")
        folder = default_folder(built, found) if out is None else Path(out)
        with gpus_for_others(built):
            work = partial(evaluate_and_report, built, found, folder, view)
            problem, summary = _run_in_thread(work, view)
        if problem is not None:
            raise problem
    return EvaluationResult(folder, summary)


class _Given(NamedTuple):
    """The id of the given environment, and whether only this process can make it."""

    id: str = ""
    is_here_only: bool = False


def _known_env(env: EnvInMemory | None, grader: Grader | None, stack: ExitStack) -> _Given:
    """The environment under an id that is registered until `stack` closes. Raises ConfigError."""
    if grader is not None and (env is None or isinstance(env, str) or callable(env)):
        raise ConfigError(
            "grader: belongs to tools, as in env=[search, python]; a class has its own"
        )
    if env is None or isinstance(env, str):
        return _Given(env or "")
    if callable(env):
        maker, name = env, getattr(env, "__qualname__", type(env).__name__)
        env_id = f"{getattr(env, '__module__', 'memory')}:{name}"
    else:
        maker = _maker_of(env, grader)
        env_id = f"memory:{'+'.join(one.name for one in env)}"
    try:
        is_known = loaded(env_id) is maker
    except ConfigError:
        is_known = False
    if not is_known:
        stack.enter_context(registered(env_id, maker))
    return _Given(env_id, not is_known or env_id.startswith("__main__:"))


def _maker_of(tools: Sequence[Tool], grader: Grader | None) -> Callable[[Task], Env]:
    if not isinstance(tools, Iterable):
        raise ConfigError(f"env: expected a class, an id or a list of tools, got {tools!r:.100}")
    for one in tools:
        if not (hasattr(one, "schema") and hasattr(one, "call")):
            raise ConfigError(f"env: {one!r} is not a tool; put @tool before a function")
    graded = ExactMatch() if grader is None else grader
    return lambda task: ToolEnv(task, tools, graded)


def _read(config: msgspec.Struct | Mapping[str, Any] | str | Path) -> tuple[Tree, str, str]:
    """A copy of the configuration as plain data, its name in messages, and a name for its run."""
    if isinstance(config, str | Path):
        return read_toml(Path(config)), str(config), Path(config).stem
    if not isinstance(config, msgspec.Struct | Mapping):
        raise ConfigError(f"config: expected a file or its content, got {config!r:.100}")
    given = config if isinstance(config, msgspec.Struct) else dict(config)
    plain: Tree = msgspec.to_builtins(given, enc_hook=str)
    return plain, "the configuration", time.strftime("run-%Y%m%d-%H%M%S")


def _texts(overrides: Overrides) -> Iterator[str]:
    """Overrides in the format of a command line."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: {overrides!r} is one text; expected a list of them")
    if not isinstance(overrides, Mapping):
        yield from overrides
        return
    for key, value in values_in(overrides):
        yield f"{key}={shown(value)}"


def _replace_keys(
    raw: Tree, model: Any, env_id: str, data: Rows | None, held_out: Rows | None, view: View
) -> dict[str, list[Any]]:
    """Replace the keys of given arguments; returns the rows to store, by file name."""
    kept: dict[str, list[Any]] = {}

    def path_of(rows: Rows, parameter: str, name: str) -> Any:
        found, is_rows = _files_or_rows(rows, parameter)
        if not is_rows:
            return found
        kept[f"{name}.jsonl"] = found
        return f"{{run}}/{INPUTS}/{name}.jsonl"

    if model is not None:
        place = f"{{run}}/{INPUTS}/model" if _is_model(model) else str(model)
        raw["model"] = {**raw.get("model", {}), "path": place}
    if env_id:
        raw["env"] = {**of_env(raw, env_id, view.log).get("env", {}), "id": env_id}
    if data is not None:
        others = {k: v for k, v in raw.get("data", {}).items() if k not in ("train", "mix")}
        raw["data"] = {**others, "train": path_of(data, "data", "train")}
    if held_out is not None:
        before = raw.get("eval", {})
        sets = dict(before.get("sets", {}))
        own = {**sets.pop("heldout", {}), "path": path_of(held_out, "held_out", "heldout")}
        raw["eval"] = {**before, "sets": {"heldout": own, **sets}}  # the first is reported
    return kept


def _files_or_rows(given: Rows, name: str) -> tuple[Any, bool]:
    """A path, or a list of paths or of rows; and whether it is rows. Raises ConfigError."""
    if isinstance(given, str | os.PathLike):
        return str(given), False
    found = list(given) if isinstance(given, Iterable) else []
    if found and all(isinstance(one, str | os.PathLike) for one in found):
        return [str(one) for one in found], False
    if not found or not all(isinstance(one, Mapping) for one in found):
        raise ConfigError(f"{name}: expected a file, files, or rows such as {{'question': ...}}")
    return found, True


def _is_model(given: Any) -> bool:
    return hasattr(given, "save_pretrained")


def _keep(folder: Path, rows: Mapping[str, Sequence[Any]], model: Any, tokenizer: Any) -> None:
    """Write rows and an in-memory model to files, for other processes. Raises ConfigError."""
    for name, found in rows.items():
        write_rows(folder / name, found)
    if not _is_model(model):
        if tokenizer is not None:
            raise ConfigError("tokenizer: belongs to a model in memory; a directory has its own")
        return
    if not _is_model(tokenizer):
        raise ConfigError("tokenizer: expected that of the model in memory, an object")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


# One run at a time per process: it owns the shared resources (agentenv/contract/env.py) and the
# log.

_one_at_a_time = threading.Lock()


OPTION = re.compile(
    r"--(resume|model|tokenizer|env|data|sets?|checkpoint|n|out|help-keys)\b|on the command line"
)
OTHERS = {"set": "`sets`", "n": "`max_tasks`", "on the command line": "in `overrides`"}
OTHERS |= {"help-keys": "agentenv train --help-keys"}


def _parameter(option: re.Match[str]) -> str:
    """The parameter of `train` or `evaluate` for an option of their commands."""
    return OTHERS.get(option[0].removeprefix("--"), f"`{option[1]}`")


@contextmanager
def _process(view: View, writing: str) -> Iterator[tuple[View, ExitStack]]:
    """Inside, the process settings of a command apply, and errors become those that the command
    would print."""
    if not _one_at_a_time.acquire(blocking=False):
        raise ConfigError("another run is in progress in this process; wait, or use a new process")
    here, waits, files = os.getcwd(), "OMP_WAIT_POLICY", resource.getrlimit(resource.RLIMIT_NOFILE)
    adds_here, adds_waits = here not in sys.path, waits not in os.environ
    level = logging.getLogger().level
    try:
        with ExitStack() as stack, without_deepspeed():
            check_places()
            raise_file_limit()
            if adds_waits:  # spinning threads starve other processes
                os.environ[waits] = "PASSIVE"
            if adds_here:  # import the user's modules as the command does
                sys.path.insert(0, here)
            yield view, stack
    except (ImportError, OSError, AgentEnvError, ExceptionGroup) as error:
        reason = reason_of(error, view.folder, writing)
        if isinstance(reason, AgentEnvError):
            reason = copy(reason)
            reason.args = (OPTION.sub(_parameter, str(reason)),)
        if reason is None or str(reason) == str(error):
            raise
        raise reason from error
    finally:
        view.close()
        logging.getLogger().setLevel(level)
        if adds_here and here in sys.path:
            sys.path.remove(here)
        if adds_waits:
            os.environ.pop(waits, None)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        _one_at_a_time.release()


def _run_in_thread(work: Callable[[], Coroutine[Any, Any, T]], view: View) -> T:
    """Run the work in a separate thread, since the caller's may have an event loop; returns its
    result. A first KeyboardInterrupt cancels the work, which may save before it ends; a second one
    abandons it."""
    loop = asyncio.SelectorEventLoop()
    task: asyncio.Task[T] | None = None

    async def main() -> T:
        nonlocal task
        task = asyncio.current_task()
        async with isolated_shared():
            return await work()

    def run() -> T:
        watchdog = Watchdog(loop, view.warn_at_once)
        with watchdog.watch_thread(), asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main())

    outcome = in_new_thread(run, "agentenv")
    try:
        return result_of(outcome)
    except KeyboardInterrupt:
        activity = f"; waiting for {view.activity}" if view.activity else ""
        view.log(f"interrupted{activity}")
        with suppress(RuntimeError):  # the loop is closed: the work has ended
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)
        with suppress(BaseException):
            result_of(outcome)
        raise
