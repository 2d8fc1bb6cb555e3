"""The parts of a command: model, tokenizer, renderer, roles, environments, questions.

train, evaluate, sft, dpo and synthesize have one Assembly each, of the class that their parts
need. `pipelines/setup/checks.py` asks an Assembly for its parts in the order that finds mistakes
first.

    model -> tokenizer -> renderer --------------------------------+
    rows of the questions --------------------------+              |
    servers of roles -> settings of the sets -> environments -> questions that fit -> engine

The set-up of a new run goes before the first part that is made of something in the run's folder.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

import agentenv.env
from agentenv.config import RUN, Say, resolver
from agentenv.dataset import PromptFitter, TaskMix, load_mix, load_tasks
from agentenv.env import Env, close_shared
from agentenv.errors import ConfigError, DataError
from agentenv.model_files import check_model_directory, load_tokenizer, read_eos_ids
from agentenv.native import NativeConfig, NativeRenderer
from agentenv.offload import in_thread
from agentenv.pipelines.config.cluster import FOLDER
from agentenv.pipelines.config.rl import (
    DataConfig,
    EnvConfig,
    Sampling,
    TrainConfig,
)
from agentenv.pipelines.run.arguments import RunConfig
from agentenv.pipelines.run.checkpoints import find_checkpoint
from agentenv.pipelines.serving.servers import ServerFactory, fill_roles, start_servers
from agentenv.pipelines.setup.environments import (
    Asked,
    EnvMaker,
    EnvProcesses,
    Resolve,
    try_env,
)
from agentenv.registry import loaded
from agentenv.renderer import PromptConfig, Renderer, TagRenderer, TagsConfig
from agentenv.rows import RowsConfig
from agentenv.server_config import RoleConfig
from agentenv.types import Info, Limits, Message, Task

P = TypeVar("P")
A = TypeVar("A", bound="Assembly[Any]")


def once(build: Callable[[A], Awaitable[P]]) -> Callable[[A], Coroutine[Any, Any, P]]:
    """A method that builds a part when it is first called, and gives the same one ever after."""
    name = build.__name__

    @functools.wraps(build)
    async def part(self: A) -> P:
        if name not in self.built:
            # What starts beside the checks asks for it, too; a subclass asks within its own.
            async with self.building[build.__qualname__]:
                if name not in self.built:
                    self.built[name] = await build(self)
        found: P = self.built[name]
        return found

    return part


class HasRenderer(Protocol):
    """A configuration with a renderer: that of every command with an Assembly."""

    @property
    def renderer(self) -> TagsConfig | NativeConfig: ...


class HasRoles(HasRenderer, Protocol):
    """A configuration with models beside the policy: that of every command that asks questions."""

    @property
    def roles(self) -> Mapping[str, RoleConfig]: ...


C = TypeVar("C", bound=HasRenderer)
Asking = TypeVar("Asking", bound=HasRoles)


class Assembly(Generic[C]):
    """Builds each part once, when it is first asked for, after the parts that it is made of; the
    configuration is never changed. `folder` is what {run} stands for in paths; `stack` closes
    what is started; `checkpoint` is where a resumed run goes on.

    All methods raise ConfigError or DataError for the user's mistakes.
    """

    has_weights = True  # in the directory of the model

    def __init__(
        self,
        config: C,
        folder: Path,
        stack: AsyncExitStack,
        say: Say,
        checkpoint: Path | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.stack = stack
        self.say = say
        self.checkpoint = checkpoint
        self.ends = 0  # rows that are read of each end of a data file; 0: all
        self.built: dict[str, Any] = {}
        self.building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def resolve(self, text: str) -> Path:
        """A path of the configuration."""
        return resolver(self.folder)(text)

    async def model(self) -> Path | None:
        """Directory of model and tokenizer; None where an endpoint has them."""
        raise NotImplementedError

    @once
    async def tokenizer(self) -> Any:
        """The tokenizer; None where messages are sent in place of tokens."""
        model = await self.model()
        if model is None:
            return None
        return await in_thread(load_tokenizer, model, self.has_weights)

    async def renderers(self) -> Mapping[str, Renderer]:
        """Every renderer that the command needs, by the name of its set."""
        raise NotImplementedError

    async def renderer(self, prompt: PromptConfig) -> Renderer:
        """The renderer of prompts as `prompt` has them."""
        model = await self.model()
        assert model is not None
        return make_renderer(self.config.renderer, prompt, await self.tokenizer(), model)

    @property
    def run(self) -> RunConfig:
        """[run], of a command that has one."""
        found = getattr(self.config, "run", None)
        return found if isinstance(found, RunConfig) else RunConfig()

    def makes(self, named: object) -> bool:
        """Whether the set-up of a new run is to make what these paths of the configuration name:
        what is in the run's folder."""
        return bool(self.run.setup) and self.checkpoint is None and RUN in str(named)

    @once
    async def set_up(self) -> None:
        """The set-up of a new run has been run."""
        if self.run.setup and self.checkpoint is None:
            setup = load_function(self.run.setup, "run.setup")
            message = await in_thread(setup, self.folder, self.run.seed)
            if isinstance(message, str):
                self.say(message)

    async def own_model(self, path: str) -> Path:
        """The checkpoint or model directory `path`, which the set-up may make."""
        if self.makes(path):
            await self.set_up()
        found = find_checkpoint(self.resolve(path))
        try:
            check_model_directory(found)
        except DataError as error:
            raise DataError(f"model.path: {error}") from error
        return found


class SetConfig(Struct, frozen=True):
    """A set of questions and how they are asked, whichever command asks. `key` begins the set's
    keys in messages, `rows` says how its rows are read."""

    key: str
    rows: RowsConfig
    env: EnvConfig
    prompt: PromptConfig
    limits: Limits
    sampling: Sampling
    num_samples: int = 1
    python: Any = None
    search: Any = None
    grader: Any = None


TRAINED = "data"  # the set of the training questions
TRAINING, EVALUATING = "train", "eval"  # uses of an actor


def training_set(config: TrainConfig) -> SetConfig:
    """The training questions of a run, and how they are asked."""
    return SetConfig(
        TRAINED,
        config.data,
        env=config.env,
        prompt=config.prompt,
        limits=config.limits,
        sampling=config.sampling.train,
        python=config.python,
        search=config.search,
        grader=config.grader,
    )


def actor_seed(config: TrainConfig, sampling: Sampling, use: str) -> str:
    """The key of all randomness of an actor's rollouts."""
    return f"{config.run.seed if sampling.seed is None else sampling.seed}/{use}"


class Questions(NamedTuple):
    """One set, ready to be asked."""

    config: SetConfig
    tasks: Sequence[Task]
    make_env: EnvMaker
    renderer: Renderer


class AskingAssembly(Assembly[Asking]):
    """The parts of a command that asks `sets` of questions, with models beside the policy.
    Servers of roles have their logs in `folder`."""

    is_whole = False  # all rows of a run are there: an environment that no row meets is a mistake

    def __init__(
        self,
        config: Asking,
        folder: Path,
        stack: AsyncExitStack,
        say: Say,
        checkpoint: Path | None = None,
        *,
        sets: Mapping[str, SetConfig],
    ) -> None:
        super().__init__(config, folder, stack, say, checkpoint)
        self.sets = sets
        self.read: dict[str, Sequence[Task]] = {}  # by the name of the set
        self.servers = ServerFactory(folder, stack, say)
        self.processes: list[tuple[EnvMaker, EnvProcesses]] = []

    @cached_property
    def logs(self) -> Path:
        """The folder for logs of the processes that environments live in."""
        return self.folder / FOLDER

    async def contexts(self) -> Sequence[int]:
        """Tokens of prompt and response that each engine can hold, as far as that is known."""
        raise NotImplementedError

    async def read_rows(self, one: SetConfig) -> Sequence[Task]:
        """The tasks of a set."""
        raise NotImplementedError

    async def tasks_of(self, name: str) -> Sequence[Task]:
        """The tasks of a set, whatever the length of their prompts."""
        if name not in self.read:
            if self.makes(self.sets[name].rows):
                await self.set_up()
            self.read[name] = await self.read_rows(self.sets[name])
        return self.read[name]

    async def tasks(self) -> dict[str, Sequence[Task]]:
        """Those of every set."""
        return {name: await self.tasks_of(name) for name in self.sets}

    @once
    async def urls(self) -> dict[str, str]:
        """The URLs of roles by name, whose servers are started, which may take long."""
        self.stack.push_async_callback(close_shared)
        return await start_servers(self.config.roles, self.resolve, self.servers)

    @once
    async def makers(self) -> dict[str, EnvMaker]:
        """What makes the environments of each set; sets that are asked alike share one."""
        urls = await self.urls()
        found: dict[str, EnvMaker] = {}
        known: list[tuple[Asked, EnvMaker]] = []
        for name, one in self.sets.items():
            asked = Asked.of(fill_roles(one, urls))
            maker = next((maker for other, maker in known if other == asked), None)
            if maker is None:
                maker = EnvMaker.of(asked, self.resolve)
                known.append((asked, maker))
            found[name] = maker
        return found

    async def make_env(self, name: str) -> Callable[[Task], Env]:
        """What makes the environments that rollouts of a set meet: in processes of their own, if
        the configuration says so."""
        maker, one = (await self.makers())[name], self.sets[name]
        if not maker.config.workers:
            return maker
        for known, processes in self.processes:
            if known is maker:
                return processes.make
        asked = Asked.of(fill_roles(one, await self.urls()))
        number = len(self.processes)
        logs = self.logs / f"set-{number}" if number else self.logs
        found = agentenv.env.shared(
            ("environments", str(logs)), lambda: EnvProcesses(asked, self.folder, logs, self.say)
        )
        self.processes.append((maker, found))
        await found.start()
        return found.make

    @once
    async def shared(self) -> list[tuple[EnvMaker, dict[str, Sequence[Task]]]]:
        """The sets by what makes their environments, their tasks by the name of the set."""
        tasks = await self.tasks()
        groups: dict[int, tuple[EnvMaker, dict[str, Sequence[Task]]]] = {}
        for name, maker in (await self.makers()).items():
            groups.setdefault(id(maker), (maker, {}))[1][name] = tasks[name]
        return list(groups.values())

    @once
    async def episodes(self) -> dict[str, tuple[list[Message], Info]]:
        """The start of an episode of the first task of each set."""
        tasks, makers = await self.tasks(), await self.makers()
        return {name: await try_env(makers[name], tasks[name][0]) for name in self.sets}

    @once
    async def renderers(self) -> Mapping[str, Renderer]:
        return {name: await self.renderer(one.prompt) for name, one in self.sets.items()}

    @once
    async def questions(self) -> dict[str, Questions]:
        """Every set, with prompts that fit."""
        tasks, makers, renderers = await self.tasks(), await self.makers(), await self.renderers()
        found = {}
        for name, one in self.sets.items():
            renderer = renderers[name]
            fitting = await fit_prompts(
                tasks[name], one.rows, makers[name], renderer, one.limits, self.say, one.key
            )
            found[name] = Questions(one, fitting, makers[name], renderer)
        return found


def make_renderer(
    config: TagsConfig | NativeConfig, prompt: PromptConfig, tokenizer: Any, model: Path
) -> Renderer:
    """The renderer that the configuration names. Raises ConfigError for a chat template that it
    cannot use."""
    eos_ids = read_eos_ids(model, tokenizer)
    if isinstance(config, NativeConfig):
        return NativeRenderer(tokenizer, config, prompt, eos_ids)
    return TagRenderer(tokenizer, prompt, eos_ids, config.tools_in_prompt)


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function that 'module:function' names; a ConfigError names the key otherwise."""
    try:
        function = loaded(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {path!r} cannot be loaded: {error}") from error
    if not inspect.isroutine(function):
        raise ConfigError(f"{key}: {path!r} is not a function")
    return function


# The rows of questions.


async def load_training(
    config: DataConfig, env_id: str, resolve: Resolve, say: Say, ends: int = 0
) -> Sequence[Task]:
    """The training questions: those of data.train, or the weighted parts of data.mix."""
    if config.mix:
        return await in_thread(
            load_mix, config.mix, env_id, config, resolve, ends=ends, say=said(say, "data")
        )
    number = config.max_samples
    return await load_set(config.train, env_id, config, resolve, say, "data", number, ends)


async def load_set(
    paths: str | list[str],
    env_id: str,
    rows: RowsConfig,
    resolve: Resolve,
    say: Say,
    key: str,
    max_samples: int = 0,
    ends: int = 0,
) -> list[Task]:
    """The questions of one set, whose keys begin with `key`; of its files all rows, or `ends` of
    each end."""
    found = [resolve(path) for path in ([paths] if isinstance(paths, str) else paths)]
    return await in_thread(
        load_tasks,
        found,
        env_id,
        rows,
        max_samples=max_samples,
        ends=ends,
        say=said(say, key),
        held_out=not isinstance(rows, DataConfig),
        key=key,
    )


async def fit_prompts(
    tasks: Sequence[Task],
    rows: RowsConfig,
    make_env: EnvMaker,
    renderer: Renderer,
    limits: Limits,
    say: Say,
    key: str,
) -> Sequence[Task]:
    """The tasks whose prompts fit, a mix part by part."""
    overlong = f"{key}.overlong_prompt"
    fitter = PromptFitter(make_env, renderer, limits, rows.overlong_prompt, overlong, say)
    if isinstance(tasks, TaskMix):
        return TaskMix([await fitter.fit(part) for part in tasks.parts], tasks.weights)
    return await fitter.fit(tasks)


def said(say: Say, key: str) -> Say:
    """`say` with the keys that the text is about in front."""
    return lambda text: say(f"{key}: {text}")
