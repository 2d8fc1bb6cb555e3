"""The environment of each question.

Missing, invalid or unused parts of a configuration are rejected before anything starts.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import Parameter, signature
from typing import Any, NamedTuple, Self

import msgspec
from msgspec import Struct

import agentenv.contract.env_registry
from agentenv.assembly.keys import rl
from agentenv.base.config import Resolve, substituted
from agentenv.base.crashes import at_start
from agentenv.base.errors import ConfigError, DataError, reported_as
from agentenv.base.registry import decode_part, loaded, not_one_of
from agentenv.base.types import Constraints, Info, Limits, Message, Task
from agentenv.contract.env import Env, Grader, check_reset
from agentenv.contract.env_registry import needs_answer
from agentenv.contract.tool_config import load_tools
from agentenv.contract.tool_env import grades_state
from agentenv.contract.tools import ChosenTool
from agentenv.text.prompt import PromptConfig, load_instruction

Tables = Mapping[str, msgspec.Struct | None]


class Recipe(NamedTuple):
    """How to construct the environment of some rows. `read`: the tables of the run that it uses."""

    env_id: str
    kwargs: dict[str, Any]
    tools: Sequence[ChosenTool]
    read: frozenset[str]


class EnvMaker:
    """Makes the env of a task: a variant, `env.id`, or another registered id in its row.

    `settings`: a configuration with the keys of EnvSettings, such as a set's; environments with a
    keyword for [python], [search] or [grader] get that table. `resolve` replaces "{run}" in texts
    by the run's directory.
    """

    def __init__(self, settings: Any, resolve: Resolve) -> None:
        config: rl.EnvConfig = settings.env
        limits: Limits = settings.limits
        prompt: PromptConfig = settings.prompt
        import_envs(config.module)
        self.settings, self.config = settings, config
        self._tables = tables_of(settings)
        self._resolve = resolve
        self._answers_excess = limits.on_limit == "result"  # the env answers calls beyond the limit
        self._needs_tool_env = bool(self._answers_excess or prompt.template)
        self._settings: dict[str, Any] = {
            "on_limit": limits.on_limit,
            "outage_s": limits.outage_s,
            "max_tool_calls": limits.max_tool_calls if self._answers_excess else None,
            "instruction": load_instruction(prompt, resolve),
        }
        self._recipes = {config.id: self._recipe(config, "env")}
        for name, variant in config.variants.items():
            self._recipes[name] = self._recipe(variant, f"env.variants.{name}")

    def __call__(self, task: Task) -> Env:
        """A new env for one episode. Raises ConfigError."""
        recipe = self._recipe_of(task.env_id)
        env = agentenv.contract.env_registry.make(recipe.env_id, task, **recipe.kwargs)
        configure = getattr(env, "configure", None)
        if configure is not None:
            configure(tools=recipe.tools, **self._settings)
        elif self._needs_tool_env or recipe.tools:
            raise ConfigError(
                "env.tools, prompt.template and limits.on_limit = 'result' require a ToolEnv; "
                f"{recipe.env_id} is not one"
            )
        return env

    async def check_machine(self) -> None:
        """Raises ConfigError if this machine lacks a requirement of an environment."""
        for recipe in self._recipes.values():
            factory = agentenv.contract.env_registry.spec(recipe.env_id).load()
            check = getattr(factory, "check_machine", None)
            if check is not None:
                await check(**recipe.kwargs)

    def check_known(self, env_id: str, key: str) -> None:
        """Raises ConfigError with `key` unless the env or variant exists."""
        if env_id not in self._recipes:
            known = sorted(self.config.variants)
            self._spec(env_id, key, f"; env.variants are {known}" if known else "")

    def check_read(
        self, tasks: Iterable[Task], *, all_rows: bool = False, elsewhere: Collection[str] = ()
    ) -> None:
        """Raises ConfigError for an unknown environment, and for an unused table, except those in
        `elsewhere`. If the tasks are `all_rows` of a run, also for keys of an unused
        environment."""
        used = self._used(tasks)
        read = {*elsewhere, *self.reads(())}
        for name, table in self._tables.items():
            if table is not None and name not in read:
                ids = ", ".join(sorted({recipe.env_id for recipe in self._recipes.values()}))
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
        """The tables that the environments of the tasks, and all variants, read. Raises ConfigError
        for an unknown environment."""
        self._used(tasks)
        return frozenset(name for recipe in self._recipes.values() for name in recipe.read)

    # inner workings

    def _used(self, tasks: Iterable[Task]) -> set[str]:
        """The environment ids of the tasks. Raises ConfigError for an unknown one."""
        used = set[str]()
        for one in tasks:
            self.check_known(one.env_id, f"task {one.id}")
            recipe = self._recipe_of(one.env_id)
            used.add(one.env_id)
            if not one.answers and needs_answer(recipe.env_id):
                raise DataError(f"task {one.id}: no answer; add one, or a `judge` to {one.env_id}")
        return used

    def _recipe_of(self, env_id: str) -> Recipe:
        if env_id not in self._recipes:
            self._recipes[env_id] = self._recipe(rl.EnvChoice(id=env_id), f"env {env_id}")
        return self._recipes[env_id]

    def _spec(
        self, env_id: str, key: str, hint: str = ""
    ) -> agentenv.contract.env_registry.EnvSpec:
        """The registered spec of an environment. Raises ConfigError with `key` and `hint`."""
        try:
            return agentenv.contract.env_registry.spec(env_id)
        except ConfigError as error:
            module = self.config.module
            own = f"; env.module = {module!r} does not register that id"
            if module == "agentenv.envs":
                own = "; to register a custom one, set env.module"
            raise ConfigError(f"{key}: {error}{hint}{own}") from error

    def _recipe(self, variant: rl.EnvChoice, key: str) -> Recipe:
        spec = self._spec(variant.id, f"{key}.id")
        with reported_as(ConfigError, f"{key}.id", ConfigError):
            factory = spec.load()
        parameters = _parameters(key, factory)
        kwargs = substituted(variant.kwargs, self._resolve)
        read = set()
        for name in rl.TABLES:
            own, table = getattr(variant, name, None), self._tables.get(name)
            if own is not None and not _takes(parameters, name):
                raise ConfigError(f"{key}.{name}: not used by {variant.id}; remove the table")
            if not _takes(parameters, name) or (own is None and table is None):
                continue
            if name in kwargs:
                raise ConfigError(
                    f"{key}.kwargs.{name} and the table {name!r}: set only one of them"
                )
            read.add(name)
            used = own if own is not None else table
            plain = substituted(msgspec.to_builtins(used), self._resolve)
            kwargs[name] = msgspec.convert(plain, type(used), dec_hook=decode_part)
        if any(one.name == "constraints" for one in parameters):
            kwargs["constraints"] = getattr(self.settings, "constraints", "none")
        _check_kwargs(f"{key}.kwargs", variant, parameters, {**spec.kwargs, **kwargs})
        tools = load_tools(variant.tools, self._resolve)
        return Recipe(variant.id, kwargs, tools, frozenset(read))


def tables_of(config: Any) -> Tables:
    """The tables [python], [search] and [grader] of a configuration."""
    return {name: getattr(config, name) for name in rl.TABLES}


def import_envs(module: str) -> None:
    """Import the built-in environments, and the module that registers the user's."""
    importlib.import_module("agentenv.envs")
    with reported_as(ConfigError, f"env.module: {module!r} cannot be imported", ConfigError):
        loaded(module)


async def try_env(make_env: Callable[[Task], Env], task: Task) -> tuple[list[Message], Info]:
    """Make and reset one env, to find missing requirements before the run starts; returns the
    first messages and the info."""

    async def start() -> tuple[list[Message], Info]:
        env = make_env(task)
        try:
            return check_reset(await env.reset(seed=0))
        finally:
            await env.close()

    return await at_start(start(), f"the environment {task.env_id}, begun for task {task.id},")


@asynccontextmanager
async def grader_of(make_env: Callable[[Task], Env], task: Task) -> AsyncIterator[Grader | None]:
    """The grader of a task, from an environment that is never reset; None without one."""
    env = make_env(task)
    try:
        yield grader_alone(env)
    finally:
        await env.close()


def grader_alone(env: Env) -> Grader | None:
    """The grader that grades this environment by the policy's text; None if only the environment
    can, such as one with a `judge`."""
    return None if grades_state(type(env)) else getattr(env, "grader", None)


def _parameters(key: str, factory: Any) -> list[Parameter]:
    """Those after the task. Raises ConfigError for a factory that does not take a task."""
    parameters = [*signature(factory).parameters.values()]
    if not parameters or parameters[0].kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
        raise ConfigError(f"{key}.id: {factory!r} must be a class or function of (task, ...)")
    return parameters[1:]


def _check_kwargs(
    key: str, variant: rl.EnvChoice, parameters: Sequence[Parameter], given: Mapping[str, Any]
) -> None:
    """Raises ConfigError for keywords of the variant that the factory does not accept, and for
    required keywords that `given`, all keywords, lacks."""
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    known = [one.name for one in named]
    for name in variant.kwargs:
        if not _takes(parameters, name):
            hint = not_one_of(name, known, "" if known else "no keyword arguments")
            raise ConfigError(f"{key}.{name}: unknown to {variant.id}; {hint}")
    for one in named:
        if one.default is one.empty and one.name not in given:
            raise ConfigError(f"{key}.{one.name}: missing; {variant.id} requires it")


def _takes(parameters: Sequence[Parameter], name: str) -> bool:
    """Whether a class or function with these parameters accepts a keyword."""
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


class EnvSettings(Struct, frozen=True, kw_only=True):
    """The part of a configuration that environments depend on."""

    env: rl.EnvConfig
    limits: Limits
    prompt: PromptConfig
    python: rl.PythonTable = None
    search: rl.SearchTable = None
    grader: rl.GraderTable = None
    constraints: Constraints = "none"

    @classmethod
    def of(cls, config: Any, **more: Any) -> Self:
        """The settings in a configuration that has these keys, such as a set's, and `more`
        fields of a subclass."""
        names = [name for name in cls.__struct_fields__ if hasattr(config, name)]
        return cls(**{name: getattr(config, name) for name in names} | more)
