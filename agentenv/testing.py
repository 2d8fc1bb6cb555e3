"""A conformance kit for environments: run it on yours.

async def test_weather() -> None:
    call = Message("assistant", "..", (ToolCall("weather", {"city": "Lima"}),))
    answer = Message("assistant", "<answer>sunny</answer>")
    await check_tool_env(WeatherEnv, task, [call, call, answer])
"""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import psutil

from agentenv.env import Env
from agentenv.types import Limit, Message, Task

T = TypeVar("T")
Make = Callable[[Task], Env]
Outcome = tuple[list[Message], float, bool, bool]

SEED = 20
SETTLE_S = 5.0  # how long killed processes may take to be gone
MAX_SUSPENSIONS = 200


async def check_tool_env(make: Make, task: Task, actions: Sequence[Message]) -> None:
    """Raises AssertionError, with a text that says what is wrong, if the env breaks its contract.

    `actions` are one whole episode, the last action being the one that ends it. They should give
    the same observations each time, and change the state of the tools if they have any.
    """
    reference = await _play(make, task, actions)
    again = await _play(make, task, actions)
    _same(reference, again, "two episodes with one seed")
    await _check_reset_and_close(make, task)
    await _check_finish(make, task, actions)
    await _check_cancellation(make, task, actions)
    env = make(task)
    fork_mode = env.fork_mode
    await env.close()
    if fork_mode != "none":
        await _check_forks(make, task, actions, reference)


async def _play(make: Make, task: Task, actions: Sequence[Message]) -> list[Outcome]:
    env = make(task)
    try:
        await env.reset(seed=SEED)
        return await _act(env, actions)
    finally:
        await env.close()


async def _act(env: Env, actions: Sequence[Message]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for action in actions:
        outcome = await env.step(action)
        _check_outcome(outcome)
        outcomes.append(outcome[:4])
    return outcomes


def _check_outcome(outcome: Any) -> None:
    assert isinstance(outcome, tuple), f"step returned {type(outcome).__name__}, not a tuple"
    assert len(outcome) == 5, f"step returned {len(outcome)} values, not 5"
    messages, reward, terminated, truncated, info = outcome
    assert isinstance(messages, list), "the observation of step is not a list"
    assert all(isinstance(message, Message) for message in messages), (
        f"the observation of step holds something else than messages: {messages!r}"
    )
    assert type(reward) in (int, float), f"the reward is {reward!r}, not a number"
    assert type(terminated) is bool, f"terminated is {terminated!r}, not a bool"
    assert type(truncated) is bool, f"truncated is {truncated!r}, not a bool"
    assert isinstance(info, dict), f"info is {type(info).__name__}, not a dict"


async def _check_reset_and_close(make: Make, task: Task) -> None:
    unused = make(task)
    await unused.close()  # an env that was never reset
    prompts = []
    for _ in range(2):
        env = make(task)
        messages, info = await env.reset(seed=SEED)
        assert messages, "reset gave no prompt"
        assert isinstance(info, dict), f"info of reset is {type(info).__name__}, not a dict"
        prompts.append(messages)
        await env.close()
        await env.close()  # idempotent
    assert prompts[0] == prompts[1], f"two resets with one seed gave two prompts: {prompts}"


async def _check_finish(make: Make, task: Task, actions: Sequence[Message]) -> None:
    env = make(task)
    try:
        await env.reset(seed=SEED)
        await _act(env, actions[:-1])
        reward, info = await env.finish(Limit.TURNS, actions[-1])
        assert type(reward) in (int, float), f"finish: the reward is {reward!r}, not a number"
        assert isinstance(info, dict), f"finish: info is {type(info).__name__}, not a dict"
    finally:
        await env.close()


async def _check_cancellation(make: Make, task: Task, actions: Sequence[Message]) -> None:
    """Cancel each step, and each fork, at every point where it waits; closing must still work."""
    before = await _Leftovers.settled(None)
    for number, action in enumerate(actions):
        for suspension in range(1, MAX_SUSPENSIONS):
            env = make(task)
            await env.reset(seed=SEED)
            await _act(env, actions[:number])
            stepped = await _cancelled_at(env.step(action), suspension)
            await env.close()
            if stepped:
                break
    env = make(task)
    try:
        await env.reset(seed=SEED)
        await _act(env, actions[:-1])
        for suspension in range(1, MAX_SUSPENSIONS if env.fork_mode != "none" else 1):
            forked = await _cancelled_at(_fork_and_close(env), suspension)
            if forked:
                break
    finally:
        await env.close()
    after = await _Leftovers.settled(before)
    assert after.beyond(before) == "", f"after cancelled steps: {after.beyond(before)}"


async def _fork_and_close(env: Env) -> None:
    child = await env.fork()
    await child.close()


async def _check_forks(
    make: Make, task: Task, actions: Sequence[Message], reference: list[Outcome]
) -> None:
    """At each place a child plays the rest, then its parent does: both as if never forked."""
    for place in range(len(actions)):
        env = make(task)
        try:
            await env.reset(seed=SEED)
            await _act(env, actions[:place])
            child = await env.fork()
            try:
                grandchild = await child.fork()
                await grandchild.close()
                rest = reference[place:]
                _same(rest, await _act(child, actions[place:]), f"a fork after {place} steps")
            finally:
                await child.close()
            outcomes = await _act(env, actions[place:])
            _same(rest, outcomes, f"an env after its fork at {place} steps acted and closed")
        finally:
            await env.close()


def _same(expected: list[Outcome], found: list[Outcome], what: str) -> None:
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one == other, f"{what} differ at step {number}:\n  {one}\n  {other}"


async def _cancelled_at(awaitable: Awaitable[Any], suspension: int) -> bool:
    """Run, and cancel where it waits for the n-th time. True if it ended before that."""
    task = asyncio.ensure_future(_cancelling(awaitable, suspension))
    await asyncio.wait({task})
    if task.cancelled():
        return False
    cancelled: bool = task.result()[0]
    return not cancelled


@types.coroutine
def _cancelling(awaitable: Awaitable[T], suspension: int) -> Generator[Any, Any, tuple[bool, T]]:
    """Passes every wait on to the event loop, and has this task cancelled in the n-th."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    iterator = awaitable.__await__()
    error: BaseException | None = None
    count = 0
    while True:
        try:
            waiting = next(iterator) if error is None else iterator.throw(error)
        except StopIteration as stop:
            return count >= suspension, stop.value
        count += 1
        if count == suspension:
            loop.call_soon(task.cancel)
        try:
            yield waiting
            error = None
        except BaseException as raised:  # a cancellation, above all: the awaitable must see it
            error = raised


class _Leftovers(NamedTuple):
    """What an episode could leave behind in this process."""

    tasks: int
    descriptors: int
    processes: int

    @classmethod
    def now(cls) -> _Leftovers:
        directory = "/proc/self/fd"
        descriptors = len(os.listdir(directory)) if os.path.isdir(directory) else 0
        children = psutil.Process().children(recursive=True)
        return cls(len(asyncio.all_tasks()), descriptors, len(children))

    @classmethod
    async def settled(cls, wanted: _Leftovers | None) -> _Leftovers:
        """The state once it is no more than `wanted`, or no longer falls."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        last = cls.now()
        while loop.time() < deadline:
            await asyncio.sleep(0.05)
            state = cls.now()
            if wanted is not None and not state.beyond(wanted):
                return state
            if wanted is None and state == last:
                return state
            last = state
        return last

    def beyond(self, before: _Leftovers) -> str:
        found = zip(("asyncio tasks", "file descriptors", "processes"), self, before, strict=True)
        return ", ".join(f"{now - then} {what} left" for what, now, then in found if now > then)
