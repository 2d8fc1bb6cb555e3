"""Samples the missing trajectories of a synthesis, with the actor and engines of evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.assembly.keys.evaluation import HintsConfig, SynthesisPlan, Way, set_name
from agentenv.assembly.keys.rl import EvalSet
from agentenv.assembly.parts.assembly import Questions, load_set
from agentenv.assembly.parts.environments import try_env
from agentenv.assembly.reports.records import FAILED, EvalRow, Wanted
from agentenv.assembly.run.terminal import View
from agentenv.base.config import Reporter
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.types import Info, Limit, Message, Task
from agentenv.contract.env import EnvWrapper, StepResult
from agentenv.envs.grading.verdict import final_answer
from agentenv.evaluation.run import sample_missing
from agentenv.evaluation.store import Store
from agentenv.evaluation.subject import EvaluationAssembly
from agentenv.lab.recipes import sorting
from agentenv.rollout.actor import Actor
from agentenv.rollout.actor_parts import RolloutHooks
from agentenv.rollout.branch import Branch
from agentenv.rollout.questions import Answer
from agentenv.text.call_syntax import THOUGHT_OPEN
from agentenv.text.renderer import NUM_TAIL_IDS

# Rollouts after a hint, and language-only ones; only for data synthesis.

MARK = "hint"  # in the metadata of a task and of its row
NUM_PROMPT_TOKENS = "num_prompt_tokens"  # in the root's info: the hinted text follows


class LanguageOnly(EnvWrapper):
    """An environment without tools: no text of the policy is a call, so its first turn is its
    answer, graded as usual."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        messages, info = await self.env.reset(seed=seed, options=options)
        return messages, {**info, "tools": ()}


class HintHooks(RolloutHooks):
    """Starts the trajectories of a task after the hint in its metadata (`MARK`).

    The prefix of the hint is in the root's observation, after the prompt: it is context, not
    sampled. The env gets it as the beginning of the first action.
    """

    written = ""  # text before the first action, for the env

    def prefix(self, branch: Branch, prompt_ids: list[int]) -> list[int]:
        renderer, tree = self.actor.renderer, self.tree
        prefix: str = tree.task.metadata[MARK]["prefix"]
        opened = renderer.decode(prompt_ids[-NUM_TAIL_IDS:]).rstrip().endswith(THOUGHT_OPEN)
        if opened:  # by the chat template
            prefix = prefix.removeprefix(THOUGHT_OPEN).lstrip("\n")
        self.written = (THOUGHT_OPEN + "\n" if opened else "") + prefix
        tree.root.info[NUM_PROMPT_TOKENS] = len(prompt_ids)
        return renderer.encode(prefix)

    async def step(self, branch: Branch, action: Message) -> StepResult:
        return await super().step(branch, self._whole(branch, action))

    async def finish(
        self, branch: Branch, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        whole = None if action is None else self._whole(branch, action)
        return await super().finish(branch, limit, whole)

    def _whole(self, branch: Branch, action: Message) -> Message:
        if branch.num_turns != 1:
            return action
        return replace(action, content=self.written + action.content)


def hinted_row(row: EvalRow, answer: Answer) -> EvalRow:
    """The row with the hinted text, if any, moved from the prompt to the beginning of the policy's
    text."""
    if MARK not in row.metadata:
        return row
    root, renderer = answer.tree.root, answer.question.actor.renderer
    hint = {key: value for key, value in row.metadata[MARK].items() if key != "prefix"}
    row = replace(row, metadata={**row.metadata, MARK: hint})
    size = root.info.get(NUM_PROMPT_TOKENS)
    if size is None:  # failed before its start
        return row
    prompt, prefix = root.observation_ids[:size], root.observation_ids[size:]
    first = dict(row.segments[1]) if len(row.segments) > 1 else {"policy": ""}
    first["policy"] = renderer.decode(prefix) + first["policy"]
    return replace(row, segments=[{"env": renderer.decode(prompt)}, first, *row.segments[2:]])


MAX_HINTED_SHARE = 0.75  # of limits.max_response_tokens; the rest is for the policy


class TaskPair(Struct, frozen=True):
    """A question of the user's set `name`: its tasks without and with tools."""

    name: str
    direct: Task
    tools: Task


@dataclass(eq=False)
class SynthesisSampling:
    """Samples in two stages, since hints need the language-only chains; skips trajectories in
    `store`. `tools`: names of tools by environment id."""

    plan: SynthesisPlan
    assembly: EvaluationAssembly
    sets: Mapping[str, Questions]
    store: Store
    tools: Mapping[str, Sequence[str]]
    view: View
    num_failed: int = field(default=0, init=False)

    async def run(self, pairs: Sequence[TaskPair]) -> list[sorting.Sorted]:
        """Sample the missing trajectories; returns every question with all of its trajectories."""
        direct = [wanted for pair in pairs for wanted in self._samples(pair, "direct")]
        await self._sample("language-only", direct)
        await self._sample("with tools", [one for pair in pairs for one in self._with_tools(pair)])
        return [self._sorted(pair) for pair in pairs]

    # Selection of samples.

    def _samples(self, pair: TaskPair, way: Way) -> Iterator[Wanted]:
        name = set_name(pair.name, way)
        task = pair.direct if way == "direct" else pair.tools
        for sample in range(self.sets[name].config.num_samples):
            yield Wanted(name, task, sample)

    def _with_tools(self, pair: TaskPair) -> Iterator[Wanted]:
        yield from self._samples(pair, "tools")
        direct = self._judged(self._samples(pair, "direct"))
        if self.plan.config.hints is not None and all(one.reason for one in direct):
            yield from self._hinted(pair)

    def _hinted(self, pair: TaskPair) -> Iterator[Wanted]:
        """The first chains of the question that have a place for a hint."""
        config, name = self.plan.config.hints, set_name(pair.name, "hints")
        assert config is not None
        one, count = self.sets[name], 0
        room = MAX_HINTED_SHARE * one.config.limits.max_response_tokens
        for wanted in self._samples(pair, "direct"):
            row = self.store.rows.get(wanted.key)
            if row is None or row.end == FAILED or count == config.max_per_question:
                continue
            text = sorting.chain_text(sorting.parts_of(row, self.tools[pair.tools.env_id]))
            rng = Random(f"{self.plan.config.seed}/{pair.name}/{pair.tools.id}/{row.sample}/hint")
            hint = make_hint(text, row.sample, config, rng)
            if hint is not None and len(one.renderer.encode(hint.prefix)) <= room:
                count += 1
                hinted = {**pair.tools.metadata, MARK: msgspec.to_builtins(hint)}
                yield Wanted(name, replace(pair.tools, metadata=hinted), row.sample)

    # Sampling.

    async def _sample(self, stage: str, wanted: Sequence[Wanted]) -> None:
        self.num_failed += await sample_missing(
            self.assembly, self.store, wanted, stage, self.view, adapt=_adapt, change=hinted_row
        )

    # Stored samples.

    def _sorted(self, pair: TaskPair) -> sorting.Sorted:
        direct = list(self._samples(pair, "direct"))
        expected = [*direct, *self._with_tools(pair)]
        kept = {one.key: one for one in (*expected, *self._samples(pair, "tools"))}
        judged = self._judged(kept.values())
        is_whole = all(one.key in self.store.rows for one in expected)
        config = self.plan.config
        return sorting.sort_question(
            pair.name, pair.tools, judged, config.filter, config.seed, is_whole=is_whole
        )

    def _judged(self, wanted: Iterable[Wanted]) -> list[sorting.Judged]:
        config = self.plan.config.filter
        judged = []
        for one in wanted:
            row = self.store.rows.get(one.key)
            if row is not None:
                way = cast(Way, one.dataset.rpartition(".")[2])
                judged.append(sorting.judge(row, way, self.tools[one.task.env_id], config))
        return judged


def _adapt(name: str, actor: Actor) -> None:
    """Let the actor of a set sample in the set's way."""
    if name.endswith(".direct"):
        make_env = actor.make_env
        actor.make_env = lambda task: LanguageOnly(make_env(task))
    elif name.endswith(".hints"):
        actor.make_hooks = HintHooks


# The questions to sample: each once, without excluded ones.


async def read_questions(
    plan: SynthesisPlan,
    assembly: EvaluationAssembly,
    sets: Mapping[str, Questions],
    report: Reporter,
) -> tuple[list[TaskPair], list[sorting.Dropped]]:
    """The questions in order, and the dropped ones. Raises DataError if none remains."""
    excluded: dict[str, str] = {}
    for path in plan.config.exclude:
        tasks = await load_set(EvalSet(path=path), "", assembly.resolve, report, "exclude")
        excluded |= {plain_question(task.question): f"in {path}, {task.id}" for task in tasks}
    seen: dict[str, str] = {}
    pairs: list[TaskPair] = []
    dropped: list[sorting.Dropped] = []
    for name in plan.sets:
        direct = {task.id: task for task in sets[set_name(name, "direct")].tasks}
        tools = {task.id: task for task in sets[set_name(name, "tools")].tasks}
        for task in direct.values():
            plain = plain_question(task.question)
            if task.id not in tools:
                dropped.append(sorting.Dropped(name, task, "prompt_too_long", "with tools"))
            elif plain in excluded:
                dropped.append(sorting.Dropped(name, task, "excluded", excluded[plain]))
            elif plain in seen:
                dropped.append(sorting.Dropped(name, task, "duplicate", f"of {seen[plain]}"))
            else:
                seen[plain] = f"{name} {task.id}"
                pairs.append(TaskPair(name, task, tools[task.id]))
    if not pairs:
        raise DataError(f"none of {len(dropped)} questions is left: all are excluded or duplicates")
    return pairs, dropped


def plain_question(text: str) -> str:
    """The text for comparing questions, without case and extra blanks."""
    return " ".join(text.casefold().split())


async def tool_names(
    pairs: Sequence[TaskPair], plan: SynthesisPlan, sets: Mapping[str, Questions]
) -> dict[str, list[str]]:
    """The names of the tools of each environment of the questions. Raises ConfigError for an
    environment without tools."""
    first = {pair.tools.env_id: pair for pair in reversed(pairs)}
    found = {}
    for env_id, pair in first.items():
        make_env = sets[set_name(pair.name, "tools")].make_env
        _, info = await try_env(make_env, pair.tools)
        found[env_id] = [str(tool["name"]) for tool in info.get("tools", ())]
        if not found[env_id]:
            raise ConfigError(
                f"sets.{pair.name}: the environment {env_id} has no tools, so answers with tools "
                "cannot be sampled"
            )
    return found


# Hints: a language-only chain, cut at a doubt or after its answer, continues with tools after an
# inserted sentence (Tool-Star, arXiv 2505.16410, section 3.1). The thought stays open, so that the
# trajectory has one answer.
#
#     uncertain   <think>facts. Perhaps it is Cusco..     ->  <think>facts. HINT
#     answer      <think>facts.</think><answer>X</answer> ->  <think>facts. So it would be X. HINT

_TAG = re.compile(r"<[^<>]*>")
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f](?=\s|$)|[\u3002\uff01\uff1f\n]")


class Hint(Struct, frozen=True):
    """The beginning of a trajectory: `prefix`, which ends with the sentence `text`. `sample`: the
    number of the language-only chain from which it was cut."""

    prefix: str
    place: Literal["uncertain", "answer"]
    text: str
    sample: int


def make_hint(chain: str, sample: int, config: HintsConfig, rng: Random) -> Hint | None:
    """The hint for a chain; None if it has no place for one."""
    if config.place != "answer":
        before = cut_at_doubt(chain, config.phrases)
        if before is not None:
            text = rng.choice(config.verification)
            return Hint(before + text, "uncertain", text, sample)
    if config.place != "uncertain":
        before = reopened(chain)
        if before is not None:
            text = rng.choice(config.reflection)
            return Hint(before + text, "answer", text, sample)
    return None


def cut_at_doubt(chain: str, phrases: Sequence[str]) -> str | None:
    """The chain up to the first sentence of a thought that contains one of the phrases, ready for
    another sentence; None without one. Only the part before an answer counts."""
    doubts = re.compile("|".join(map(_pattern, phrases)), re.IGNORECASE)
    for doubt in doubts.finditer(chain):
        before = chain[: doubt.start()]
        thought = before.rfind("<think>")
        if "<answer>" in before:
            return None
        if thought < 0 or "</think>" in before[thought:]:
            continue
        start = thought + len("<think>")
        ends = [end.end() for end in _SENTENCE_END.finditer(before, start)]
        return _ready(before[: ends[-1] if ends else start])
    return None


def reopened(chain: str) -> str | None:
    """The chain as one open thought that ends with its answer; None unless the chain is thoughts
    followed by an answer."""
    before, tag, rest = chain.partition("<answer>")
    thought, closed, between = before.rpartition("</think>")
    body, end, _ = rest.partition("</answer>")
    if not (tag and closed and end) or between.strip() or "<think>" not in thought:
        return None
    answer = " ".join(_TAG.sub(" ", final_answer(f"<answer>{body}</answer>")).split())
    return None if not answer else f"{_ready(thought)}So it would be {answer.rstrip('.')}. "


def _pattern(phrase: str) -> str:
    """A pattern for the phrase: as whole words, if the script has blanks between words."""
    word = re.escape(phrase.strip())
    return rf"(?<!\w){word}(?!\w)" if phrase.isascii() else word


def _ready(text: str) -> str:
    """The text ready for another sentence: with a blank after a sentence, none after a tag."""
    text = text.rstrip()
    return text if text.endswith(">") else f"{text} "
