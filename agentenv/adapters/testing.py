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
Make = Callable[[Task], Env]
Outcome = tuple[list[Message], float, bool, bool]

SEED = 20  # of every episode
HELD_S = 1.0  # maximum time for which a step may block the event loop
SETTLE_S = 5.0  # time for killed processes to exit
CANCEL_TIMEOUT_S = 30.0  # time for a cancelled step to end
MAX_SUSPENSIONS = 200
NUM_CONCURRENT = 8


async def check_tool_env(
    make: Make, task: Task, actions: Sequence[Message | str], *, renderer: CallProtocol = "tags"
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
        env = make(task)
        try:
            _, info = _refuse(check_reset, await env.reset(seed=SEED))
        finally:
            await env.close()
        tools: Sequence[dict[str, Any]] = info.get("tools", ())
        if renderer == "tags":
            _refuse(check_tags, tools)
        await _Trial(make, task, [_message(action, tools) for action in actions]).check()


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


class _Trial:
    """The checks of an environment by one episode; `reference` has the outcomes of its actions."""

    def __init__(self, make: Make, task: Task, actions: Sequence[Message]) -> None:
        self.make, self.task, self.actions = make, task, actions
        self.reference: list[Outcome] = []

    async def check(self) -> None:
        """The seed determines an episode; it does not block the loop, nor depend on others."""
        before = getstate()
        held: list[list[float]] = [[], []]
        self.reference = await self.play(held[0])
        assert getstate() == before, "an episode changed the state of the global random generator"
        check_end(self.reference)
        for observation, *_ in self.reference[:-1]:
            _refuse(check_observation, observation)
        self.same(await self.play(held[1]), "two episodes with the same seed")
        for number, seconds in enumerate(map(min, *held)):  # the first call may load something
            assert seconds <= HELD_S, (
                f"step {number} blocked the event loop, and with it every other rollout, for "
                f"{seconds:.1f} s: await I/O, and run computations in a thread (asyncio.to_thread) "
                "or a process"
            )
        await self.check_reset_and_close()
        async with self.begun(len(self.actions) - 1) as env:
            await env.reset(seed=SEED)
            outcomes = await act(env, self.actions)
            self.same(outcomes, "an episode and the next one of the same env")
        async with self.begun(len(self.actions) - 1) as env:
            found = await env.finish(Limit.TURNS, self.actions[-1])
            _refuse(check_finish, found)
            check_reward(found[0], "finish")
        for episode in await asyncio.gather(*(self.play() for _ in range(NUM_CONCURRENT))):
            self.same(episode, "an episode alone and one of several at the same time")
        await self.check_cancellation()
        async with self.begun(0) as env:
            fork_mode = env.fork_mode
        assert fork_mode in get_args(ForkMode), f"fork_mode is {fork_mode!r}"
        if fork_mode != "none":
            await self.check_forks()

    async def check_reset_and_close(self) -> None:
        """A step before `reset` and after `close` must raise; `close` may be called at any time,
        and twice."""
        unused = self.make(self.task)
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
            env = self.make(self.task)
            messages, _ = _refuse(check_reset, await env.reset(seed=SEED, options=options))
            assert messages, "reset returned no prompt"
            prompts.append(messages)
            await env.close()
            await env.close()  # idempotent
        env = self.make(self.task)
        await env.reset()  # no seed is allowed too
        await env.close()
        assert prompts[0] == prompts[1], (
            f"two resets with the same seed returned different prompts: {prompts}"
        )

    async def check_cancellation(self) -> None:
        """Cancel each step, and each fork, at every point where it waits; closing must still
        work."""
        before = await Leftovers.settled(None, SETTLE_S)
        for number, action in enumerate(self.actions):
            for suspension in range(1, MAX_SUSPENSIONS):
                async with self.begun(number) as env:
                    finished = await cancel_at(env.step(action), suspension, f"step {number}")
                if finished:
                    break
        async with self.begun(len(self.actions) - 1) as env:
            for suspension in range(1, MAX_SUSPENSIONS if env.fork_mode != "none" else 1):
                if await cancel_at(_fork_and_close(env), suspension, "fork"):
                    break
        after = await Leftovers.settled(before, SETTLE_S)
        assert after.beyond(before) == "", f"after cancelled steps: {after.beyond(before)}"

    async def check_forks(self) -> None:
        """At each place a child plays the rest, then its parent, or both at the same time: all as
        if there were no fork."""
        for place in range(len(self.actions)):
            rest = self.actions[place:]
            async with self.begun(place) as env:
                async with _forked(env) as child:
                    await _fork_and_close(child)
                    self.same(await act(child, rest), f"a fork after {place} steps", place)
                outcomes = await act(env, rest)
                self.same(
                    outcomes, f"an env after its fork at {place} steps acted and closed", place
                )
        place = len(self.actions) // 2
        rest = self.actions[place:]
        async with self.begun(place) as env, _forked(env) as child:
            for outcomes in await asyncio.gather(act(env, rest), act(child, rest)):
                self.same(outcomes, "a parent and its fork that act at the same time", place)

    @asynccontextmanager
    async def begun(self, num_actions: int) -> AsyncIterator[Env]:
        """An episode with SEED after the first actions; closed at the end."""
        env = self.make(self.task)
        try:
            await env.reset(seed=SEED)
            await act(env, self.actions[:num_actions])
            yield env
        finally:
            await env.close()

    async def play(self, held: list[float] | None = None) -> list[Outcome]:
        """The outcomes of one whole episode with SEED; `held` as in `act`."""
        async with self.begun(0) as env:
            return await act(env, self.actions, held)

    def same(self, found: list[Outcome], what: str, place: int = 0) -> None:
        """The outcomes are those of the reference from this action on."""
        expected = self.reference[place:]
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert one == other, f"{what} differ at step {number}:\n  {one}\n  {other}"


async def _fork_and_close(env: Env) -> None:
    async with _forked(env):
        pass


@asynccontextmanager
async def _forked(env: Env) -> AsyncIterator[Env]:
    """A fork; closed at the end."""
    child = await env.fork()
    try:
        yield child
    finally:
        await child.close()


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
    *before, last = (terminated or truncated for _, _, terminated, truncated in outcomes)
    assert True not in before, (
        f"action {before.index(True)} already ends the episode; an action with a tool call is a "
        "Message with tool_calls, or a text such as '<stock>bolts</stock>'"
    )
    assert last, "the last action does not end the episode"


async def cancel_at(awaitable: Awaitable[Any], suspension: int, what: str) -> bool:
    """Run the awaitable, and cancel it in its n-th wait (`suspension`); whether it ended before.
    Raises AssertionError if the cancellation does not end it, as deadlines require."""
    held: list[float] = []

    def cancel() -> None:
        if len(held) == suspension:
            asyncio.get_running_loop().call_soon(task.cancel)

    task = asyncio.ensure_future(_watched(awaitable, held, cancel))
    await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
    if task.cancelled():
        return False
    ending = "went on" if len(held) > suspension else ""
    if task.done():
        task.result()
    else:
        task.cancel()
        ending = "stuck"
    assert not ending, (
        f"{what}, cancelled at its wait number {suspension}, {ending}: a deadline could not stop it"
    )
    return True


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
            if state == last if wanted is None else not state.beyond(wanted):
                return state
            last = state
        return last

    def beyond(self, before: Leftovers) -> str:
        """Resources that increased, as text; "" for none."""
        found = zip(("asyncio tasks", "file descriptors", "processes"), self, before, strict=True)
        return ", ".join(f"{now - then} {what} left" for what, now, then in found if now > then)
