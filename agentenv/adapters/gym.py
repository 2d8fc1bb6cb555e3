"""Environments as Gymnasium ones; actions and observations are texts.

    import gymnasium
    env = gymnasium.make("agentenv.adapters.gym:agentenv/QAGrader-v0", data="questions.jsonl")

Importing this module, as this form of the id does, registers every known id with Gymnasium, and ids
that are registered later; Gymnasium itself reads no entry points since 1.0. Episodes are coroutines
on one event loop in a thread, which all envs of the process share. Gymnasium's vector env steps
them one after the other, or with vectorization_mode="async" a process per env, which needs
vector_kwargs={"shared_memory": False}.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import gymnasium
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Text
from gymnasium.vector.utils import create_shared_memory

from agentenv.base.errors import ConfigError, EnvError, reported_as
from agentenv.base.types import Info, Message, Task
from agentenv.base.untrusted import shortened
from agentenv.contract import env_registry
from agentenv.contract.env import Env, close_shared, forget_shared
from agentenv.data.dataset import load_tasks
from agentenv.text.renderer import RESULT_CLOSE, RESULT_OPEN
from agentenv.text.tags import tag_calls

T = TypeVar("T")
Step = tuple[str, float, bool, bool, Info]

GAP_MARKER = " ... "
CLOSE_SHARED_S = 60.0


class LoopThread:
    """An event loop in a thread, shared by all open envs of the process."""

    _current: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._num_users = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentenv-gym")
        self._thread.daemon = True  # an unclosed env must not keep the process alive
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """The running loop, or a new one; adds a user."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current._num_users += 1
            return cls._current

    def release(self) -> None:
        """Remove a user; the last one closes the shared resources and stops the loop."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            type(self)._current = None
            try:
                self.run(close_shared(), CLOSE_SHARED_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(CLOSE_SHARED_S)
                if not self._thread.is_alive():  # else a callback hangs
                    self._loop.close()

    @classmethod
    def forget(cls) -> None:
        """In a forked child: drop the thread and the shared resources, which are the parent's."""
        cls._current, cls._lock = None, threading.Lock()
        forget_shared()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run the coroutine in the loop, and wait for its result. Raises EnvError after
        `timeout_s` seconds."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise EnvError(f"the environment did not answer within {timeout_s} s") from error


os.register_at_fork(after_in_child=LoopThread.forget)


class AnyText(Text):  # type: ignore[misc]  # gymnasium is not typed for us
    """Texts of any characters up to a length; samples consist of letters and digits."""

    def contains(self, x: Any) -> bool:
        """Whether x is a text within the length."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length


@create_shared_memory.register(AnyText)  # type: ignore[untyped-decorator]
def _refuse_shared_memory(*_: Any, **__: Any) -> Any:
    """Gymnasium's "async" mode then reports that it needs shared_memory=False."""
    raise CustomSpaceError("strings of arbitrary characters cannot be placed in shared memory")


class TextEnv(gymnasium.Env):  # type: ignore[misc]
    """One registered environment over a set of tasks, as `gymnasium.make` returns it.

    The tasks are `tasks`, or the rows of the file `data`; `reset(seed=...)` draws one,
    `reset(options={"task": 3})` selects one. The action is the text of a turn of the policy in the
    tag protocol: a text that ends with </search> is a call of `search`. The observation is the
    prompt, then the tool results. Other keyword arguments go to the environment. Each operation has
    a limit of `timeout_s` seconds.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        env_id: str,
        tasks: Sequence[Task] | None = None,
        data: str | None = None,
        max_chars: int = 65536,
        timeout_s: float = 120.0,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        if (tasks is None) == (data is None) or (tasks is not None and not tasks):
            raise ConfigError(
                f"gymnasium.make({env_id!r}): pass either tasks=[Task(...), ...] or data='FILE'"
            )
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"{env_id}: render_mode must be 'ansi' or None, not {render_mode!r}")
        self.tasks = tasks if tasks is not None else load_tasks(Path(str(data)), env_id)
        self.action_space = AnyText(max_chars, min_length=0)
        self.observation_space = AnyText(max_chars, min_length=0)
        self.render_mode = render_mode
        self._env_id = env_id
        self._kwargs = kwargs
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self._env: Env | None = None
        self._schemas: list[dict[str, Any]] = []
        self._transcript = ""
        self._loop: LoopThread | None = None
        found = env_registry.spec(env_id)
        problem = f"{env_id} cannot be made with {sorted(kwargs)}"
        with reported_as(ConfigError, problem, TypeError):
            inspect.signature(found.load()).bind(None, **{**found.kwargs, **kwargs})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        """The prompt of a task. info["task"] is its id, info["tools"] holds the tools' schemas."""
        super().reset(seed=seed)
        return self._run(self._start(options or {}))

    def step(self, action: str) -> Step:
        """One turn of the policy: the tools answer it; without calls, it is graded."""
        if not isinstance(action, str):
            raise ConfigError(
                f"an action must be the text that the policy writes, got {type(action).__name__}: "
                f"{action!r:.80}"
            )
        return self._run(self._take(str(action)))  # also of numpy's str_

    def __deepcopy__(self, _: dict[int, Any]) -> TextEnv:
        """A fork of the episode, with the same random state. Raises EnvError if it cannot fork."""
        env, other = self._env, copy.copy(self)
        other._env = other._loop = None
        if env is not None:
            if env.fork_mode == "none":
                raise EnvError(f"{self._env_id} cannot be copied in an episode: it cannot fork")
            other._env = other._run(env.fork())
        for name in ("action_space", "observation_space", "_np_random"):
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        return other

    def render(self) -> str | None:
        """The episode so far, as text."""
        return self._transcript if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the episode and, with the last env, the shared resources; idempotent."""
        loop = self._loop
        if loop is not None:
            try:
                loop.run(self._stop(), self._timeout_s)
            finally:
                self._loop = None
                loop.release()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = LoopThread.acquire()
        return self._loop.run(coroutine, self._timeout_s)

    # the parts of `reset`, `step` and `close` on the event loop

    async def _start(self, options: dict[str, Any]) -> tuple[str, Info]:
        drawn = int(self.np_random.integers(len(self.tasks)))
        own_seed = int(self.np_random.integers(2**31))
        number = options.get("task", drawn)
        if type(number) is not int or not 0 <= number < len(self.tasks):
            raise ConfigError(
                f'{self._env_id}: options["task"] must be a number below {len(self.tasks)}, '
                f"got {number!r}"
            )
        await self._stop()
        self._env = env_registry.make(self._env_id, self.tasks[number], **self._kwargs)
        messages, info = await self._env.reset(seed=own_seed)
        self._schemas = list(info.get("tools", ()))
        self._transcript = ""
        text = "\n\n".join(message.content for message in messages)
        return self._show(text), {**info, "task": self.tasks[number].id}

    async def _take(self, action: str) -> Step:
        if self._env is None:
            raise EnvError(f"{self._env_id}: step before reset or after close")
        message = Message("assistant", action, tag_calls(action, self._schemas))
        self._transcript += message.content
        messages, reward, terminated, truncated, info = await self._env.step(message)
        text = "".join(RESULT_OPEN + one.content + RESULT_CLOSE for one in messages)
        return self._show(text), float(reward), terminated, truncated, _without_times(info)

    async def _stop(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await env.close()

    def _show(self, text: str) -> str:
        if len(text) > self._max_chars:
            room = max(0, self._max_chars - len(GAP_MARKER))
            text = shortened(text, room, GAP_MARKER)[: self._max_chars]
        self._transcript += text
        return text


def _without_times(info: Info) -> Info:
    """The info without durations, so that equal episodes give equal infos."""
    records = info.get("tool_calls")
    if not isinstance(records, list):
        return info
    times = ("duration_s", "waited_s")
    kept = [{key: value for key, value in one.items() if key not in times} for one in records]
    return {**info, "tool_calls": kept}


def _register(env_id: str) -> None:
    if env_id in gymnasium.registry:
        return
    with contextlib.suppress(gymnasium.error.Error):  # an id that Gymnasium does not accept
        gymnasium.register(env_id, "agentenv.adapters.gym:TextEnv", kwargs={"env_id": env_id})


env_registry.on_register(_register)
