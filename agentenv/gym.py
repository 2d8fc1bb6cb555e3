"""Our environments as real Gymnasium ones: synchronous, with texts for actions and observations.

    import gymnasium, agentenv.gym
    env = gymnasium.make("agentenv/QAGrader-v0", data="questions.jsonl")

Importing this module registers every known id with Gymnasium, and those registered later too. It
is the only module that imports gymnasium.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import gymnasium
from gymnasium.spaces import Text

import agentenv.env
from agentenv.data.dataset import load_tasks
from agentenv.env import Env, close_shared
from agentenv.errors import AgentEnvError, ConfigError, EnvError
from agentenv.native import Parser, hermes_calls, llama_calls
from agentenv.renderer import RESULT_CLOSE, RESULT_OPEN, first_argument
from agentenv.types import Info, Message, Task, ToolCall

# An event loop in a thread, for callers that are not asynchronous.

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, which all envs of the process share while there are any."""

    _current: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._num_users = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentenv-gym")
        self._thread.daemon = True  # an env that nobody closes must not keep the process alive
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """The running loop, or a new one."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current._num_users += 1
            return cls._current

    def release(self) -> None:
        """The last user closes what the episodes shared, and stops the loop."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            type(self)._current = None
            try:
                self.run(close_shared(), 60.0)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run it in the loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise EnvError(f"the environment did not answer within {timeout_s:g} s") from error


GAP_MARKER = " ... "


class AnyText(Text):  # type: ignore[misc]  # gymnasium is not typed for us
    """Texts of any characters up to a length; samples are of letters and digits."""

    def contains(self, x: Any) -> bool:
        """Whether x is a text that is short enough."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length


class TextEnv(gymnasium.Env):  # type: ignore[misc]
    """One registered environment over a set of tasks, as `gymnasium.make` gives it.

    `tasks`, or the rows of the file `data`, are what episodes are about; `reset(seed=...)` draws
    one, `reset(options={"task": 3})` chooses it. The action is what the policy writes in a turn.
    `protocol` says how it calls tools: "tags" (text that ends with </search> is a call of
    `search`), "hermes" (<tool_call>{"name": ..}</tool_call>) or "llama" ({"name": ..} alone). The
    observation is the prompt, then the tool results. Other keyword arguments go to the
    environment. No operation may take over `timeout_s`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        env_id: str,
        tasks: Sequence[Task] | None = None,
        data: str | None = None,
        max_chars: int = 65536,
        timeout_s: float = 120.0,
        protocol: str = "tags",
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        if (tasks is None) == (data is None) or (tasks is not None and not tasks):
            raise ConfigError(
                f"gymnasium.make({env_id!r}): give either tasks=[Task(...), ...] or data='FILE'"
            )
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"{env_id}: render_mode is 'ansi' or None, not {render_mode!r}")
        if protocol not in _PROTOCOLS:
            raise ConfigError(f"{env_id}: protocol is one of {[*_PROTOCOLS]}, not {protocol!r}")
        self.tasks = list(tasks) if tasks is not None else load_tasks(Path(str(data)), env_id)
        self.action_space = AnyText(max_chars, min_length=0)
        self.observation_space = AnyText(max_chars, min_length=0)
        self.render_mode = render_mode
        self._env_id = env_id
        self._protocol = _PROTOCOLS[protocol]
        self._kwargs = kwargs
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self._env: Env | None = None
        self._schemas: list[dict[str, Any]] = []
        self._transcript = ""
        self._loop: LoopThread | None = None
        agentenv.env.spec(env_id)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        """The prompt of a task. info["task"] is its id, info["tools"] holds the tools' schemas."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(len(self.tasks)))
        own_seed = int(self.np_random.integers(2**31))
        number = (options or {}).get("task", drawn)
        if type(number) is not int or not 0 <= number < len(self.tasks):
            raise ConfigError(
                f'{self._env_id}: options["task"] is a number below {len(self.tasks)}, '
                f"got {number!r}"
            )
        messages, info = self._run(self._restart(self.tasks[number], own_seed))
        self._schemas = list(info.get("tools", ()))
        self._transcript = ""
        text = "\n\n".join(message.content for message in messages)
        return self._show(text), {**info, "task": self.tasks[number].id}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """One turn of the policy, answered by the tools, or graded if it calls none."""
        if self._env is None:
            raise EnvError(f"{self._env_id}: step before reset or after close")
        calls = self._protocol.parse(str(action), self._schemas)
        message = Message("assistant", str(action), calls)
        self._transcript += message.content
        messages, reward, terminated, truncated, info = self._run(self._env.step(message))
        opening, closing = self._protocol.opening, self._protocol.closing
        text = "".join(opening + one.content + closing for one in messages)
        return self._show(text), float(reward), terminated, truncated, _without_times(info)

    def render(self) -> str | None:
        """The episode so far, as text."""
        return self._transcript if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the episode, and what all episodes share with the last env; idempotent."""
        loop = self._loop
        if loop is not None:
            try:
                loop.run(self._close_env(), self._timeout_s)
            finally:
                self._loop = None
                loop.release()

    async def _restart(self, task: Task, seed: int) -> tuple[list[Message], Info]:
        await self._close_env()
        self._env = agentenv.env.make(self._env_id, task, **self._kwargs)
        return await self._env.reset(seed=seed)

    async def _close_env(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await env.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = LoopThread.acquire()
        return self._loop.run(coroutine, self._timeout_s)

    def _show(self, text: str) -> str:
        if len(text) > self._max_chars:
            room = max(0, self._max_chars - len(GAP_MARKER))
            text = text[: room - room // 2] + GAP_MARKER + text[len(text) - room // 2 :]
            text = text[: self._max_chars]
        self._transcript += text
        return text


def tag_calls(text: str, schemas: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    """The call that a text of the tag protocol ends with, if any."""
    text = text.rstrip()
    for schema in schemas:
        name = schema["name"]
        body, closing = text.removesuffix(f"</{name}>"), f"</{name}>"
        if text.endswith(closing) and f"<{name}>" in body:
            text = body.rpartition(f"<{name}>")[2].strip()
            return (ToolCall(name, first_argument(schema, text)),)
    return ()


class _Protocol(NamedTuple):
    """How calls are read, and what stands around a tool result."""

    parse: Parser
    opening: str
    closing: str


_PROTOCOLS = {
    "tags": _Protocol(tag_calls, RESULT_OPEN, RESULT_CLOSE),
    "hermes": _Protocol(hermes_calls, "\n<tool_response>\n", "\n</tool_response>\n"),
    "llama": _Protocol(llama_calls, "\n", "\n"),
}


def _without_times(info: Info) -> Info:
    """Equal episodes give equal infos."""
    records = info.get("tool_calls")
    if not isinstance(records, list):
        return info
    kept = [{key: value for key, value in one.items() if key != "duration_s"} for one in records]
    return {**info, "tool_calls": kept}


def _register(env_id: str) -> None:
    if env_id in gymnasium.registry:
        return
    with contextlib.suppress(gymnasium.error.Error):  # an id of a form that Gymnasium has not
        gymnasium.register(env_id, "agentenv.gym:TextEnv", kwargs={"env_id": env_id})


agentenv.env.on_register(_register)


# Many environments in one process: a coroutine each, where Gymnasium's vector envs need a
# process each.
#
#     async with VectorEnv(make_env, tasks, num_envs=1000) as vector:
#         observations, infos = await vector.reset(seed=0)
#         while ...:
#             observations, rewards, terminated, truncated, infos = await vector.step(actions)

Step = tuple[list[Message], float, bool, bool, Info]


class VectorEnv:
    """Steps `num_envs` environments at once; each goes through tasks of its own.

    An environment that ended is reset by the next step, with the next task and whatever its
    action, as in Gymnasium's next-step autoreset. One that fails, or takes over `timeout_s`, ends
    as truncated with info["error"]; the others go on. At most `max_concurrency` environments are
    at work at a time.
    """

    def __init__(
        self,
        make_env: Callable[[Task], Env],
        tasks: Sequence[Task],
        num_envs: int,
        *,
        timeout_s: float = 120.0,
        max_concurrency: int | None = None,
    ) -> None:
        if num_envs < 1 or not tasks:
            raise ConfigError(
                f"VectorEnv: needs at least one env and one task, got {num_envs} and {len(tasks)}"
            )
        self.num_envs = num_envs
        self.timeout_s = timeout_s
        self._make_env = make_env
        self._tasks = tasks
        self._upcoming: Iterator[Task] = cycle(tasks)
        self._envs: list[Env | None] = [None] * num_envs
        self._ended = [True] * num_envs
        self._num_resets = 0
        self._seed: int | None = None
        self._places = asyncio.Semaphore(max_concurrency or num_envs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def reset(self, *, seed: int | None = None) -> tuple[list[list[Message]], list[Info]]:
        """Start all environments, from the first task on; equal seeds give equal episodes."""
        await self.close()
        self._upcoming, self._num_resets, self._seed = cycle(self._tasks), 0, seed
        steps = await self._all(self._restart(place) for place in range(self.num_envs))
        return [step[0] for step in steps], [step[4] for step in steps]

    async def step(
        self, actions: Sequence[Message]
    ) -> tuple[list[list[Message]], list[float], list[bool], list[bool], list[Info]]:
        """One action an environment; lists in the order of the environments."""
        if len(actions) != self.num_envs:
            raise ConfigError(f"VectorEnv.step: {len(actions)} actions for {self.num_envs} envs")
        steps = await self._all(
            self._restart(place) if self._ended[place] else self._step(place, action)
            for place, action in enumerate(actions)
        )
        observations, rewards, terminated, truncated, infos = zip(*steps, strict=True)
        return (
            list(observations),
            list(rewards),
            list(terminated),
            list(truncated),
            list(infos),
        )

    async def close(self) -> None:
        """Close every environment, also after one of them fails to; idempotent."""
        closing = [self._close(place) for place in range(self.num_envs) if self._envs[place]]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    # inner workings

    async def _all(self, steps: Iterable[Coroutine[Any, Any, Step]]) -> list[Step]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(step) for step in steps]
        return [task.result() for task in tasks]

    def _restart(self, place: int) -> Coroutine[Any, Any, Step]:
        """Its task and seed are drawn now, in the order of the environments."""
        task, number = next(self._upcoming), self._num_resets
        self._num_resets += 1
        seed = None if self._seed is None else Random(f"{self._seed}/{number}").getrandbits(31)
        return self._start(place, task, seed)

    async def _start(self, place: int, task: Task, seed: int | None) -> Step:
        try:
            await self._close(place)
            env = self._envs[place] = self._make_env(task)
            messages, info = await self._within(env.reset(seed=seed))
        except AgentEnvError as error:
            return self._failed(place, error)
        self._ended[place] = False
        return messages, 0.0, False, False, info

    async def _step(self, place: int, action: Message) -> Step:
        env = self._envs[place]
        assert env is not None
        try:
            step = await self._within(env.step(action))
        except AgentEnvError as error:
            return self._failed(place, error)
        self._ended[place] = step[2] or step[3]
        return step

    async def _within(self, awaitable: Awaitable[T]) -> T:
        async with self._places:
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await awaitable
            except TimeoutError as error:
                raise AgentEnvError(f"no answer within {self.timeout_s:g} s") from error

    def _failed(self, place: int, error: AgentEnvError) -> Step:
        self._ended[place] = True
        return [], 0.0, False, True, {"error": f"{type(error).__name__}: {error}"}

    async def _close(self, place: int) -> None:
        env, self._envs[place] = self._envs[place], None
        self._ended[place] = True
        if env is not None:
            async with asyncio.timeout(self.timeout_s):
                await env.close()
