"""Our environments as real Gymnasium ones: synchronous, with texts for actions and observations.

    import gymnasium, agentenv.gym
    env = gymnasium.make("agentenv/QAGrader-v0", data="questions.jsonl")

Importing this module registers every known id with Gymnasium, and those registered later too. It
is the only module that imports gymnasium.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import gymnasium
from gymnasium.spaces import Text

import agentenv.env
from agentenv.dataset import load_tasks
from agentenv.env import Env
from agentenv.errors import ConfigError, EnvError
from agentenv.loop_thread import LoopThread
from agentenv.renderer import RESULT_CLOSE, RESULT_OPEN, first_argument
from agentenv.tool_syntax import Parser, hermes_calls, llama_calls
from agentenv.types import Info, Message, Task, ToolCall

T = TypeVar("T")

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
