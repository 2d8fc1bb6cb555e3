"""The checks of every start that build the parts: environments, tools, renderers and graders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from agentenv.adapters.trial import try_contract
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import RolloutAssembly
from agentenv.assembly.parts.environments import EnvMaker, grader_of, tables_of, try_env
from agentenv.base.errors import ConfigError, CrashError, reported_as
from agentenv.base.offload import in_thread
from agentenv.base.types import Message, Task
from agentenv.contract.env import Env, check_observation, check_step
from agentenv.contract.tool_env import ToolEnv
from agentenv.engines.openai import OpenAIConfig
from agentenv.envs.grading.reward import NUM_CHECKED_ROWS, check_grader
from agentenv.text.contexts import for_programs
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import TagRenderer, ToolSchemas

logger = logging.getLogger(__name__)


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
