"""Prompts that are too long, found before a run starts: refused, left out, or cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from agentenv.data_config import Overlong
from agentenv.env import Env
from agentenv.errors import AgentEnvError, ConfigError, DataError, EnvError, InfraError
from agentenv.limits import Limits
from agentenv.renderer import CUT_MARKER, Renderer, ToolSchemas
from agentenv.types import Message, Task

CUT_KEY = "num_cut_chars"  # of Task.metadata: characters that were taken out of the question
BATCH = 256
MAX_LISTED = 10


class _Prompt(NamedTuple):
    messages: list[Message]
    tools: ToolSchemas


class PromptFitter:
    """Renders the prompts of tasks and holds them to limits.max_prompt_tokens.

    A prompt is not rendered when its last message has fewer bytes than the limit leaves beside
    a rendered prompt that is otherwise equal, since a token stands for a byte at least. The actor
    looks at the length again. `key` is the one that chooses `mode`, for the messages.
    """

    def __init__(
        self,
        make_env: Callable[[Task], Env],
        renderer: Renderer,
        limits: Limits,
        mode: Overlong,
        key: str,
        say: Callable[[str], None],
    ) -> None:
        self.make_env = make_env
        self.renderer = renderer
        self.limits = limits
        self.mode = mode
        self.key = key
        self.say = say
        self._rendered: dict[str, int] = {}  # tokens of a prompt, by what it shares with others

    async def fit(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks whose prompts fit, in order. Raises DataError for the first that does not, or
        when none is left, and ConfigError for an environment that cannot be made."""
        kept: list[Task] = []
        overlong: list[str] = []
        for start in range(0, len(tasks), BATCH):
            batch = tasks[start : start + BATCH]
            prompts = await asyncio.gather(*map(self._prompt, batch))
            lengths = await asyncio.to_thread(self._lengths, prompts)
            for task, length in zip(batch, lengths, strict=True):
                if length <= self.limits.max_prompt_tokens:
                    kept.append(task)
                    continue
                overlong.append(f"{task.id} ({length} tokens)")
                if self.mode == "cut":
                    kept.append(await self._cut(task))
        if overlong:
            self._report(overlong, len(tasks))
        if not kept:
            raise DataError(f"{self.key} = 'skip' left none of {len(tasks)} questions")
        return kept

    def _report(self, overlong: list[str], num_tasks: int) -> None:
        limit = f"limits.max_prompt_tokens = {self.limits.max_prompt_tokens}"
        listed = ", ".join(overlong[:MAX_LISTED]) + (", .." if len(overlong) > MAX_LISTED else "")
        found = f"{len(overlong)} of {num_tasks} prompts are longer than {limit}: {listed}"
        if self.mode == "error":
            raise DataError(f"{found}; raise the limit, or set {self.key} to 'skip' or 'cut'")
        done = "are left out" if self.mode == "skip" else "are cut in the middle of the question"
        self.say(f"{self.key}: {found}; they {done}")

    async def _prompt(self, task: Task) -> _Prompt | AgentEnvError | None:
        """The prompt of a task; None if its env could not be reset, which is the rollout's
        business. Other errors are returned, so that all envs of a batch are closed."""
        try:
            env = self.make_env(task)
        except ConfigError as error:
            return ConfigError(f"task {task.id}: {error}")
        found: _Prompt | AgentEnvError | None = None
        try:
            async with asyncio.timeout(self.limits.env_timeout_s):
                messages, info = await env.reset(seed=0)
            found = _Prompt(messages, info.get("tools", ()))
        except (EnvError, InfraError, TimeoutError):
            pass
        except AgentEnvError as error:
            found = error
        try:
            async with asyncio.timeout(self.limits.env_timeout_s):
                await env.close()
        except TimeoutError:
            return EnvError(
                f"task {task.id}: its environment did not close in limits.env_timeout_s"
            )
        return found

    def _lengths(self, prompts: Sequence[_Prompt | AgentEnvError | None]) -> list[int]:
        """Tokens of each prompt, or 0 where it certainly fits."""
        lengths = []
        for prompt in prompts:
            if isinstance(prompt, AgentEnvError):
                raise prompt
            lengths.append(0 if prompt is None else self._length(prompt))
        return lengths

    def _length(self, prompt: _Prompt) -> int:
        messages, tools = prompt
        shared = repr((messages[:-1], messages[-1].role, tools))
        size = len(messages[-1].content.encode(errors="replace"))
        beside = self._rendered.get(shared)
        if beside is not None and beside + size <= self.limits.max_prompt_tokens:
            return 0
        length = len(self.renderer.prompt(messages, tools))
        self._rendered[shared] = min(length, beside or length)
        return length

    async def _cut(self, task: Task) -> Task:
        """The task with as much of its question's head and tail as fits."""
        fits, low, high = None, 0, len(task.question) - 1
        while low <= high:
            middle = (low + high) // 2
            candidate = _shortened(task, middle)
            prompt = await self._prompt(candidate)
            (length,) = await asyncio.to_thread(self._lengths, [prompt])
            if length <= self.limits.max_prompt_tokens:
                fits, low = candidate, middle + 1
            else:
                high = middle - 1
        if fits is None:
            raise DataError(
                f"task {task.id}: its prompt is longer than limits.max_prompt_tokens = "
                f"{self.limits.max_prompt_tokens} even without the question; raise the limit"
            )
        return fits


def _shortened(task: Task, num_chars: int) -> Task:
    """The task with that many characters of its question, half of them from the end."""
    text, tail = task.question, num_chars // 2
    question = text[: num_chars - tail] + CUT_MARKER + text[len(text) - tail :]
    metadata = {**task.metadata, CUT_KEY: len(text) - num_chars}
    return replace(task, question=question, metadata=metadata)
