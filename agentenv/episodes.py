"""Episodes of a conformance check: played, their form looked at, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from agentenv.env import Env
from agentenv.types import Message, Task

Make = Callable[[Task], Env]
Outcome = tuple[list[Message], float, bool, bool]

SEED = 20


async def play(make: Make, task: Task, actions: Sequence[Message]) -> list[Outcome]:
    """One whole episode, with the seed of all."""
    env = make(task)
    try:
        await env.reset(seed=SEED)
        return await act(env, actions)
    finally:
        await env.close()


async def act(env: Env, actions: Sequence[Message]) -> list[Outcome]:
    """Take the actions, and see that what each step returns has the right form."""
    outcomes: list[Outcome] = []
    for action in actions:
        outcome = await env.step(action)
        check_outcome(outcome)
        outcomes.append(outcome[:4])
    return outcomes


def check_outcome(outcome: Any) -> None:
    """What `step` must return."""
    assert isinstance(outcome, tuple), f"step returned {type(outcome).__name__}, not a tuple"
    assert len(outcome) == 5, f"step returned {len(outcome)} values, not 5"
    messages, reward, terminated, truncated, info = outcome
    assert isinstance(messages, list), "the observation of step is not a list"
    assert all(isinstance(message, Message) for message in messages), (
        f"the observation of step holds something else than messages: {messages!r}"
    )
    check_reward(reward, "step")
    roles = {message.role for message in messages}
    assert roles <= {"tool", "user"}, f"an observation speaks as {sorted(roles)}"
    assert type(terminated) is bool, f"terminated is {terminated!r}, not a bool"
    assert type(truncated) is bool, f"truncated is {truncated!r}, not a bool"
    assert isinstance(info, dict), f"info is {type(info).__name__}, not a dict"


def check_reward(reward: Any, what: str) -> None:
    """A reward is a finite number."""
    assert type(reward) in (int, float), f"{what}: the reward is {reward!r}, not a number"
    assert math.isfinite(reward), f"{what}: the reward is {reward!r}, not finite"


def check_end(outcomes: list[Outcome]) -> None:
    """The last action ends the episode, and none before it."""
    for number, (_, _, terminated, truncated) in enumerate(outcomes):
        ended = terminated or truncated
        if number < len(outcomes) - 1:
            assert not ended, f"action {number} already ends the episode"
        else:
            assert ended, "the last action does not end the episode"


def same(expected: list[Outcome], found: list[Outcome], what: str) -> None:
    """The outcomes are equal, and as many."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one == other, f"{what} differ at step {number}:\n  {one}\n  {other}"
