"""Synthesizes data: `agentenv synthesize SUBJECT [key=value ...]`, see
docs/synthesis.md.

The policy answers each question without tools, with tools, and with hints inserted into answers
without tools. Correct trajectories that pass the filters become dialogues for `agentenv sft`;
unsolved questions become data for `agentenv train`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.keys.evaluation import SynthesisConfig, SynthesisPlan, make_plan, set_name
from agentenv.assembly.keys.help import KeysParser
from agentenv.assembly.parts.assembly import Questions
from agentenv.assembly.parts.environments import try_env
from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.rundir import LOG_FILE
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import ConfigError
from agentenv.engines.chat import ChatEngine
from agentenv.engines.openai import TokensEngine
from agentenv.evaluation.run import chosen_sets, saved_of
from agentenv.evaluation.store import Store
from agentenv.evaluation.subject import EvaluationAssembly, Subject, configured
from agentenv.lab.recipes import sorting
from agentenv.lab.recipes.sampling import SynthesisSampling, read_questions, tool_names
from agentenv.launchers.command import add_dry_run, add_questions, parse, subject_of

FOLDER = "synthesis"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted."""
    parser = KeysParser(
        prog="agentenv synthesize",
        usage="agentenv synthesize SUBJECT [key.sub=value ...] [options]",
        description="Sample trajectories of questions with and without tools, and sort them into "
        "data for agentenv sft and questions for agentenv train.",
    )
    out = f"folder of the data, from which the command also resumes; default {FOLDER}/NAME"
    add_dry_run(parser)
    add_questions(parser, SynthesisConfig, out)
    return exit_code_of(
        partial(_run, parse(parser, argv)),
        "writing the data",
        interrupted="interrupted; the same command continues with the missing trajectories",
    )


def _run(arguments: argparse.Namespace, view: View) -> int:
    subject = subject_of(arguments, view)
    plan = _plan(arguments, subject, view)
    if arguments.dry_run:
        from agentenv.lab.diagnosis.dry_run import dry_run  # slow to load

        return dry_run(plan.evaluation, arguments, view, subject.run, str(subject.model or ""))
    out = arguments.out or Path(FOLDER) / f"{subject.name}-{'-'.join(plan.sets)}".replace("/", "-")
    view.wait_for("getting ready", "the questions")
    num_failed = run_until_done(synthesize(plan, subject, out, view), view)
    if num_failed:
        view.log(f"{num_failed} trajectories failed; the same command retries them")
    view.end()
    path = shlex.quote(str(out))
    view.suggest(
        {
            f"agentenv sft CONFIG data.train={path}/sft.jsonl": "imitate the dialogues",
            f"agentenv train CONFIG data.train={path}/rl.jsonl": "train on the hard questions",
        }
    )
    return 0


def _plan(arguments: argparse.Namespace, subject: Subject, view: View) -> SynthesisPlan:
    """The plan of the arguments; it uses the subject's settings, but not its sets."""
    settings = {key: value for key, value in subject.raw.items() if key != "sets"}
    subject = subject._replace(raw=settings)
    plan = configured(arguments, subject, SynthesisConfig, make_plan, view.log)
    if not arguments.n:
        return plan
    return replace(plan, evaluation=chosen_sets(plan.evaluation, (), arguments.n))


async def synthesize(plan: SynthesisPlan, subject: Subject, out: Path, view: View) -> int:
    """Sample the trajectories that `out` lacks and write the data; returns the number of failed
    trajectories."""
    async with AsyncExitStack() as stack:
        assembly = EvaluationAssembly(plan.evaluation, subject, stack, view.log)
        await refuse(assembly, "model")
        endpoint = await assembly.endpoint()
        _check_hints(plan, endpoint)
        await refuse(assembly)
        sets = await assembly.questions()
        pairs, dropped = await read_questions(plan, assembly, sets, view.log)
        tools = await tool_names(pairs, plan, sets)
        sorting.claim(out, plan)
        store = Store(out / sorting.TRAJECTORIES, saved_of(plan.evaluation, subject, endpoint))
        stack.callback(store.close)
        view.log_to(out / LOG_FILE)
        sampling = SynthesisSampling(plan, assembly, sets, store, tools, view)
        found = await sampling.run(pairs)
        await _write(plan, sets, out, found, dropped, view)
        return sampling.num_failed


async def _write(
    plan: SynthesisPlan,
    sets: Mapping[str, Questions],
    out: Path,
    found: Sequence[sorting.Sorted],
    dropped: Sequence[sorting.Dropped],
    view: View,
) -> None:
    sft, rl = [], []
    for one in found:
        name, task = one.set_name, one.task
        if one.chosen:
            # with tools, also for answers without: the policy learns when to skip them
            prompt, _ = await try_env(sets[set_name(name, "tools")].make_env, task)
            sft += [sorting.sft_row(judged, task, prompt, name) for judged in one.chosen]
        if one.kind == "hard":
            env = plan.sets[name].env
            rl.append(sorting.rl_row(task, name, env.id if env is not None else ""))
    summary = sorting.summarize(plan, found, dropped)
    sorting.write_data(out, sft, rl, sorting.rejected_rows(found, dropped), summary)
    view.show(sorting.class_table(summary))
    view.show(sorting.reason_table(summary))
    view.log(f"{out}: {len(sft)} dialogues in sft.jsonl, {len(rl)} questions in rl.jsonl")


def _check_hints(plan: SynthesisPlan, engine: ChatEngine | TokensEngine | None) -> None:
    """Reject hints for an endpoint that cannot continue a text."""
    has_hints = plan.config.hints is not None
    if has_hints and isinstance(engine, ChatEngine) and engine.way() == "turns":
        raise ConfigError(
            "hints: this endpoint uses chat messages and does not continue a text; set "
            "engine.continuation = 'prefix' if it can, pass --tokenizer for a vLLM or SGLang "
            "server, or remove the table"
        )
