"""What is looked at before anything starts: each check has a name, and passes or says what is wrong
and what to do.

train, evaluate, sft, dpo and synthesize go through the same list, in its order, which finds
mistakes early: first what the configuration alone tells; then files; then the model; then the
parts, for which the servers of roles are started. A dry run looks at what is here
(pipelines/planning/reading.py). What learner and
engine find as they start is at the end of the list, for those who want to know before a run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from glob import glob
from operator import methodcaller
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from agentenv import hub
from agentenv.config import paths_of
from agentenv.data_files import find_files
from agentenv.engine import EngineConfig, check_context
from agentenv.envs.grading.keys import grader_config
from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.learners.learner import LearnerConfig
from agentenv.model_files import check_turn_end, num_positions, read_model_config
from agentenv.native import NativeConfig, NativeRenderer
from agentenv.offload import in_thread
from agentenv.outcomes import Protocol
from agentenv.pipelines.config.evaluation import EvaluateConfig
from agentenv.pipelines.config.rl import TABLES, ModelConfig, TrainConfig
from agentenv.pipelines.config.supervised import SupervisedRunConfig
from agentenv.pipelines.run.rundir import check_writable
from agentenv.pipelines.serving.roles import check_roles
from agentenv.pipelines.serving.server_commands import find_python
from agentenv.pipelines.setup.assembly import AskingAssembly, Assembly, load_function
from agentenv.pipelines.setup.data import (
    EnvMaker,
    check_graders,
    said,
    tables_of,
    try_env,
    try_turn,
)
from agentenv.pipelines.setup.idle import check_idle
from agentenv.pipelines.setup.timeouts import check_time_outs
from agentenv.renderer import TagRenderer

Needs = Literal["configuration", "files", "model", "parts", "started"]
TRAIN, EVALUATE = (TrainConfig,), (EvaluateConfig,)
ASKING = (TrainConfig, EvaluateConfig)
SUPERVISED = (SupervisedRunConfig,)
RUNS = (*TRAIN, *SUPERVISED)
ALL = (*ASKING, *SUPERVISED)


def hub_keys(config: Any) -> Iterator[tuple[str, str, hub.Kind]]:
    """The keys that may name something on the hub, what they say, and of which kind it is."""
    model = getattr(config, "model", None)
    if isinstance(model, ModelConfig):
        yield "model.path", model.path, "model"
    for name, role in getattr(config, "roles", {}).items():
        yield f"roles.{name}.model", role.model, "model"
    dialogues = isinstance(config, SupervisedRunConfig)
    if dialogues and config.data.dataset_info:
        return  # which gives the names in data.train their files
    for key, path, is_rows in paths_of(config):
        if is_rows or (dialogues and key in ("data.train", "data.eval")):
            yield key, path, "dataset"


class Check(NamedTuple):
    """`look` raises what is wrong. `needs` is what must be there before, `of` are the
    configurations that it looks at."""

    name: str
    needs: Needs
    of: tuple[type[Struct], ...]
    look: Callable[[Any], Awaitable[object]]


class Finding(NamedTuple):
    """What a check found; without an error it has passed."""

    name: str
    error: AgentEnvError | None = None

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        return "" if self.error is None else str(self.error).partition("; ")[0]

    @property
    def remedy(self) -> str:
        """What to do about it, as far as the error says."""
        return "" if self.error is None else str(self.error).partition("; ")[2]


async def findings(
    assembly: Assembly[Any],
    last: Needs = "parts",
    without: Collection[str] = (),
    first: Needs = "configuration",
) -> AsyncIterator[Finding]:
    """Every check of the command from those that need `first` to those that need `last`, whether or
    not others have passed, but for those whose names are in `without`.
    A part that cannot be built is an error of each check that needs the part."""
    stages = get_args(Needs)
    wanted = stages[stages.index(first) : stages.index(last) + 1]
    for check in CHECKS:
        if check.needs not in wanted or not isinstance(assembly.config, check.of):
            continue
        if check.name in without:
            continue
        try:
            await check.look(assembly)
        except AgentEnvError as error:
            yield Finding(check.name, error)
        else:
            yield Finding(check.name)


async def refuse(
    assembly: Assembly[Any], last: Needs = "parts", first: Needs = "configuration"
) -> None:
    """Raise the error of the first check that does not pass."""
    async for finding in findings(assembly, last, first=first):
        if finding.error is not None:
            raise finding.error


# The configuration.


async def sizes(assembly: Assembly[TrainConfig]) -> None:
    """An update is a whole number of mini-batches."""
    config = assembly.config
    groups, part = config.queue.groups_per_step, config.learner.groups_per_minibatch
    if groups % part:
        default = " (its default)" if part == LearnerConfig().groups_per_minibatch else ""
        fits = max(number for number in range(1, part + 1) if groups % number == 0)
        raise ConfigError(
            f"learner.groups_per_minibatch = {part}{default} does not divide "
            f"queue.groups_per_step = {groups}; {fits} does"
        )


async def idle_ranks(assembly: Assembly[TrainConfig]) -> None:
    """The ranks of the learner find enough to do."""
    config = assembly.config
    check_idle(config.learner, config.algorithm, config.limits)


async def time_outs(assembly: Assembly[TrainConfig]) -> None:
    """No deadline is longer than one that it is inside of."""
    check_time_outs(assembly.config)


async def demonstrations(assembly: Assembly[TrainConfig]) -> None:
    """The cold start is written in the protocol of the renderer."""
    config = assembly.config
    if config.sft is not None and isinstance(config.renderer, NativeConfig):
        raise ConfigError(
            "renderer.name: the demonstrations of [sft] are written in the tag protocol; choose "
            "'tags', or remove [sft]"
        )


async def evaluation_sets(assembly: Assembly[TrainConfig]) -> None:
    """The set and the figure that the best checkpoint is chosen by are there."""
    config = assembly.config
    known, metric = sorted(config.eval.sets), config.checkpoint.best_metric
    name = metric.partition("/")[0]
    if name and name not in known:
        raise ConfigError(
            f"checkpoint.best_metric: there is no evaluation set {name!r}; known: {known}"
        )
    if metric and metric.partition("/")[2] not in ("success", "reward"):
        raise ConfigError(
            f"checkpoint.best_metric: expected SET/success or SET/reward, got {metric!r}"
        )


async def adapter(assembly: Assembly[TrainConfig]) -> None:
    """The engine loads what the learner trains."""
    config = assembly.config
    if config.engine.new_weights == "adapter" and config.learner.lora is None:
        raise ConfigError('engine.lora = "adapter" needs [learner.lora], which trains one')


async def helpers(assembly: Assembly[EvaluateConfig]) -> None:
    """[assist] names a helper, and limits let the refiner begin."""
    config = assembly.config
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
    rooms = [one.limits.max_response_tokens for one in config.sets.values()]
    if all(room <= refiner.min_response_tokens for room in rooms):
        raise ConfigError(
            f"assist.refiner.min_response_tokens = {refiner.min_response_tokens} is never reached: "
            f"limits.max_response_tokens is {max(rooms)}; expected less than that"
        )


class _Tables(Struct):
    """The tables of all sets of an evaluation, as `check_roles` reads those of a run."""

    roles: Any
    assist: Any
    env: Any
    grader: Any
    search: Any
    python: Any


async def roles(assembly: Assembly[Any]) -> None:
    """Every role has a name of ours, and is read."""
    config = assembly.config
    if isinstance(config, EvaluateConfig):
        tables = {
            table: {name: getattr(one, table) for name, one in config.sets.items()}
            for table in ("env", *TABLES)
        }
        check_roles(_Tables(config.roles, config.assist, **tables))
    else:
        check_roles(config)


# Files.


async def disk(assembly: Assembly[Any]) -> None:
    """The run's directory can be written."""
    check_writable(assembly.folder)


async def of_the_hub(assembly: Assembly[Any]) -> None:
    """Models and datasets that are named by their ids on the hub are in its cache, or fetched."""
    for key, text, kind in hub_keys(assembly.config):
        if assembly.checkpoint is not None and key == "model.path":
            continue  # a resumed run has its weights
        try:
            await in_thread(hub.fetch, text, kind, said(assembly.say, key))
        except DataError as error:
            raise DataError(f"{key}: {error}") from error


async def files(assembly: Assembly[Any]) -> None:
    """What paths name is there, but for what the set-up makes, or a registry of datasets names; a
    resumed run has its cold start behind it."""
    config = assembly.config
    has_names = isinstance(config, SupervisedRunConfig) and config.data.dataset_info
    for key, path, is_rows in paths_of(config):
        if assembly.makes(path) or (key.startswith("sft.") and assembly.checkpoint is not None):
            continue
        if has_names and key.startswith("data.") and key != "data.dataset_info":
            continue
        if not is_rows:
            found = assembly.resolve(path).expanduser()
            if not found.exists() and not glob(str(found), recursive=True):
                raise ConfigError(f"{key}: {path}: there is no such file or folder")
            continue
        for file in find_files([assembly.resolve(path)]):
            if not file.exists():
                raise DataError(f"{key}: {file}: there is no such dataset file")


# What can be told before the set-up of a run, which may take long.


async def set_up(assembly: Assembly[Any]) -> None:
    """run.setup is a function."""
    if assembly.run.setup and assembly.checkpoint is None:
        load_function(assembly.run.setup, "run.setup")


async def environment_classes(assembly: AskingAssembly[Any]) -> None:
    """Every environment that the configuration names is registered, its class can be loaded and
    takes its keywords, its tools can be made, and the keys of its grader belong together."""
    known: list[Any] = []
    for one in assembly.sets.values():
        if one.grader is not None and one.grader.kind and not one.grader.compat:
            grader_config(one.grader)  # the environment adds what others do not say
        given = (one.env, tables_of(one), one.limits, one.prompt)
        if given not in known and not assembly.makes((one.env.tools, one.prompt)):
            known.append(given)
            env, tables, limits, prompt = given
            EnvMaker(env, tables, assembly.resolve, limits, prompt)


async def servers(assembly: AskingAssembly[Any]) -> None:
    """Servers that are to be started can be; those that run already answer."""
    config = assembly.config
    given = {"engine": config.engine}
    if isinstance(config, TrainConfig) and config.eval.engine is not None:
        given["eval.engine"] = config.eval.engine
    for key, engine in given.items():
        if engine.launched is not None:
            find_python(engine.kind, engine.launched, f"{key}.servers")
        await engine.check_reachable(key)
    for name, role in config.roles.items():
        if not role.url:
            find_python(role.engine, role, f"roles.{name}")


async def rows_here(assembly: AskingAssembly[Any]) -> None:
    """Rows that the set-up does not make can be read."""
    for name, one in assembly.sets.items() if assembly.run.setup else ():
        if not assembly.makes(one.rows):
            await assembly.tasks_of(name)


async def graders_here(assembly: AskingAssembly[Any]) -> None:
    """Environments that need nothing of the set-up begin an episode and grade right answers, and
    where all of them are such, every table is read by one."""
    if not assembly.run.setup or assembly.config.roles:
        return
    here = {
        name: one
        for name, one in assembly.sets.items()
        if not assembly.makes((one.rows, one.env, tables_of(one), one.prompt))
    }
    if len(here) == len(assembly.sets):
        await environments(assembly)
    for name, one in here.items():
        await assembly.urls()  # of none; what the environments share is closed in the end
        maker = EnvMaker(one.env, tables_of(one), assembly.resolve, one.limits, one.prompt)
        tasks = await assembly.tasks_of(name)
        await try_env(maker, tasks[0])
        await check_graders(maker, tasks)


# The model.


async def context(assembly: AskingAssembly[Any]) -> None:
    """The engines hold prompt and response of the longest episode."""
    for length in await assembly.contexts():
        for one in assembly.sets.values():
            check_context(one.limits, length)


async def turn_end(assembly: Assembly[Any]) -> None:
    """Something ends a turn, and the token with which the chat template ends an answer does."""
    model, engine = await assembly.model(), getattr(assembly.config, "engine", None)
    if model is None or (isinstance(engine, EngineConfig) and not engine.has_weights):
        return  # a server elsewhere has files of its own
    for renderer in (await assembly.renderers()).values():
        if isinstance(renderer, TagRenderer | NativeRenderer):
            prompt = renderer.prompt_config
            kwargs = prompt.chat_template_kwargs if prompt.apply_chat_template else None
            await in_thread(check_turn_end, model, renderer.tokenizer, kwargs)


async def room_for_weights(assembly: Any) -> None:
    """New weights have room on their way from the learner to the engine."""
    found = await assembly.passage()
    if found.told:
        assembly.say(found.told)


# The parts.


async def environments(assembly: AskingAssembly[Any]) -> None:
    """Every environment is known, and every table is read by one."""
    groups = await assembly.shared()
    for maker, sets in groups:
        for one in map(assembly.sets.__getitem__, sets):
            for value, env_id in one.rows.env_by.items():
                maker.check_known(env_id, f"{one.key}.env_by.{value}")
    reads = [maker.reads(task for own in sets.values() for task in own) for maker, sets in groups]
    anywhere = frozenset[str]().union(*reads)
    for maker, sets in groups:
        tasks = [task for own in sets.values() for task in own]
        maker.check_read(tasks, all_rows=assembly.is_whole, elsewhere=anywhere)


async def callable_tools(assembly: AskingAssembly[Any]) -> None:
    """The policy can call each tool, as the renderer writes calls."""
    episodes, renderers = await assembly.episodes(), await assembly.renderers()
    for name, (_, info) in episodes.items():
        one = assembly.sets[name]
        try:
            renderers[name].check_tools(info.get("tools", ()))
        except ConfigError as error:
            raise ConfigError(f"{one.env.id}: {error}") from error


async def observations(assembly: AskingAssembly[Any]) -> None:
    """The renderer can write what the environment of each set answers to a turn without a call. One
    that computes in processes of its own is not asked here, where nothing could end its step."""
    protocol: Protocol = "native" if isinstance(assembly.config.renderer, NativeConfig) else "tags"
    for maker, sets in await assembly.shared():
        if maker.config.workers:
            continue
        tasks = {task.env_id: task for own in sets.values() for task in reversed(own)}
        for task in tasks.values():
            await try_turn(maker, task, protocol)


async def graders(assembly: AskingAssembly[Any]) -> None:
    """Each grader grades the right answers of three rows of each set."""
    if assembly.try_graders:
        for maker, sets in await assembly.shared():
            for tasks in sets.values():
                await check_graders(maker, tasks)


async def sequence_lengths(assembly: Any) -> None:
    """The model has positions for the longest sequence."""
    model_dir = await assembly.model()
    context, longest = num_positions(read_model_config(model_dir)), (await assembly.rows()).longest
    if context and longest > context:
        raise DataError(
            f"data.max_length = {assembly.config.data.max_length}: a sequence has {longest} "
            f"tokens, and {model_dir} was made for {context}; set data.max_length={context} to "
            "cut it"
        )


def part(name: str) -> Callable[[Any], Awaitable[object]]:
    """The check that a part of the assembly can be built."""
    return methodcaller(name)


CHECKS: tuple[Check, ...] = (
    Check("sizes divide", "configuration", TRAIN, sizes),
    Check("idle ranks", "configuration", TRAIN, idle_ranks),
    Check("time-outs", "configuration", TRAIN, time_outs),
    Check("cold start and renderer", "configuration", TRAIN, demonstrations),
    Check("names of evaluation sets", "configuration", TRAIN, evaluation_sets),
    Check("adapter", "configuration", TRAIN, adapter),
    Check("helpers", "configuration", EVALUATE, helpers),
    Check("roles", "configuration", ASKING, roles),
    Check("disk", "files", RUNS, disk),
    Check("hub", "files", ALL, of_the_hub),
    Check("files", "files", RUNS, files),
    Check("set-up", "files", RUNS, set_up),
    Check("classes of environments", "files", TRAIN, environment_classes),
    # engine and learner have the GPUs that they need
    Check("GPUs", "files", TRAIN, part("gpus")),
    Check("servers", "files", ASKING, servers),
    Check("rows that are here", "files", TRAIN, rows_here),
    Check("graders of rows that are here", "files", TRAIN, graders_here),
    # the directory has configuration, tokenizer and weights; the endpoint answers
    Check("model", "model", ALL, part("tokenizer")),
    Check("context", "model", ASKING, context),
    # the renderer can write the prompts of this model
    Check("chat template", "model", ALL, part("renderers")),
    Check("end of a turn", "model", ALL, turn_end),
    # what the set-up makes is there from here on
    Check("set-up is run", "model", RUNS, part("set_up")),
    # new weights have room on their way to the engine
    Check("room for weights", "model", TRAIN, room_for_weights),
    # every row of the data can be read
    Check("rows", "model", ASKING, part("tasks")),
    Check("sequence lengths", "model", SUPERVISED, sequence_lengths),
    Check("environments", "parts", ASKING, environments),
    # the environment of each set begins an episode
    Check("first episodes", "parts", ASKING, part("episodes")),
    Check("callable tools", "parts", ASKING, callable_tools),
    Check("observations", "parts", ASKING, observations),
    Check("graders", "parts", ASKING, graders),
    # every set has a prompt that fits
    Check("prompts", "parts", ASKING, part("questions")),
    # the tools that helpers repair are there, those that they repeat can be
    Check("helpers and tools", "parts", EVALUATE, part("helpers")),
    # demonstrations can be read, and every stage of the cold start has some
    Check("demonstrations", "parts", TRAIN, part("demonstrations")),
    # the questions are enough for an update
    Check("number of updates", "parts", TRAIN, part("num_steps")),
    # the ranks start and load the model; the engine starts and serves it
    Check("learner", "started", RUNS, part("learner")),
    Check("engine", "started", ASKING, part("engine")),
)
