"""A guide takes part in a rollout: it changes the context, the turns and the end of a branch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentenv.base.errors import ConfigError
from agentenv.base.tree import Trajectory
from agentenv.base.types import Info, Limit, Limits, Message, SamplingParams
from agentenv.contract.env import StepResult
from agentenv.contract.plan import Independent
from agentenv.rollout.actor_parts import RolloutHooks
from agentenv.rollout.branch import Branch, Continuation, Retake
from agentenv.rollout.conversation import Context
from tests.support.toy import CharTokenizer, CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.test_actor import TASK, make_actor, rollout


def encode(text: str) -> list[int]:
    return CharTokenizer().encode(text)


class Prefixed(RolloutHooks):
    """Begins every trajectory with a text, and shows it to the env."""

    def prefix(self, branch: Branch, prompt_ids: list[int]) -> list[int]:
        return encode("So ")

    async def step(self, branch: Branch, action: Message) -> StepResult:
        *rest, info = await super().step(branch, action)
        return (*rest, {**info, "read": "So " + action.content})  # type: ignore[return-value]


def test_a_prefix_is_context_that_counts_as_response() -> None:
    actor = make_actor(limits=Limits(max_prompt_tokens=len(TASK.question) + 1))
    actor.make_hooks = Prefixed
    tree = rollout(actor, Independent(2))
    for found in tree.trajectories():
        text = CharTokenizer().decode(found.token_ids)
        assert text.startswith(f"{TASK.question}\nSo <think>")
        size = len(found.path[0].observation_ids)
        assert not any(found.loss_mask[:size])
        assert found.loss_mask[size]
        assert found.turns[0].info["read"].startswith("So <think>")
    actor = make_actor(limits=Limits(max_response_tokens=30))
    actor.make_hooks = Prefixed
    (leaf,) = rollout(actor, Independent(1)).leaves()
    assert (leaf.limit, len(leaf.action_ids)) == (Limit.RESPONSE_TOKENS, 27)


class Rewinding(RolloutHooks):
    """Repeats the first turn at a lower temperature, and continues from a new prompt after the
    second."""

    def sampling(self, branch: Branch) -> SamplingParams:
        self.temperatures = [*getattr(self, "temperatures", []), 0.5 if "~" in branch.name else 1.0]
        return SamplingParams(max_tokens=1, temperature=self.temperatures[-1])

    async def redirect(self, branch: Branch, observation_ids: Sequence[int]) -> Continuation:
        if "~" not in branch.name:
            return Retake(branch.name + "~1", 1)
        if branch.num_turns == 2:
            return Context(encode("short"), {}, num_used=7)
        return observation_ids


def test_a_branch_continues_where_hooks_moved_it() -> None:
    actor = make_actor()
    actor.make_hooks = Rewinding
    tree = rollout(actor, Independent(1))
    (leaf,) = tree.leaves()
    places = [("0", 0), ("0~1", 0), ("0~1", 2)]
    assert [(node.branch, node.parent) for node in tree.nodes[1:4]] == places
    assert tree.nodes[1].action_ids != tree.nodes[2].action_ids
    assert (tree.nodes[4].parent, tree.nodes[4].continues) == (None, 3)
    assert tree.path(leaf)[0] is tree.nodes[4]
    assert [node.index for node in tree.history(leaf)][:4] == [0, 2, 3, 4]
    text = CharTokenizer().decode(Trajectory(tree.path(leaf)).token_ids)
    assert text.startswith("short<think>")


class Watching(RolloutHooks):
    """Records ended branches, and grades truncated ones."""

    ended: list[str]

    async def finish(
        self, branch: Branch, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        return 5.0, {"limit": limit}

    async def end(self, branch: Branch) -> None:
        assert branch.env is None or not branch.env.closed  # type: ignore[attr-defined]
        self.ended.append(branch.name)


def test_hooks_are_called_at_every_end_including_cancellation() -> None:
    actor = make_actor(limits=Limits(max_turns=1))
    ended: list[str] = []
    Watching.ended = ended
    actor.make_hooks = Watching
    tree = rollout(actor, Independent(2))
    assert sorted(ended) == ["0", "1"]
    assert [(leaf.reward, leaf.info["limit"]) for leaf in tree.leaves()] == [(5.0, "turns")] * 2
    ended.clear()
    slow = make_actor(latency_s=50.0)
    slow.make_hooks = Watching

    async def cancelled() -> None:
        running = asyncio.create_task(slow.rollout(TASK, Independent(2)))
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.wait({running})

    run_virtual(cancelled())
    assert sorted(ended) == ["0", "1"]
    assert CountingEnv.num_open == 0


class Refusing(RolloutHooks):
    def __init__(self, *_: Any) -> None:
        raise ConfigError("not with this plan")


def test_hooks_may_refuse_a_rollout() -> None:
    actor: Any = make_actor()
    actor.make_hooks = Refusing
    with pytest.raises(ConfigError, match="with this plan"):
        rollout(actor, Independent(1))
