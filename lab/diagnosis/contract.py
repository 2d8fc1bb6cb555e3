"""Contract checks of a run's parts: policy, renderer, engine and learner agree; environments, tools
and graders conform; services answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from msgspec.structs import replace

from agentenv.assembly.checks.checks import EPISODES, MACHINE, MODEL, RUNS, TRAIN, Check, Skip
from agentenv.assembly.parts.assembly import TRAINED, Assembly
from agentenv.assembly.parts.environments import EnvMaker, grader_of
from agentenv.base import errors
from agentenv.base.deadline import within
from agentenv.base.offload import in_thread
from agentenv.base.types import Completion, Message, Task
from agentenv.contract.env import Grader, graded, start_grader
from agentenv.engines.scripted import ScriptedConfig
from agentenv.envs.grading.reward import AnswerReward
from agentenv.envs.search.corpus import Query
from agentenv.envs.search.providers import RemoteSearchConfig, WebConfig
from agentenv.text.call_syntax import TEXT, sample_call
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
    wanted, stop = sample_call(tool), None
    name = wanted.name
    if isinstance(renderer, TagRenderer):
        stop = f"</{name}>"
        if not takes_object(tool):  # its argument is a text
            wanted = replace(wanted, arguments=dict.fromkeys(wanted.arguments, TEXT))
    text = renderer.calling("", [wanted], tools)
    written = Completion(renderer.encode(text), [], [], "stop", [], stop)
    found = renderer.parse(written, tools, prompt).tool_calls
    if list(found) != [wanted]:
        got = ", ".join(f"{one.name}({one.arguments})" for one in found) or "no call"
        raise errors.ConfigError(
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


async def kernels(assembly: Assembly[Any]) -> None:
    """This machine runs the learner's kernels, unless its ranks are elsewhere."""
    from agentenv.learners.trees.liger import check_device  # loads torch

    learner = assembly.config.learner
    if learner.fused == "liger" and learner.launch == "local":
        check_device()


async def parity(assembly: TrainingAssembly) -> str:
    """Engine and learner compute the same log-probs."""
    config = assembly.config
    if isinstance(config.engine, ScriptedConfig):
        raise Skip("the scripted engine has no model")
    if config.resources.in_turn:
        raise Skip("engine and learner alternate on their GPUs; the run checks its first publish")
    learner, engine = await assembly.learner_and_engine()
    prompts = await assembly.probe_prompts()
    probe = ParityProbe(engine, learner, prompts, sampling_at=config.sampling.at)
    probe.start()
    gap = await probe.finish()
    if gap is None:
        raise Skip("the engine did not answer in time")
    message = f"{gap.mean:.2g} nats on average, at most {gap.max:.2g}, over {gap.num_tokens} tokens"
    in_float32 = await in_thread(computes_in_float32, config)
    allowed, stop = gap_limits(config.train, in_float32)
    if gap.worst_mean > stop:
        raise errors.ConfigError(
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
JOINTS = (". ", " or ", "\n", ", also known as ", "; ", " - ")  # of two candidates
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
        pairs = list(zip(rows, rows[1:] + rows[:1], strict=True))
        for task, other in pairs:
            gold = task.answers[0]
            if not await is_right(grader, task, gold):
                raise errors.ConfigError(
                    f"row {task.id}: the grader grades its own gold answer {gold!r} as wrong; does "
                    "the gold answer have the form that the grader reads, and does grader.kind fit "
                    "such answers?"
                )
            if await is_right(grader, task, other.answers[0]):
                raise errors.ConfigError(
                    f"row {task.id}: the grader grades {other.answers[0]!r}, the gold answer of "
                    f"row {other.id}, as correct instead of {gold!r}; any answer earns a reward: "
                    "choose a stricter grader"
                )
        for task, other in pairs[:NUM_GUESSED]:
            await refuse_two_guesses(grader, task, other.answers[0])
        for task in rows:
            gold = task.answers[0]
            for spelled in respelled(gold):
                if not await is_right(grader, task, spelled):
                    raise errors.ConfigError(
                        f"row {task.id}: the grader grades its gold answer {gold!r}, written as "
                        f"{spelled!r}, as wrong; correct answers in another form earn nothing: "
                        f"{_more_lenient(grader)}"
                    )
    return (
        f"{len(rows)} gold answers correct, shuffled ones and two in one answer wrong, reformatted "
        "ones correct"
    )


async def refuse_two_guesses(grader: Grader, task: Task, other: str) -> None:
    """Raises ConfigError for a grader that accepts an answer with two candidates: the gold one and
    `other`, which is wrong by itself, unless it is of another kind or shares a word with a gold
    answer, of which it may be another form."""
    gold, texts = task.answers[0], list[str]()
    words = _words(" ".join(task.answers))
    if _kind(gold) == _kind(other) and words.isdisjoint(_words(other)):
        texts = [joint.join(both) for joint in JOINTS for both in permutations((gold, other))]
    paid = [text for text in texts if await is_right(grader, task, text)]
    if paid:
        shown = " and ".join(map(repr, paid[:2])).replace("; ", ";")  # "; " begins a remedy
        raise errors.ConfigError(
            f"row {task.id}: {len(paid)} of {len(texts)} answers that name a second candidate "
            f"besides the gold answer are graded as correct, such as {shown}; it rewards guessing "
            'twice, which a policy learns: reject such answers, as kind = "layered" does'
        )


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.lower())}


def _kind(text: str) -> str:
    if text.strip().lower() in ("yes", "no", "true", "false"):
        return "yes or no"
    return "number" if any(letter.isdigit() for letter in text) else "words"


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
    failed = f"row {task.id}: the grader cannot grade {answer!r}"
    with errors.reported_as(errors.ConfigError, failed, errors.GraderError, errors.CrashError):
        return (await graded(grader, task, [Message("assistant", text)], {})).success


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
    except (errors.InfraError, errors.StallError, errors.EnvError) as error:
        raise errors.ConfigError(
            f"a search failed: {error}; check key, quota and network of the search service"
        ) from error
    finally:
        await backend.close()
    return f"a search returned {len(hits)} results"


OF_MODEL = (
    Check("packed model", "contract", RUNS, packed_model, MODEL),
    Check("learner's kernels", "contract", RUNS, kernels, MACHINE),
    Check("learner's settings", "contract", RUNS, learner_settings, MODEL),
)
CONTRACT = (
    *OF_MODEL,
    Check("calls come back", "contract", TRAIN, calls, after=EPISODES),
    Check("services", "contract", TRAIN, services, remote=True),
    Check("grader sanity", "contract", TRAIN, grader_sanity, after=EPISODES),
)
