"""The parts of a command: model, tokenizer, renderer, roles, environments, questions.

train, evaluate, sft, dpo and synthesize each have a subclass of Assembly. The checks
(`assembly/checks/checks.py`) build the parts in an order that finds mistakes early.

    model -> tokenizer -> renderer --------------------------------+
    rows of the questions --------------------------+              |
    servers of roles -> settings of the sets -> environments -> questions that fit -> engine

The set-up of a new run (run.setup) runs before the first part that needs its output.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from agentenv.assembly.keys.evaluation import EvaluateConfig, PolicyConfig
from agentenv.assembly.keys.rl import DataConfig, Sampling, TrainConfig
from agentenv.assembly.keys.run import RunConfig
from agentenv.assembly.keys.supervised import SupervisedRunConfig
from agentenv.assembly.parts.environments import EnvMaker, EnvSettings, try_env
from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.serving.servers import ServerFactory, fill_roles, start_servers
from agentenv.base.config import RUN, Reporter, Resolve, resolver
from agentenv.base.errors import ConfigError, DataError, reported_as
from agentenv.base.model_files import check_model_directory, load_tokenizer, read_eos_ids
from agentenv.base.offload import in_thread
from agentenv.base.registry import loaded
from agentenv.base.types import Constraints, Info, Limits, Message, Task
from agentenv.contract.engine import Engine, EngineConfig, EngineStart, ServerStarter
from agentenv.contract.env import close_shared
from agentenv.data.dataset import TaskMix, load_mix, load_tasks
from agentenv.data.rows import RowsConfig
from agentenv.rollout.actor import Actor
from agentenv.text.bridged import AnyRenderer, BridgedConfig, BridgedRenderer
from agentenv.text.native import NativeConfig, NativeRenderer
from agentenv.text.prompt import PromptConfig
from agentenv.text.prompt_fitting import PromptFitter
from agentenv.text.renderer import Renderer, TagRenderer

P = TypeVar("P")
A = TypeVar("A", bound="Assembly[Any]")


def once(build: Callable[[A], Awaitable[P]]) -> Callable[[A], Coroutine[Any, Any, P]]:
    """A method that builds a part at its first call and then always returns the same part."""
    name = build.__name__

    @functools.wraps(build)
    async def part(self: A) -> P:
        if name not in self.built:
            # Concurrent callers wait; the lock is per class, since a subclass calls super().
            async with self.building[build.__qualname__]:
                if name not in self.built:
                    self.built[name] = await build(self)
        found: P = self.built[name]
        return found

    return part


C = TypeVar("C", bound=TrainConfig | EvaluateConfig | PolicyConfig | SupervisedRunConfig)
WithRoles = TypeVar("WithRoles", bound=TrainConfig | EvaluateConfig)


@dataclass(eq=False)
class Assembly(Generic[C]):
    """Builds each part once, at its first use, after the parts that it depends on. The
    configuration is never changed. `folder` replaces {run} in paths; `stack` closes the parts;
    `checkpoint` is that of a resumed run; `ends`: number of rows to read from each end of a data
    file, 0: all.

    All methods raise ConfigError or DataError for bad input.
    """

    has_weights = True  # whether the model's directory must contain weights
    ends = 0

    config: C
    folder: Path
    stack: AsyncExitStack
    report: Reporter
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        self.built: dict[str, Any] = {}
        self.building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def resolve(self, text: str) -> Path:
        """A path of the configuration."""
        return resolver(self.folder)(text)

    async def model(self) -> Path | None:
        """Directory of model and tokenizer; None if an endpoint has them."""
        raise NotImplementedError

    @once
    async def tokenizer(self) -> Any:
        """The tokenizer; None if the engine takes messages instead of tokens."""
        model = await self.model()
        return None if model is None else await in_thread(load_tokenizer, model, self.has_weights)

    async def renderers(self) -> Mapping[str, Renderer]:
        """The renderers of the command, by the name of the set."""
        raise NotImplementedError

    async def renderer(self, prompt: PromptConfig) -> Renderer:
        """The renderer for the prompt settings `prompt`."""
        model = await self.model()
        assert model is not None
        return make_renderer(self.config.renderer, prompt, await self.tokenizer(), model)

    @property
    def run(self) -> RunConfig:
        """The table [run]; the defaults for a command without one."""
        found = getattr(self.config, "run", None)
        return found if isinstance(found, RunConfig) else RunConfig()

    def makes(self, paths: object) -> bool:
        """Whether the set-up of a new run creates these paths, or tables with paths: whether they
        contain {run}."""
        return bool(self.run.setup) and self.checkpoint is None and RUN in str(paths)

    @once
    async def set_up(self) -> None:
        """Run the set-up of a new run."""
        if self.run.setup and self.checkpoint is None:
            setup = load_function(self.run.setup, "run.setup")
            message = await in_thread(setup, self.folder, self.run.seed)
            if isinstance(message, str):
                self.report(message)

    async def own_model(self, path: str) -> Path:
        """The checkpoint or model directory at `path`, which the set-up may create."""
        if self.makes(path):
            await self.set_up()
        found = find_checkpoint(self.resolve(path))
        with reported_as(DataError, "model.path", DataError):
            check_model_directory(found)
        return found


class SetConfig(EnvSettings, frozen=True, kw_only=True):
    """A set of questions with its rollout settings, for all commands. `key`: prefix of the set's
    keys in messages. `rows`: how to read its rows."""

    key: str
    rows: RowsConfig
    sampling: Sampling
    num_samples: int = 1


TRAINED = "data"  # the set of the training questions


def training_set(config: TrainConfig) -> SetConfig:
    """The training questions of a run, with their rollout settings."""
    return SetConfig.of(config, key=TRAINED, rows=config.data, sampling=config.sampling.train)


def actor_of(
    config: TrainConfig,
    engine: Engine,
    renderer: Renderer,
    make_env: EnvMaker,
    use: Literal["train", "eval"] = "train",
) -> Actor:
    """An actor of a run, whose seed determines all randomness of its rollouts."""
    sampling: Sampling = getattr(config.sampling, use)
    seed = config.run.seed if sampling.seed is None else sampling.seed
    params = config.sampling.at(0) if use == "train" else sampling.params()
    schedule = config.sampling.at if use == "train" and config.sampling.schedule else None
    limits, key = config.limits, f"{seed}/{use}"
    return Actor(engine, renderer, make_env, limits, params, key, schedule=schedule)


class Questions(NamedTuple):
    """A set, ready for rollouts."""

    config: SetConfig
    tasks: Sequence[Task]
    make_env: EnvMaker
    renderer: Renderer


def constraints_of(engine: EngineConfig, sampling: Sampling, key: str, default: str) -> Constraints:
    """The part of a program's requirements that the engine enforces; `default` is that of
    `structured_output`. Raises ConfigError with `key`."""
    if engine.capabilities.can_guide:
        return "calls" if (sampling.structured_output or default) == "prompt" else "all"
    if sampling.structured_output == "engine":
        raise ConfigError(
            f"{key}: structured_output = 'engine' needs an engine that follows grammars; set "
            "engine.name = 'vllm' or 'sglang', or structured_output = 'prompt'"
        )
    return "none"


@dataclass(eq=False)
class RolloutAssembly(Assembly[WithRoles]):
    """The parts of a command with rollouts of `sets` of questions. Servers of roles write their
    logs to `folder`."""

    is_whole = False  # whether `sets` are all of a run, so that unused environments are mistakes
    tries_all = False  # environments are tried although the algorithm does not fork

    sets: dict[str, SetConfig] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read: dict[str, Sequence[Task]] = {}  # by the name of the set
        self.servers = ServerFactory(self.folder, self.stack, self.report)

    async def contexts(self) -> Sequence[int]:
        """The context length (tokens of prompt and response) of each engine, if known."""
        raise NotImplementedError

    async def read_rows(self, one: SetConfig) -> Sequence[Task]:
        """The tasks of a set."""
        return await load_set(one.rows, one.env.id, self.resolve, self.report, one.key, self.ends)

    async def tasks_of(self, name: str) -> Sequence[Task]:
        """The tasks of a set, including those with overlong prompts."""
        if name not in self.read:
            if self.makes(self.sets[name].rows):
                await self.set_up()
            self.read[name] = await self.read_rows(self.sets[name])
        return self.read[name]

    async def tasks(self) -> dict[str, Sequence[Task]]:
        """The tasks of every set, by name."""
        return {name: await self.tasks_of(name) for name in self.sets}

    @once
    async def urls(self) -> dict[str, str]:
        """The URLs of roles by name; starts their servers, which may take long."""
        self.stack.push_async_callback(close_shared)
        return await start_servers(self.config.roles, self.resolve, self.servers)

    @once
    async def makers(self) -> dict[str, EnvMaker]:
        """The environment maker of each set; sets with equal settings share one."""
        urls = await self.urls()
        found: dict[str, EnvMaker] = {}
        for name, one in self.sets.items():
            settings = EnvSettings.of(fill_roles(one, urls), constraints=self._constraints(one))
            same = (maker for maker in found.values() if maker.settings == settings)
            found[name] = next(same, None) or EnvMaker(settings, self.resolve)
        return found

    def _constraints(self, one: SetConfig) -> Constraints:
        """See `constraints_of`; none for environments without a program."""
        default = "prompt" if one.key == TRAINED else "engine"
        found = constraints_of(self.config.engine, one.sampling, one.key, default)
        choices = (one.env, *one.env.variants.values())
        return found if any("program" in env.kwargs for env in choices) else "none"

    @once
    async def shared(self) -> dict[EnvMaker, dict[str, Sequence[Task]]]:
        """The environment makers, each with the tasks of its sets by name."""
        tasks = await self.tasks()
        groups: dict[EnvMaker, dict[str, Sequence[Task]]] = {}
        for name, maker in (await self.makers()).items():
            groups.setdefault(maker, {})[name] = tasks[name]
        return groups

    @once
    async def episodes(self) -> dict[str, tuple[list[Message], Info]]:
        """Reset the environment of the first task of each set; returns messages and info."""
        tasks, makers = await self.tasks(), await self.makers()
        return {name: await try_env(makers[name], tasks[name][0]) for name in self.sets}

    @once
    async def renderers(self) -> Mapping[str, Renderer]:
        return {name: await self.renderer(one.prompt) for name, one in self.sets.items()}

    @once
    async def questions(self) -> dict[str, Questions]:
        """Every set, with the tasks whose prompts fit."""
        tasks, makers, renderers = await self.tasks(), await self.makers(), await self.renderers()
        found = {}
        for name, one in self.sets.items():
            maker, renderer, rule = makers[name], renderers[name], one.rows.overlong_prompt
            key = f"{one.key}.overlong_prompt"
            fitter = PromptFitter(maker, renderer, one.limits, rule, key, self.report)
            fitting = mix = tasks[name]
            if isinstance(mix, TaskMix):  # its parts stay separate
                fitting = TaskMix([await fitter.fit(part) for part in mix.parts], mix.weights)
            else:
                fitting = await fitter.fit(fitting)
            found[name] = Questions(one, fitting, maker, renderer)
        return found


async def start_engine(
    assembly: Assembly[Any], limits: Limits, servers: ServerStarter, seed: int = 0, **more: Any
) -> Engine:
    """The engine of a command, started. `more` fields of EngineStart are those of a training
    run."""
    given = {"model": await assembly.model(), "policy_version": 0, **more}
    tokenizer, stack = await assembly.tokenizer(), assembly.stack
    start = EngineStart(
        tokenizer=tokenizer, limits=limits, stack=stack, servers=servers, seed=seed, **given
    )
    engine: Engine = await assembly.config.engine.start(start)
    return engine


def make_renderer(
    config: AnyRenderer, prompt: PromptConfig, tokenizer: Any, model: Path
) -> Renderer:
    """The configured renderer. Raises ConfigError for an unsuitable chat template."""
    eos_ids = read_eos_ids(model, tokenizer)
    if isinstance(config, BridgedConfig):
        return BridgedRenderer(tokenizer, config.family, prompt, eos_ids)
    if isinstance(config, NativeConfig):
        return NativeRenderer(tokenizer, prompt, eos_ids)
    return TagRenderer(tokenizer, prompt, eos_ids, config.tools_in_prompt)


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function named by 'module:function'. Raises ConfigError with the key."""
    with reported_as(ConfigError, f"{key}: {path!r} cannot be loaded", ConfigError):
        function = loaded(path)
    if not inspect.isroutine(function):
        raise ConfigError(f"{key}: {path!r} is not a function")
    return function


# The rows of questions.


async def load_set(
    rows: Any, env_id: str, resolve: Resolve, report: Reporter, key: str = TRAINED, ends: int = 0
) -> Sequence[Task]:
    """The questions of a set, whose table is `rows`: of its files, or of the weighted parts of
    data.mix. `key`: prefix of its keys in messages. `ends`: number of rows to read from each end of
    a file; 0: all."""
    report = prefixed(report, key)
    is_trained = isinstance(rows, DataConfig)
    if is_trained and rows.mix:
        return await in_thread(load_mix, rows.mix, env_id, rows, resolve, ends=ends, report=report)
    paths = rows.train if is_trained else rows.path
    return await in_thread(
        load_tasks,
        [resolve(path) for path in ([paths] if isinstance(paths, str) else paths)],
        env_id,
        rows,
        max_samples=(rows.max_samples if is_trained else rows.max_tasks) or 0,
        ends=ends,
        report=report,
        held_out=not is_trained,
        key=key,
    )


def prefixed(report: Reporter, key: str) -> Reporter:
    """`report` with `key` before each text."""
    return lambda text: report(f"{key}: {text}")
