"""Contract checks of a run's parts: policy, renderer, engine and learner agree; environments, tools
and graders conform; services answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

from msgspec.structs import replace

from agentenv.assembly.checks.checks import EPISODES, MODEL, RUNS, TRAIN, Check, Skip
from agentenv.assembly.parts.assembly import TRAINED, Assembly
from agentenv.assembly.parts.environments import EnvMaker, grader_of
from agentenv.base.deadline import within
from agentenv.base.errors import (
    ConfigError,
    CrashError,
    EnvError,
    GraderError,
    InfraError,
    StallError,
)
from agentenv.base.offload import in_thread
from agentenv.base.types import Completion, Message, Task
from agentenv.contract.env import Grader, graded, start_grader
from agentenv.engines.scripted import ScriptedConfig
from agentenv.envs.grading.reward import AnswerReward
from agentenv.envs.search.corpus import Query
from agentenv.envs.search.providers import RemoteSearchConfig, WebConfig
from agentenv.text.call_syntax import sample_call
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import Renderer, TagRenderer, ToolSchemas
from agentenv.text.tags import takes_object
from agentenv.training.loop.parity import ParityProbe, computes_in_float32, gap_limits
from agentenv.training.supervised.assembly import TrainingAssembly


async def calls(assembly: TrainingAssembly) -> str:
    """The parser returns the call that the renderer writes for each tool."""
    renderers, episodes = await assembly.renderers(), await assembly.episodes()
    renderer, (messages, info) = renderers[TRAINED], episodes[TRAINED]
    tools = info.get("tools", ())
    if not tools:
        raise Skip("the environment has no tools")
    prompt = renderer.prompt(messages, tools)
    for tool in tools:
        refuse_lost_call(renderer, prompt, tools, tool)
    return ", ".join(str(tool["name"]) for tool in tools)


def refuse_lost_call(
    renderer: Renderer, prompt: Sequence[int], tools: ToolSchemas, tool: dict[str, Any]
) -> None:
    """Raises ConfigError if the parser does not recover a call of this tool."""
    assert isinstance(renderer, TagRenderer | NativeRenderer)
    wanted, stop = sample_call(tool, "1"), None
    name = wanted.name
    if isinstance(renderer, TagRenderer):
        stop = f"</{name}>"
        if not takes_object(tool):  # its argument is a text
            wanted = replace(wanted, arguments=dict.fromkeys(wanted.arguments, "1"))
    text = renderer.calling("", [wanted], tools)
    written = Completion(renderer.encode(text), [], [], "stop", [], stop)
    found = renderer.parse(written, tools, prompt).tool_calls
    if list(found) != [wanted]:
        got = ", ".join(f"{one.name}({one.arguments})" for one in found) or "no call"
        raise ConfigError(
            f"the tool {name!r}: its call {text!r} is parsed as {got}; choose another "
            "renderer.name or tool name"
        )


async def packed_model(assembly: Assembly[Any]) -> str:
    """The learner's computation of a small model of this family matches transformers."""
    from agentenv.learners.ranks.model_check import TOLERANCE, check_model  # loads torch

    learner, model = assembly.config.learner, await assembly.model()
    await in_thread(check_model, model, learner.context_parallel)
    return f"within {TOLERANCE:g} nats"


async def learner_settings(assembly: Assembly[Any]) -> None:
    """The learner's settings fit the model: heads, adapters, losses, optimizer."""
    from agentenv.learners.ranks.rank import check_settings  # loads torch

    config, model = assembly.config, await assembly.model()
    algorithm = getattr(config, "algorithm", None)
    await in_thread(check_settings, model, config.learner, algorithm)


async def parity(assembly: TrainingAssembly) -> str:
    """Engine and learner compute the same log-probs."""
    config = assembly.config
    if isinstance(config.engine, ScriptedConfig):
        raise Skip("the scripted engine has no model")
    if config.resources.in_turn:
        raise Skip("engine and learner alternate on their GPUs; the run checks its first publish")
    learner, engine = await assembly.learner_and_engine()
    probe = ParityProbe(engine, learner, await assembly.probe_prompts())
    probe.start()
    gap = await probe.finish()
    if gap is None:
        raise Skip("the engine did not answer in time")
    message = f"{gap.mean:.2g} nats on average, at most {gap.max:.2g}, over {gap.num_tokens} tokens"
    in_float32 = await in_thread(computes_in_float32, config)
    allowed, stop = gap_limits(config.train, in_float32)
    if gap.worst_mean > stop:
        raise ConfigError(
            f"{gap.worst or 'the engine'} and the learner disagree by {message}, more than "
            f"train.stop_logprob_gap = {stop:g}; check for a different dtype, quantization or "
            "model path"
        )
    if gap.worst_mean > allowed:
        message += f" (beyond train.max_logprob_gap = {allowed:g}: the run will warn)"
    return message


# Environments, graders, services.

NUM_GRADED = 8  # rows whose golds are graded
NUM_GUESSED = 3  # rows whose golds get a second candidate
SERVICE_S = 60.0


async def grader_sanity(assembly: TrainingAssembly) -> str:
    """The grader accepts the gold answer, also reformatted, and rejects that of another row, also
    next to the gold answer."""
    found = []
    for maker, sets in (await assembly.shared()).items():
        for name, tasks in sets.items():
            found.append(f"{name}: {await check_grader_sanity(maker, tasks)}")
    return ", ".join(found)


async def check_grader_sanity(make_env: EnvMaker, tasks: Sequence[Task]) -> str:
    """Raises ConfigError for a grader that misjudges answers."""
    rows = distinct(tasks)
    if len(rows) < 2:
        raise Skip("no two rows have different answers")
    async with grader_of(make_env, rows[0]) as grader:
        if grader is None:
            raise Skip(f"only {rows[0].env_id} itself grades, such as by its state")
        await start_grader(grader)
        for task, other in zip(rows, rows[1:] + rows[:1], strict=True):
            gold = task.answers[0]
            if not await is_right(grader, task, gold):
                raise ConfigError(
                    f"row {task.id}: the grader grades its own gold answer {gold!r} as wrong; does "
                    "the gold answer have the form that the grader reads, and does grader.kind fit "
                    "such answers?"
                )
            if await is_right(grader, task, other.answers[0]):
                raise ConfigError(
                    f"row {task.id}: the grader grades {other.answers[0]!r}, the gold answer of "
                    f"row {other.id}, as correct instead of {gold!r}; any answer earns a reward: "
                    "choose a stricter grader"
                )
        await refuse_two_guesses(grader, rows)
        for task in rows:
            gold = task.answers[0]
            for spelled in respelled(gold):
                if not await is_right(grader, task, spelled):
                    raise ConfigError(
                        f"row {task.id}: the grader grades its gold answer {gold!r}, written as "
                        f"{spelled!r}, as wrong; correct answers in another form earn nothing: "
                        f"{_more_lenient(grader)}"
                    )
    return (
        f"{len(rows)} gold answers correct, shuffled ones and two in one answer wrong, reformatted "
        "ones correct"
    )


async def refuse_two_guesses(grader: Grader, rows: Sequence[Task]) -> None:
    """Raises ConfigError for a grader that accepts an answer with two candidates."""
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
                f"candidate besides the gold answer are graded as correct, such as {shown}; "
                f"{remedy(guesses)}"
            )


def _more_lenient(grader: Grader) -> str:
    """The remedy for a grader that accepts only one spelling."""
    if isinstance(grader, AnswerReward):
        return (
            "grader.kind = 'layered' (without [grader], agentenv.envs.qa_grader.make_grader) reads "
            "forms"
        )
    return f"let {type(grader).__name__} compare by agentenv.envs.grading.verdict.same_answer"


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """At most NUM_GRADED rows with different answers."""
    found: dict[str, Task] = {}
    for task in tasks:
        if task.answers:
            found.setdefault(task.answers[0].strip().lower(), task)
        if len(found) == NUM_GRADED:
            break
    return list(found.values())


def respelled(gold: str) -> list[str]:
    """Other spellings of the same answer."""
    found = [f"  {gold} ", f"{gold}."]
    if gold.upper() != gold and not any(one in gold for one in "\\$^_{"):
        found.append(gold.upper())
    return found


async def is_right(grader: Grader, task: Task, answer: str) -> bool:
    """Whether the grader accepts an answer in the usual format. Raises ConfigError if it fails."""
    text = rf"<think>.</think><answer>\boxed{{{answer}}}</answer>"
    try:
        grade = await graded(grader, task, [Message("assistant", text)], {})
    except (GraderError, CrashError) as error:
        raise ConfigError(f"row {task.id}: the grader cannot grade {answer!r}: {error}") from error
    if not math.isfinite(grade.reward):
        raise ConfigError(f"row {task.id}: the reward of {answer!r} is {grade.reward}")
    return grade.success


async def services(assembly: TrainingAssembly) -> str:
    """The search service accepts the key, and its quota is not exhausted: one search."""
    search = assembly.config.search
    if search is None or not isinstance(search.backend, WebConfig | RemoteSearchConfig):
        raise Skip("no search service is configured")
    backend = search.backend.build()
    try:
        await within(SERVICE_S, "the search service", backend.start())
        query = Query("capital of Peru", 3)
        hits = await within(SERVICE_S, "the search service", backend.search(query))
    except (InfraError, StallError, EnvError) as error:
        raise ConfigError(
            f"a search failed: {error}; check key, quota and network of the search service"
        ) from error
    finally:
        await backend.close()
    return f"a search returned {len(hits)} results"


# Whether a grader rewards guessing: answers that name another candidate next to the correct one.
# The other candidate is wrong by itself, is of the same kind (a number, words, yes or no) and
# shares no word with the correct answer, so it is neither an alias nor a more exact form.

IsRight = Callable[[str], Awaitable[bool]]

JOINTS = (". ", " or ", "\n", ", also known as ", "; ", " - ")
MAX_TRIED = 8  # candidates; the first one that is wrong by itself is used
OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_WORDS = re.compile(r"\w+")


class Guess(NamedTuple):
    """An answer with two candidates; `is_paid`: it was graded as correct."""

    text: str
    right_first: bool
    is_paid: bool


async def guess_twice(
    is_right: IsRight, answer: str, golds: Sequence[str], candidates: Iterable[str]
) -> list[Guess]:
    """The correct answer joined with another candidate, in both orders, graded; empty if no
    candidate is suitable."""
    words = _words(" ".join((answer, *golds)))
    opposite = OPPOSITES.get(answer.strip().lower())
    fitting = [
        one
        for one in ([opposite] if opposite else dict.fromkeys(candidates))
        if _kind(one) == _kind(answer) and words.isdisjoint(_words(one))
    ]
    for other in fitting[:MAX_TRIED]:
        if not await is_right(other):
            pairs = product(JOINTS, permutations((answer, other)))
            texts = [(joint.join(both), both[0] == answer) for joint, both in pairs]
            return [Guess(text, first, await is_right(text)) for text, first in texts]
    return []


def _words(text: str) -> set[str]:
    return {*_WORDS.findall(text.lower())}


def _kind(text: str) -> str:
    if text.strip().lower() in OPPOSITES:
        return "yes or no"
    return "number" if any(letter.isdigit() for letter in text) else "words"


def remedy(guesses: Sequence[Guess]) -> str:
    """The remedy for a grader that rewards some of these guesses."""
    orders = {one.right_first for one in guesses if one.is_paid}
    if len(orders) == 2:
        found = "it rewards guessing twice, which a policy learns"
    else:
        place = "first" if orders == {True} else "last"
        found = f"of two candidates it reads only the {place}, so that an answer may list several"
    return f'{found}: reject answers with two candidates, as kind = "layered" does'


OF_MODEL = (
    Check("packed model", "contract", RUNS, packed_model, MODEL),
    Check("learner's settings", "contract", RUNS, learner_settings, MODEL),
)
CONTRACT = (
    *OF_MODEL,
    Check("calls come back", "contract", TRAIN, calls, after=EPISODES),
    Check("services", "contract", TRAIN, services, remote=True),
    Check("grader sanity", "contract", TRAIN, grader_sanity, after=EPISODES),
)
