"""The trial of a program: one episode with a scripted policy, which shows how its calls are read.

The policy calls tools twice with sample arguments and then answers. Each fork point forks once, so
that replays are tried too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec.structs import replace

from agentenv.assembly.reports.records import NOTED
from agentenv.base.config import Reporter
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limits, SamplingParams, Task, ToolCall
from agentenv.base.untrusted import schema_types
from agentenv.contract.env import Env, shared_stats
from agentenv.contract.plan import Independent
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.envs.program import ProgramEnv
from agentenv.rollout import failure_log
from agentenv.rollout.actor import Actor
from agentenv.text.call_syntax import properties_of
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import TagRenderer

MARK = "trial step"  # one in each turn with a call
NUM_CALLS = 2
SHOWN = (*NOTED, "diverged/")
SAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}


@dataclass(frozen=True)
class EachPoint(Independent):
    """The first trajectory forks once at each fork point."""

    fork_window: int = 1

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1

    def on_fork_point(self, tree: TrajectoryTree, node: Node, entropies: Any, rng: Random) -> int:
        return int("+" not in node.branch)


class TrialPolicy:
    """The script of an engine; `renderer` is that of the rollouts, which shows it the tools."""

    def __init__(self, renderer: TagRenderer | NativeRenderer) -> None:
        self.renderer = copy(renderer)
        self._stop = renderer.stop
        self.renderer.stop = self._seen  # type: ignore[method-assign]
        self._tools: Sequence[dict[str, Any]] = ()

    def _seen(self, tools: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        self._tools = tools
        return self._stop(tools)

    def __call__(self, prompt: str, rng: Random) -> str:
        number = prompt.count(MARK)
        if not self._tools or number >= NUM_CALLS:
            return f"The answer is {rng.randrange(1000)}."
        call = sample_call(rng.choice(list(self._tools)))
        text = f"{MARK} {rng.randrange(1000)}"
        if isinstance(self.renderer, NativeRenderer):
            return self.renderer.calling(text, [call])
        return self.renderer.calling(text, [call], self._tools)


def sample_call(tool: dict[str, Any]) -> ToolCall:
    """A call with a value for each parameter."""
    arguments = {}
    for name, schema in properties_of(tool).items():
        types = sorted(schema_types(schema) - {"string"})
        is_text = "string" in schema_types(schema) or not types
        value = "sample" if is_text else SAMPLES[types[0]]
        chosen = schema.get("enum") if isinstance(schema, dict) else None
        arguments[name] = chosen[0] if chosen else value
    return ToolCall(str(tool["name"]), arguments)


async def try_program(
    make_env: Callable[[Task], Env],
    task: Task,
    renderer: Any,
    limits: Limits,
    report: Reporter,
) -> None:
    """Play the episode of a task, if its environment is a program, and report on its calls."""
    env = make_env(task)
    await env.close()  # it only has the keys
    if not isinstance(env, ProgramEnv) or not env.config.trial_s:
        return
    policy = TrialPolicy(renderer)
    engine = ScriptedEngine(
        ScriptedConfig(max_model_len=1 << 20), renderer.tokenizer, script=policy
    )
    limits = replace(limits, max_failures=0)
    actor = Actor(engine, policy.renderer, make_env, limits, SamplingParams(max_tokens=1), seed=0)
    logs = logging.getLogger(failure_log.__name__)
    level = logs.level
    logs.setLevel(logging.CRITICAL)  # the report has the errors
    try:
        async with asyncio.timeout(env.config.trial_s):
            tree = await actor.rollout(task, EachPoint(2 * NUM_CALLS))
    except TimeoutError:
        report(f"the program's trial did not end within {env.config.trial_s:g} s")
        return
    finally:
        logs.setLevel(level)
        await engine.close()
    for line in _findings(tree):
        report(line)


def _findings(tree: TrajectoryTree) -> Iterator[str]:
    leaves = tree.leaves()
    num_points = sum(node.num_forks is not None for node in tree.nodes)
    stats = {name: int(value) for name, value in shared_stats().items()}
    replays = f"{stats.get('program/replays_exact', 0)} of {stats.get('program/replays', 0)}"
    yield (
        f"trial of the program, task {tree.task.id}: {sum(bool(n.action_ids) for n in tree.nodes)} "
        f"turns, {num_points} fork points, {replays} replays exact"
    )
    counts: Counter[str] = Counter()
    for leaf in leaves:
        counts.update(leaf.info.get("endpoint", {}))
    counts["system_as_user"] = stats.get("program/system_as_user", 0)
    shown = [f"{name} {number}" for name, number in sorted(counts.items()) if _is_shown(name)]
    if shown := [one for one in shown if not one.endswith(" 0")]:
        yield f"trial, counted: {', '.join(shown)}"
    contexts = [f"{name} {counts[name]}" for name in sorted(counts) if name.startswith("context/")]
    if contexts:
        yield f"trial, contexts: {', '.join(contexts)}"
    if not num_points:
        yield "trial: without a fork point an algorithm that forks has roots alone"
    yield from dict.fromkeys(f"trial, failed: {leaf.error}" for leaf in leaves if leaf.error)


def _is_shown(name: str) -> bool:
    return name.startswith(SHOWN) or name == "system_as_user"
