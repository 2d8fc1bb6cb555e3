"""The checks of every start, in the order of the list in `checks.py`: configuration, files, model
and parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

from msgspec import to_builtins

from agentenv.adapters.trial import try_contract
from agentenv.assembly.checks.memory import find_shape
from agentenv.assembly.checks.paths import absent_paths, hub_keys
from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import Assembly, RolloutAssembly, load_function, prefixed
from agentenv.assembly.parts.environments import (
    EnvMaker,
    EnvSettings,
    grader_of,
    tables_of,
    try_env,
)
from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.run.rundir import check_writable
from agentenv.assembly.serving.gpus import trains_on_gpu
from agentenv.assembly.serving.server_command import find_python
from agentenv.assembly.serving.servers import check_roles
from agentenv.base import model_files
from agentenv.base.errors import ConfigError, CrashError, DataError, EngineError, reported_as
from agentenv.base.offload import in_thread
from agentenv.base.types import Message, Task
from agentenv.contract.engine import EngineConfig, check_context
from agentenv.contract.env import Env, check_observation, check_step
from agentenv.contract.server_config import LaunchConfig, RoleConfig, Served
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.weights import read_layout
from agentenv.engines.openai import OpenAIConfig
from agentenv.engines.remote.scoring import SAMPLE, teaching_server
from agentenv.envs.grading.keys import grader_config
from agentenv.envs.grading.reward import NUM_CHECKED_ROWS, check_grader
from agentenv.learners.algorithms.check import check_algorithm
from agentenv.learners.deepspeed_settings import deepspeed_settings
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.text.contexts import for_programs
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import TagRenderer, TagsConfig, ToolSchemas

logger = logging.getLogger(__name__)


# The configuration.


async def sizes(assembly: Assembly[TrainConfig]) -> None:
    """An update is a whole number of mini-batches."""
    config = assembly.config
    groups, part = config.queue.groups_per_step, config.learner.groups_per_minibatch
    if groups % part:
        default = " (its default)" if part == LearnerConfig().groups_per_minibatch else ""
        fits = max(number for number in range(1, part + 1) if groups % number == 0)
        raise ConfigError(
            f"learner.groups_per_minibatch = {part}{default} does not divide queue.groups_per_step "
            f"= {groups}; {fits} does"
        )


async def time_outs(assembly: Assembly[TrainConfig]) -> None:
    """No deadline is longer than an enclosing one."""
    problems = list(contradictions(assembly.config))
    if problems:
        raise ConfigError(
            f"{' | '.join(problems)}; an outer deadline must be longer than the inner one"
        )


def contradictions(config: TrainConfig) -> Iterator[str]:
    """A description of each pair of contradictory keys."""
    limits = config.limits
    whole = f"limits.max_seconds = {limits.max_seconds:g}"
    if limits.seconds_of_tree < limits.max_seconds:
        yield (
            f"limits.max_tree_seconds = {limits.seconds_of_tree:g} ends trees before {whole} can "
            "end a trajectory"
        )
    for name in _OF_TOOLS:
        for key, seconds in _timeouts(name, to_builtins(getattr(config, name), enc_hook=str)):
            if seconds > limits.max_seconds:
                yield f"{key} = {seconds:g} lets one call take longer than {whole}"
    if config.eval.sets and config.eval.timeout_s < limits.max_seconds:
        yield f"eval.timeout_s = {config.eval.timeout_s:g} ends evaluations before {whole}"


_OF_TOOLS = ("python", "search", "grader", "env")


def _timeouts(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every key `timeout_s` in a table of plain values."""
    if isinstance(value, int | float) and path.endswith(".timeout_s"):
        yield path, float(value)
    entries = enumerate(value) if isinstance(value, list) else ()
    for name, one in value.items() if isinstance(value, dict) else entries:
        yield from _timeouts(f"{path}.{name}", one)


async def algorithm(assembly: Assembly[TrainConfig]) -> None:
    """Plan, advantages and credit of the algorithm fit their contracts, also for equal returns."""
    check_algorithm(assembly.config.algorithm)


async def deepspeed_file(assembly: Assembly[Any]) -> None:
    """learner.deepspeed_config fits the other keys of the learner, on the device of its ranks."""
    config = assembly.config
    deepspeed_settings(config.learner.resolved(on_gpu=trains_on_gpu(config)))


async def demonstrations(assembly: Assembly[TrainConfig]) -> None:
    """The renderer supports the tag protocol of the cold start's demonstrations."""
    config = assembly.config
    if config.sft is not None and not isinstance(config.renderer, TagsConfig):
        raise ConfigError(
            "renderer.name: the demonstrations of [sft] use the tag protocol; choose 'tags', or "
            "remove [sft]"
        )


async def evaluation_sets(assembly: Assembly[TrainConfig]) -> None:
    """The set and the metric of checkpoint.best_metric exist."""
    config = assembly.config
    known, metric = sorted(config.eval.sets), config.checkpoint.best_metric
    name = metric.partition("/")[0]
    if config.train.stop_at is not None and not metric:
        raise ConfigError(
            "train.stop_at is a value of checkpoint.best_metric, which is empty: set it, for "
            f"instance to {known[0] if known else 'SET'}/success"
        )
    if name and name not in known:
        raise ConfigError(
            f"checkpoint.best_metric: unknown evaluation set {name!r}; known: {known}; "
            "checkpoint.best_metric= on the command line keeps no best checkpoint"
        )
    if metric and metric.partition("/")[2] not in ("success", "reward"):
        raise ConfigError(
            f"checkpoint.best_metric: expected SET/success or SET/reward, got {metric!r}"
        )


async def adapter(assembly: Assembly[TrainConfig]) -> None:
    """If the engine loads adapters, the learner trains one."""
    config = assembly.config
    if config.engine.new_weights == "adapter" and config.learner.lora is None:
        raise ConfigError('engine.lora = "adapter" requires [learner.lora], which trains one')


async def helpers(assembly: Assembly[EvaluateConfig]) -> None:
    """[assist] has a helper, and the limits let the refiner start."""
    config = assembly.config
    if config.assist is None:
        return
    if config.assist == type(config.assist)():
        raise ConfigError(
            "assist: no helper given; expected [assist.debugger], [assist.backtracer] or "
            "[assist.refiner]"
        )
    refiner = config.assist.refiner
    if refiner is None:
        return
    rooms = [one.limits.max_response_tokens for one in config.sets.values()]
    if all(room <= refiner.min_response_tokens for room in rooms):
        raise ConfigError(
            f"assist.refiner.min_response_tokens = {refiner.min_response_tokens} is unreachable: "
            f"limits.max_response_tokens is {max(rooms)}; expected less than that"
        )


async def roles(assembly: Assembly[Any]) -> None:
    """Every role has a known name, and is used."""
    check_roles(assembly.config)


async def teacher(assembly: Assembly[TrainConfig]) -> None:
    """A teacher behind a server scores at temperature 1, over the whole vocabulary."""
    config = assembly.config
    role, top_k = config.roles.get("teacher"), config.algorithm.teach_top_k
    hint, is_server = config.algorithm.hint, role is not None and role.engine != "learner"
    for key in ("hint", "teach_gate", "teach_top_k") if not config.algorithm.teach else ():
        if value := getattr(config.algorithm, key):
            raise ConfigError(f"algorithm.{key} = {value!r} is unused: algorithm.teach is 0")
    if hint and is_server:
        raise ConfigError(
            'algorithm.hint: the learner scores hints; set roles.teacher.engine = "learner", or '
            "remove roles.teacher"
        )
    if ":" in hint:
        load_function(hint, "algorithm.hint")
    elif hint not in ("", "sibling", "gold"):
        raise ConfigError(f"algorithm.hint = {hint!r}: expected sibling, gold or module:function")
    if hint == "sibling" and config.algorithm.group_size == 1:
        raise ConfigError("algorithm.group_size = 1: no siblings for algorithm.hint; expected 2")
    if (hint or top_k) and config.sampling.is_truncated:
        raise ConfigError("sampling.train: hint and teach_top_k need the whole vocabulary")
    if top_k and config.learner.context_parallel > 1:
        raise ConfigError("algorithm.teach_top_k needs learner.context_parallel = 1; remove it")
    if top_k and config.algorithm.teach_gate:
        raise ConfigError("algorithm.teach_gate weights sampled tokens; remove it, or teach_top_k")
    is_whole = all(one == 1 for _, one in config.sampling.points)
    if is_server and (config.sampling.is_truncated or not is_whole):
        raise ConfigError(
            "roles.teacher: a server scores at temperature 1 and over the whole vocabulary; "
            "remove temperature, top_k, top_p and min_p from sampling.train, or set engine = "
            '"learner"'
        )


# Files.


async def disk(assembly: Assembly[Any]) -> None:
    """The run's directory, or its closest existing parent, is writable."""
    folder = assembly.folder.absolute()
    check_writable(next(one for one in (folder, *folder.parents) if one.exists()))


async def of_the_hub(assembly: Assembly[Any]) -> None:
    """Models and datasets with an id of the hub are in its cache, or are fetched."""
    for key, text, kind in hub_keys(assembly.config):
        if assembly.checkpoint is not None and key == "model.path":
            continue  # a resumed run has its weights
        with reported_as(DataError, key, DataError):
            await in_thread(model_files.fetch_from_hub, text, kind, prefixed(assembly.report, key))


async def files(assembly: Assembly[Any]) -> None:
    """Every path exists."""
    for key, path, is_rows in absent_paths(assembly):
        if is_rows:
            raise DataError(f"{key}: {path}: no such dataset file")
        raise ConfigError(f"{key}: {path}: no such file or folder")


# Checks before the set-up of a run, which may take long.


async def set_up(assembly: Assembly[Any]) -> None:
    """run.setup is a function."""
    if assembly.run.setup and assembly.checkpoint is None:
        load_function(assembly.run.setup, "run.setup")


async def environment_classes(assembly: RolloutAssembly[Any]) -> None:
    """Every configured environment is registered, its class loads and accepts its keywords, its
    tools load, and the keys of its grader are consistent."""
    known: list[EnvSettings] = []
    for one in assembly.sets.values():
        if one.grader is not None and one.grader.kind and not one.grader.compat:
            grader_config(one.grader)  # other kinds get defaults from the environment
        settings = EnvSettings.of(one)
        if settings not in known and not assembly.makes((one.env.tools, one.prompt)):
            known.append(settings)
            EnvMaker(settings, assembly.resolve)


async def needs_of_environments(assembly: RolloutAssembly[Any]) -> None:
    """This machine meets the requirements of the environments, such as a sandbox for programs."""
    for one in assembly.sets.values():
        if not assembly.makes((one.env.tools, one.prompt)):
            await EnvMaker(one, assembly.resolve).check_machine()


async def servers(assembly: RolloutAssembly[Any]) -> None:
    """The programs of servers to start are installed; running servers respond."""
    for name, launched, key in launched_servers(assembly.config):
        find_python(name, launched, key)
    await assembly.config.engine.check_reachable()


def launched_servers(
    config: TrainConfig | EvaluateConfig,
) -> Iterator[tuple[str, LaunchConfig, str]]:
    """The servers that a command starts: kind of engine, configuration, key."""
    engine = config.engine
    if engine.launched is not None:
        yield engine.kind, engine.launched, "engine.servers"
    for name, role in config.roles.items():
        if role.is_launched:
            yield role.engine, role, f"roles.{name}"


async def rows_here(assembly: RolloutAssembly[Any]) -> None:
    """Rows that the set-up does not create can be read."""
    for name, one in assembly.sets.items() if assembly.run.setup else ():
        if not assembly.makes(one.rows):
            await assembly.tasks_of(name)


async def graders_here(assembly: RolloutAssembly[Any]) -> None:
    """Environments that do not depend on the set-up start an episode and grade correct answers; if
    that is all of them, every table is used."""
    if not assembly.run.setup or assembly.checkpoint is not None or assembly.config.roles:
        return
    here = [
        name
        for name, one in assembly.sets.items()
        if not assembly.makes((one.rows, one.env, tables_of(one), one.prompt))
    ]
    if len(here) == len(assembly.sets):
        await environments(assembly)
    await assembly.urls()  # without roles: only registers the close of shared resources
    for name in here:
        maker = EnvMaker(assembly.sets[name], assembly.resolve)
        tasks = await assembly.tasks_of(name)
        await try_env(maker, tasks[0])
        await check_graders(maker, tasks)


# The model.


async def model_type(assembly: Assembly[Any]) -> None:
    """transformers knows the type of the model, which has an embedding for every token, and its
    weights are complete."""
    model = await assembly.model()
    assert model is not None, "an endpoint cannot be trained"
    await in_thread(model_files.check_known, model)
    if any(model.glob("*.safetensors")):  # a dry run lists them as missing
        with reported_as(DataError, "model.path", EngineError):
            await in_thread(read_layout, model)
    await in_thread(model_files.check_vocabulary, model, await assembly.tokenizer())


async def context(assembly: RolloutAssembly[Any]) -> None:
    """The engine serves the model, and its context holds prompt and response of the longest
    episode."""
    model = await assembly.model()
    if model is not None:
        await in_thread(assembly.config.engine.check_model, model)
    for length in await assembly.contexts():
        for one in assembly.sets.values():
            check_context(one.limits, length)


async def server_commands(assembly: RolloutAssembly[TrainConfig]) -> None:
    """The servers that the run starts can serve their models on this machine."""
    for name, launched, key in launched_servers(assembly.config):
        role = launched.model if isinstance(launched, RoleConfig) else ""
        model = find_checkpoint(assembly.resolve(role)) if role else await assembly.model()
        rank = 0 if role else getattr(assembly.config, "adapter_rank", 0)
        if model is not None and (model / "config.json").is_file():
            assembly.servers.check(Served(name, model, key, lora_rank=rank), launched, key)


IMITATION_RATE = 8e4  # divided by the number of weights: usual learning rate of AdamW for SFT


def rate_advice(optimizer: OptimizerConfig, num_params: int) -> str:
    """A line if the learning rate of a cold start differs much from the usual one for a pretrained
    model, else "". Usual: 6e-4 at 135 million weights (SmolLM2, GSM8K), 1e-5 at 7 billion."""
    usual, rate = IMITATION_RATE / num_params, optimizer.learning_rate
    if optimizer.optimizer != "adamw" or not rate or 1 / 5 < rate / usual < 5:
        return ""
    return (
        f"sft.optimizer.learning_rate = {rate:g} is {'low' if rate < usual else 'high'} for a "
        f"pretrained model of {num_params / 1e9:.2g} billion weights: a usual value is about "
        f"{usual:.0e}; watch sft/loss"
    )


async def cold_start_rate(assembly: Assembly[TrainConfig]) -> None:
    """Report an unusual learning rate for the cold start of a pretrained model."""
    config = assembly.config
    sft, begins = config.sft, assembly.checkpoint is None
    if sft is None or config.learner.lora or not begins or assembly.makes(config.model.path):
        return
    model = await assembly.model()
    shape = find_shape(model) if model is not None else None
    if advice := shape and rate_advice(sft.optimizer, shape.num_params):
        assembly.report(advice)


async def turn_end(assembly: Assembly[Any]) -> None:
    """The model has end-of-turn tokens, and the one of the chat template is among them."""
    model, engine = await assembly.model(), getattr(assembly.config, "engine", None)
    if model is None or (isinstance(engine, EngineConfig) and not engine.capabilities.has_weights):
        return  # an external server has its own files
    for renderer in (await assembly.renderers()).values():
        if isinstance(renderer, TagRenderer | NativeRenderer):
            prompt = renderer.prompt_config
            kwargs = prompt.chat_template_kwargs if prompt.apply_chat_template else None
            await in_thread(model_files.check_turn_end, model, renderer.tokenizer, kwargs)


async def room_for_weights(assembly: Any) -> None:
    """There is space for new weights in transfer from the learner to the engine."""
    found = await assembly.passage()
    if found.message:
        assembly.report(found.message)


async def teacher_tokens(assembly: Assembly[TrainConfig]) -> None:
    """The teacher is another model than the policy, with the same tokens."""
    role, model = assembly.config.roles.get("teacher"), await assembly.model()
    if role is None or not role.model or model is None:
        return  # the tokens of a server are compared when it is connected
    place = find_checkpoint(assembly.resolve(role.model))
    if place.resolve() == model.resolve() and not assembly.config.algorithm.hint:
        raise ConfigError(
            f"roles.teacher.model = {role.model} is the policy itself, which teaches it nothing; "
            "expected another model, or a hint (algorithm.hint)"
        )
    own, its = [await in_thread(model_files.load_tokenizer, one) for one in (model, place)]
    same = own.get_vocab() == its.get_vocab() and own.encode(SAMPLE) == its.encode(SAMPLE)
    least = model_files.vocab_size(place)
    if not same or least < len(own):
        raise ConfigError(
            f"roles.teacher.model = {role.model} has another tokenizer than the policy, or {least} "
            f"ids for its {len(own)}; expected equal tokens, since the teacher scores the policy's"
        )
    of_model = model_files.num_stretched_positions(model_files.read_model_config(place))
    if most := role.max_model_len or of_model:  # of which a server writes a token
        check_context(assembly.config.limits, most - role.is_launched, "roles.teacher")


async def teacher_server(assembly: Assembly[TrainConfig]) -> None:
    """A running teacher responds, and scores the policy's tokens."""
    config, role = assembly.config, assembly.config.roles.get("teacher")
    if role is None or not role.url or await assembly.model() is None:
        return
    tokenizer, top_k = await assembly.tokenizer(), config.algorithm.teach_top_k
    await teaching_server(role, role.url, tokenizer, config.limits, top_k, assembly.stack)


async def hints(assembly: RolloutAssembly[TrainConfig]) -> None:
    """A hint can be placed in the turns of each environment, and rows have the gold of one."""
    if not (hint := assembly.config.algorithm.hint):
        return
    for name, (_, info) in (await assembly.episodes()).items():
        if "turn" in info:
            why = "runs a program, whose turns have several contexts; remove it"
            raise ConfigError(f"algorithm.hint: {assembly.sets[name].env.id} {why}")
    trained, *_ = assembly.sets
    bare = [one.id for one in await assembly.tasks_of(trained) if not one.answers]
    if hint == "gold" and bare:
        raise ConfigError(
            f'algorithm.hint = "gold": {len(bare)} rows have no answer; the first is {bare[0]}; '
            'expected answers, "sibling" or a function'
        )


# The parts.


async def environments(assembly: RolloutAssembly[Any]) -> None:
    """Every environment exists, and every table is used."""
    groups = (await assembly.shared()).items()
    for maker, sets in groups:
        for one in map(assembly.sets.__getitem__, sets):
            for value, env_id in one.rows.env_by.items():
                maker.check_known(env_id, f"{one.key}.env_by.{value}")
    reads = [maker.reads(task for own in sets.values() for task in own) for maker, sets in groups]
    anywhere = frozenset[str]().union(*reads)
    for maker, sets in groups:
        tasks = [task for own in sets.values() for task in own]
        maker.check_read(tasks, all_rows=assembly.is_whole, elsewhere=anywhere)


async def callable_tools(assembly: RolloutAssembly[Any]) -> None:
    """The renderer can express a call of each tool, and the turns of programs."""
    episodes, renderers = await assembly.episodes(), await assembly.renderers()
    for name, (_, info) in episodes.items():
        one = assembly.sets[name]
        if "turn" in info:
            for_programs(renderers[name], one.env.id)
        with reported_as(ConfigError, one.env.id, ConfigError):
            renderers[name].check_tools(info.get("tools", ()))


async def control_tokens(assembly: RolloutAssembly[Any]) -> str:
    """Control tokens and tags in tool results become ordinary text."""
    renderers, episodes = await assembly.renderers(), await assembly.episodes()
    number = 0
    for name, renderer in renderers.items():
        if isinstance(renderer, TagRenderer | NativeRenderer):
            number += refuse_forged(renderer, episodes[name][1].get("tools", ()))
    return f"{number} tokens and tags" if number else ""


def refuse_forged(renderer: TagRenderer | NativeRenderer, tools: ToolSchemas) -> int:
    """Raises ConfigError if an added token of the tokenizer, or a tag, that is the text of a tool
    result becomes a control token, or a tag of the protocol. Returns the number of texts."""
    probe = copy(renderer)
    probe.is_probe = True
    name = str(tools[0]["name"]) if tools else "tool"
    tags = [f"<{kind}{tool['name']}>" for tool in tools for kind in ("", "/")]
    forged = {*renderer.control_tokens.values(), *tags, "</result>", "<answer>"}
    added: dict[str, int] = getattr(renderer.tokenizer, "get_added_vocab", dict)()

    def of(text: str) -> tuple[int, str]:
        ids = probe.observation([Message("tool", text, name=name)], tools, 512)
        return sum(one in renderer.special_ids for one in ids), probe.decode(ids)

    harmless, frame = of("before  after")
    for text in (texts := forged | added.keys()):
        number, read = of(f"before {text} after")
        if number > harmless or (text in forged and read.count(text) > frame.count(text)):
            raise ConfigError(
                f"the tool result {text!r} becomes a token or tag of the protocol; this is a bug "
                "of the renderer: report it with the name of the tokenizer"
            )
    return len(texts)


async def tokens_of_questions(assembly: RolloutAssembly[Any]) -> None:
    """Report the questions that contain control tokens, which are not broken there."""
    if await assembly.model() is None and not isinstance(assembly.config.engine, OpenAIConfig):
        return  # the tokenizer is missing
    tasks = await assembly.tasks()
    for name, renderer in (await assembly.renderers()).items():
        if (control := getattr(renderer, "control", None)) is None:
            continue
        found = await in_thread(
            lambda own, seen=control.search: [one.id for one in own if seen(one.question)],
            tasks[name],
        )
        if found:
            assembly.report(
                f"{assembly.sets[name].key}: {len(found)} of {len(tasks[name])} questions contain "
                f"control tokens, which the model reads as such; the first is {found[0]}: remove "
                "them from the data, unless they are intended"
            )


async def observations(assembly: RolloutAssembly[Any]) -> None:
    """The renderer can express the answer of each environment to a turn without a call."""
    for maker, sets in (await assembly.shared()).items():
        tasks = {task.env_id: task for own in sets.values() for task in reversed(own)}
        for task in tasks.values():
            messages = await try_turn(maker, task)
            has_user = any(message.role == "user" for message in messages)
            if has_user and await assembly.model() is not None:  # may run the set-up
                renderers = await assembly.renderers()
                for name in sets:
                    room = assembly.sets[name].limits.max_tool_result_tokens
                    renderers[name].observation(messages, (), room)


PROBE_S = 10.0  # deadline of the probe; slower environments are not checked
PROBE = Message("assistant", "Which one?")


async def try_turn(make_env: Callable[[Task], Env], task: Task) -> list[Message]:
    """The answer of an environment with a custom `step` to a turn without a call; empty if it ends
    the episode or raises, which may be intended. Raises ConfigError for an invalid answer."""
    env = make_env(task)
    if getattr(type(env), "step", None) is ToolEnv.step:  # always ends the episode
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
    with reported_as(ConfigError, f"{task.env_id}, task {task.id}", CrashError):
        messages, _, terminated, truncated, _ = check_step(outcome)
        if terminated or truncated:
            return []
        check_observation(messages)
    return messages


async def graders(assembly: RolloutAssembly[Any]) -> None:
    """Each grader accepts the correct answers of three rows of each set."""
    for maker, sets in (await assembly.shared()).items():
        for tasks in sets.values():
            await check_graders(maker, tasks)


async def check_graders(make_env: Callable[[Task], Env], tasks: Iterable[Task]) -> None:
    """Check the grader of each environment with the golds of three rows; skip environments without
    an attribute `grader`. Raises ConfigError."""
    rows: dict[str, list[Task]] = {}
    for task in tasks:
        kept = rows.setdefault(task.env_id, [])
        if len(kept) < NUM_CHECKED_ROWS:
            kept.append(task)
    for own in rows.values():
        async with grader_of(make_env, own[0]) as grader:
            if grader is not None:
                await check_grader(grader, own)


async def trials(assembly: RolloutAssembly[TrainConfig]) -> str:
    """Forks of each custom environment are independent, and nothing outlives its episodes: in the
    doctor, in a dry run, and before a training whose algorithm forks."""
    if not (assembly.tries_all or assembly.config.algorithm.may_fork):
        return "not tried: the algorithm does not fork"
    for maker, sets in (await assembly.shared()).items():
        tasks = {task.env_id: task for rows in sets.values() for task in rows}
        for task in tasks.values() if maker.config.trial else ():
            if finding := await try_contract(maker, task):
                assembly.report(finding)
    return ""


async def sequence_lengths(assembly: Any) -> None:
    """The context of the model holds the longest sequence."""
    model_dir = await assembly.model()
    context = model_files.num_positions(model_files.read_model_config(model_dir))
    longest = (await assembly.rows()).longest
    if context and longest > context:
        raise DataError(
            f"data.max_length = {assembly.config.data.max_length}: a sequence has {longest} "
            f"tokens, but the context of {model_dir} is {context}; set data.max_length={context} "
            f"to cut it"
        )
