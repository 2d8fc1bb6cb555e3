"""Data checks of a dry run: both ends of every available data file, and a prompt and a gold of each
set.

These are the checks of the run itself for which all inputs exist. Nothing is started: servers of
roles get a dummy address, the set-up does not run, and search uses the shipped sample of Wikipedia,
since no query is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from msgspec.structs import replace

from agentenv.assembly.checks.checks import START, Has, refuse_dry
from agentenv.assembly.checks.start_checks import environment_classes, needs_of_environments
from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import SupervisedRunConfig
from agentenv.assembly.parts.assembly import TRAINED, Assembly, RolloutAssembly, SetConfig
from agentenv.assembly.parts.environments import EnvMaker, grader_of
from agentenv.assembly.reports.records import NOTED
from agentenv.base.config import Reporter
from agentenv.base.errors import ConfigError, MissingError
from agentenv.base.offload import in_thread
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limits, SamplingParams, Task
from agentenv.contract.env import Env, close_shared, shared_stats, start_grader
from agentenv.contract.plan import Independent
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.envs.grading.keys import GraderConfig, GraderKeys
from agentenv.envs.grading.reward import AnswerReward, ToolReward, check_grader
from agentenv.envs.program import ProgramEnv
from agentenv.envs.search.bm25 import BM25Config
from agentenv.envs.search.keys import SearchConfig
from agentenv.evaluation.subject import EvaluationAssembly, Subject
from agentenv.lab.diagnosis.contract import OF_MODEL
from agentenv.rollout import failure_log
from agentenv.rollout.actor import Actor
from agentenv.text.call_syntax import THOUGHT_CLOSE, THOUGHT_OPEN, sample_call
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import TagRenderer
from agentenv.training.supervised.data import RowLoader
from agentenv.training.supervised.run import SupervisedAssembly

# The trial of a program: one episode with a scripted policy, which shows how its calls are read.
#
# The policy thinks, calls tools twice with sample arguments, then answers. Each fork point forks
# once, so that replays are tried too.

MARK = "trial step"  # one in each turn with a call
NUM_CALLS = 2
DROPPED = "context/altered/thoughts_dropped"
SHOWN = (*NOTED, "context/", "diverged/", "system_as_user")


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
        is_open = prompt.rstrip().endswith(THOUGHT_OPEN)
        thought = f"{'' if is_open else THOUGHT_OPEN}\na thought\n{THOUGHT_CLOSE}\n\n"
        if not self._tools or number >= NUM_CALLS:
            return f"{thought}The answer is {rng.randrange(1000)}."
        call = sample_call(rng.choice(list(self._tools)))
        text = f"{thought}{MARK} {rng.randrange(1000)}"
        return self.renderer.calling(text, [call], self._tools)


async def try_program(
    make_env: Callable[[Task], Env], task: Task, renderer: Any, limits: Limits, report: Reporter
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
    found = {name: count for name, count in sorted(counts.items()) if name.startswith(SHOWN)}
    if shown := [f"{name} {count}" for name, count in found.items() if count]:
        yield f"trial, counted: {', '.join(shown)}"
    if counts[DROPPED]:
        yield (
            "trial: the program drops thoughts; for a policy that writes them, set "
            'env.kwargs.program.thoughts = "text"'
        )
    if not num_points:
        yield "trial: without a fork point an algorithm that forks has roots alone"
    yield from dict.fromkeys(f"trial, failed: {leaf.error}" for leaf in leaves if leaf.error)


ENDS = 1000  # number of rows to read from each end of a file
NOWHERE = "http://127.0.0.1:9"  # a dummy address for servers of roles
ENV_TABLES = ("env", "python", "grader", "prompt")  # whose files environments require

Grading = TypeVar("Grading", bound=GraderKeys)
AnyRun = TrainConfig | SupervisedRunConfig | EvaluateConfig


async def check_data(
    config: AnyRun,
    folder: Path,
    model: Path | None,
    absent: Collection[str],
    report: Reporter,
    *,
    is_elsewhere: bool = False,
) -> None:
    """Read, render and grade samples, and report the findings. `model`: a directory with a
    tokenizer, None if it is missing. `absent`: the keys of other missing inputs. `is_elsewhere`:
    the run is for another machine. Raises the errors that the run would raise."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(close_shared)
        assembly = _assembly(config, folder, model, stack, report)
        assembly.ends, assembly.has_weights = ENDS, False
        assembly.built |= {"model": model, "endpoint": None, "set_up": None}
        here: set[Has] = set() if model is None else {"model"}
        if not is_elsewhere:
            here.add("machine")
        if isinstance(assembly, RolloutAssembly):
            await _read_sets(assembly, model, absent, report, here)
        else:
            await _read_dialogues(assembly, model, absent, report)


def _assembly(
    config: AnyRun, folder: Path, model: Path | None, stack: AsyncExitStack, report: Reporter
) -> Assembly[Any]:
    if isinstance(config, TrainConfig):
        # Slow to load: after the checks of the configuration.
        from agentenv.training.supervised.assembly import TrainingAssembly

        return TrainingAssembly(config, folder, stack, report)
    if isinstance(config, EvaluateConfig):
        return EvaluationAssembly(config, Subject("", {}, folder, model), stack, report)
    return SupervisedAssembly(config, folder, stack, report)


# Questions.


async def _read_sets(
    assembly: RolloutAssembly[Any],
    model: Path | None,
    absent: Collection[str],
    report: Reporter,
    here: set[Has],
) -> None:
    """Read the questions of each set that exist, and try one of each."""
    config = assembly.config
    assembly.is_whole = False  # only the ends of large files are read
    assembly.tries_all = True
    assembly.built["urls"] = dict.fromkeys(config.roles, NOWHERE)
    keys = ("", *(f"{one.key}." for one in assembly.sets.values()))
    has_env = not any(_lacks(absent, f"{key}{name}") for key in keys for name in ENV_TABLES)
    missing = list[str]()
    if has_env:
        await environment_classes(assembly)
        missing += [line async for line in _not_installed(assembly)]
        if "machine" in here:
            await needs_of_environments(assembly)
    made = [one.key for one in assembly.sets.values() if assembly.makes(one.rows)]
    if made:
        report(
            "not checked, with env, grader and the trial of a program, since the run generates "
            f"the rows: {', '.join(made)} (the doctor generates and checks them)"
        )
    assembly.sets = {
        name: _local(one)
        for name, one in assembly.sets.items()
        if not _lacks(absent, one.key) and not assembly.makes(one.rows)
    }
    if assembly.sets:
        here |= {"rows", "env"} if has_env else {"rows"}
    has_sft = isinstance(config, TrainConfig) and config.sft is not None
    if has_sft and not _lacks(absent, "sft") and TRAINED in assembly.sets:
        here.add("sft")  # read with the renderer and the tools of the training questions
    await refuse_dry(assembly, (*START, *OF_MODEL), here)
    if missing:
        raise MissingError("; ".join(dict.fromkeys(missing)))
    if not assembly.sets:
        return
    makers = await assembly.makers() if has_env else {}
    for name, tasks in (await assembly.tasks()).items():
        parts = [f"read {len(tasks)} rows"]
        if name in makers:
            parts.append(await _prompt(assembly, name, model))
            parts.append(await _gold(makers[name], tasks[0]))
        report(f"{assembly.sets[name].key}: {'; '.join(parts)}")
    if TRAINED in makers and model is not None and "machine" in here:
        limits, task = assembly.sets[TRAINED].limits, (await assembly.tasks())[TRAINED][0]
        renderer = (await assembly.renderers())[TRAINED]
        await try_program(makers[TRAINED], task, renderer, limits, report)


async def _not_installed(assembly: RolloutAssembly[Any]) -> AsyncIterator[str]:
    """Lines on missing packages of the environments and graders of sets whose rows the run
    generates."""
    for one in map(_local, assembly.sets.values()):
        if not assembly.makes(one.rows) or assembly.makes((one.env.tools, one.prompt)):
            continue
        try:
            task = Task("none", one.env.id, "none", ("1",))
            async with grader_of(EnvMaker(one, assembly.resolve), task) as grader:
                if grader is not None:
                    await start_grader(grader)
        except MissingError as error:
            yield str(error)
        except Exception:  # it may need the output of the set-up
            continue


def _local(one: SetConfig) -> SetConfig:
    """The set with a grader of rules, and without web, index or cache."""
    search, grader = one.search, one.grader
    if isinstance(search, SearchConfig):
        search = replace(search, backend=BM25Config(), cache="", arpo_cache="")
    if isinstance(grader, GraderConfig):
        parts = {name: _by_rules(part) for name, part in grader.combined.items()}
        grader = replace(_by_rules(grader), combined=parts)
    return replace(one, search=search, grader=grader)


def _by_rules(grader: Grading) -> Grading:
    """The grader's keys without a judge."""
    return grader if grader.judge is None else replace(grader, kind="layered", judge=None)


def _lacks(absent: Collection[str], table: str) -> bool:
    return any(key.startswith(f"{table}.") for key in absent)


async def _prompt(assembly: RolloutAssembly[Any], name: str, model: Path | None) -> str:
    messages, info = (await assembly.episodes())[name]
    if model is None:
        return f"a prompt has {len(messages)} messages"
    renderer = (await assembly.renderers())[name]
    size, most = len(renderer.prompt(messages, info.get("tools", ()))), assembly.sets[name].limits
    return f"a prompt has {size} of {most.max_prompt_tokens} tokens"


async def _gold(maker: EnvMaker, task: Task) -> str:
    """Grade the row's own gold with the environment's grader; returns the result as text. Raises
    ConfigError if a built-in grader grades it as wrong."""
    async with grader_of(maker, task) as grader:
        if grader is None:
            return "only the environment grades it"
        (grade,) = await check_grader(grader, [task])
        if not grade.success and isinstance(grader, ToolReward | AnswerReward):
            raise ConfigError(
                f"grader: row {task.id}: its own gold answer {task.answers[0]!r} is graded as "
                f"wrong ({grade.reason}); choose another grader.kind, or fix the row"
            )
        matcher = getattr(grader, "matcher", grader)
        return (
            f"its gold answer is graded as {'correct' if grade.success else 'wrong'} "
            f"({type(matcher).__name__})"
        )


# Dialogues.


async def _read_dialogues(
    assembly: Assembly[Any], model: Path | None, absent: Collection[str], report: Reporter
) -> None:
    config = assembly.config
    if _lacks(absent, "data") or assembly.makes(config.data):
        return
    if model is None:
        number = await in_thread(RowLoader(config, assembly.resolve, report, ENDS).count)
        report(f"data: read {number} rows")
        return
    await refuse_dry(assembly, (*START, *OF_MODEL), {"model", "machine"})
    rows = await assembly.rows()  # type: ignore[attr-defined]
    report(f"data: {len(rows.train)} training rows, the longest has {rows.longest} tokens")
