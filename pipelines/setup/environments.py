"""The environment of each question, in this process or in separate ones.

Missing, invalid or unused parts of a configuration are rejected before
anything starts.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

import agentenv.env
from agentenv.cluster.envs import EnvWorkers, WorkerEnv
from agentenv.config import Say, build_config, substituted, to_plain
from agentenv.env import Env, check_observation, check_reset, check_step
from agentenv.envs.grading.reward import NUM_CHECKED_ROWS, check_grader
from agentenv.errors import ConfigError, CrashError, at_start
from agentenv.pipelines.config.rl import (
    TABLES,
    EnvConfig,
    EnvVariant,
    GraderTable,
    PythonTable,
    SearchTable,
)
from agentenv.pipelines.serving import encodes_on_gpu
from agentenv.registry import decode_part, loaded
from agentenv.renderer import PromptConfig, load_instruction
from agentenv.supervisor import Supervisor
from agentenv.tool_env import ToolEnv
from agentenv.tools import ChosenTool, load_tools
from agentenv.types import Info, Limits, Message, Task
from agentenv.worker_group import WorkerSpec

logger = logging.getLogger(__name__)

Resolve = Callable[[str], Path]
Tables = Mapping[str, msgspec.Struct | None]


class Recipe(NamedTuple):
    """The construction of the environment of some rows. `read` names the tables of the run that it
    uses.
    """

    env_id: str
    kwargs: dict[str, Any]
    tools: Sequence[ChosenTool]
    read: frozenset[str]


class EnvMaker:
    """Makes the env of a task: a variant, `env.id`, or another registered id that its row names.

    `tables` are the run's [python], [search] and [grader], for the environments that take such a
    keyword. "{run}" in texts stands for the run's directory.
    """

    def __init__(
        self,
        config: EnvConfig,
        tables: Tables,
        resolve: Resolve,
        limits: Limits,
        prompt: PromptConfig,
    ) -> None:
        import_envs(config.module)
        self.config = config
        self._tables = tables
        self._resolve = resolve
        self._answers_excess = limits.on_limit == "result"  # the env answers calls beyond the limit
        self._asked = bool(self._answers_excess or prompt.template)
        self._settings: dict[str, Any] = {
            "on_limit": limits.on_limit,
            "outage_s": limits.outage_s,
            "max_tool_calls": limits.max_tool_calls if self._answers_excess else None,
            "instruction": load_instruction(prompt, resolve),
        }
        own = {config.id: EnvVariant(id=config.id, kwargs=config.kwargs, tools=config.tools)}
        self._recipes = {
            name: self._recipe(
                variant, f"env.variants.{name}" if name in config.variants else "env"
            )
            for name, variant in {**own, **config.variants}.items()
        }

    @classmethod
    def of(cls, config: Any, resolve: Resolve) -> EnvMaker:
        """Of a configuration with env, limits, prompt and the tables, such as that of a set."""
        return cls(config.env, tables_of(config), resolve, config.limits, config.prompt)

    def __call__(self, task: Task) -> Env:
        """A new env for one episode. Raises ConfigError."""
        recipe = self._recipe_of(task.env_id)
        env = agentenv.env.make(recipe.env_id, task, **recipe.kwargs)
        configure = getattr(env, "configure", None)
        if configure is not None:
            configure(tools=recipe.tools, **self._settings)
        elif self._asked or recipe.tools:
            raise ConfigError(
                "env.tools, prompt.template and limits.on_limit = 'result' require a ToolEnv; "
                f"{recipe.env_id} is not one"
            )
        return env

    def factories(self) -> list[Any]:
        """The classes of the environments that the configuration names."""
        return [agentenv.env.spec(one.env_id).load() for one in self._recipes.values()]

    async def check_machine(self) -> None:
        """Raises ConfigError where this machine lacks what an environment says that it needs."""
        for recipe, factory in zip(self._recipes.values(), self.factories(), strict=True):
            check = getattr(factory, "check_machine", None)
            if check is not None:
                await check(**recipe.kwargs)

    def check_known(self, env_id: str, key: str) -> None:
        """Raises ConfigError, which names `key`, unless there is such an env or variant."""
        if env_id not in self._recipes:
            known = sorted(self.config.variants)
            self._spec(env_id, key, f"; env.variants are {known}" if known else "")

    def check_read(
        self,
        tasks: Iterable[Task],
        *,
        all_rows: bool = False,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Refuse an environment that is not known, a table that none reads, here or `elsewhere`,
        and, if the tasks are `all_rows` of a run, keys of an environment that no row meets."""
        used = self._used(tasks)
        recipes = [*self._recipes.values(), *map(self._recipe_of, used)]
        for name, table in self._tables.items():
            if table is None or name in elsewhere:
                continue
            if not any(name in recipe.read for recipe in recipes):
                ids = ", ".join(sorted({recipe.env_id for recipe in recipes}))
                raise ConfigError(
                    f"[{name}]: not used by {ids}; remove the table, or give the environment's "
                    f"constructor a keyword {name!r} (docs/own-parts.md)"
                )
        if not all_rows:
            return
        for name in self.config.variants:
            if name not in used:
                raise ConfigError(
                    f"env.variants.{name}: no row selects it; rows select {sorted(used)}"
                )
        if (self.config.kwargs or self.config.tools) and self.config.id not in used:
            raise ConfigError(
                f"env.kwargs, env.tools: no row uses {self.config.id}; rows use {sorted(used)}"
            )

    def reads(self, tasks: Iterable[Task]) -> frozenset[str]:
        """The tables that the environments read, those of the tasks and of all variants. Raises
        ConfigError for a task whose environment is not known."""
        recipes = [*self._recipes.values(), *map(self._recipe_of, self._used(tasks))]
        return frozenset(name for recipe in recipes for name in recipe.read)

    # inner workings

    def _used(self, tasks: Iterable[Task]) -> set[str]:
        """The environments of the tasks, all of them known."""
        used = {task.env_id: task.id for task in reversed(list(tasks))}
        for env_id, task_id in used.items():
            self.check_known(env_id, f"task {task_id}")
        return set(used)

    def _recipe_of(self, env_id: str) -> Recipe:
        if env_id not in self._recipes:
            self._recipes[env_id] = self._recipe(EnvVariant(id=env_id), f"env {env_id}")
        return self._recipes[env_id]

    def _spec(self, env_id: str, key: str, hint: str = "") -> agentenv.env.EnvSpec:
        """The registration of an environment that `key` names. Raises ConfigError with `hint`."""
        try:
            return agentenv.env.spec(env_id)
        except ConfigError as error:
            module = self.config.module
            own = f"; env.module = {module!r} does not register that id"
            if module == "agentenv.envs":
                own = "; to register a custom one, set env.module"
            raise ConfigError(f"{key}: {error}{hint}{own}") from error

    def _recipe(self, variant: EnvVariant, key: str) -> Recipe:
        spec = self._spec(variant.id, f"{key}.id")
        try:
            factory = spec.load()
        except ConfigError as error:
            raise ConfigError(f"{key}.id: {error}") from error
        taken = _keywords(factory)
        kwargs = substituted(variant.kwargs, self._resolve)
        read = set()
        for name in TABLES:
            own, table = getattr(variant, name), self._tables.get(name)
            if own is not None and not _takes(taken, name):
                raise ConfigError(f"{key}.{name}: not used by {variant.id}; remove the table")
            if not _takes(taken, name) or (own is None and table is None):
                continue
            if name in kwargs:
                raise ConfigError(
                    f"{key}.kwargs.{name} and the table {name!r}: set only one of them"
                )
            read.add(name)
            kwargs[name] = _resolved(own if own is not None else table, self._resolve)
        _check_kwargs(f"{key}.kwargs", variant, factory, {**spec.kwargs, **kwargs})
        tools = load_tools(variant.tools, self._resolve)
        return Recipe(variant.id, kwargs, tools, frozenset(read))


def tables_of(config: Any) -> Tables:
    """The tables of a configuration that has them at its top."""
    return {name: getattr(config, name) for name in TABLES}


def import_envs(module: str) -> None:
    """Import the module that registers the user's environments; `envs` is always there."""
    importlib.import_module("agentenv.envs")
    try:
        loaded(module)
    except ConfigError as error:
        raise ConfigError(f"env.module: {module!r} cannot be imported: {error}") from error


async def try_env(make_env: Callable[[Task], Env], task: Task) -> tuple[list[Message], Info]:
    """Make and reset one env, so that what it needs is found missing before the run starts."""

    async def begun() -> tuple[list[Message], Info]:
        env = make_env(task)
        try:
            return check_reset(await env.reset(seed=0))
        finally:
            await env.close()

    return await at_start(begun(), f"the environment {task.env_id}, begun for task {task.id},")


async def check_led(make_env: Callable[[Task], Env], task: Task, key: str) -> None:
    """Refuse, for this key, an environment that cannot be led to a place of an earlier trajectory
    by its actions. Raises ConfigError."""

    async def looked() -> str:
        env = make_env(task)
        try:
            _, info = check_reset(await env.reset(seed=0))
            if "turn" in info:
                return "is a program, whose trajectories have contexts of their own"
            return "cannot be copied or replayed" if env.fork_mode == "none" else ""
        finally:
            await env.close()

    if why := await at_start(looked(), f"the environment {task.env_id}, begun for task {task.id},"):
        raise ConfigError(
            f"{key}: the environment {task.env_id} {why}, so that no group can start after given "
            f"turns; remove {key}, or train on another environment"
        )


HELD_S = 300.0  # after which a process that an environment holds up is killed, at least
PROBE_S = 10.0  # in which an environment answers the probe, or is not tried
PROBE = Message("assistant", "Which one?")


async def try_turn(make_env: Callable[[Task], Env], task: Task) -> list[Message]:
    """The answer of an environment whose `step` is its own to a turn without a call; one that
    rollouts refuse is a ConfigError. What it raises may be meant for the policy."""
    env = make_env(task)
    if getattr(type(env), "step", None) is ToolEnv.step:  # grades, and answers nothing else
        return []
    try:
        async with asyncio.timeout(PROBE_S):
            await env.reset(seed=0)
            outcome = await env.step(PROBE)
    except Exception as error:
        logger.info("%s: a turn without a tool call raised %r", task.env_id, error)
        return []
    finally:
        await env.close()
    try:
        messages, _, terminated, truncated, _ = check_step(outcome)
        if terminated or truncated:
            return []
        check_observation(messages)
    except CrashError as error:
        raise ConfigError(f"{task.env_id}, task {task.id}: {error}") from error
    return messages


async def check_graders(make_env: Callable[[Task], Env], tasks: Iterable[Task]) -> None:
    """Have the grader of each environment grade the golds of three of its rows; an environment
    without an attribute `grader` is left alone. Raises ConfigError."""
    rows: dict[str, list[Task]] = {}
    for task in tasks:
        kept = rows.setdefault(task.env_id, [])
        if len(kept) < NUM_CHECKED_ROWS:
            kept.append(task)
    for own in rows.values():
        env = make_env(own[0])
        try:
            grader = getattr(env, "grader", None)
            if grader is not None:
                await check_grader(grader, own)
        finally:
            await env.close()


def _keywords(factory: Any) -> set[str]:
    """The keywords that a class or function takes; "**" among them if it takes any."""
    parameters = inspect.signature(factory).parameters.values()
    named = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    return named if len(named) == len(parameters) else {*named, "**"}


def _check_kwargs(key: str, variant: EnvVariant, factory: Any, given: Mapping[str, Any]) -> None:
    """Refuse keywords of the variant that the factory does not take after the task, and the lack
    of one that it needs in what is `given` in all."""
    keywords = _keywords(factory)
    _, *parameters = inspect.signature(factory).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    known = [one.name for one in named]
    for name in variant.kwargs:
        if not _takes(keywords, name):
            near = difflib.get_close_matches(name, known, n=1)
            takes = f"it has {', '.join(known)}" if known else "it has no keyword arguments"
            hint = f"did you mean {near[0]}?" if near else f"{takes}; remove this one"
            raise ConfigError(f"{key}.{name}: unknown to {variant.id}; {hint}")
    for one in named:
        if one.default is one.empty and one.name not in given:
            raise ConfigError(f"{key}.{one.name}: missing; {variant.id} requires it")


def _takes(keywords: set[str], name: str) -> bool:
    return name in keywords or "**" in keywords


def _resolved(table: Any, resolve: Resolve) -> Any:
    plain = substituted(msgspec.to_builtins(table), resolve)
    return msgspec.convert(plain, type(table), dec_hook=decode_part)


# Environments in processes of their own (`env.workers`), for environments that compute. A process
# makes them from the same configuration as the host would; the host has the stand-ins of
# agentenv/cluster/envs.py.

START_TIMEOUT_S = 300.0
MAX_RESTARTS = 5  # in a row, of a process that answered nothing


class Asked(Struct, frozen=True, kw_only=True):
    """The part of a configuration that environments depend on."""

    env: EnvConfig
    limits: Limits
    prompt: PromptConfig
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None

    @classmethod
    def of(cls, config: Any) -> Asked:
        """Of a configuration that has all of it, such as that of a set."""
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})


class EnvSetup(Struct, array_like=True, frozen=True):
    """The setup of a process: an `Asked`, plain, and the run's folder."""

    asked: dict[str, Any]
    folder: str


read_env_setup = msgspec.msgpack.Decoder(EnvSetup).decode


def asked_of(setup: EnvSetup) -> Asked:
    """The configuration in a setup. Raises ConfigError."""
    return build_config(Asked, setup.asked, "the host")


class EnvProcesses:
    """The processes of one configuration of environments, with their logs in `logs`. A shared
    resource (agentenv/env.py): their counters are reported with those of this process."""

    def __init__(self, asked: Asked, folder: Path, logs: Path, report: Say) -> None:
        self._workers = EnvWorkers(held_s=max(HELD_S, asked.limits.env_timeout_s), report=report)
        setup = EnvSetup(to_plain(asked), str(folder.absolute()))
        spec = WorkerSpec(
            "agentenv.pipelines.workers.env_worker",
            "env-worker",
            "environment process",
            asked.env.workers,
            START_TIMEOUT_S,
            MAX_RESTARTS,
            sees_gpus=encodes_on_gpu(asked),
        )
        self._supervisor = Supervisor(spec, self._workers, setup, logs, report)

    async def start(self) -> None:
        """Returns when all processes are ready. Raises WorkerError, and their own errors."""
        await self._supervisor.start()

    def make(self, task: Task) -> WorkerEnv:
        """An env of the task, in one of the processes."""
        return self._workers.make(task)

    def stats(self) -> dict[str, float]:
        """The counters of the environments."""
        return self._workers.stats()

    async def close(self) -> None:
        """Idempotent."""
        await self._supervisor.close()
