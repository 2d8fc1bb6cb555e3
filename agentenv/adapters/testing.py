"""A conformance test kit for environments.

async def test_weather() -> None:
    call = "<weather>Lima</weather>"  # or Message("assistant", "..", (ToolCall(..),))
    await check_tool_env(WeatherEnv, task, [call, call, "<answer>sunny</answer>"])
"""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from random import getstate
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import psutil

from agentenv.base.errors import AgentEnvError, ConfigError, CrashError
from agentenv.base.types import Limit, Message, Task
from agentenv.contract.env import (
    Env,
    ForkMode,
    check_finish,
    check_observation,
    check_reset,
    check_step,
    isolated_shared,
)
from agentenv.text.tags import check_tags, tag_calls

T = TypeVar("T")
CallProtocol = Literal["tags", "native"]  # of renderers
Ending = Literal["cancelled", "finished before", "went on", "stuck"]
Make = Callable[[Task], Env]
Outcome = tuple[list[Message], float, bool, bool]

SEED = 20  # of every episode
HELD_S = 1.0  # maximum time for which a step may block the event loop
SETTLE_S = 5.0  # time for killed processes to exit
CANCEL_TIMEOUT_S = 30.0  # time for a cancelled step to end
MAX_SUSPENSIONS = 200
NUM_CONCURRENT = 8


async def check_tool_env(
    make: Make,
    task: Task,
    actions: Sequence[Message | str],
    *,
    renderer: CallProtocol = "tags",
) -> None:
    """Raises AssertionError with an explanation if the env violates its contract.

    `actions` are one whole episode, which the last action ends: messages, or texts in the tag
    protocol. They should give the same observations each time, and change the state of stateful
    tools.

    The kit checks Gymnasium's rules for reset and step, seeding, idempotent close, and `finish`;
    that no step blocks the event loop, and with it every other rollout, for over HELD_S; that a
    deadline can end a step or a fork at each of its awaits, without leftovers; that episodes are
    independent; the fork law (a fork and its parent continue independently); that the policy can
    call each tool in the format of `renderer`; and that observations consist of tool results and
    user messages. Checks of rollouts (`agentenv.contract.env`) fail with the same text. Shared
    resources are closed at the end.
    """
    async with isolated_shared():
        tools = await _tools(make, task)
        if renderer == "tags":
            _refuse(check_tags, tools)
        await _check_env(make, task, [_message(action, tools) for action in actions])


async def _check_env(make: Make, task: Task, actions: Sequence[Message]) -> None:
    """The seed determines an episode; it does not block the loop, nor depend on other episodes."""
    before = getstate()
    held: list[list[float]] = [[], []]
    reference = await play(make, task, actions, held[0])
    assert getstate() == before, "an episode changed the state of the global random generator"
    check_end(reference)
    for observation, *_ in reference[:-1]:
        _refuse(check_observation, observation)
    again = await play(make, task, actions, held[1])
    same(reference, again, "two episodes with the same seed")
    for number, seconds in enumerate(map(min, *held)):  # the first call may load something
        assert seconds <= HELD_S, (
            f"step {number} blocked the event loop, and with it every other rollout, for "
            f"{seconds:.1f} s: await I/O, and run computations in a thread (asyncio.to_thread) or "
            "a process"
        )
    await _check_reset_and_close(make, task)
    await _check_second_reset(make, task, actions, reference)
    await _check_finish(make, task, actions)
    await _check_concurrency(make, task, actions, reference)
    await _check_cancellation(make, task, actions)
    async with _begun(make, task, ()) as env:
        fork_mode = env.fork_mode
    assert fork_mode in get_args(ForkMode), f"fork_mode is {fork_mode!r}"
    if fork_mode != "none":
        await _check_forks(make, task, actions, reference)
        await _check_concurrent_forks(make, task, actions, reference)


async def _tools(make: Make, task: Task) -> Sequence[dict[str, Any]]:
    """The schemas of the tools of a new env, after its reset."""
    env = make(task)
    try:
        _, info = _refuse(check_reset, await env.reset(seed=SEED))
    finally:
        await env.close()
    tools: Sequence[dict[str, Any]] = info.get("tools", ())
    return tools


def _refuse(check: Callable[..., T], *given: Any) -> T:
    """The result of a rollout's check. Converts its error to AssertionError."""
    try:
        return check(*given)
    except (ConfigError, CrashError) as error:
        raise AssertionError(str(error)) from error


def _message(action: Message | str, tools: Sequence[dict[str, Any]]) -> Message:
    """An action; a text is parsed as a turn of the tag protocol."""
    if isinstance(action, Message):
        return action
    return Message("assistant", action, tag_calls(action, tools))


async def _check_reset_and_close(make: Make, task: Task) -> None:
    """A step before `reset` and after `close` must raise; `close` may be called at any time, and
    twice."""
    unused = make(task)
    try:
        await unused.step(Message("assistant", "too early"))
    except AgentEnvError:
        pass
    else:
        raise AssertionError("step before reset must raise EnvError")
    await unused.close()  # an env that was never reset
    prompts = []
    choices: tuple[dict[str, Any] | None, ...] = (None, {})
    for options in choices:
        env = make(task)
        outcome = await env.reset(seed=SEED, options=options)
        messages, _ = _refuse(check_reset, outcome)
        assert messages, "reset returned no prompt"
        prompts.append(messages)
        await env.close()
        await env.close()  # idempotent
    env = make(task)
    await env.reset()  # no seed is allowed too
    await env.close()
    assert prompts[0] == prompts[1], (
        f"two resets with the same seed returned different prompts: {prompts}"
    )


async def _check_second_reset(
    make: Make, task: Task, actions: Sequence[Message], reference: list[Outcome]
) -> None:
    async with _begun(make, task, actions[:-1]) as env:
        await env.reset(seed=SEED)
        same(reference, await act(env, actions), "an episode and the next one of the same env")


async def _check_concurrency(
    make: Make, task: Task, actions: Sequence[Message], reference: list[Outcome]
) -> None:
    episodes = await asyncio.gather(*(play(make, task, actions) for _ in range(NUM_CONCURRENT)))
    for episode in episodes:
        same(reference, episode, "an episode alone and one of several at the same time")


async def _check_concurrent_forks(
    make: Make, task: Task, actions: Sequence[Message], reference: list[Outcome]
) -> None:
    """A parent and its child play the rest concurrently."""
    place = len(actions) // 2
    async with _begun(make, task, actions[:place]) as env:
        async with _forked(env) as child:
            both = await asyncio.gather(act(env, actions[place:]), act(child, actions[place:]))
        for outcomes in both:
            same(reference[place:], outcomes, "a parent and its fork that act at the same time")


async def _check_finish(make: Make, task: Task, actions: Sequence[Message]) -> None:
    async with _begun(make, task, actions[:-1]) as env:
        found = await env.finish(Limit.TURNS, actions[-1])
        _refuse(check_finish, found)
        check_reward(found[0], "finish")


async def _check_cancellation(make: Make, task: Task, actions: Sequence[Message]) -> None:
    """Cancel each step, and each fork, at every point where it waits; closing must still work."""
    before = await Leftovers.settled(None, SETTLE_S)
    for number, action in enumerate(actions):
        for suspension in range(1, MAX_SUSPENSIONS):
            async with _begun(make, task, actions[:number]) as env:
                ending = await cancel_at(env.step(action), suspension, CANCEL_TIMEOUT_S)
                _check_ending(ending, f"step {number}", suspension)
            if ending == "finished before":
                break
    async with _begun(make, task, actions[:-1]) as env:
        for suspension in range(1, MAX_SUSPENSIONS if env.fork_mode != "none" else 1):
            ending = await cancel_at(_fork_and_close(env), suspension, CANCEL_TIMEOUT_S)
            _check_ending(ending, "fork", suspension)
            if ending == "finished before":
                break
    after = await Leftovers.settled(before, SETTLE_S)
    assert after.beyond(before) == "", f"after cancelled steps: {after.beyond(before)}"


def _check_ending(ending: Ending, what: str, suspension: int) -> None:
    """A cancellation must end the call, since deadlines cancel it."""
    assert ending not in ("went on", "stuck"), (
        f"{what}, cancelled at its wait number {suspension}, {ending}: a deadline could not stop it"
    )


async def _fork_and_close(env: Env) -> None:
    async with _forked(env):
        pass


async def _check_forks(
    make: Make, task: Task, actions: Sequence[Message], reference: list[Outcome]
) -> None:
    """At each place a child plays the rest, then its parent: both as if there were no fork."""
    for place in range(len(actions)):
        rest = reference[place:]
        async with _begun(make, task, actions[:place]) as env:
            async with _forked(env) as child:
                await _fork_and_close(child)
                same(rest, await act(child, actions[place:]), f"a fork after {place} steps")
            outcomes = await act(env, actions[place:])
            same(rest, outcomes, f"an env after its fork at {place} steps acted and closed")


@asynccontextmanager
async def _begun(make: Make, task: Task, actions: Sequence[Message]) -> AsyncIterator[Env]:
    """An episode with SEED after these actions; closed at the end."""
    env = make(task)
    try:
        await env.reset(seed=SEED)
        await act(env, actions)
        yield env
    finally:
        await env.close()


@asynccontextmanager
async def _forked(env: Env) -> AsyncIterator[Env]:
    """A fork; closed at the end."""
    child = await env.fork()
    try:
        yield child
    finally:
        await child.close()


async def play(
    make: Make, task: Task, actions: Sequence[Message], held: list[float] | None = None
) -> list[Outcome]:
    """The outcomes of one whole episode with SEED; `held` as in `act`."""
    async with _begun(make, task, ()) as env:
        return await act(env, actions, held)


async def act(
    env: Env, actions: Sequence[Message], held: list[float] | None = None
) -> list[Outcome]:
    """Take the actions, and check the form of each step's result. `held` gets, for each step, the
    longest time in seconds for which it blocked the event loop."""
    outcomes: list[Outcome] = []
    for action in actions:
        seconds: list[float] = []
        outcome = await _watched(env.step(action), seconds)
        if held is not None:
            held.append(max(seconds))
        check_outcome(outcome)
        outcomes.append(outcome[:4])
    return outcomes


def check_outcome(outcome: Any) -> None:
    """Check a result of `step`: the rules of rollouts, and those of Gymnasium."""
    _refuse(check_step, outcome)
    assert isinstance(outcome, tuple), f"step returned {type(outcome).__name__}, not a tuple"
    messages, reward, terminated, truncated, _ = outcome
    assert isinstance(messages, list), "the observation of step is not a list"
    check_reward(reward, "step")
    assert type(terminated) is bool, f"terminated is {terminated!r}, not a bool"
    assert type(truncated) is bool, f"truncated is {truncated!r}, not a bool"


def check_reward(reward: Any, what: str) -> None:
    """A reward is a plain number."""
    assert type(reward) in (int, float), f"{what}: the reward is {reward!r}, not a number"


def check_end(outcomes: list[Outcome]) -> None:
    """The last action ends the episode, and none before it."""
    for number, (_, _, terminated, truncated) in enumerate(outcomes):
        ended = terminated or truncated
        if number < len(outcomes) - 1:
            assert not ended, (
                f"action {number} already ends the episode; an action with a tool call is a "
                "Message with tool_calls, or a text such as '<stock>bolts</stock>'"
            )
        else:
            assert ended, "the last action does not end the episode"


def same(expected: list[Outcome], found: list[Outcome], what: str) -> None:
    """Both have the same outcomes, as many and equal."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one == other, f"{what} differ at step {number}:\n  {one}\n  {other}"


async def cancel_at(awaitable: Awaitable[Any], suspension: int, timeout_s: float) -> Ending:
    """Run the awaitable, cancel it in its n-th wait (`suspension`), and return the ending: "went
    on" returned a result anyway, "stuck" did not end within `timeout_s` seconds."""
    held: list[float] = []

    def cancel() -> None:
        if len(held) == suspension:
            asyncio.get_running_loop().call_soon(task.cancel)

    task = asyncio.ensure_future(_watched(awaitable, held, cancel))
    await asyncio.wait({task}, timeout=timeout_s)
    if not task.done():
        task.cancel()
        return "stuck"
    if task.cancelled():
        return "cancelled"
    task.result()
    return "went on" if len(held) > suspension else "finished before"


@types.coroutine
def _watched(
    awaitable: Awaitable[T], held: list[float], on_wait: Callable[[], None] = lambda: None
) -> Generator[Any, Any, T]:
    """Forward every wait to the event loop, and return the result. `held` gets the seconds before,
    between and after the waits, and `on_wait` is called in each wait."""
    time = asyncio.get_running_loop().time
    iterator = awaitable.__await__()
    error: BaseException | None = None
    while True:
        start = time()
        try:
            waiting = next(iterator) if error is None else iterator.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            held.append(time() - start)
        on_wait()
        try:
            yield waiting
            error = None
        except BaseException as raised:  # a cancellation, above all: the awaitable must see it
            error = raised


class Leftovers(NamedTuple):
    """Counts of resources that an episode could leave in this process."""

    tasks: int
    descriptors: int
    processes: int

    @classmethod
    def now(cls) -> Leftovers:
        """The current numbers of tasks, file descriptors and child processes."""
        directory = "/proc/self/fd"
        descriptors = len(os.listdir(directory)) if os.path.isdir(directory) else 0
        children = psutil.Process().children(recursive=True)
        return cls(len(asyncio.all_tasks()), descriptors, len(children))

    @classmethod
    async def settled(cls, wanted: Leftovers | None, settle_s: float) -> Leftovers:
        """The counts once they are at most `wanted`, or no longer fall, or after settle_s
        seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settle_s
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

    def beyond(self, before: Leftovers) -> str:
        """Resources that increased, as text; "" for none."""
        found = zip(("asyncio tasks", "file descriptors", "processes"), self, before, strict=True)
        return ", ".join(f"{now - then} {what} left" for what, now, then in found if now > then)
