"""Runs an evaluation, and stores its trajectories in a directory; skips stored ones."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.parts.assembly import Questions
from agentenv.assembly.reports.records import FAILED, EvalRow, Wanted, facts, observed, prediction
from agentenv.assembly.run.exits import first_reason
from agentenv.assembly.run.rundir import LOG_FILE
from agentenv.assembly.run.terminal import View
from agentenv.assembly.run.waits import watched
from agentenv.assembly.run.watchdog import rolling_out
from agentenv.base.config import to_plain
from agentenv.base.errors import (
    AgentEnvError,
    ConfigError,
    EngineError,
    EnvError,
    TooManyFailuresError,
)
from agentenv.base.offload import in_thread, poll_pause
from agentenv.base.tree import Node, Trajectory
from agentenv.base.types import Limits, Task
from agentenv.contract.engine import Engine
from agentenv.contract.env import shared_stats
from agentenv.engines.chat import ChatEngine, ChatRenderer
from agentenv.engines.openai import TokensEngine
from agentenv.evaluation.figures import Summary
from agentenv.evaluation.report import report_of
from agentenv.evaluation.store import Saved, Store, identity
from agentenv.evaluation.subject import EvaluationAssembly, Subject, weights_digest
from agentenv.reference.helpers import count_calls
from agentenv.rollout.actor import Actor
from agentenv.rollout.failure_log import FailureLog
from agentenv.rollout.failures import NUM_NAMED
from agentenv.rollout.metrics import Throughput, num_padded
from agentenv.rollout.questions import Answer, Question, run_questions
from agentenv.text.renderer import Renderer, TextCodec

INTERVAL_S = 1.0


def verdict(row: EvalRow) -> str:
    """The verdict of a row: "failed", "right" or "wrong"."""
    return "failed" if row.end == FAILED else "right" if row.success else "wrong"


class Progress:
    """Shows finished trajectories, success so far, tokens per second, failures and retries.
    `counts`: number of trajectories by verdict, beginning with those of `stored`, and of
    "retries"."""

    def __init__(
        self, show: Callable[[int, str], None], engine: Engine, stored: Iterable[EvalRow]
    ) -> None:
        self.counts = Counter(map(verdict, stored))
        self._report, self._engine = show, engine
        self._throughput, self._rate = Throughput(), 0.0
        self._ticking = asyncio.create_task(self._tick())

    def count(self, what: str) -> None:
        """Count a finished trajectory by its verdict, or a failed attempt that is retried."""
        self.counts[what] += 1
        self._show()

    def close(self) -> None:
        """Stop the display."""
        self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            self._rate = self._throughput.rate(self._engine.stats())
            self._show()
            await poll_pause(INTERVAL_S)

    def _show(self) -> None:
        num_done = self.counts["right"] + self.counts["wrong"]
        note = f"success {self.counts['right'] / max(1, num_done):.3f}"
        note += f"  {self._rate:.0f} tok/s" if round(self._rate) else ""
        for name in ("failed", "retries"):
            note += f"  {self.counts[name]} {name}" if self.counts[name] else ""
        self._report(num_done + self.counts["failed"], note)


MAX_FAILED = 32  # if all of the first attempts failed, the evaluation stops


def row_of(dataset: str, answer: Answer, seed: int) -> EvalRow:
    """The row of a trajectory; of a failed one, the part before the failure."""
    question, tree = answer.question, answer.tree
    renderer = question.actor.renderer
    (leaf,) = tree.leaves()
    trajectory = Trajectory(tree.history(leaf))
    row = row_of_path(dataset, question.task, question.sample, trajectory, renderer)
    prompt_tokens, tool_tokens = _counts(trajectory, renderer)
    versions = [span.version for node in trajectory.path for span in node.version_spans]
    return replace(
        row,
        seed=seed,
        prediction=prediction(row) if row.end != FAILED else "",
        num_turns=sum(bool(node.action_ids) for node in trajectory.path),
        num_retries=answer.num_retries,
        prompt_tokens=prompt_tokens,
        action_tokens=trajectory.num_action_tokens,
        padded_tokens=num_padded(trajectory.path, getattr(renderer, "num_words", math.inf)),
        tool_tokens=tool_tokens,
        seconds=round(answer.seconds, 4),
        reason=str(leaf.info.get("reason", "")),
        assist=leaf.info.get("assist") or count_calls(row.tool_calls),  # of a browser agent
        abandoned=[
            renderer.decode(node.action_ids) + renderer.decode(node.observation_ids)
            for node in tree.nodes
            if "abandoned" in node.info
        ],
        policy_versions=[min(versions), max(versions)] if versions else [],
    )


def row_of_path(
    dataset: str, task: Task, sample: int, trajectory: Trajectory, codec: Renderer | TextCodec
) -> EvalRow:
    """The row of a trajectory without figures: the input of its grader, and the result."""
    return EvalRow(
        dataset=dataset,
        sample=sample,
        env_id=task.env_id,
        metadata=task.metadata,
        segments=segments_of(trajectory.path, codec),
        reward=0.0 if trajectory.leaf.end == FAILED else trajectory.reward,
        **facts(task, trajectory),
    )


def segments_of(path: list[Node], renderer: Renderer | TextCodec) -> list[dict[str, str]]:
    """The text in order, with its author; an end-of-sequence token is separate."""
    segments: list[dict[str, str]] = []
    eos_ids: Any = getattr(renderer, "eos_ids", ())
    for node in path:
        ids = node.action_ids
        if ids:
            ended = ids[-1] in eos_ids
            segment = {"policy": renderer.decode(ids[:-1] if ended else ids)}
            segments.append({**segment, "eos": renderer.decode(ids[-1:])} if ended else segment)
        if node.observation_ids:
            segments.append(observed(node, renderer.decode))
    return segments


def _counts(trajectory: Trajectory, renderer: Renderer) -> tuple[int, int]:
    """Number of tokens of the prompt, and of the env's later text. For an endpoint of chat
    messages: the endpoint's counts, if it reports them."""
    turns = trajectory.turns
    prompt = len(trajectory.path[0].observation_ids)
    tools = sum(len(node.observation_ids) for node in turns if node.parent is not None)
    actions = [node for node in turns if node.action_ids]
    one_context = all(node.parent is not None for node in turns)
    if isinstance(renderer, ChatRenderer) and actions and one_context:
        before = [renderer.num_prompt_tokens(node.action_ids) for node in actions]
        if all(before):
            sampled = sum(len(node.action_ids) for node in actions[:-1])
            return before[0], max(0, before[-1] - before[0] - sampled)
    return prompt, tools


Problem = AgentEnvError | OSError


async def run_evaluation(
    config: EvaluateConfig, subject: Subject, out: Path, view: View
) -> tuple[int, Problem | None]:
    """Sample the trajectories that `out` lacks. Returns the number of trajectories that finally
    failed, and the error if their share is too large. Raises the error of `broken` if all attempts
    fail."""
    async with AsyncExitStack() as stack:
        assembly = EvaluationAssembly(config, subject, stack, view.log)
        await refuse(assembly)
        sets = await assembly.questions()
        store = Store(out, saved_of(config, subject, await assembly.endpoint()))
        stack.callback(store.close)
        view.log_to(out / LOG_FILE)
        wanted = [one for name, questions in sets.items() for one in _wanted(name, questions)]
        keys = {one.key for one in wanted}
        if others := len(store.rows.keys() - keys):
            view.log(
                f"{out} also contains {others} trajectories of other samples, questions or sets: "
                "the report covers all; for a report on this command's only, choose another --out"
            )
        is_whole = not store.missing(wanted)
        problem: Problem | None = None
        try:
            await sample_missing(assembly, store, wanted, "evaluation", view, then="the report")
        except* TooManyFailuresError as errors:
            problem = first_reason(errors)
        if is_whole:
            return 0, None
        engine = (await assembly.engine()).stats()
        asked = {f"engine/num_{name}": engine.get(name) for name in ("requests", "retries")}
        store.count(stats := shared_stats())
        counts = {**stats, **asked}
        if counted := [f"{name} {value:g}" for name, value in counts.items() if value]:
            view.log(f"environments: {', '.join(counted)}")
        failed = [row for row in store.rows.values() if row.end == FAILED]
        for name, one in sets.items():
            if problem is None or not one.config.limits.strict:  # also counts stored rows
                found = _too_many(name, store, one.config.limits)
                problem = found or problem
        return len(failed), problem


async def evaluate_and_report(
    config: EvaluateConfig, subject: Subject, out: Path, view: View
) -> tuple[Problem | None, Summary]:
    """`run_evaluation`, and then the report of all rows in `out`."""
    num_failed, problem = await run_evaluation(config, subject, out, view)
    if num_failed:
        view.log(f"{num_failed} trajectories failed; the same command retries them")
    view.wait_for("scoring", "the report")
    summary = await report_of(out, view)
    view.end()
    return problem, summary


def _too_many(name: str, store: Store, limits: Limits) -> TooManyFailuresError | None:
    """The error if more than limits.max_failed_share of a set's trajectories failed, else None."""
    rows = [row for row in store.rows.values() if row.dataset == name]
    errors = [row.error or "" for row in rows if row.end == FAILED]
    if len(errors) <= limits.max_failed_share * len(rows):
        return None
    return TooManyFailuresError(
        f"{len(errors)} of {len(rows)} trajectories of sets.{name} failed, which is more than "
        f"limits.max_failed_share = {limits.max_failed_share:g}: {named_causes(errors)}; "
        "the same command retries them"
    )


def named_causes(errors: Iterable[str]) -> str:
    """The most frequent errors, each with its count."""
    causes = Counter(errors).most_common(NUM_NAMED)
    return "; ".join(f"{count} x {text}" for text, count in causes)


FOLDER = "evals"


def chosen_sets(config: EvaluateConfig, names: Sequence[str], num_tasks: int) -> EvaluateConfig:
    """The configuration with only these sets, by default all, and the first `num_tasks` questions
    of each (0: all). Raises ConfigError."""
    for name in names:
        if name not in config.sets:
            raise ConfigError(f"--set {name}: no such set; known: {sorted(config.sets)}")
    sets = {name: config.sets[name] for name in names or config.sets}
    if num_tasks < 0:
        raise ConfigError(f"--n {num_tasks}: expected a number of questions, or 0 for all")
    if num_tasks:
        sets = {name: replace(one, max_tasks=num_tasks) for name, one in sets.items()}
    return replace(config, sets=sets)


def default_folder(config: EvaluateConfig, subject: Subject) -> Path:
    """The default directory: equal for equal weights and configurations, so that the same command
    resumes."""
    identified = {"url": subject.name}
    if subject.model is not None:
        identified = {"weights": weights_digest(subject.model)}
    saved = Saved(subject=identified, run="", config=to_plain(config))
    digest = hashlib.sha256(msgspec.json.encode(identity(saved), order="sorted")).hexdigest()
    name = f"{subject.name.replace('/', '-')}-{'-'.join(config.sets)}"[:80]
    return Path(FOLDER) / f"{name}-{digest[:6]}"


def broken(errors: Iterable[str]) -> type[EngineError | EnvError]:
    """The type of error to raise if every trajectory failed: EngineError if all `errors` are of the
    engine, else EnvError."""
    return EngineError if all(one.startswith("Engine") for one in errors) else EnvError


async def sample_missing(
    assembly: EvaluationAssembly,
    store: Store,
    wanted: Sequence[Wanted],
    stage: str,
    view: View,
    *,
    then: str = "",
    adapt: Callable[[str, Actor], None] = lambda name, actor: None,
    change: Callable[[EvalRow, Answer], EvalRow] = lambda row, answer: row,
) -> int:
    """Sample the `wanted` trajectories that the store lacks, by actors of their sets that `adapt`
    may change; see `sample_into`. `stage`, and `then` that follows it, are for the terminal."""
    missing, keys = store.missing(wanted), {one.key for one in wanted}
    if len(missing) < len(wanted):
        held = f"{len(wanted) - len(missing)} of {len(wanted)} trajectories"
        view.log(f"{stage}: {held} exist already")
    if not missing:
        return 0
    log, actors = FailureLog(), dict[str, Actor]()
    for name in dict.fromkeys(one.dataset for one in missing):
        actors[name] = await assembly.actor(name)
        actors[name].failures.log = log
        adapt(name, actors[name])
    stored = [row for row in store.rows.values() if row.end != FAILED and row.key in keys]
    view.begin(stage, len(missing) + len(stored), len(stored), then)
    try:
        with rolling_out(), watched(actors.values, view):
            sample = partial(sample_into, concurrency=assembly.config.concurrency, change=change)
            return await sample(store, missing, actors, assembly.seed, view.advance, stored=stored)
    finally:
        log.report("failed attempts")
        view.end()


async def sample_into(
    store: Store,
    missing: Sequence[Wanted],
    actors: Mapping[str, Actor],
    seed: Callable[[str], int],
    show: Callable[[int, str], None],
    *,
    concurrency: int,
    stored: Iterable[EvalRow] = (),
    change: Callable[[EvalRow, Answer], EvalRow] = lambda row, answer: row,
) -> int:
    """Sample the `missing` trajectories with the actor and the seed of each set, and store each row
    as soon as its trajectory ends. `show` takes the progress, which begins with `stored` rows;
    `change` gives the row to store. Returns the number of failed trajectories. Raises the error of
    `broken` if the first MAX_FAILED attempts, or all, have failed, which is no coincidence."""
    names = {id(actor): name for name, actor in actors.items()}
    errors: list[str] = []
    most = sum(1 + actors[one.dataset].limits.max_failures for one in missing)
    hopeless = min(MAX_FAILED, most)  # number of failures to stop at; 0: some attempt succeeded
    if any(row.end != FAILED for row in store.rows.values()):
        hopeless = 0

    def count(answer: Answer, error: str) -> None:
        errors.append(error)
        if len(errors) == hopeless:
            raise broken(errors)(
                f"all of the first {hopeless} attempts failed; the evaluation stops here; the "
                f"last error: {error}; the same command tries again"
            )

    async def keep(answer: Answer) -> None:
        nonlocal hopeless
        name = names[id(answer.question.actor)]
        row = change(row_of(name, answer, seed(name)), answer)
        await in_thread(store.add, row)
        progress.count(verdict(row))
        if row.end != FAILED:
            hopeless = 0
        else:
            count(answer, row.error or "")

    def retry(answer: Answer) -> None:
        progress.count("retries")
        count(answer, answer.tree.failures()[0].error or "")

    questions = (Question(actors[one.dataset], one.task, one.sample) for one in missing)
    progress = Progress(show, next(iter(actors.values())).engine, stored)
    try:
        await run_questions(questions, keep, retry, concurrency=concurrency)
    finally:
        progress.close()
    return progress.counts["failed"]


def _wanted(name: str, one: Questions) -> Iterator[Wanted]:
    for task in one.tasks:
        for sample in range(one.config.num_samples):
            yield Wanted(name, task, sample)


def saved_of(
    config: EvaluateConfig, subject: Subject, endpoint: ChatEngine | TokensEngine | None
) -> Saved:
    """The content of config.json of an evaluation."""
    described: dict[str, Any] = {"name": subject.name}
    if subject.model is not None:
        described |= {"path": str(subject.model), "weights": weights_digest(subject.model)}
    if endpoint is not None:
        found = endpoint.endpoint
        described |= {"name": found.model, "model": found.model, "root": found.served_from}
    return Saved(subject=described, run=str(subject.run.absolute()), config=to_plain(config))
