"""Rollouts with helpers: a scripted policy, real tools, and a scripted server that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from agentenv.base.config import build_config
from agentenv.base.errors import ToolError
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Completion, Limits, SamplingParams, Task
from agentenv.contract.env import Env
from agentenv.contract.function_tool import tool
from agentenv.contract.plan import Independent
from agentenv.contract.tool_env import ToolEnv
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.envs.grading.reward import make_grader
from agentenv.reference.helpers import Assist, AssistConfig, assist_actor
from agentenv.rollout.actor import Actor
from agentenv.text.renderer import TagRenderer
from tests.support.toy import CharTokenizer

TASK = Task("t", "toy", "How much is it?", ("2",))
ANSWER = "<think>so</think><answer>2</answer>"


@tool
async def search(query: str) -> str:
    """Search the documents."""
    if query.startswith("bad"):
        raise ToolError(f"the index does not know {query}")
    return f"found {query}"


def search_env(task: Task) -> ToolEnv:
    """Searches; queries that begin with "bad" are errors."""
    return ToolEnv(task, [search], make_grader(None, kind="exact"))


def look(query: str) -> str:
    """A turn that searches."""
    return f"<think>look</think><search>{query}</search>"


class Watched(ScriptedEngine):
    """Records its requests."""

    def __init__(self, script: Callable[[str, Random], str]) -> None:
        super().__init__(ScriptedConfig(max_model_len=100_000), CharTokenizer(), script=script)
        self.prompts: list[str] = []
        self.samplings: list[SamplingParams] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, **more: Any
    ) -> Completion:
        self.prompts.append(CharTokenizer().decode(prompt_ids))
        self.samplings.append(sampling)
        return await super().generate(prompt_ids, sampling, **more)


class Turns:
    """A policy that samples these turns for any prompt."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)

    def __call__(self, prompt: str, rng: Random) -> str:
        return self.turns.pop(0)


class Rollout:
    """One tree of a scripted policy with helpers, and its counts, records and texts."""

    def __init__(
        self,
        script: Callable[[str, Random], str],
        make_env: Callable[[Task], Env],
        limits: Limits | None = None,
        temperature: float = 1.0,
        **assist: Any,
    ) -> None:
        self.engine = Watched(script)
        self.assist = Assist(build_config(AssistConfig, assist, "test"))
        self.actor = Actor(
            self.engine,
            TagRenderer(CharTokenizer()),
            make_env,
            limits or Limits(max_response_tokens=50_000, max_failures=0),
            SamplingParams(max_tokens=1, temperature=temperature),
            seed=3,
        )
        assist_actor(self.actor, self.assist)
        self.tree = TrajectoryTree(TASK)

    async def grow(self) -> Rollout:
        """Grow it; no env stays open under any faults."""
        await self.assist.start()
        try:
            self.tree = await self.actor.rollout(TASK, Independent(1))
        finally:
            await self.assist.close()
            assert self.actor.envs.count == 0
        return self

    @property
    def leaf(self) -> Node:
        (leaf,) = self.tree.leaves()
        return leaf

    @property
    def counts(self) -> dict[str, float]:
        counts: dict[str, float] = self.leaf.info["assist"]
        return counts

    @property
    def records(self) -> list[dict[str, Any]]:
        """Of the calls on the way to the leaf."""
        nodes = self.tree.history(self.leaf)
        return [record for node in nodes for record in node.info.get("tool_calls", ())]

    @property
    def text(self) -> str:
        """Of the context that the leaf was sampled in, and the last turn."""
        nodes = self.tree.path(self.leaf)
        ids = [token for node in nodes for token in node.action_ids + node.observation_ids]
        return CharTokenizer().decode(ids)
