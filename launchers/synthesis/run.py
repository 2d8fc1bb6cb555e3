"""Samples, sorts and writes a synthesis into its directory."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.engines.openai_chat import ChatEngine
from agentenv.errors import ConfigError
from agentenv.types import Message
from launchers.environments import try_env
from launchers.evaluation.parts import Builder, Questions
from launchers.evaluation.run import saved_of
from launchers.evaluation.store import Store
from launchers.evaluation.subject import Subject
from launchers.synthesis.config import Plan, set_name
from launchers.synthesis.output import (
    TRAJECTORIES,
    claim,
    rejected_rows,
    rl_row,
    sft_row,
    write_data,
)
from launchers.synthesis.questions import Dropped, read_questions, tool_names
from launchers.synthesis.report import class_table, reason_table, summarise
from launchers.synthesis.sampling import Sampling
from launchers.synthesis.sorting import Sorted, sort_question
from launchers.view import View


async def synthesize(plan: Plan, subject: Subject, out: Path, view: View) -> int:
    """Ask what `out` does not hold yet and write the data; how many trajectories failed.
    Cancelled by SIGTERM as by Ctrl-C."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    async with AsyncExitStack() as stack:
        builder = Builder(plan.evaluation, subject, stack, view.say)
        await builder.start()
        _check_hints(plan, builder)
        sets = await builder.questions()
        pairs, dropped = await read_questions(plan, builder, sets, view.say)
        tools = await tool_names(pairs, plan, sets)
        claim(out, plan)
        store = Store(out / TRAJECTORIES, saved_of(plan.evaluation, subject, builder))
        stack.callback(store.close)
        sampling = Sampling(plan, builder, sets, store, tools, view)
        questions = await sampling.run(pairs)
        config = plan.config
        found = [sort_question(one, config.filter, config.seed) for one in questions]
        await _write(plan, sets, out, found, dropped, view)
        return sampling.num_failed


async def _write(
    plan: Plan,
    sets: Mapping[str, Questions],
    out: Path,
    found: Sequence[Sorted],
    dropped: Sequence[Dropped],
    view: View,
) -> None:
    sft, rl = [], []
    for one in found:
        name, task = one.question.set_name, one.question.task
        if one.chosen:
            prompt = await _prompt(sets[set_name(name, "tools")], one)
            sft += [sft_row(judged, task, prompt, name) for judged in one.chosen]
        if one.kind == "hard":
            env = plan.sets[name].env
            rl.append(rl_row(task, name, env.id if env is not None else ""))
    summary = summarise(plan, found, dropped)
    write_data(out, sft, rl, rejected_rows(found, dropped), summary)
    view.show(class_table(summary))
    view.show(reason_table(summary))
    view.say(f"{out}: {len(sft)} dialogues in sft.jsonl, {len(rl)} questions in rl.jsonl")


async def _prompt(questions: Questions, one: Sorted) -> list[Message]:
    """The messages that the policy meets with tools: it shall learn there when it needs none."""
    messages, _ = await try_env(questions.make_env, one.question.task)
    return messages


def _check_hints(plan: Plan, builder: Builder) -> None:
    """Refuse hints where no text can be gone on with."""
    engine = builder.endpoint
    if plan.config.hints is None or not isinstance(engine, ChatEngine):
        return
    chosen = engine.endpoint.config.continuation
    if chosen == "turns" or (chosen == "auto" and not engine.endpoint.known):
        raise ConfigError(
            "hints: this endpoint takes chat messages and does not go on with a text; set "
            "engine.continuation = 'prefix' if it can, give --tokenizer for a vLLM or SGLang "
            "server, or take the table out"
        )
