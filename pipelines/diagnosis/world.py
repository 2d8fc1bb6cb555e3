"""Whether environments, tools and graders do what they promise, and services answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from agentenv.deadline import within
from agentenv.env import Env
from agentenv.envs.grading.reward import AnswerReward
from agentenv.envs.search.corpus import Query
from agentenv.envs.search.providers import RemoteSearchConfig, WebConfig
from agentenv.errors import ConfigError, CrashError, EnvError, GraderError, InfraError, StallError
from agentenv.metrics import LoopLag
from agentenv.pipelines.diagnosis.guesses import guess_twice, remedy
from agentenv.pipelines.diagnosis.protocol import sample_call
from agentenv.pipelines.rl.parts import TrainingAssembly
from agentenv.pipelines.setup.assembly import TRAINED
from agentenv.pipelines.setup.checks import Skip
from agentenv.pipelines.setup.data import EnvMaker
from agentenv.testing import check_end, check_tool_env, play
from agentenv.tool_env import Grader, graded, start_grader
from agentenv.types import Message, Task

NUM_GRADED = 8  # rows whose golds are graded
NUM_GUESSED = 3  # of them, that are given a second guess
CONFORM_S = 120.0
SERVICE_S = 60.0
LATE_MS = 100.0


async def grader_sanity(assembly: TrainingAssembly) -> str:
    """The right answer is right, in another spelling too; another row's is wrong, also beside the
    right one."""
    found = []
    for maker, sets in await assembly.shared():
        for name, tasks in sets.items():
            found.append(f"{name}: {await check_grader_sanity(maker, tasks)}")
    return ", ".join(found)


async def check_grader_sanity(make_env: EnvMaker, tasks: Sequence[Task]) -> str:
    """Raises ConfigError for a grader that misjudges answers."""
    rows = distinct(tasks)
    if len(rows) < 2:
        raise Skip("there are no two rows with different answers")
    env = make_env(rows[0])
    try:
        grader: Grader | None = getattr(env, "grader", None)
        if grader is None:
            raise Skip(f"{rows[0].env_id} has no grader")
        await start_grader(grader)
        for task, other in zip(rows, rows[1:] + rows[:1], strict=True):
            gold = task.answers[0]
            if not await is_right(grader, task, gold):
                raise ConfigError(
                    f"row {task.id}: the grader finds its own gold {gold!r} wrong; is the gold of "
                    "the form that the grader reads, grader.kind the one for such answers?"
                )
            if await is_right(grader, task, other.answers[0]):
                raise ConfigError(
                    f"row {task.id}: the grader finds {other.answers[0]!r}, the gold of row "
                    f"{other.id}, right, though {gold!r} is; whatever is answered earns a reward: "
                    "choose a stricter grader"
                )
        await refuse_two_guesses(grader, rows)
        for task in rows:
            gold = task.answers[0]
            for spelled in respelled(gold):
                if not await is_right(grader, task, spelled):
                    raise ConfigError(
                        f"row {task.id}: the grader finds its gold {gold!r}, spelled {spelled!r}, "
                        "wrong; right answers in another form earn nothing: "
                        f"{_more_lenient(grader)}"
                    )
    finally:
        await env.close()
    return (
        f"{len(rows)} golds right, shuffled ones and two in one answer wrong, respelled ones right"
    )


async def refuse_two_guesses(grader: Grader, rows: Sequence[Task]) -> None:
    """Raises ConfigError for a grader that finds an answer with two candidates right."""
    golds = [one.answers[0] for one in rows]
    for task in rows[:NUM_GUESSED]:
        guesses = await guess_twice(
            partial(is_right, grader, task), task.answers[0], task.answers, golds
        )
        paid = [one.text for one in guesses if one.is_paid]
        if paid:
            shown = " and ".join(map(repr, paid[:2])).replace("; ", ";")  # "; " begins a remedy
            raise ConfigError(
                f"row {task.id}: {len(paid)} of {len(guesses)} answers that name a second "
                f"candidate beside the gold are graded right, such as {shown}; {remedy(guesses)}"
            )


def _more_lenient(grader: Grader) -> str:
    """What to do where a grader reads one spelling alone: one of ours is chosen by its keys."""
    if isinstance(grader, AnswerReward):
        return (
            "grader.kind = 'layered' (without [grader], agentenv.envs.qa_grader.make_grader) reads "
            "forms"
        )
    return f"let {type(grader).__name__} compare by agentenv.envs.grading.verdict.same_answer"


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """Some rows with answers that differ."""
    found: dict[str, Task] = {}
    for task in tasks:
        if task.answers:
            found.setdefault(task.answers[0].strip().lower(), task)
        if len(found) == NUM_GRADED:
            break
    return list(found.values())


def respelled(gold: str) -> list[str]:
    """The same answer as people also write it."""
    found = [f"  {gold} ", f"{gold}."]
    if gold.upper() != gold and not any(one in gold for one in "\\$^_{"):
        found.append(gold.upper())
    return found


async def is_right(grader: Grader, task: Task, answer: str) -> bool:
    """The verdict on an answer in the usual form. Raises ConfigError where there is none."""
    text = rf"<think>.</think><answer>\boxed{{{answer}}}</answer>"
    try:
        grade = await graded(grader, task, [Message("assistant", text)], {})
    except (GraderError, CrashError) as error:
        raise ConfigError(
            f"row {task.id}: the grader gives no verdict on {answer!r}: {error}"
        ) from error
    if not math.isfinite(grade.reward):
        raise ConfigError(f"row {task.id}: the reward of {answer!r} is {grade.reward}")
    return grade.success


async def conformance(assembly: TrainingAssembly) -> str:
    """The environment keeps its contract (agentenv/testing.py), and no step holds up the loop."""
    if assembly.config.roles or _asks_web(assembly):
        raise Skip("its episodes ask paid services; check_tool_env in a test of yours can")
    maker, (_, info) = (await assembly.makers())[TRAINED], (await assembly.episodes())[TRAINED]
    task = (await assembly.tasks())[TRAINED][0]
    gold = task.answers[0] if task.answers else ""
    answer = Message("assistant", f"<think>.</think><answer>{gold}</answer>")
    call = [
        Message("assistant", "<think>.</think>", (sample_call(tool, every=False),))
        for tool in list(info.get("tools", ()))[:1]
    ]
    return await check_conformance(maker, task, [*call, answer])


async def check_conformance(maker: EnvMaker, task: Task, actions: Sequence[Message]) -> str:
    """Raises ConfigError with what breaks the contract."""

    def make(task: Task) -> Env:
        return maker(task)

    try:
        check_end(await play(make, task, actions))
    except (AssertionError, EnvError) as error:
        raise Skip(
            f"a call and an answer are no whole episode of it ({error}); agentenv.testing."
            "check_tool_env with actions of yours checks it"
        ) from error
    lag = LoopLag()
    measuring = asyncio.create_task(lag.run())
    try:
        async with asyncio.timeout(CONFORM_S):
            await check_tool_env(make, task, actions)
    except AssertionError as error:
        raise ConfigError(
            f"{task.env_id} breaks the contract of environments: {str(error).replace('; ', ', ')}; "
            "see 'An environment of your own' in README.md, and run check_tool_env of "
            "agentenv/testing.py in a test of yours"
        ) from error
    except TimeoutError:
        raise Skip(f"it took longer than {CONFORM_S:g} s") from None
    finally:
        measuring.cancel()
    late = lag.figures().get("lag_max_ms", 0.0)
    return f"the loop was at most {late:.0f} ms late" + (" (long)" if late > LATE_MS else "")


def _asks_web(assembly: TrainingAssembly) -> bool:
    search = assembly.config.search
    return search is not None and isinstance(search.backend, WebConfig | RemoteSearchConfig)


async def services(assembly: TrainingAssembly) -> str:
    """The key of the search service is there and accepted, and its quota is not used up: one
    search."""
    search = assembly.config.search
    if search is None or not _asks_web(assembly):
        raise Skip("no search service is configured")
    backend = search.backend.build()
    try:
        hits = await within(SERVICE_S, "the search service", _one_search(backend))
    except (InfraError, StallError, EnvError) as error:
        raise ConfigError(
            f"one search failed: {error}; look at key, quota and network of the search service"
        ) from error
    finally:
        await backend.close()
    return f"one search gave {hits} results"


async def _one_search(backend: object) -> int:
    await backend.start()  # type: ignore[attr-defined]
    return len(await backend.search(Query("capital of Peru", 3)))  # type: ignore[attr-defined]
