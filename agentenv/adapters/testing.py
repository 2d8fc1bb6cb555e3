"""A conformance test kit for environments.

async def test_weather() -> None:
    call = "<weather>Lima</weather>"  # or Message("assistant", "..", (ToolCall(..),))
    await check_tool_env(WeatherEnv, task, [call, call, "<answer>sunny</answer>"])
"""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from random import getstate
from typing import Any, Literal, TypeVar, get_args

import psutil

from agentenv.adapters.trial import (
    SEED,
    Make,
    Outcome,
    Trial,
    fork_and_close,
    left,
    refuse,
    running,
)
from agentenv.base.errors import AgentEnvError
from agentenv.base.types import Limit, Message, Task
from agentenv.contract import env as contract
from agentenv.text.tags import check_tags, tag_calls

T = TypeVar("T")
CallProtocol = Literal["tags", "native"]  # of renderers

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
    async with contract.isolated_shared():
        trial = _Conformance(make, task, ())
        async with trial.begun(0):
            tools: Sequence[dict[str, Any]] = trial.info.get("tools", ())
        if renderer == "tags":
            refuse(check_tags, tools)
        trial.actions = [_message(action, tools) for action in actions]
        await trial.check()


def _message(action: Message | str, tools: Sequence[dict[str, Any]]) -> Message:
    """An action; a text is parsed as a turn of the tag protocol."""
    if isinstance(action, Message):
        return action
    return Message("assistant", action, tag_calls(action, tools))


class _Conformance(Trial):
    """The checks of an environment by one episode."""

    async def check(self) -> None:
        """The seed determines an episode; it does not block the loop, nor depend on others."""
        before = getstate()
        self.held: dict[int, list[float]] = {}
        try:
            await self.check_episodes()
        finally:
            assert getstate() == before, "an episode changed the global random generator"
        check_end(self.reference, len(self.actions))
        for observation, *_ in self.reference[:-1]:
            refuse(contract.check_observation, observation)
        for number, action in enumerate(self.actions):
            seconds = min(self.held[id(action)])  # the first call may load something
            assert seconds <= HELD_S, (
                f"step {number} blocked the event loop, and with it every other rollout, for "
                f"{seconds:.1f} s: await I/O, and run computations in a thread (asyncio.to_thread) "
                "or a process"
            )
        assert self.fork_mode in get_args(contract.ForkMode), f"fork_mode is {self.fork_mode!r}"
        if self.fork_mode != "none":
            await self.check_forks(range(len(self.actions)))
        await self.check_reset_and_close()
        async with self.begun(len(self.actions) - 1) as env:
            await env.reset(seed=SEED)
            outcomes = await self.act(env, self.actions)
            self.same(outcomes, "an episode and the next one of the same env")
        async with self.begun(len(self.actions) - 1) as env:
            found = await env.finish(Limit.TURNS, self.actions[-1])
            refuse(contract.check_finish, found)
            check_reward(found[0], "finish")
        for episode in await asyncio.gather(*(self.play() for _ in range(NUM_CONCURRENT))):
            self.same(episode, "an episode alone and one of several at the same time")
        await self.check_cancellation()

    async def step(self, env: contract.Env, action: Message) -> contract.StepResult:
        """The result of a step, which follows Gymnasium's rules too. `held` gets the longest time
        in seconds for which it blocked the event loop."""
        seconds: list[float] = []
        outcome = await _watched(env.step(action), seconds)
        self.held.setdefault(id(action), []).append(max(seconds))
        check_outcome(outcome)
        return outcome

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
            messages, _ = refuse(contract.check_reset, await env.reset(seed=SEED, options=options))
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
        before = await left(set(), resources, SETTLE_S / 10)
        for number, action in enumerate(self.actions):
            for suspension in range(1, MAX_SUSPENSIONS):
                async with self.begun(number) as env:
                    finished = await cancel_at(env.step(action), suspension, f"step {number}")
                if finished:
                    break
        async with self.begun(len(self.actions) - 1) as env:
            for suspension in range(1, MAX_SUSPENSIONS if env.fork_mode != "none" else 1):
                if await cancel_at(fork_and_close(env), suspension, "fork"):
                    break
        for one in await left(before, resources, SETTLE_S):
            raise AssertionError(f"after cancelled steps: {one} left")


def check_outcome(outcome: Any) -> None:
    """Check a result of `step`: the rules of rollouts, and those of Gymnasium."""
    refuse(contract.check_step, outcome)
    assert isinstance(outcome, tuple), f"step returned {type(outcome).__name__}, not a tuple"
    messages, reward, terminated, truncated, _ = outcome
    assert isinstance(messages, list), "the observation of step is not a list"
    check_reward(reward, "step")
    assert type(terminated) is bool, f"terminated is {terminated!r}, not a bool"
    assert type(truncated) is bool, f"truncated is {truncated!r}, not a bool"


def check_reward(reward: Any, what: str) -> None:
    """A reward is a plain number."""
    assert type(reward) in (int, float), f"{what}: the reward is {reward!r}, not a number"


def check_end(outcomes: list[Outcome], num_actions: int) -> None:
    """The last of the actions ends the episode, and none before it."""
    assert len(outcomes) == num_actions, (
        f"action {len(outcomes) - 1} already ends the episode; an action with a tool call is a "
        "Message with tool_calls, or a text such as '<stock>bolts</stock>'"
    )
    assert outcomes[-1][2] or outcomes[-1][3], "the last action does not end the episode"


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


def resources() -> set[Any]:
    """The tasks and threads of this process, and numbers for its open files and children."""
    numbers = {
        "file descriptor": len(os.listdir("/proc/self/fd")),
        "child process": len(psutil.Process().children(recursive=True)),
    }
    return running() | {f"{name} {n}" for name, most in numbers.items() for n in range(most)}
