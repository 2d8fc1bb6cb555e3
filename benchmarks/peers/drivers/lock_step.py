"""The loop of the released code of ARPO, with its barriers, over engines that live.

Runs: `LockStep` (benchmarks/parts/makespan.py) with the actor's renderer, environments, fork rule
and trees, in one process: every trajectory of a batch has its turn, then every tool runs, then
survivors fork; the next batch begins when the last trajectory of this one has ended. Not run: a
queue, a journal, a learner. It is of this repository, not a peer's code.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from agentenv.actor import Actor
from agentenv.reference.algorithms import ReleasedARPO
from agentenv.renderer import TagRenderer
from agentenv.tool_env import ToolEnv
from agentenv.tools import StatelessTool
from agentenv.types import Completion, Limits, SamplingParams, Task, ToolResult, VersionSpan
from benchmarks.parts.makespan import LockStep
from benchmarks.parts.mock_server import SCHEMA, TURN_TOKENS
from benchmarks.parts.overhead import RESULT_TOKENS, LuckGrader

if TYPE_CHECKING:
    from benchmarks.peers.work import Work


class Engine:
    """Asks the work."""

    policy_version = 0

    def __init__(self, work: Work) -> None:
        self._work = work
        self._prompt = 0
        self._rng = Random(0)

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **others: Any) -> Any:
        self._prompt = self._prompt or len(prompt_ids)
        turns = (len(prompt_ids) - self._prompt) / (TURN_TOKENS + RESULT_TOKENS)
        num_results = round(turns)
        token_ids, logprobs = await self._work.turn("tags", num_results)
        level = self._rng.random() * 2
        entropies = [level * self._rng.random() for _ in token_ids]
        last = num_results >= self._work.num_calls
        spans = [VersionSpan(0, 0, len(token_ids))]
        stop = None if last else "</search>"
        return Completion(token_ids, logprobs, entropies, "stop", spans, stop=stop)


class LookUp(StatelessTool):
    """Asks the work."""

    name = "search"
    description = "Search."
    schema = SCHEMA

    def __init__(self, work: Work) -> None:
        self._work = work

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        return ToolResult(await self._work.result())


async def run(work: Work) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work.tokenizer)
    tool, grader = LookUp(work), LuckGrader()
    engine: Any = Engine(work)
    actor = Actor(
        engine,
        TagRenderer(tokenizer, None, [tokenizer.eos_token_id]),
        lambda task: ToolEnv(task, tools=[tool], grader=grader),
        Limits(max_prompt_tokens=256, max_response_tokens=3800, max_turn_tokens=256),
        SamplingParams(max_tokens=256),
        "0",
    )
    plan = ReleasedARPO(group_size=work.group_size).plan(len(tokenizer))
    loop = LockStep(actor, plan)
    number = 0
    while not work.is_over:
        batch = []
        for _ in range(max(1, work.at_once // work.group_size)):
            batch.append(Task(str(number), "peers", work.question(number), ("it",)))
            number += 1
        await loop.rollout(batch)
