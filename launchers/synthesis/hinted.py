"""Rollouts that begin behind a hint, and language-only ones; for data synthesis only."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.branch import Branch
from agentenv.env import Env, ForkMode
from agentenv.evaluate import Answer
from agentenv.growth import Growth, Outcome
from agentenv.plan import RolloutPlan
from agentenv.renderer import NUM_TAIL_IDS, THOUGHT_OPEN
from agentenv.tree import TrajectoryTree
from agentenv.types import Info, Limit, Message, Task
from launchers.evaluation.rows import EvalRow
from launchers.synthesis.hints import MARK

NUM_PROMPT_TOKENS = "num_prompt_tokens"  # of the root's info: what follows is the hinted text


class LanguageOnly:
    """An environment whose policy hears of no tools: nothing it writes is a call, so its first
    turn is its answer, graded as ever."""

    def __init__(self, env: Env) -> None:
        self.env = env

    @property
    def fork_mode(self) -> ForkMode:
        return self.env.fork_mode

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        messages, info = await self.env.reset(seed=seed, options=options)
        return messages, {**info, "tools": ()}

    async def step(self, action: Message) -> Outcome:
        return await self.env.step(action)

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        return await self.env.finish(reason, action)

    async def fork(self) -> Self:
        return type(self)(await self.env.fork())

    async def close(self) -> None:
        await self.env.close()


class HintedActor(Actor):
    """Rolls out tasks whose metadata has a hint (`MARK`). Its prefix stands in the root's
    observation, behind the prompt: context, never sampled, so no loss mask covers it. The env
    reads it as the beginning of the first action, and it counts as response, not as prompt."""

    def _growth(
        self, tree: TrajectoryTree, plan: RolloutPlan, group: asyncio.TaskGroup, session: str
    ) -> Growth:
        return HintedGrowth(self, tree, plan, group, session)


class HintedGrowth(Growth):
    """Grows one tree behind its hint."""

    written = ""  # what the env reads before the first action

    def _render_prompt(self, messages: list[Message], branch: Branch) -> None:
        super()._render_prompt(messages, branch)
        renderer, root = self.actor.renderer, self.tree.root
        prefix = hint_of(self.tree.task)["prefix"]
        tail = renderer.decode(root.observation_ids[-NUM_TAIL_IDS:])
        opened = tail.rstrip().endswith(THOUGHT_OPEN)
        if opened:  # by the chat template
            prefix = prefix.removeprefix(THOUGHT_OPEN).lstrip("\n")
        self.written = (THOUGHT_OPEN + "\n" if opened else "") + prefix
        root.info[NUM_PROMPT_TOKENS] = len(root.observation_ids)
        root.observation_ids = root.observation_ids + renderer.encode(prefix)

    async def _open_root(self, branch: Branch) -> None:
        await super()._open_root(branch)
        branch.num_prompt_tokens = self.tree.root.info[NUM_PROMPT_TOKENS]

    async def _step(self, branch: Branch, action: Message) -> Outcome:
        return await super()._step(branch, self._whole(branch, action))

    async def _truncate(self, branch: Branch, limit: Limit, action: Message | None) -> None:
        whole = None if action is None else self._whole(branch, action)
        await super()._truncate(branch, limit, whole)

    def _whole(self, branch: Branch, action: Message) -> Message:
        if branch.num_turns != 1:
            return action
        return replace(action, content=self.written + action.content)


def hint_of(task: Task) -> dict[str, Any]:
    """The hint of a task. It is never without one here."""
    found: dict[str, Any] = task.metadata[MARK]
    return found


def hinted_row(row: EvalRow, answer: Answer) -> EvalRow:
    """The row with the hinted text where it belongs: at the beginning of what was written."""
    root, renderer = answer.tree.root, answer.question.actor.renderer
    hint = {key: value for key, value in row.metadata[MARK].items() if key != "prefix"}
    row = replace(row, metadata={**row.metadata, MARK: hint})
    size = root.info.get(NUM_PROMPT_TOKENS)
    if size is None:  # failed before it began
        return row
    prompt, prefix = root.observation_ids[:size], root.observation_ids[size:]
    first = dict(row.segments[1]) if len(row.segments) > 1 else {"policy": ""}
    first["policy"] = renderer.decode(prefix) + first["policy"]
    return replace(row, segments=[{"env": renderer.decode(prompt)}, first, *row.segments[2:]])
