"""Prompts that are too long, found before a run starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from agentenv.base import errors
from agentenv.base.crashes import guarded
from agentenv.base.deadline import Deadline
from agentenv.base.offload import in_thread
from agentenv.base.types import Limits, Message, Task
from agentenv.base.untrusted import shortened
from agentenv.contract.env import Env
from agentenv.data.rows import Overlong
from agentenv.text.renderer import CUT_MARKER, Renderer, ToolSchemas

logger = logging.getLogger(__name__)

CUT_KEY = "num_cut_chars"  # in Task.metadata: characters removed from the question
MAX_STARTED = 8
BATCH = 256
MAX_LISTED_PROMPTS = 10


class _Prompt(NamedTuple):
    messages: list[Message]
    tools: ToolSchemas


@dataclass(eq=False)
class PromptFitter:
    """Renders the prompts of tasks, and rejects, skips or cuts those that are longer than
    limits.max_prompt_tokens.

    Rendering is skipped for a prompt that certainly fits: a rendered prompt differs only in the
    last message, and this message has fewer bytes (a token has at least one) than the limit leaves.
    At most MAX_STARTED prompts are rendered of environments with an attribute `starts_processes`.
    The actor checks the length again. `key` names the key of `mode` in messages.
    """

    make_env: Callable[[Task], Env]
    renderer: Renderer
    limits: Limits
    mode: Overlong
    key: str
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        self._rendered: dict[str, int] = {}  # tokens of a prompt, by what it shares with others
        self._num_started = 0  # environments that start processes
        self._not_begun: dict[str, str] = {}  # why an environment did not begin, by its task

    async def fit(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks whose prompts fit, in order. Raises DataError for a prompt that does not fit,
        or if no task remains, and ConfigError for an environment that cannot be made."""
        kept: list[Task] = []
        overlong: list[str] = []
        for start in range(0, len(tasks), BATCH):
            batch = tasks[start : start + BATCH]
            prompts = await asyncio.gather(*map(self._prompt, batch), return_exceptions=True)
            lengths = await in_thread(self._lengths, prompts)
            for task, length in zip(batch, lengths, strict=True):
                if length <= self.limits.max_prompt_tokens:
                    kept.append(task)
                    continue
                overlong.append(f"{task.id} ({length} tokens)")
                if self.mode == "cut":
                    kept.append(await self._cut(task))
        self._report_not_begun(len(tasks))
        if overlong:
            self._report(overlong, len(tasks))
        if not kept:
            raise errors.DataError(f"{self.key} = 'skip' skipped all {len(tasks)} questions")
        return kept

    def _report_not_begun(self, num_tasks: int) -> None:
        """Warn about tasks whose rollouts would fail if the failure repeats."""
        if self._not_begun:
            task_id, problem = next(iter(self._not_begun.items()))
            self.report(
                f"{len(self._not_begun)} of {num_tasks} environments failed to reset in the trial "
                "before the start, and their rollouts fail if that repeats; the first is that of "
                f"task {task_id}: {problem}"
            )

    def _report(self, overlong: list[str], num_tasks: int) -> None:
        limit = f"limits.max_prompt_tokens = {self.limits.max_prompt_tokens}"
        listed = ", ".join(overlong[:MAX_LISTED_PROMPTS]) + (
            ", .." if len(overlong) > MAX_LISTED_PROMPTS else ""
        )
        found = f"{len(overlong)} of {num_tasks} prompts are longer than {limit}: {listed}"
        if self.mode == "error":
            raise errors.DataError(
                f"{found}; raise the limit, or set {self.key} to 'skip' or 'cut'"
            )
        done = (
            "are skipped" if self.mode == "skip" else "are truncated in the middle of the question"
        )
        self.report(f"{self.key}: {found}; they {done}")

    async def _prompt(self, task: Task) -> _Prompt | None:
        """The prompt of a task; None if its env could not be reset, which is reported and left to
        the rollout."""

        async def made() -> Env:
            return self.make_env(task)

        try:
            env = await guarded(made(), "making the environment")
        except errors.CrashError as error:
            self._not_begun[task.id] = str(error)
            return None
        except errors.ConfigError as error:
            raise errors.ConfigError(f"task {task.id}: {error}") from error
        if getattr(env, "starts_processes", False):
            self._num_started += 1
            if self._num_started > MAX_STARTED and CUT_KEY not in task.metadata:
                return None
        limit, limit_s = "(limits.env_timeout_s)", self.limits.env_timeout_s
        try:
            with Deadline.after(limit_s, f"its reset {limit}", errors.EnvError):
                messages, info = await guarded(env.reset(seed=0), "the environment's reset")
            return _Prompt(messages, info.get("tools", ()))
        except (errors.EnvError, errors.InfraError) as error:
            self._not_begun[task.id] = str(error)
            return None
        finally:
            closing = f"task {task.id}: closing its environment {limit}"
            with Deadline.after(limit_s, closing, errors.EnvError):
                await env.close()

    def _lengths(self, prompts: Sequence[_Prompt | BaseException | None]) -> list[int]:
        """Tokens of each prompt, or 0 for a prompt that certainly fits."""
        lengths = []
        for prompt in prompts:
            if isinstance(prompt, BaseException):
                raise prompt
            lengths.append(0 if prompt is None else self._length(prompt))
        return lengths

    def _length(self, prompt: _Prompt) -> int:
        messages, tools = prompt
        shared = repr((messages[:-1], messages[-1].role, tools))
        size = len(messages[-1].content.encode(errors="replace"))
        shortest = self._rendered.get(shared)
        if shortest is not None and shortest + size <= self.limits.max_prompt_tokens:
            return 0
        length = len(self.renderer.prompt(messages, tools))
        self._rendered[shared] = min(length, shortest or length)
        return length

    async def _cut(self, task: Task) -> Task:
        """The task with the middle of its question removed so that it fits."""
        fits, low, high = None, 0, len(task.question) - 1
        while low <= high:
            middle = (low + high) // 2
            metadata = {**task.metadata, CUT_KEY: len(task.question) - middle}
            question = shortened(task.question, middle, CUT_MARKER)
            candidate = replace(task, question=question, metadata=metadata)
            prompt = await self._prompt(candidate)
            (length,) = await in_thread(self._lengths, [prompt])
            if length <= self.limits.max_prompt_tokens:
                fits, low = candidate, middle + 1
            else:
                high = middle - 1
        if fits is None:
            raise errors.DataError(
                f"task {task.id}: its prompt is longer than limits.max_prompt_tokens = "
                f"{self.limits.max_prompt_tokens} even without the question; raise the limit"
            )
        return fits
