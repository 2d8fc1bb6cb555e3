"""What an evaluation is made of, built from its configuration; what cannot work is refused before
an engine starts.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.assist import Assist, assist_actor
from agentenv.engine import Engine, EngineStart, check_context
from agentenv.engines.chat import ChatEngine, ChatRenderer, Pieces
from agentenv.engines.openai import OpenAIConfig, TokensEngine
from agentenv.env import Env, close_shared
from agentenv.errors import ConfigError
from agentenv.native import NativeConfig
from agentenv.renderer import Renderer
from agentenv.types import Task
from launchers.assembly import load_tokenizer, make_renderer
from launchers.config import TABLES
from launchers.data import (
    EnvMaker,
    check_environments,
    check_graders,
    fit_prompts,
    load_set,
    said,
    try_env,
)
from launchers.evaluation.benchmarks import load_benchmark
from launchers.evaluation.config import EvaluateConfig, QuestionSet, settings
from launchers.evaluation.subject import Subject
from launchers.serving.roles import check_roles, fill_roles, start_servers
from launchers.serving.servers import ServerFactory

# What is refused about [assist] before anything is asked.


def check_assist(config: EvaluateConfig) -> None:
    """Raises ConfigError for a table without any helper, and for a refiner that no limit lets
    begin."""
    if config.assist is None:
        return
    if config.assist == type(config.assist)():
        raise ConfigError(
            "assist: no helper is given; expected [assist.debugger], [assist.backtracer] or "
            "[assist.refiner]"
        )
    refiner = config.assist.refiner
    if refiner is None:
        return
    rooms = {
        name: one.limits.max_response_tokens
        for name, one in config.sets.items()
        if one.limits is not None
    }
    if all(room <= refiner.min_response_tokens for room in rooms.values()):
        raise ConfigError(
            f"assist.refiner.min_response_tokens = {refiner.min_response_tokens} is never reached: "
            f"limits.max_response_tokens is {max(rooms.values())}; expected less than that"
        )


async def check_envs(assist: Assist, envs: Mapping[str, Env]) -> None:
    """Raises ConfigError where a set's env cannot go back, or none has the tool that the debugger
    is for. Closes the envs."""
    modes = {name: env.fork_mode for name, env in envs.items()}
    fitting = [name for name, env in envs.items() if assist.fits(env)]
    for env in envs.values():
        await env.close()
    config = assist.config
    if config.backtracer is not None:
        for name, mode in modes.items():
            if mode == "none":
                raise ConfigError(
                    f"assist.backtracer: the environment of sets.{name} cannot be forked, so no "
                    "turn can be taken again; take the table out"
                )
    if config.debugger is not None and not fitting:
        raise ConfigError(
            f"assist.debugger: no set's environment has a tool {config.debugger.tool!r}; name "
            "the one that runs code with assist.debugger.tool, or take the table out"
        )


# The questions of a set, read from its files.

Say = Callable[[str], None]


async def read_questions(
    name: str, one: QuestionSet, resolve: Callable[[str], Path], say: Say
) -> list[Task]:
    """Tasks with names of their own. Raises DataError."""
    key, env_id = f"sets.{name}", settings(one).env.id
    if one.benchmark:
        paths = [
            resolve(path)
            for path in ([one.path] if isinstance(one.path, str) else one.path)
            if path  # without any, load_benchmark says where to get it
        ]
        tasks = await asyncio.to_thread(
            load_benchmark, one.benchmark, paths, one.max_tasks, env_id=env_id, rows=one,
            say=said(say, key),
        )  # fmt: skip
    else:
        tasks = await load_set(one.path, env_id, one, resolve, say, key, one.max_tasks or 0)
    return _with_own_names(tasks, said(say, key))


def _with_own_names(tasks: Sequence[Task], say: Say) -> list[Task]:
    """The tasks; a name that returns gets a number, since rows are kept by name."""
    seen: Counter[str] = Counter()
    named = []
    for task in tasks:
        seen[task.id] += 1
        again = seen[task.id] > 1
        named.append(replace(task, id=f"{task.id}#{seen[task.id]}") if again else task)
    twice = sum(count - 1 for count in seen.values())
    if twice:
        say(f"{twice} questions have the name of an earlier one; they are told apart by a number")
    return named


class Questions(NamedTuple):
    """One set, ready to be asked."""

    config: QuestionSet
    tasks: Sequence[Task]
    make_env: EnvMaker
    renderer: Renderer


class Builder:
    """Builds for one evaluation; `stack` closes what it starts."""

    def __init__(
        self, config: EvaluateConfig, subject: Subject, stack: AsyncExitStack, say: Say
    ) -> None:
        self.config = config
        self.subject = subject
        self.endpoint: ChatEngine | TokensEngine | None = None
        self.assist: Assist | None = None
        self._stack = stack
        self._say = say
        self._pieces = Pieces()
        self._tokenizer: Any = None
        self._tasks: Mapping[str, Sequence[Task]] = {}
        self._factory: ServerFactory | None = None

    async def start(self, given: Mapping[str, Sequence[Task]] | None = None) -> None:
        """Find model or endpoint, read the questions (or take those `given`), then start the
        models of roles, which may take long."""
        logs = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agentenv-evaluate-"))
        self._stack.push(partial(_remove_unless_failed, logs))
        self._factory = ServerFactory(logs, self._stack, self._say)
        engine, model = self.config.engine, self._model()
        if model is not None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, model, engine.has_weights)
        if isinstance(engine, OpenAIConfig):
            native = isinstance(self.config.renderer, NativeConfig)
            self.endpoint = (
                ChatEngine(engine, self._pieces, native=native)
                if model is None
                else TokensEngine(engine)
            )
            self._stack.push_async_callback(self.endpoint.close)
            await self.endpoint.start()
        self._check_contexts()
        self._stack.push_async_callback(close_shared)
        config = self.config
        check_roles(_tables_of_all(config))
        self._tasks = given or {
            name: await read_questions(name, one, self.resolve, self._say)
            for name, one in config.sets.items()
        }
        urls = await start_servers(config.roles, self.resolve, self._factory)
        sets = {name: fill_roles(one, urls) for name, one in config.sets.items()}
        self.config = fill_roles(replace(config, sets=sets), urls)
        if self.config.assist is not None:
            self.assist = Assist(self.config.assist)
            self._stack.push_async_callback(self.assist.close)
            await self.assist.start()

    async def questions(self, *, try_graders: bool = True) -> dict[str, Questions]:
        """Every set, with environments and graders tried and prompts that fit."""
        tasks = self._tasks
        makers = {name: self._maker(name, dict.fromkeys(TABLES, True)) for name in tasks}
        read = {name: maker.reads(tasks[name]) for name, maker in makers.items()}
        anywhere = frozenset().union(*read.values())
        found = {}
        for name, own in tasks.items():
            one = self.config.sets[name]
            # a table that another set reads is none of this one's business
            kept = {table: table in read[name] or table not in anywhere for table in TABLES}
            make_env = makers[name] if all(kept.values()) else self._maker(name, kept)
            key = f"sets.{name}"
            check_environments({key: (one, own)}, make_env, whole_run=False)
            await try_env(make_env, own[0])
            if try_graders:
                await check_graders(make_env, own)
            renderer = self._renderer(one)
            limits = settings(one).limits
            fitting = await fit_prompts(own, one, make_env, renderer, limits, self._say, key)
            found[name] = Questions(one, fitting, make_env, renderer)
        if self.assist is not None:
            await check_envs(
                self.assist, {name: one.make_env(one.tasks[0]) for name, one in found.items()}
            )
        return found

    async def engine(self) -> Engine:
        """Started; weights are loaded where they are ours."""
        if self.endpoint is not None:
            return self.endpoint
        engine, model = self.config.engine, self.subject.model
        assert model is not None
        assert self._factory is not None
        limits = max(
            (settings(one).limits for one in self.config.sets.values()),
            key=lambda limits: limits.max_prompt_tokens + limits.max_response_tokens,
        )
        return await engine.start(
            EngineStart(
                model=model,
                tokenizer=self._tokenizer,
                policy_version=0,
                limits=limits,
                stack=self._stack,
                servers=self._factory,
                seed=self.config.seed,
            )
        )

    def actor(self, name: str, questions: Questions, engine: Engine) -> Actor:
        """The actor of a set. Its seed does not depend on what else is asked."""
        own = settings(questions.config)
        parts = (engine, questions.renderer, questions.make_env, own.limits, own.sampling.params())
        seed = f"{self.seed(questions.config)}/eval/{name}"
        actor = Actor(*parts, seed)
        if self.assist is not None:
            assist_actor(actor, self.assist)
        return actor

    def seed(self, one: QuestionSet) -> int:
        """The seed of sampling of a set."""
        own = settings(one).sampling.seed
        return self.config.seed if own is None else own

    def resolve(self, text: str) -> Path:
        """A path of the configuration."""
        return Path(text.replace("{run}", str(self.subject.run)))

    # inner workings

    def _model(self) -> Path | None:
        """The directory of model, or at least tokenizer; None where chat messages are spoken."""
        engine = self.config.engine
        if not isinstance(engine, OpenAIConfig):
            if self.subject.model is None:
                raise ConfigError("engine.name: the engine of a URL is 'openai'")
            return self.subject.model
        if self.subject.model is not None:
            raise ConfigError("engine.name = 'openai': give the endpoint's URL as what to evaluate")
        return Path(engine.tokenizer) if engine.tokenizer else None

    def _check_contexts(self) -> None:
        engine, length = self.config.engine, 0
        if self.endpoint is not None:
            length = self.endpoint.endpoint.max_model_len
        elif self.subject.model is not None and engine.has_weights:
            length = engine.max_context(self.subject.model)
        for one in self.config.sets.values():
            if length:
                check_context(settings(one).limits, length)

    def _maker(self, name: str, kept: Mapping[str, bool]) -> EnvMaker:
        one = self.config.sets[name]
        tables = {table: getattr(one, table) if kept[table] else None for table in TABLES}
        own = settings(one)
        return EnvMaker(own.env, tables, self.resolve, own.limits, own.prompt)

    def _renderer(self, one: QuestionSet) -> Renderer:
        prompt, model = settings(one).prompt, self._model()
        if model is not None:
            return make_renderer(self.config.renderer, prompt, self._tokenizer, model)
        if not prompt.apply_chat_template or prompt.chat_template_kwargs:
            raise ConfigError(
                "prompt: an endpoint of chat messages applies its own template; leave out "
                "apply_chat_template and chat_template_kwargs (engine.extra_body = "
                "{chat_template_kwargs = ...} reaches vLLM and SGLang), or give --tokenizer"
            )
        native = isinstance(self.config.renderer, NativeConfig)
        return ChatRenderer(self._pieces, native=native)


class _Tables(msgspec.Struct):
    """The tables of all sets, as check_roles reads those of a run."""

    roles: Any
    assist: Any
    env: Any
    grader: Any
    search: Any
    python: Any


def _tables_of_all(config: EvaluateConfig) -> _Tables:
    return _Tables(
        config.roles,
        config.assist,
        *(
            {name: getattr(one, table) for name, one in config.sets.items()}
            for table in ("env", "grader", "search", "python")
        ),
    )


def _remove_unless_failed(logs: Path, failed: type[BaseException] | None, *_: object) -> None:
    """The servers' logs stay when they may say why."""
    if failed is None:
        shutil.rmtree(logs, ignore_errors=True)
